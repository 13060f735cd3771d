"""Lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["some_of"]


def some_of(names: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """The first of the names, and how many more there are: "a, b, c, d and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
