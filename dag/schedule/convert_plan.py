"""Plans, to the wire and back. The only place where their messages are read or written.

Reading validates: what `plan_from_proto` returns keeps every rule of `dag/plan/plan.py`, however
hostile the message was. A bad message raises PlanError and nothing else. Whether a plan fits a
graph is left to `Plan.validate`; here its stages only have to fit each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

from ...proto import broker_pb2, peer_pb2
from ..ir.convert import name_of
from ..plan.full_steps import FullSteps
from ..plan.outline import Crossed, Outline, StageOutline, TiedGroup
from ..plan.plan import (
    CodecChoice,
    PeerId,
    Plan,
    PlanError,
    Route,
    SnapshotKeeper,
    StageExchange,
    StageSlot,
    Visit,
    Visits,
)
from ..plan.visit_lists import NumberedVisits
from .filled import filled, taken
from .flow import Role
from .orders.schedules import SCHEDULES

__all__ = [
    "ROLES",
    "microbatches_of",
    "part_from_proto",
    "plan_from_proto",
    "plan_to_proto",
    "routes_of",
]

ROLES = {role.value: int(peer_pb2.Role.Value(role.name)) for role in Role}


def _refuse(what: str) -> NoReturn:
    raise PlanError(f"plan message: {what}")


def plan_to_proto(plan: Plan) -> broker_pb2.Plan:
    """Raises PlanError for a role that no frame has."""
    for choice in plan.codecs:
        if choice.role not in ROLES:
            raise PlanError(f"a codec is chosen for role {choice.role!r}: expected {list(ROLES)}")
    routes, route_of, visits = _numbered(plan.peers, plan.routes, plan.visits)
    held_out, held_out_of, evaluations = _numbered(
        plan.peers, plan.evaluation_routes, plan.evaluations
    )
    return broker_pb2.Plan(
        stages=[filled(broker_pb2.StageSlot, s) for s in plan.stages],
        routes=routes,
        route_of=route_of,
        exchanges=[
            filled(
                broker_pb2.StageExchange,
                e,
                groups=[broker_pb2.PeerGroup(peers=group) for group in e.groups],
            )
            for e in plan.exchanges
        ],
        schedule=plan.schedule,
        microbatch_size=plan.microbatch_size,
        codecs=[filled(broker_pb2.CodecChoice, c, role=ROLES[c.role]) for c in plan.codecs],
        evaluation_routes=held_out,
        evaluation_route_of=held_out_of,
        head_parts=plan.head_parts,
        without_norm=plan.without_norm,
        keepers=[filled(broker_pb2.Keeper, k) for k in plan.keepers],
        outline=[
            filled(
                broker_pb2.StageOutline,
                s,
                sends=[filled(broker_pb2.Crossed, c) for c in s.sends],
            )
            for s in plan.outline.stages
        ],
        tied=[filled(broker_pb2.TiedGroup, g) for g in plan.outline.tied],
        visits=visits,
        evaluations=evaluations,
        full=_full_to_proto(plan),
    )


def _full_to_proto(plan: Plan) -> broker_pb2.FullSteps | None:
    if plan.full is None:
        return None
    routes, route_of, visits = _numbered(plan.peers, plan.full.routes, plan.full.visits)
    return filled(broker_pb2.FullSteps, plan.full, routes=routes, route_of=route_of, visits=visits)


def _full_from_proto(message: broker_pb2.Plan, peers: Sequence[PeerId]) -> FullSteps | None:
    if not message.HasField("full"):
        return None
    full = message.full
    routes = _routes_from_proto(_in_order(full.routes, full.route_of))
    visits = _numbers_from_proto(full.visits).visits(peers, routes)
    return FullSteps(full.before, full.since, routes, visits)


def _numbers_from_proto(message: broker_pb2.VisitLists) -> NumberedVisits:
    return NumberedVisits(
        tuple(tuple(found.numbers) for found in message.lists), tuple(message.list_of)
    )


def _numbered(
    peers: Sequence[PeerId], routes: Sequence[Route], visits: Visits
) -> tuple[list[broker_pb2.Route], list[int], broker_pb2.VisitLists]:
    """Thousands of microbatches take the same few ways: each is written once, and which way each
    microbatch takes; lists of visits have the places of theirs in those."""
    place: dict[Route, int] = {}
    route_of = [place.setdefault(route, len(place)) for route in routes]
    ways = [
        broker_pb2.Route(visits=[broker_pb2.Visit(stage=v.stage, peer=v.peer) for v in route])
        for route in place
    ]
    found = NumberedVisits.of(peers, visits, routes)
    lists = [broker_pb2.VisitList(numbers=numbers) for numbers in found.lists]
    return ways, route_of, broker_pb2.VisitLists(lists=lists, list_of=found.list_of)


def routes_of(plan: broker_pb2.Plan) -> list[broker_pb2.Route]:
    """The route of each microbatch of a step. Raises PlanError for a number of no route."""
    return _in_order(plan.routes, plan.route_of)


def microbatches_of(plan: broker_pb2.Plan) -> int:
    """The microbatches of a step; 0 in a message without a route."""
    return len(plan.route_of or plan.routes)


def _in_order(
    routes: Sequence[broker_pb2.Route], route_of: Sequence[int]
) -> list[broker_pb2.Route]:
    if wrong := [number for number in route_of if number >= len(routes)]:
        _refuse(f"a microbatch takes route {wrong[0]} of {len(routes)}")
    return [routes[number] for number in route_of] if route_of else list(routes)


def plan_from_proto(message: broker_pb2.Plan) -> Plan:
    """Raises PlanError when a rule of the plan is broken. Whether it covers a graph is for
    `Plan.validate` to say, with the graph at hand."""
    plan = part_from_proto(message)
    return plan.validate(plan.stages[-1].stop if plan.stages else 0)


def part_from_proto(message: broker_pb2.Plan) -> Plan:
    """A plan, or the part of one that a slice has: whether it is whole is not looked at."""
    if message.schedule not in SCHEDULES:
        _refuse(f"schedule {message.schedule[:60]!r} is unknown: expected {', '.join(SCHEDULES)}")
    plan = Plan(
        stages=tuple(
            taken(StageSlot, s, holders=tuple(map(_peer, s.holders))) for s in message.stages
        ),
        routes=_routes_from_proto(routes_of(message)),
        exchanges=tuple(
            taken(StageExchange, e, groups=tuple(tuple(map(_peer, g.peers)) for g in e.groups))
            for e in message.exchanges
        ),
        microbatch_size=message.microbatch_size,
        schedule=message.schedule,
        codecs=tuple(_codec_from_proto(c) for c in message.codecs),
        evaluation_routes=_routes_from_proto(
            _in_order(message.evaluation_routes, message.evaluation_route_of)
        ),
        head_parts=message.head_parts,
        without_norm=message.without_norm,
        keepers=tuple(SnapshotKeeper(_peer(k.holder), _peer(k.peer)) for k in message.keepers),
        outline=_outline_from_proto(message),
    )
    return replace(
        plan,
        visits=_numbers_from_proto(message.visits).visits(plan.peers, plan.routes),
        evaluations=_numbers_from_proto(message.evaluations).visits(
            plan.peers, plan.evaluation_routes
        ),
        full=_full_from_proto(message, plan.peers),
    )


def _outline_from_proto(message: broker_pb2.Plan) -> Outline:
    stages = tuple(
        taken(
            StageOutline,
            s,
            index=i,
            sends=tuple(
                taken(Crossed, c, value=name_of(c.value, "a value", _refuse)) for c in s.sends
            ),
        )
        for i, s in enumerate(message.outline)
    )
    tied = tuple(
        taken(TiedGroup, g, index=i, parameter=name_of(g.parameter, "a parameter", _refuse))
        for i, g in enumerate(message.tied)
    )
    return Outline(stages, tied)


def _routes_from_proto(routes: Iterable[broker_pb2.Route]) -> tuple[Route, ...]:
    """Equal routes are one tuple."""
    made: dict[bytes, Route] = {}
    read: dict[int, Route] = {}
    found = []
    for route in routes:
        if id(route) not in read:
            key = route.SerializeToString(deterministic=True)
            if key not in made:
                made[key] = tuple(Visit(v.stage, _peer(v.peer)) for v in route.visits)
            read[id(route)] = made[key]
        found.append(read[id(route)])
    return tuple(found)


def _codec_from_proto(message: broker_pb2.CodecChoice) -> CodecChoice:
    roles = [name for name, number in ROLES.items() if number == message.role]
    if not roles:
        _refuse(f"a codec is chosen for role {message.role}, which is unknown")
    codec = name_of(message.codec, "a codec", _refuse)
    return CodecChoice(_peer(message.source), _peer(message.destination), roles[0], codec)


def _peer(text: str) -> PeerId:
    return PeerId(name_of(text, "a peer id", _refuse))
