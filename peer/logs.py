"""Log lines of a peer: a stable event name, then fields.

12:00:01 info  joined peer=home-1-3fa2c1 broker=b-77
"""

from __future__ import annotations

import logging
import sys

from ..net.grpc_quirks import pass_over_broken_streams
from ..net.printable import SafeFormatter
from ..net.repeats import Repeats

__all__ = ["LineFormatter", "note", "to_stderr"]


def note(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Logs an event with its fields; fields without a value ("" or None) are left out."""
    if logger.isEnabledFor(level):
        kept = {k: v for k, v in fields.items() if v is not None and v != ""}
        logger.log(level, event, extra={"fields": kept})


class LineFormatter(SafeFormatter):
    """Formats a log line of a peer: a stable event name, then fields. Texts with blanks are quoted;
    a traceback follows on lines of its own."""

    def line(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        time = self.formatTime(record, "%H:%M:%S")
        parts = [f"{time} {record.levelname.lower():<7} {record.getMessage()}"]
        parts += [f"{key}={_shown(value)}" for key, value in fields.items()]
        return " ".join(parts)


def to_stderr(level: str) -> None:
    """Sends this process's log lines to stderr; once, at the entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    handler.addFilter(Repeats())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    pass_over_broken_streams()


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if any(c.isspace() for c in text) else text
