"""Carrying out MakePlan and ConsiderPlan: from a serialised graph and offers to their answers.

The simulated worlds call `answer` and `consider` in their own process, the broker in another one
(`planner.py`): they run every operator of a stranger's graph on fake tensors. They import torch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch._subclasses import FakeTensorMode

from ...dag.analysis.beside import beside_data
from ...dag.analysis.skippable import bypass_of
from ...dag.cost.network import Network
from ...dag.ir.convert import graph_from_bytes
from ...dag.ir.graph import Graph, GraphError
from ...dag.ir.validate import validate
from ...dag.plan.cut import bare_stages, cut, outline, tied_groups
from ...dag.plan.plan import PeerId, Plan, PlanError
from ...dag.plan.report import NO_REPORT, PlanReport, PlanWithReport, Spare
from ...dag.rounds.vector import with_elements
from ...dag.schedule.convert_plan import plan_from_proto
from ...dag.schedule.flow import Flow
from ...dag.schedule.schedule import check_listed, listed
from ...dag.transforms.vocabulary import planned_graph
from ...job.words import count_of, size_text, some_of
from ...proto.broker_pb2 import RunSpec
from ..base.interface import NoPlan, PeerOffer, Planner, PlannerOptions, PlanRequest
from ..codecs.carried import CodedStepCost
from ..cost.cost_model import CostModel
from ..requests.asked import (
    ConsiderPlan,
    FormReplicas,
    MakePlan,
    PlanConsidered,
    PlanFailed,
    PlanReady,
)
from ..requests.request import data_that_stays, plan_request
from ..requests.requirements import read_spec
from ..schedulers.coded import with_codecs
from ..schedulers.replan import migration
from ..schedulers.schedulers import plan as by_name
from .bad_plan import bad_plan
from .deeper import or_deeper
from .leaving_out import LeftOut, without_culprits

__all__ = [
    "answer",
    "as_before",
    "consider",
    "frame_pairs",
    "had_form",
    "make_plan",
    "or_refused",
    "ready_of",
    "warm_up",
    "with_left_out",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


def warm_up() -> None:
    """Loads what torch loads when shapes are inferred for the first time: two seconds."""
    FakeTensorMode()


def answer(ask: MakePlan, graph_bytes: bytes, planner: Planner = by_name) -> PlanReady | PlanFailed:
    """The event that answers a MakePlan, whatever graph and offers are. Raises MemoryError."""

    def made() -> PlanReady:
        graph = graph_from_bytes(graph_bytes)

        def make(peers: tuple[PeerOffer, ...], network: Network | None) -> PlanReady:
            ready = make_plan(replace(ask, peers=peers, network=network), graph, planner)
            if problem := bad_plan(PlanWithReport(ready.plan, ready.report), ready.pairs):
                by_hand = ask.spec.HasField("plan") and ask.before is None
                raise PlanError(problem) if by_hand else ValueError(problem)
            return ready

        ready, left = without_culprits(make, ask.peers, ask.network)
        return replace(ready, report=with_left_out(ready.report, left)) if left else ready

    return or_refused(ask, made)


def or_refused(ask: MakePlan | FormReplicas, made: Callable[[], T]) -> T | PlanFailed:
    """Return what is made, or the event that says why it is not. Raises MemoryError."""
    try:
        return made()
    except NoPlan as error:
        return PlanFailed(ask.replica, ask.version, error.reason, error.code, error.short_bytes)
    except PlanError as error:
        return PlanFailed(ask.replica, ask.version, f"the plan of the run: {error}", "plan")
    except GraphError as error:
        return PlanFailed(ask.replica, ask.version, f"the graph of the run: {error}", "graph")
    except MemoryError:
        raise
    except Exception as error:  # a planner's bug must not leave a run waiting forever
        log.exception("plan_crashed run=%s", ask.replica)
        text = f"planning crashed: {type(error).__name__}: {error}"
        return PlanFailed(ask.replica, ask.version, text, "internal")


def make_plan(ask: MakePlan, graph: Graph, planner: Planner = by_name) -> PlanReady:
    """Raises NoPlan, PlanError for a hand-written plan, GraphError."""
    spec = ask.spec
    if graph.operator_set != "full":
        raise GraphError(f"its operator set is {graph.operator_set}: expected the full form")
    if by_hand := spec.HasField("plan") and ask.before is None:
        plan, report = _with_ids(plan_from_proto(spec.plan), ask.peers), NO_REPORT
        if (had := had_form(spec)) not in (None, (plan.microbatch_size, plan.head_parts)):
            raise PlanError(
                f"it has microbatches of {plan.microbatch_size} and the head in {plan.head_parts} "
                f"parts, and its checkpoint was made with {had}: they may not change"
            )
    else:
        wish, had = read_spec(spec), had_form(spec, ask.before)

        def planned(options: PlannerOptions) -> PlanWithReport:
            wanted = replace(wish, options=options)
            request = plan_request(spec, wanted, graph, ask.peers, ask.network)
            return planner(replace(as_before(request, had), running=ask.before))

        plan, report = or_deeper(wish, planned)
    form = planned_graph(_bound(graph, plan.microbatch_size), plan)
    plan.validate(len(form.operators))
    if by_hand:
        if plan.head_parts and read_spec(spec).options.whole_parameters:
            raise PlanError(
                f"the head is in {plan.head_parts} parts, and the job's train.optimizer has to "
                "have parameters whole: expected head_parts 0"
            )
        _check_memory(ask, form, plan)
        _check_scaled(ask, form, plan)
        plan, report = _with_codecs(ask, form, plan)
    return ready_of(ask, form, PlanWithReport(plan, report))


def ready_of(ask: MakePlan | FormReplicas, form: Graph, planned: PlanWithReport) -> PlanReady:
    """The event that gives a run a plan. `form`: its bound `planned_graph`. Raises PlanError."""
    plan, report = planned
    local = _kept(ask, form, plan)
    plan = outlined(form, plan)
    core = [str(o) for o in ask.peers if o.operator_set == "core" and o.peer in plan.peers]
    if plan.head_parts and core:
        raise PlanError(
            f"the head is in {plan.head_parts} parts, and {', '.join(core)} has the core operator "
            "set only: expected peers with the full set, or head_parts 0"
        )
    return PlanReady(ask.replica, ask.version, plan, frame_pairs(form, plan), local, report)


def had_form(spec: RunSpec, before: Plan | None = None) -> tuple[int, int] | None:
    """(microbatch size, parts of the head) that a plan must have: those of the plan before, or of
    the checkpoint that the run begins with. None: any."""
    if before is None and not spec.HasField("resumed"):
        return None
    had = before or spec.resumed
    return had.microbatch_size, had.head_parts


def as_before(request: PlanRequest, had: tuple[int, int] | None) -> PlanRequest:
    """The request for a plan that a running one can move to, where one has to. Raises NoPlan."""
    if had is None:
        return request
    if (kept := request.form(*had)) is None:
        text = f"microbatches of {had[0]} with the head in {had[1]} parts, as before, are not asked"
        raise NoPlan(text)
    return kept


def _kept(ask: MakePlan | FormReplicas, form: Graph, plan: Plan) -> tuple[str, ...]:
    """The inputs whose data the plan keeps where it is. Raises PlanError for one that has data read
    elsewhere; a hand-written one can."""
    local, has, blended = data_that_stays(ask.spec, form, ask.peers)
    for i in beside_data(form, local, blended=blended):
        stage = next(s for s in plan.stages if s.start <= i < s.stop)
        strangers = [p for p in stage.holders if p not in has]
        if strangers:
            raise PlanError(
                f"it has operator {form.operators[i].name} on {strangers[0]}, which lacks the data "
                "that must not leave its peer"
            )
    return local


def _check_memory(ask: MakePlan, form: Graph, plan: Plan) -> None:
    """Raises PlanError for a hand-written plan that takes more memory of a peer than its owner
    offers, by what the broker's own plans are judged with."""
    judge = _judge(ask, form, plan)
    offers = {o.peer: o for o in ask.peers}
    for peer, needed in judge.plan_bytes(plan).items():
        offered = offers[peer].device_memory_bytes
        if needed > offered:
            raise PlanError(
                f"its stages take {size_text(needed)} of {offers[peer]}, which offers "
                f"{size_text(offered)}: short by {size_text(needed - offered)}; give it fewer "
                "operators, smaller microbatches, or recompute"
            )


def _check_scaled(ask: MakePlan, form: Graph, plan: Plan) -> None:
    """Raises PlanError for a hand-written plan that leaves out a stage of which the job wants
    scaled what it cannot."""
    if not read_spec(ask.spec).options.stochastic_depth:
        return
    visits = Counter(v.stage for route in plan.routes for v in route)
    for k in (k for k in range(len(plan.stages)) if visits[k] < len(plan.routes)):
        slot = plan.stages[k]
        if why := bypass_of(form, slot.start, slot.stop).why_not_scaled:
            raise PlanError(
                f'it leaves out stage {k} with plan.skip_scaling = "stochastic-depth", and that '
                f"stage {why}"
            )


def _judge(ask: MakePlan, form: Graph, plan: Plan) -> CostModel:
    """The judge of the request that a hand-written plan answers."""
    options, count = read_spec(ask.spec).options, len(plan.routes)
    request = PlanRequest(
        form, ask.peers, count, plan.microbatch_size, options=options, links=ask.network
    )
    return CostModel(request)


def _with_codecs(ask: MakePlan, form: Graph, plan: Plan) -> PlanWithReport:
    """A hand-written plan with the codecs that the job asks for, where it has none of its own."""
    asked = read_spec(ask.spec).options.codecs.asked
    if plan.codecs or len(plan.peers) < 2 or not asked:
        return PlanWithReport(plan)
    return with_codecs(_judge(ask, form, plan), PlanWithReport(plan))


def _bound(graph: Graph, size: int) -> Graph:
    """The graph for a plan's microbatches; raises GraphError."""
    if graph.batch not in (None, size):
        raise GraphError(f"it is bound to microbatches of {graph.batch}, the plan has {size}")
    return validate(graph).bind(size)


def with_left_out(report: PlanReport, left: LeftOut) -> PlanReport:
    """The report, with who was left out of the offers and why."""
    if not left:
        return report
    spares = tuple(Spare(peer, why) for peer, why in left.items())
    text = f"{count_of(len(left), 'peer')} left out, as no plan can be made with them: "
    reasons = (*report.reasons, text + some_of(list(left)))
    return replace(report, spares=(*report.spares, *spares), reasons=reasons)


def consider(ask: ConsiderPlan, graph_bytes: bytes, planner: Planner = by_name) -> PlanConsidered:
    """The event that answers a ConsiderPlan. Raises MemoryError."""
    try:
        return _considered(ask, graph_bytes, planner)
    except MemoryError:
        raise
    except Exception:  # the run goes on under its plan
        log.exception("plan_not_considered run=%s", ask.replica)
        return PlanConsidered(ask.replica, ask.version)


def _considered(ask: ConsiderPlan, graph_bytes: bytes, planner: Planner) -> PlanConsidered:
    graph = graph_from_bytes(graph_bytes)
    wish = read_spec(ask.spec)
    offered = {o.peer for o in ask.peers}
    if any(p not in offered for p in ask.plan.peers):
        return PlanConsidered(ask.replica, ask.version)  # a holder is gone: not a matter of speed
    try:
        whole = plan_request(ask.spec, wish, graph, ask.peers, ask.network)
    except NoPlan:  # after a restart, nobody has said yet that it has the data
        return PlanConsidered(ask.replica, ask.version)
    # A running plan keeps its microbatches and its graph.
    kept = whole.form(ask.plan.microbatch_size, ask.plan.head_parts)
    if kept is None:
        return PlanConsidered(ask.replica, ask.version)
    request = replace(kept, running=ask.plan)
    running = CodedStepCost(CostModel(request), ask.plan)
    running_s = running.seconds(running.of_plan(ask.plan.codecs))
    try:
        found, report = planner(request)
    except NoPlan:
        return PlanConsidered(ask.replica, ask.version, running_s)
    seconds = migration(
        ask.plan,
        found,
        request.graph,
        request.network,
        state_bytes=request.options.standing_bytes,
    )
    found = outlined(request.graph, found)
    step_s, pairs = report.predicted.step_s, frame_pairs(request.graph, found)
    told = (running_s, step_s, seconds, found, pairs)
    return PlanConsidered(ask.replica, ask.version, *told, report=report)


def outlined(graph: Graph, plan: Plan) -> Plan:
    """The plan with what crosses its stages, and its visits listed where they are not yet. `graph`:
    its bound `planned_graph`. Raises PlanError for lists that nobody can follow."""
    bounds = [(s.start, s.stop) for s in plan.stages]
    found = replace(plan, outline=with_elements(outline(graph, bounds), graph, bounds))
    if not found.visits:
        return listed(found, bare_stages(found))
    check_listed(found, bare_stages(found))
    return found


def frame_pairs(graph: Graph, plan: Plan) -> tuple[tuple[PeerId, PeerId], ...]:
    """Pairs of peers that exchange frames under a plan of the bound `planned_graph`, each once; of
    each pair the one that stands first in `plan.peers` comes first; the pairs are in that order."""
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    # Microbatches on equal routes exchange the same frames, so one of each kind is enough.
    reduced = plan.with_routes(lambda routes: tuple(dict.fromkeys(routes)))
    flow = Flow(reduced, stages, tied_groups(graph, stages))
    place = {peer: i for i, peer in enumerate(plan.peers)}
    found = {tuple(sorted((place[t.source], place[t.destination]))) for t in flow.taken_by}
    return tuple((plan.peers[a], plan.peers[b]) for a, b in sorted(found) if a != b)


def _with_ids(plan: Plan, offers: Sequence[PeerOffer]) -> Plan:
    """A hand-written plan with peer ids where it has names."""
    ids = {offer.name: offer.peer for offer in offers} | {o.peer: o.peer for o in offers}

    def known(peer: PeerId) -> PeerId:
        if peer not in ids:
            raise PlanError(f"peer {peer} is not among {', '.join(o.peer for o in offers)}")
        return ids[peer]

    return plan.with_peers(known)
