"""What is logged of what a peer's machine is told, and of what it tells."""

from __future__ import annotations

import logging

from ...proto import broker_pb2
from ..core import events as e
from ..logs import note

__all__ = ["note_heard", "note_told"]


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
    if kind == "availability":
        fields["why"] = message.availability.closed.text or "it takes part again"
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
