"""Carrying out FormReplicas: who is which replica of a run, and how they shall train.

Of `sync.kind = "local"` it is the formation (`planner/replicas/form.py`). Of "auto" that
formation stands beside the plan of all peers with equal weights, and replicas that meet in rounds
are recommended only where they train clearly more samples/s: a sample teaches less the rarer they
meet, and by how much is not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ...compression.codec import parse, typical_bytes
from ...compression.echo import TensorShape
from ...dag.cost.network import Network
from ...dag.ir.convert import graph_from_bytes
from ...dag.ir.graph import Graph
from ...dag.plan.report import Alternative, PlanWithReport
from ...dag.schedule.filled import filled
from ...dag.transforms.vocabulary import planned_graph
from ...job.clients.client_privacy import why_members
from ...job.gossip import SapsOptions
from ...job.rounds import RoundSettings, SparseLocoOptions, StreamingOptions, options_of
from ...job.training import Training
from ...job.words import WRONG_CHOICE, count_of
from ...proto import broker_pb2
from ..base.interface import NoPlan, PeerOffer, Planner, PlannerOptions, PlanRequest
from ..replicas.beside import ONE_REPLICA
from ..replicas.copies import PAUSE_S
from ..replicas.division import NEAR
from ..replicas.form import form
from ..replicas.formation import Formation
from ..requests.asked import FormReplicas, PlanFailed, PlanReady, ReplicasFormed
from ..requests.client_data import offer_of_each, spec_of_client
from ..requests.request import plan_request
from ..requests.requirements import RunRequirements, decided, one_of_many, read_spec
from ..schedulers.schedulers import plan as by_name
from .around_hosts import around_hosts
from .bad_plan import bad_plan
from .deeper import most_of, or_deeper
from .leaving_out import without_culprits
from .planning import as_before, had_form, or_refused, ready_of

__all__ = ["answer", "contribution_bytes", "formed", "one_plan"]

_EQUAL = "one replica with equal weights after every step"
_CLIENTS = "each peer trains clients of a round by itself, as many as its predicted speed is worth"
_TOGETHER = (
    "peers that have no memory for the whole model train a client together, as pipelines; clients "
    "of a round are divided by predicted speed"
)
_MANY = 8
"""Replicas of which the sum of what they give is thought, where their number is not known."""


def answer(
    ask: FormReplicas, graph_bytes: bytes, planner: Planner = by_name
) -> ReplicasFormed | PlanFailed:
    """The event that answers, whatever graph and offers are. Raises MemoryError."""

    def made() -> ReplicasFormed:
        graph = graph_from_bytes(graph_bytes)

        def make(peers: tuple[PeerOffer, ...], network: Network | None) -> ReplicasFormed:
            these = replace(ask, peers=peers, network=network)
            one = None
            if read_spec(ask.spec).sync.kind == "auto":
                with suppress(NoPlan):  # replicas of other peers may be possible
                    one = one_plan(these, graph, planner)
            return formed(these, graph, one, planner)

        found, left = without_culprits(make, ask.peers, ask.network)
        told = found.formation
        told.left_out.extend(broker_pb2.Spare(peer=p, reason=why) for p, why in left.items())
        return found

    return or_refused(ask, made)


def _one_of_each(ask: FormReplicas) -> FormReplicas:
    """Return the request with one peer for each client whose data stays with peers. Raises
    NoPlan."""
    if not ask.spec.client_data:
        return ask
    mine = {o.peer for o in offer_of_each(ask.spec, ask.peers).values()}
    at = [i for i, offer in enumerate(ask.peers) if offer.peer in mine]
    if not at:
        raise NoPlan("no peer on offer has data of a client, which stays where it is", "peers")
    network = ask.network and ask.network.part(at)
    return replace(ask, peers=tuple(ask.peers[i] for i in at), network=network)


def _clients(ask: FormReplicas, found: Formation) -> list[int]:
    """Return the client whose data each replica trains on, where that stays with peers; else 0."""
    if not ask.spec.client_data:
        return [0] * len(found.replicas)
    client = {o.peer: c for c, o in offer_of_each(ask.spec, ask.peers).items()}
    return [next(client[p] for p in r.peers if p in client) for r in found.replicas]


def one_plan(ask: FormReplicas, graph: Graph, planner: Planner = by_name) -> PlanWithReport:
    """That of all peers with equal weights after every step. Raises NoPlan, GraphError."""
    spec = decided(ask.spec, "allreduce", 1)
    return planner(plan_request(spec, read_spec(spec), graph, ask.peers, ask.network))


def formed(
    ask: FormReplicas, graph: Graph, one: PlanWithReport | None, planner: Planner = by_name
) -> ReplicasFormed:
    """Return what is recommended; `one`: the plan of all peers with equal weights, where that is
    known. Raises NoPlan, GraphError."""
    asked = read_spec(ask.spec)
    return or_deeper(asked, lambda options: _formed(ask, graph, one, planner, asked, options))


def _formed(
    ask: FormReplicas,
    graph: Graph,
    one: PlanWithReport | None,
    planner: Planner,
    asked: RunRequirements,
    options: PlannerOptions,
) -> ReplicasFormed:
    spec, hosts = one_of_many(ask.spec), _one_of_each(ask)
    around = bool(ask.spec.client_data) and options.stages != 1
    wish, ask = read_spec(spec), ask if around else hosts
    if asked.cohorts is not None:
        wish = replace(wish, options=options)
    rounds = Training.from_json(asked.training).rounds or Training.from_json(wish.training).rounds
    assert rounds is not None, "a run whose replicas meet"
    count = None if asked.undecided else asked.replicas
    request = plan_request(spec, wish, graph, ask.peers, ask.network)
    most = len(hosts.peers)
    if asked.cohorts is None:
        most = min(_MANY, most)
    elif not ask.spec.client_data:
        most = min(most // (options.stages or 1), asked.cohorts.per_round) or 1
    replicas, every = count or most, wish.sync.steps
    each_bytes = contribution_bytes(rounds, replicas)
    make = partial(
        _replicas_of,
        ask.spec,
        request,
        clients=asked.cohorts is not None,
        every=every,
        bytes_per_parameter=each_bytes,
        overlap=rounds.overlap_of(every),
        goes_whole=rounds.goes_whole and asked.sync.kind != "gossip",
        pause_s=PAUSE_S if "snapshot" in wish.recovery.ladder else None,
        planner=planner,
    )
    try:
        if around:
            alone = asked.options if asked.options.stages == 1 else None
            found = around_hosts(
                ask, graph, wish, planner, alone=alone, bytes_per_parameter=each_bytes
            )
        elif asked.cohorts is None or count:
            found = make(count)
        else:  # one for each peer, or as many pipelines as can be
            found = make(most) if options.stages == 1 else most_of(most, make)
        if asked.sync.kind == "gossip" and len(found.replicas) == 1:  # nobody to meet
            found = make(2)
    except NoPlan as error:
        if one is None or asked.sync.kind != "auto":
            raise
        reasons = [_EQUAL, error.reason]
        return ReplicasFormed(
            ask.replica, ask.version, broker_pb2.Formation(kind="allreduce", reasons=reasons)
        )
    if asked.cohorts is not None and len(found.replicas) < asked.cohorts.fewest:
        why = why_members(asked.cohorts.privacy)
        raise NoPlan(f"{len(found.replicas)} peers would train clients, {why}", "peers")
    if asked.cohorts is not None:  # what is compared is other training
        each = _CLIENTS if all(len(r.peers) == 1 for r in found.replicas) else _TOGETHER
        found = replace(found, alternatives=(), reasons=(each,))
    clients = _clients(ask, found)
    of_each = [replace(ask, spec=spec_of_client(ask.spec, c)) for c in clients]
    plans = tuple(_ready(a, graph, r.made) for a, r in zip(of_each, found.replicas, strict=True))
    memory = rounds.stepping_bytes + rounds.exchange_bytes
    told = _told(one, found, plans, memory, clients, chooses=asked.sync.kind == "auto")
    away = (c for c in range(len(ask.spec.client_data)) if c not in clients)
    told.replicas.extend(broker_pb2.FormedReplica(client=c) for c in away)
    if told.kind == "allreduce":
        plans = ()
    return ReplicasFormed(ask.replica, ask.version, told, plans)


def _replicas_of(
    spec: broker_pb2.RunSpec, request: PlanRequest, count: int | None, *, clients: bool, **how: Any
) -> Formation:
    """Return so many replicas, None: as many as are best. `clients`: a batch is a client's, so that
    each has a whole one. `how`: as of `form`. Raises NoPlan."""
    if clients:
        whole = (count or 1) * request.microbatches
        request = replace(request, microbatches=whole, others=())
    return form(as_before(request, had_form(spec)), count, **how)


def contribution_bytes(rounds: RoundSettings, replicas: int) -> float:
    """For each trained number, the mean of what is given and of what comes back."""
    spec = TensorShape((1 << 20,), "float32", 4 << 20)
    text = rounds.contribution_codec
    given = 4.0 if text == "none" else typical_bytes(parse(text), spec) / (1 << 20)
    if rounds.cohorts is not None and rounds.secure:  # integers, both ways
        ratio = rounds.cohorts.sends.compression_options.least_ratio
        return 8.0 * (ratio if rounds.cohorts.shares_positions else 1.0)
    if rounds.most_rows:  # and one mean comes back
        return given * (rounds.most_rows / replicas + 1) / 2
    match options_of(rounds.method, rounds.options):
        case SparseLocoOptions(result_density=0.0):
            return given * (1 + replicas) / 2  # what comes back are all contributions
        case SparseLocoOptions() as sparse:
            return (given + typical_bytes(parse(sparse.result_codec), spec) / (1 << 20)) / 2
        case SapsOptions(keep=keep):
            return given * keep
        case StreamingOptions(fragments=fragments, bits=4):
            return (given + 1.0) / 2 / fragments  # int8 comes back
        case StreamingOptions(fragments=fragments):
            return given / fragments
    back = typical_bytes(parse(rounds.results), spec) / (1 << 20) if rounds.results else given
    rows = 2 if rounds.overlap else 1  # who sent each number is given, too
    return (rows * given + back) / 2


def _ready(ask: FormReplicas, graph: Graph, made: PlanWithReport) -> PlanReady:
    bound = planned_graph(graph.bind(made.plan.microbatch_size), made.plan)
    made.plan.validate(len(bound.operators))
    ready = ready_of(ask, bound, made)
    if problem := bad_plan(PlanWithReport(ready.plan, ready.report), ready.pairs):
        raise ValueError(problem)
    return ready


def _told(
    one: PlanWithReport | None,
    found: Formation,
    plans: tuple[PlanReady, ...],
    kept_bytes: int,
    clients: Sequence[int],
    *,
    chooses: bool,
) -> broker_pb2.Formation:
    """For people and for the journal. `one`: the plan with equal weights, beside which it stands;
    `chooses`: whether that may be what is recommended. `clients`: by replica, whose data it trains
    on."""
    round_, now, reasons = found.round, found.samples_per_s, list(found.reasons)
    others, kind = list(found.alternatives), "local"
    if one is not None:
        step_s = one.step_s
        rate = round_.batch / step_s if step_s else 0.0
        who = count_of(len(one.plan.peers), "peer")
        text = f"{who}, equal weights after every step"
        others = [Alternative(ONE_REPLICA, step_s, text), *others]
        others = [a for i, a in enumerate(others) if not i or a.name != ONE_REPLICA]
        if chooses and (len(found.replicas) < 2 or rate >= NEAR * now):
            kind = "allreduce"
            reasons = [f"{_EQUAL}: {rate:.4g} samples/s; {_instead(found)}", *reasons[1:]]
    if kind == "local":
        reasons += _better(others, round_.batch, now)
    sent = dict(round_.peer_bytes)
    peers = [
        broker_pb2.FormedPeer(
            peer=p,
            bytes=sent.get(p, 0.0),
            kept_bytes=kept_bytes
            * sum(r.plan.outline.stages[k].elements for k in r.plan.stages_of(p)),
        )
        for r in plans
        for p in r.plan.peers
    ]
    return filled(
        broker_pb2.Formation,
        round_,
        kind=kind,
        replicas=[
            filled(broker_pb2.FormedReplica, r, stages=len(r.made.plan.stages), client=c)
            for r, c in zip(found.replicas, clients, strict=True)
        ],
        peers=peers,
        left_out=[filled(broker_pb2.Spare, s) for s in found.left_out],
        alternatives=[filled(broker_pb2.Alternative, a) for a in others],
        reasons=reasons,
    )


def _instead(found: Formation) -> str:
    """What the best replicas that meet in rounds would train."""
    if len(found.replicas) > 1:
        count, rate = len(found.replicas), found.samples_per_s
        return f"{count} replicas that meet in rounds would train {rate:.4g}"
    for a in found.alternatives:
        if a.name.endswith(" replicas") and a.step_s:
            rate = found.round.batch / a.step_s
            return f"{a.name} ({a.text}) that meet in rounds would train {rate:.4g}"
    return "no replicas that meet in rounds were found"


def _better(others: list[Alternative], batch: int, now: float) -> list[str]:
    """Whether another way would train clearly more samples/s than these replicas."""
    best = min((a for a in others if a.step_s), key=lambda a: a.step_s, default=None)
    if best is None or batch / best.step_s * NEAR <= now:
        return []
    rate = batch / best.step_s
    return [
        f"these replicas are {WRONG_CHOICE}: {best.name} ({best.text}) trains {rate:.4g} "
        f"samples/s, {rate / now:.2f} times theirs"
    ]
