"""Text of docs/models.md: the table of `zoo.py`."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.benchmarks.people.compared import Row

__all__ = ["page"]


def page(rows: Sequence[Row]) -> str:
    return "\n".join(r.family for r in rows)
