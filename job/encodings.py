"""Text of files that people write, whichever editor or shell has saved them.

Editors of Windows put a byte-order mark in front, and PowerShell's `>` writes UTF-16. A mark says
which encoding it is, so nothing is guessed: without one a file is UTF-8.
"""

from __future__ import annotations

import codecs
from typing import Any

__all__ = ["decoded", "each_key_once"]

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins as that of UTF-16 does
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def decoded(data: bytes) -> str:
    """The text without its byte-order mark, every line end a line feed. Raises ValueError, which
    says what is wrong where and what to do."""
    mark, encoding = next(((m, e) for m, e in _MARKS if data.startswith(m)), (b"", "utf-8"))
    if not mark and b"\0" in data[:4096]:
        raise ValueError(
            f"has a zero byte at {data.index(0)}: it is UTF-16 without a byte-order mark, no text, "
            "or was cut off by a crash; save it as UTF-8"
        )
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        at = len(mark) + error.start
        raise ValueError(
            f"is not {encoding.upper()}: {error.reason} at byte {at}; save it as UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object (`object_pairs_hook`). Raises ValueError where a key stands in it twice,
    of which json would take the last."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'"{twice}" stands in it twice')
    return table
