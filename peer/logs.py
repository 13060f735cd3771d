"""Log lines of a peer: a stable event name, then fields.

12:00:01 info  joined peer=home-1-3fa2c1 broker=b-77
"""

from __future__ import annotations

import logging
import sys

from ..proto import broker_pb2
from . import events as e

__all__ = ["LineFormatter", "note", "note_heard", "note_told", "to_stderr"]


def note(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Logs an event with its fields; fields without a value ("" or None) are left out."""
    if logger.isEnabledFor(level):
        kept = {k: v for k, v in fields.items() if v is not None and v != ""}
        logger.log(level, event, extra={"fields": kept})


def note_heard(logger: logging.Logger, peer: str, event: e.Event) -> None:
    """What a peer's machine was told and people may want to know."""
    match event:
        case e.BrokerSaid(message):
            kind = message.WhichOneof("kind") or "nothing"
            body = getattr(message, kind, None)
            if kind == "welcome":
                note(logger, logging.INFO, "joined", peer=peer, broker=message.welcome.broker)
            elif kind == "refused":
                reason = message.refused.reason
                note(logger, logging.WARNING, "refused", peer=peer, why=reason.text)
            elif kind == "probe":
                fields = {"number": message.probe.number, "other": message.probe.peer}
                note(logger, logging.DEBUG, "probe", peer=peer, **fields)
            else:
                fields = {n: getattr(body, n, "") for n in ("run", "term")}
                often = kind in ("committed", "snapshot")
                level = logging.DEBUG if often else logging.INFO
                note(logger, level, kind, peer=peer, **fields)
        case e.Detached(why):
            note(logger, logging.WARNING, "no broker", peer=peer, why=why)
        case e.LinkDown(other, why):
            note(logger, logging.INFO, "link down", peer=peer, other=other, why=why)
        case e.LinkUp(other):
            note(logger, logging.DEBUG, "link up", peer=peer, other=other)
        case e.StopAsked(now):
            note(logger, logging.INFO, "stop asked", peer=peer, at_once=now)


def note_told(logger: logging.Logger, peer: str, message: broker_pb2.PeerMessage) -> None:
    """What a peer tells the broker; heartbeats and steps only when everything is logged."""
    kind = message.WhichOneof("kind") or "nothing"
    body = getattr(message, kind, None)
    fields = {n: getattr(body, n) for n in ("run", "term", "step") if hasattr(body, n)}
    if kind == "fault":
        reason = message.fault.reason
        fields |= {"code": reason.code, "why": reason.text, "about": message.fault.about}
    if kind == "opening":
        fields["why"] = message.opening.closed.text or "it takes part again"
    if kind == "resolved":
        fields |= {"why": message.resolved.problem.text}
    if kind == "step":
        fields |= {"seconds": message.step.seconds, "compute_s": message.step.compute_s}
    if kind == "link":
        link = message.link
        fields = {"other": link.peer, "latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
        fields["why"] = link.problem.text
    if kind == "snapshot":
        fields = {"step": message.snapshot.snapshot.step, "why": message.snapshot.reason.text}
    quiet = kind in ("hello", "heartbeat", "step", "link", "snapshot")
    level = logging.DEBUG if quiet else logging.WARNING if kind == "fault" else logging.INFO
    note(logger, level, kind, peer=peer, **fields)


class LineFormatter(logging.Formatter):
    """See the module. Texts with blanks are quoted; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        time = self.formatTime(record, "%H:%M:%S")
        parts = [f"{time} {record.levelname.lower():<7} {record.getMessage()}"]
        parts += [f"{key}={_shown(value)}" for key, value in fields.items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def to_stderr(level: str) -> None:
    """Sends this process's log lines to stderr; once, at the entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if any(c.isspace() for c in text) else text
