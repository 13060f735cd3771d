"""A line of a log that comes again and again is said now and then, with how often it came.

Rules. The same text, traceback included, is said SAME times in a row and then once in AGAIN_S
seconds. Warnings and errors of one place in the code, whatever numbers are in them, are said MANY
times in a row and then PER_S a second. A line that is said again tells how many were left out.
Time is that of the records.
"""

from __future__ import annotations

import logging

from .knocks import RateLimiter
from .surroundings import fault_of

__all__ = ["Repeats"]

SAME, AGAIN_S = 10, 60.0
MANY, PER_S = 200, 1.0
_MOST = 1000
"""Texts, and places, that are remembered; the ones longest ago are forgotten."""


class Repeats(logging.Filter):
    """Filter of a handler, so that it sees the records of every logger. What the machine around us
    does not give is said in words in place of a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._texts = RateLimiter(SAME, 1 / AGAIN_S, _MOST)
        self._places = RateLimiter(MANY, PER_S, _MOST)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is said; it is changed to tell what was left out before it."""
        fields = getattr(record, "fields", None)
        error = record.exc_info[1] if record.exc_info else None
        text = f"{record.getMessage()} {fields}", type(error), str(error)
        place = record.name, record.levelno, record.pathname, record.lineno, str(record.msg)
        now = record.created
        buckets = [self._texts.of(text, now)]
        if record.levelno >= logging.WARNING:
            buckets.append(self._places.of(place, now))
        if not all(bucket.take(1, now) for bucket in buckets):  # the first that does not counts it
            return False
        if skipped := sum(bucket.refused for bucket in buckets):
            record.msg = f"{record.getMessage()} (and {skipped} more like it)"
            record.args = None
            for bucket in buckets:
                bucket.refused = 0
        if error is not None and (fault := fault_of(error)) is not None:
            record.msg, record.args = f"{record.getMessage()} ({fault})", None
            record.exc_info = record.exc_text = None
        return True
