"""What the broker and its planning processes say to each other: events to bytes and back.

Both ways it is protobuf (`proto/planning.proto`). The broker reads what comes back as it reads
anything from outside: a process that ran a stranger's graph may say whatever it likes, and an
answer that is none ends that run and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ...dag.cost.network import Network
from ...dag.cost.speed import Speeds
from ...dag.ir.graph import OperatorSet
from ...dag.plan.plan import PeerId, Plan, PlanError
from ...dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from ...dag.schedule.convert_report import report_from_proto, report_to_proto
from ...dag.schedule.filled import filled, taken
from ...proto import broker_pb2
from ...proto.broker_pb2 import PreviewAnswer
from ...proto.common_pb2 import Reason
from ...proto.planning_pb2 import (
    Considered,
    Offered,
    OfferedData,
    PlanMade,
    PlanningAnswered,
    PlanningAsked,
    PlanningLinks,
    PlanRefused,
    PlansMade,
)
from ..base.interface import PeerOffer
from ..requests.asked import (
    ConsiderPlan,
    FormReplicas,
    MakePlan,
    PlanConsidered,
    PlanFailed,
    PlanReady,
    PreviewWanted,
    ReplicaId,
    ReplicasFormed,
)

__all__ = [
    "Asked",
    "Told",
    "answer_from_bytes",
    "answer_to_bytes",
    "ask_from_proto",
    "ask_to_bytes",
]

Asked = MakePlan | FormReplicas | ConsiderPlan | PreviewWanted
Told = PlanReady | ReplicasFormed | PlanFailed | PlanConsidered | PreviewAnswer

_WANTED = {
    MakePlan: PlanningAsked.MAKE,
    FormReplicas: PlanningAsked.FORM,
    ConsiderPlan: PlanningAsked.CONSIDER,
    PreviewWanted: PlanningAsked.PREVIEW,
}

_SPEEDS = (
    ("product", "product_flops_per_s"),
    ("convolution", "convolution_flops_per_s"),
    ("attention", "attention_flops_per_s"),
    ("memory", "memory_bytes_per_s"),
    ("special", "special_bytes_per_s"),
    *((name, name) for name in ("call_s", "error", "busy", "slowed")),
)
# ---------------------------------------------------------------- requests


def ask_to_bytes(ask: Asked, graph: bytes) -> bytes:
    """A request with the serialised graph of its run."""
    message = PlanningAsked(spec=ask.spec, graph=graph, wanted=_WANTED[type(ask)])
    if isinstance(ask, PreviewWanted):
        offers = ask.offers
        message.notes.extend(ask.notes)  # the peers as people see them: the broker has them
    else:
        message.run, offers = ask.replica, ask.peers
    plan = ask.before if isinstance(ask, MakePlan) else None
    plan = ask.plan if isinstance(ask, ConsiderPlan) else plan
    if plan is not None:
        message.plan.CopyFrom(plan_to_proto(plan))
    message.offers.extend(map(_offer_to_proto, offers))
    if ask.network is not None:
        message.links.CopyFrom(_links_to_proto(ask.network))
    return message.SerializeToString()


def ask_from_proto(message: PlanningAsked) -> Asked:
    """In the planning process; versions stay with the broker."""
    offers = tuple(map(_offer_from_proto, message.offers))
    peers = tuple(o.peer for o in offers)
    links = _links_from_proto(message.links, peers) if message.HasField("links") else None
    plan = plan_from_proto(message.plan) if message.HasField("plan") else None
    run, spec = ReplicaId(message.run), message.spec
    if message.wanted == PlanningAsked.PREVIEW:
        return PreviewWanted(spec, (), offers, links, tuple(message.notes))
    if message.wanted == PlanningAsked.FORM:
        return FormReplicas(run, 0, spec, offers, links)
    if message.wanted == PlanningAsked.CONSIDER:
        assert plan is not None, "a plan that runs is considered"
        return ConsiderPlan(run, 0, spec, plan, offers, links)
    return MakePlan(run, 0, spec, offers, links, plan)


def _offer_to_proto(offer: PeerOffer) -> Offered:
    speeds = None
    if offer.speeds is not None:
        speeds = broker_pb2.Speeds(**{key: getattr(offer.speeds, name) for name, key in _SPEEDS})
    data = [
        OfferedData(manifest=manifest, inputs=inputs, blended=manifest in offer.blended)
        for manifest, inputs in offer.manifests
    ]
    return filled(Offered, offer, speeds=speeds, data=data)


def _offer_from_proto(message: Offered) -> PeerOffer:
    speeds = None
    if message.HasField("speeds"):
        speeds = Speeds(**{name: getattr(message.speeds, key) for name, key in _SPEEDS})
    known: OperatorSet = "core" if message.operator_set == "core" else "full"
    manifests = tuple((d.manifest, tuple(d.inputs)) for d in message.data)
    blended = frozenset(d.manifest for d in message.data if d.blended)
    return taken(
        *(PeerOffer, message),
        operator_set=known,
        speeds=speeds,
        manifests=manifests,
        blended=blended,
    )


def _links_to_proto(network: Network) -> PlanningLinks:
    numbers = {
        name: getattr(network, name).astype("<f8").tobytes()
        for name in ("latency_s", "bandwidth", "up", "down")
    }
    measured = b"" if network.measured is None else network.measured.astype(np.uint8).tobytes()
    return PlanningLinks(**numbers, measured=measured)


def _links_from_proto(message: PlanningLinks, peers: tuple[PeerId, ...]) -> Network:
    n = len(peers)

    def matrix(data: bytes) -> NDArray[np.float64]:
        return np.frombuffer(data, "<f8").astype(np.float64).reshape(n, n)

    return Network(
        peers,
        matrix(message.latency_s),
        matrix(message.bandwidth),
        np.frombuffer(message.up, "<f8").astype(np.float64),
        np.frombuffer(message.down, "<f8").astype(np.float64),
        np.frombuffer(message.measured, np.uint8).astype(bool).reshape(n, n)
        if message.measured
        else None,
    )


# ---------------------------------------------------------------- answers


def answer_to_bytes(told: Told) -> bytes:
    """In the planning process."""
    message = PlanningAnswered()
    match told:
        case PlanReady():
            message.made.CopyFrom(filled(PlanMade, told, **_plan_of(told)))
        case ReplicasFormed():
            plans = (filled(PlanMade, each, **_plan_of(each)) for each in told.plans)
            message.formed.CopyFrom(PlansMade(formation=told.formation, plans=plans))
        case PlanFailed():
            reason = Reason(code=told.code, text=told.reason)
            short = min(max(0, told.short_bytes), 2**64 - 1)
            message.refused.CopyFrom(PlanRefused(reason=reason, short_bytes=short))
        case PlanConsidered():
            message.considered.CopyFrom(filled(Considered, told, **_plan_of(told)))
        case PreviewAnswer():
            message.preview.CopyFrom(told)
    return message.SerializeToString()


def answer_from_bytes(ask: Asked, data: bytes) -> Told:
    """Raises ValueError for bytes that are no answer to what was asked."""
    message = PlanningAnswered()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"{len(data)} bytes that are no answer: {error}") from None
    kind = message.WhichOneof("kind")
    try:
        match ask, kind:
            case MakePlan(), "made":
                return _made_from_proto(ask, message.made)
            case FormReplicas(), "formed":
                plans = tuple(_made_from_proto(ask, made) for made in message.formed.plans)
                return ReplicasFormed(ask.replica, ask.version, message.formed.formation, plans)
            case MakePlan() | FormReplicas(), "refused":
                found = message.refused
                why, short = found.reason, int(found.short_bytes)
                return PlanFailed(ask.replica, ask.version, why.text, why.code, short)
            case ConsiderPlan(), "considered":
                return _considered(ask, message.considered)
            case PreviewWanted(), "preview":
                message.preview.peers.extend(ask.peers)
                return message.preview
    except (PlanError, IndexError) as error:
        raise ValueError(f"an answer with a plan that is none: {error}") from None
    raise ValueError(f"an answer of kind {kind} to {type(ask).__name__}")


def _plan_of(told: PlanReady | PlanConsidered) -> dict[str, object]:
    if told.plan is None:
        return dict.fromkeys(("plan", "pairs", "report"))
    return {
        "plan": plan_to_proto(told.plan),
        "pairs": _places(told.plan, told.pairs),
        "report": report_to_proto(told.report),
    }


def _made_from_proto(ask: MakePlan | FormReplicas, made: PlanMade) -> PlanReady:
    plan = plan_from_proto(made.plan)
    local, report = tuple(made.local), report_from_proto(made.report)
    return PlanReady(ask.replica, ask.version, plan, _pairs(plan, made.pairs), local, report)


def _considered(ask: ConsiderPlan, found: Considered) -> PlanConsidered:
    times = found.running_s, found.candidate_s, found.migration_s
    if not found.HasField("plan"):
        return PlanConsidered(ask.replica, ask.version, *times)
    plan = plan_from_proto(found.plan)
    pairs, report = _pairs(plan, found.pairs), report_from_proto(found.report)
    return PlanConsidered(ask.replica, ask.version, *times, plan, pairs, report=report)


def _places(plan: Plan, pairs: Iterable[tuple[PeerId, PeerId]]) -> list[int]:
    place = {peer: i for i, peer in enumerate(plan.peers)}
    return [place[peer] for pair in pairs for peer in pair]


def _pairs(plan: Plan, places: Sequence[int]) -> tuple[tuple[PeerId, PeerId], ...]:
    if len(places) % 2:
        raise IndexError(f"{len(places)} places, expected two for each pair")
    peers = plan.peers
    return tuple((peers[a], peers[b]) for a, b in zip(places[::2], places[1::2], strict=True))
