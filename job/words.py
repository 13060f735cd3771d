"""Lists and numbers of things as people read them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["WRONG_CHOICE", "count_of", "size_text", "some_of"]

WRONG_CHOICE = "the wrong choice"
"""Said of a plan, or of replicas, that something else would clearly outrun: whoever shows the
sentence shows it first."""


def count_of(count: int, what: str) -> str:
    """As "1 peer", "2 peers", "3 microbatches"."""
    plural = "es" if what.endswith("ch") else "s"
    return f"{count} {what}{'' if count == 1 else plural}"


def some_of(names: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """The first of the names, and how many more there are: "a, b, c, d and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def size_text(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
