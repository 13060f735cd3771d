"""Plans, to the wire and back. The only place where their messages are read or written.

Reading validates: what `plan_from_proto` returns keeps every rule of `dag/plan/plan.py`, however
hostile the message was. A bad message raises PlanError and nothing else. Whether a plan fits a
graph is left to `Plan.validate`; here its stages only have to fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

from ...proto import broker_pb2, peer_pb2
from ..ir.convert import MAX_TEXT, name_of
from ..plan.plan import (
    Alternative,
    CodecChoice,
    CodecUse,
    LinkPrediction,
    PeerId,
    PeerPrediction,
    Plan,
    PlanError,
    Prediction,
    Route,
    ScheduleName,
    SnapshotKeeper,
    Spare,
    StageExchange,
    StageSlot,
    Visit,
)
from .flow import Role

__all__ = ["plan_from_proto", "plan_to_proto"]

_SCHEDULES: dict[ScheduleName, broker_pb2.Schedule] = {
    "gpipe": broker_pb2.Schedule.GPIPE,
    "1f1b": broker_pb2.Schedule.ONE_F_ONE_B,
    "interleaved": broker_pb2.Schedule.INTERLEAVED,
}
_ROLES = {role.value: int(peer_pb2.Role.Value(role.name)) for role in Role}


def _refuse(what: str) -> NoReturn:
    raise PlanError(f"plan message: {what}")


def plan_to_proto(plan: Plan) -> broker_pb2.Plan:
    """Raises PlanError for a role that no frame has."""
    for choice in plan.codecs:
        if choice.role not in _ROLES:
            raise PlanError(f"a codec is chosen for role {choice.role!r}: expected {list(_ROLES)}")
    return broker_pb2.Plan(
        stages=[
            broker_pb2.StageSlot(
                start=s.start,
                stop=s.stop,
                holders=s.holders,
                recompute=s.recompute,
            )
            for s in plan.stages
        ],
        routes=_routes_to_proto(plan.routes),
        exchanges=[
            broker_pb2.StageExchange(
                stage=e.stage,
                collective=e.collective,
                groups=[broker_pb2.PeerGroup(peers=group) for group in e.groups],
                weights=e.weights,
                chunks=e.chunks,
                strategy=e.strategy,
            )
            for e in plan.exchanges
        ],
        schedule=_SCHEDULES[plan.schedule],
        microbatch_size=plan.microbatch_size,
        codecs=[
            broker_pb2.CodecChoice(
                source=c.source, destination=c.destination, role=_ROLES[c.role], codec=c.codec
            )
            for c in plan.codecs
        ],
        predicted=broker_pb2.Prediction(
            step_s=plan.predicted.step_s,
            peers=[
                broker_pb2.PeerPrediction(
                    peer=p.peer,
                    compute_s=p.compute_s,
                    device_bytes=p.device_bytes,
                    host_bytes=p.host_bytes,
                    bubble=p.bubble,
                    learned=p.learned,
                )
                for p in plan.predicted.peers
            ],
            links=[
                broker_pb2.LinkPrediction(
                    source=x.source,
                    destination=x.destination,
                    bytes=x.bytes,
                    busy_s=x.busy_s,
                    codecs=map(_use_to_proto, x.codecs),
                )
                for x in plan.predicted.links
            ],
            bottlenecks=plan.predicted.bottlenecks,
            alternatives=[
                broker_pb2.Alternative(name=a.name, step_s=a.step_s, text=a.text)
                for a in plan.predicted.alternatives
            ],
        ),
        reasons=plan.reasons,
        spares=[broker_pb2.Spare(peer=s.peer, reason=s.reason) for s in plan.spares],
        evaluation_routes=_routes_to_proto(plan.evaluation_routes),
        head_parts=plan.head_parts,
        without_norm=plan.without_norm,
        keepers=[broker_pb2.Keeper(holder=k.holder, peer=k.peer) for k in plan.keepers],
    )


def _use_to_proto(use: CodecUse) -> broker_pb2.CodecUse:
    return broker_pb2.CodecUse(
        role=use.role,
        codec=use.codec,
        bytes=use.bytes,
        dense_bytes=use.dense_bytes,
        saved_s=use.saved_s,
        encode_s=use.encode_s,
        error=use.error,
    )


def _routes_to_proto(routes: Sequence[Route]) -> list[broker_pb2.Route]:
    return [
        broker_pb2.Route(visits=[broker_pb2.Visit(stage=v.stage, peer=v.peer) for v in route])
        for route in routes
    ]


def plan_from_proto(message: broker_pb2.Plan) -> Plan:
    """Raises PlanError when a rule of the plan is broken. Whether it covers a graph is for
    `Plan.validate` to say, with the graph at hand."""
    schedules = [name for name, number in _SCHEDULES.items() if number == message.schedule]
    if not schedules:
        _refuse(f"schedule {message.schedule} is unknown")
    plan = Plan(
        stages=tuple(
            StageSlot(s.start, s.stop, tuple(map(_peer, s.holders)), s.recompute)
            for s in message.stages
        ),
        routes=_routes_from_proto(message.routes),
        exchanges=tuple(
            StageExchange(
                e.stage,
                e.collective,
                tuple(tuple(map(_peer, group.peers)) for group in e.groups),
                tuple(e.weights),
                e.chunks,
                e.strategy,
            )
            for e in message.exchanges
        ),
        microbatch_size=message.microbatch_size,
        schedule=schedules[0],
        codecs=tuple(_codec_from_proto(c) for c in message.codecs),
        predicted=Prediction(
            _seconds(message.predicted.step_s),
            tuple(
                PeerPrediction(
                    _peer(p.peer),
                    _seconds(p.compute_s),
                    p.device_bytes,
                    p.host_bytes,
                    _seconds(p.bubble),
                    _seconds(p.learned),
                )
                for p in message.predicted.peers
            ),
            tuple(
                LinkPrediction(
                    _peer(x.source),
                    _peer(x.destination),
                    x.bytes,
                    _seconds(x.busy_s),
                    tuple(map(_use_from_proto, x.codecs)),
                )
                for x in message.predicted.links
            ),
            tuple(map(_text, message.predicted.bottlenecks)),
            tuple(
                Alternative(_text(a.name), _seconds(a.step_s), _text(a.text))
                for a in message.predicted.alternatives
            ),
        ),
        reasons=tuple(map(_text, message.reasons)),
        spares=tuple(Spare(_peer(s.peer), _text(s.reason)) for s in message.spares),
        evaluation_routes=_routes_from_proto(message.evaluation_routes),
        head_parts=message.head_parts,
        without_norm=message.without_norm,
        keepers=tuple(SnapshotKeeper(_peer(k.holder), _peer(k.peer)) for k in message.keepers),
    )
    return plan.validate(plan.stages[-1].stop if plan.stages else 0)


def _routes_from_proto(routes: Iterable[broker_pb2.Route]) -> tuple[Route, ...]:
    return tuple(tuple(Visit(v.stage, _peer(v.peer)) for v in route.visits) for route in routes)


def _codec_from_proto(message: broker_pb2.CodecChoice) -> CodecChoice:
    roles = [name for name, number in _ROLES.items() if number == message.role]
    if not roles:
        _refuse(f"a codec is chosen for role {message.role}, which is unknown")
    codec = name_of(message.codec, "a codec", _refuse)
    return CodecChoice(_peer(message.source), _peer(message.destination), roles[0], codec)


def _use_from_proto(message: broker_pb2.CodecUse) -> CodecUse:
    if message.role not in _ROLES:
        _refuse(f"a codec is used for role {message.role[:60]!r}, which is unknown")
    return CodecUse(
        message.role,
        name_of(message.codec, "a codec", _refuse),
        message.bytes,
        message.dense_bytes,
        _seconds(message.saved_s),
        _seconds(message.encode_s),
        _seconds(message.error, "error"),
    )


def _peer(text: str) -> PeerId:
    return PeerId(name_of(text, "a peer id", _refuse))


def _text(text: str) -> str:
    if len(text) > MAX_TEXT:
        _refuse(f"a reason has {len(text)} characters: expected at most {MAX_TEXT}")
    return text


def _seconds(value: float, what: str = "time") -> float:
    if not (math.isfinite(value) and value >= 0):
        _refuse(f"a predicted {what} is {value}: expected a finite number of at least 0")
    return value
