"""Results and messages that are of this peer's part in a run: what each leads to in its assignment.
Whether they are of its term, the machine has looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...dag.plan.plan import PeerId
from ...net.links.frame import FrameKey
from ...proto import broker_pb2, common_pb2
from . import events as e
from .assignment import Assignment

__all__ = ["OF_PART", "answered", "grown", "refused", "timed"]


def answered(part: Assignment, event: e.Answer, now: float, away: bool) -> list[e.Instruction]:
    """Take a result. `away`: whether the broker is."""
    match event:
        case e.Computed():
            return part.computed(event, now)
        case e.Built():
            return part.built(event)
        case e.RoundReady():
            return part.rounds.ready() if part.rounds else []
        case e.ReceiptsShown(answer=answer):
            return [e.Tell(broker_pb2.PeerMessage(round_answer=answer))]
        case e.BuildFailed(why=why, code=code):
            spoilt = part.keeping.spoilt(why) if code == "snapshot" else []
            return [*spoilt, *part.fail(code, why)]
        case e.DataReady(step=step):
            return part.data_ready(step, now)
        case e.DataFailed(step=step, why=why, code=code):
            return part.data_failed(step, code, why, away)
        case e.ComputeFailed(step=step, action=action, why=why, code=code):
            return part.fail(code, f"{action} of step {step} on {part.peer}: {why}")
        case e.ExportedWeights(step=step, blob=blob):
            return part.exported(step, blob)
        case e.ExportFailed(step=step, why=why):
            return part.export_failed(step, why, now, away)


def grown(part: Assignment | None, key: FrameKey, now: float) -> list[e.Instruction]:
    """More of a frame came: rounds go on as long as some does."""
    rounds = part.rounds if part is not None else None
    return rounds.exchange.grows(key, now) if rounds is not None else []


def timed(part: Assignment, of: str, peer: str, now: float, away: bool) -> list[e.Instruction]:
    """A timer `of` something has ended; for another peer, if it is of one."""
    match of:
        case "link":
            return part.link_timer(PeerId(peer), now)
        case "round":
            return part.rounds.timer(now) if part.rounds else []
        case "stall":
            return part.stall_timer(now, away)
        case "export":
            return part.export_timer()
    return []


OF_PART: Mapping[str, Callable[[Assignment, Any, float], list[e.Instruction]]] = {
    "start": lambda part, body, now: part.start(now),
    "export": lambda part, body, now: part.export_asked(),
    "committed": lambda part, body, now: part.committed(body.step, now),
    "round_start": Assignment.round_begins,
    "round_plan": Assignment.round_planned,
    "round_masks": Assignment.round_masks,
    "round_question": lambda part, body, now: part.rounds.asked(body) if part.rounds else [],
    "round_audit": lambda part, body, now: part.rounds.ordered(body, now) if part.rounds else [],
}
"""Messages of the broker that have the run and term of a part, by kind: what they lead to."""


def refused(assign: broker_pb2.Assign, code: str, text: str) -> e.Tell:
    """Return what tells the broker that a part is not taken, and why."""
    fault = broker_pb2.Fault(
        run=assign.run,
        term=assign.term,
        step=assign.first_step,
        reason=common_pb2.Reason(code=code, text=text),
    )
    return e.Tell(broker_pb2.PeerMessage(fault=fault))
