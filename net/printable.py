"""Text from elsewhere, made safe to print: names, reasons and errors of other people's peers.

A terminal obeys control characters, shows text backwards after some invisible ones, and takes each
line for one of the program's own. So what is not printable becomes a ?, one text stays on one line,
and its length is bounded. Whoever writes to a terminal or a log does it through one of these.
"""

from __future__ import annotations

import logging

__all__ = ["MOST_CHARACTERS", "SafeFormatter", "printable", "printable_lines"]

MOST_CHARACTERS = 8_000
"""Of one line: a sentence about a thousand peers."""
_BEHIND = "    | "
"""In front of what follows a log line, so that nothing in it looks like another one."""


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """One line of at most so many characters, all of them printable (no control characters, no line
    ends, nothing that is invisible or turns the direction of text)."""
    shown = text[: most + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else "?" for c in shown)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def printable_lines(text: str) -> str:
    """Makes every line of a text of ours printable; only a line feed ends a line."""
    return "\n".join(printable(line) for line in text.split("\n"))


class SafeFormatter(logging.Formatter):
    """One line for each record, and behind it its traceback, if it has one, set off."""

    def format(self, record: logging.LogRecord) -> str:
        line = printable(self.line(record))
        if record.exc_info:
            behind = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n{_BEHIND}{printable(text)}" for text in behind)
        return line

    def line(self, record: logging.LogRecord) -> str:
        """The record without its traceback, which may have any character in it."""
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        return self.formatMessage(record)
