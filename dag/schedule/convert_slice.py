"""Slices of plans, to the wire and back. The only place where their messages are read or written.

Reading validates, as far as one peer can tell what belongs to a plan (`PlanSlice.validate`); a bad
message raises PlanError and nothing else.
"""

from __future__ import annotations

from typing import NoReturn

from ...proto import broker_pb2
from ..ir.convert import name_of
from ..plan.action import VISITS, Action, ScheduleError
from ..plan.plan import PeerId, PlanError
from ..plan.plan_slice import PlanSlice
from .convert_plan import ROLES, part_from_proto, plan_to_proto

__all__ = ["slice_from_proto", "slice_to_proto"]


def slice_to_proto(mine: PlanSlice) -> broker_pb2.PlanSlice:
    return broker_pb2.PlanSlice(
        plan=plan_to_proto(mine.plan),
        visits=map(str, mine.visits),
        evaluations=map(str, mine.evaluations),
        slots=[
            broker_pb2.Slots(source=source, role=ROLES[role], count=count)
            for source, role, count in mine.slots
        ],
        place=mine.place,
        ring=mine.ring,
        whole=sorted(mine.whole),
        full=None if mine.full is None else slice_to_proto(mine.full),
    )


def slice_from_proto(peer: PeerId, message: broker_pb2.PlanSlice) -> PlanSlice:
    """The slice of this peer. Raises PlanError when it breaks a rule."""
    part = part_from_proto(message.plan)
    words = {number: word for word, number in ROLES.items()}
    for slot in message.slots:
        if slot.role not in words:
            _refuse(f"slots are of role {slot.role}, which is unknown")
    if message.full.HasField("full"):
        _refuse("the full steps of a slice have full steps")
    found = PlanSlice(
        peer,
        part,
        tuple(map(_visit, message.visits)),
        tuple(map(_visit, message.evaluations)),
        tuple((_peer(s.source), words[s.role], s.count) for s in message.slots),
        message.place,
        tuple(map(_peer, message.ring)),
        frozenset(message.whole),
        slice_from_proto(peer, message.full) if message.HasField("full") else None,
    )
    return found.validate(part.stages[-1].stop if part.stages else 0)


def _visit(text: str) -> Action:
    try:
        action = Action.parse(text[:40])
    except ScheduleError as error:
        _refuse(str(error))
    if action.kind not in VISITS:
        _refuse(f"{text[:40]!r} is no visit")
    return action


def _peer(text: str) -> PeerId:
    return PeerId(name_of(text, "a peer id", _refuse))


def _refuse(what: str) -> NoReturn:
    raise PlanError(f"plan slice message: {what}")
