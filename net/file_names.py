"""Names of files that others chose: only what names one file beside others is taken."""

from __future__ import annotations

__all__ = ["is_file_name"]

_LONGEST = 200
"""Characters; file systems take 255 bytes, and a temporary name beside it has a few more."""
_MEANS_MORE = frozenset('/\\:*?"<>|#%')
"""Separators, drives, patterns, and what a URL or a chain of them (`zip://x::http://y`) reads."""


def is_file_name(name: object) -> bool:
    """Whether a text names one plain file in whatever folder or URL it is appended to: no way out
    of it (`..`), no hidden file, nothing that a shell, a URL or fsspec would read as more."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= _LONGEST
        and name.isprintable()
        and not name.startswith((".", "~", "-"))
        and _MEANS_MORE.isdisjoint(name)
    )
