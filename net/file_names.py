"""Names of files that others chose: only what names one file beside others is taken."""

from __future__ import annotations

__all__ = ["is_file_name"]

_LONGEST = 200
"""Bytes; file systems take 255, and a temporary name beside it has a few more."""
_MEANS_MORE = frozenset('/\\:*?"<>|#%')
"""Separators, drives, patterns, and what a URL or a chain of them (`zip://x::http://y`) reads."""


def is_file_name(name: object) -> bool:
    """Whether a text names one plain file in whatever folder or URL it is appended to: no way out
    of it (`..`), no hidden file, nothing that a shell, a URL or fsspec would read as more, and
    no spaces or dots at its ends, which some systems leave out."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and 0 < len(name.encode()) <= _LONGEST
        and name == name.strip(" .")
        and not name.startswith((".", "~", "-"))
        and _MEANS_MORE.isdisjoint(name)
    )
