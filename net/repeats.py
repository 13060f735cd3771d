"""A line of a log that comes again and again is said now and then, with how often it came.

Rules. The same text, traceback included, is said SAME times in a row and then once in AGAIN_S
seconds. Warnings and errors of one place in the code, whatever numbers are in them, are said MANY
times in a row and then PER_S a second. A line that is said again tells how many were left out.
Time is that of the records.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from .surroundings import fault_of

__all__ = ["Repeats"]

SAME, AGAIN_S = 10, 60.0
MANY, PER_S = 200, 1.0
_MOST = 1000
"""Texts, and places, that are remembered; the ones longest ago are forgotten."""


class _Bucket:
    """Bucket of lines: so many in a row, so many a second afterwards; and how many were left
    out."""

    def __init__(self, many: int, per_s: float, now: float) -> None:
        self._many, self._per_s = many, per_s
        self._left, self._at = float(many), now
        self.skipped = 0

    def allows(self, now: float) -> bool:
        passed = max(0.0, now - self._at)  # a clock may be set back
        self._left = min(self._many, self._left + passed * self._per_s)
        self._at = now
        if self._left < 1.0:
            self.skipped += 1
            return False
        self._left -= 1.0
        return True


class Repeats(logging.Filter):
    """Filter of a handler, so that it sees the records of every logger. What the machine around us
    does not give is said in words in place of a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: OrderedDict[object, _Bucket] = OrderedDict()
        self._places: OrderedDict[object, _Bucket] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is said; it is changed to tell what was left out before it."""
        fields = getattr(record, "fields", None)
        error = record.exc_info[1] if record.exc_info else None
        text = f"{record.getMessage()} {fields}", type(error), str(error)
        place = record.name, record.levelno, record.pathname, record.lineno, str(record.msg)
        now = record.created
        buckets = [self._bucket(self._texts, text, SAME, 1 / AGAIN_S, now)]
        if record.levelno >= logging.WARNING:
            buckets.append(self._bucket(self._places, place, MANY, PER_S, now))
        if not all(bucket.allows(now) for bucket in buckets):  # the first that does not counts it
            return False
        if skipped := sum(bucket.skipped for bucket in buckets):
            record.msg = f"{record.getMessage()} (and {skipped} more like it)"
            record.args = None
            for bucket in buckets:
                bucket.skipped = 0
        if error is not None and (fault := fault_of(error)) is not None:
            record.msg, record.args = f"{record.getMessage()} ({fault})", None
            record.exc_info = record.exc_text = None
        return True

    @staticmethod
    def _bucket(
        known: OrderedDict[object, _Bucket], key: object, many: int, per_s: float, now: float
    ) -> _Bucket:
        if key not in known:
            known[key] = _Bucket(many, per_s, now)
            if len(known) > _MOST:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]
