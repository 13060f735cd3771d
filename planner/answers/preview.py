"""What would run where, and why: the plan that a run would get, with what people ask next.

The same request and planner as for a run; nothing is started and nothing is kept. Slow, and runs
the operators of a stranger's graph: the broker has it made in another process (`planner.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...dag.analysis.blocks import describe_interval
from ...dag.cost.cost import cost, stage_cost
from ...dag.cost.network import Network
from ...dag.ir.convert import graph_from_bytes
from ...dag.ir.graph import Graph, GraphError
from ...dag.plan.plan import Plan, PlanError
from ...dag.plan.report import Alternative, PlanWithReport
from ...dag.schedule.convert_plan import plan_to_proto
from ...dag.schedule.convert_report import report_to_proto
from ...dag.transforms.vocabulary import planned_graph
from ...job.words import WRONG_CHOICE, count_of, some_of
from ...proto.broker_pb2 import Formation, OperatorSpan, PlannedRow, PreviewAnswer
from ...proto.common_pb2 import Reason
from ..base.interface import NoPlan, PeerOffer, PlannerOptions, PlanRequest
from ..codecs.carried import CodedStepCost
from ..cost.cost_model import CostModel
from ..requests.asked import FormReplicas, PreviewWanted, ReplicaId
from ..requests.request import plan_request
from ..requests.requirements import decided, one_of_many, read_spec
from ..requests.run_spec import RunSpecError
from ..schedulers.alternatives import ALONE, REPLICAS, alone, replicas
from ..schedulers.schedulers import plan as make
from .bad_plan import bad_plan
from .deeper import or_deeper
from .forming import formed
from .leaving_out import without_culprits
from .planning import with_left_out
from .risk import work_at_risk

__all__ = ["preview", "preview_bytes", "preview_wanted"]

MOST_ROWS = 64
"""Peers that have a row in the planned step: those of the plan's first stages."""
WORTH_SAYING = 0.98
"""Another way is said to be better when it takes less than this share of the plan's step."""


def preview_bytes(wanted: PreviewWanted, graph_bytes: bytes) -> PreviewAnswer:
    """The preview for a serialised graph, which came from outside."""
    try:
        graph = graph_from_bytes(graph_bytes)
    except GraphError as error:
        return _refusal(wanted, "graph", f"the graph of the run: {error}")
    return preview_wanted(wanted, graph)


def preview_wanted(wanted: PreviewWanted, graph: Graph) -> PreviewAnswer:
    """The preview, or an answer that says why there is none."""
    try:
        return preview(wanted, graph)
    except NoPlan as error:
        return _refusal(wanted, error.code, error.reason)
    except RunSpecError as error:
        return _refusal(wanted, "spec", str(error))
    except (GraphError, PlanError) as error:
        return _refusal(wanted, "graph", f"the graph of the run: {error}")


def preview(wanted: PreviewWanted, graph: Graph) -> PreviewAnswer:
    """Raises NoPlan, RunSpecError, GraphError, PlanError."""
    asked = read_spec(wanted.spec)
    # Beside several replicas stands the plan of all peers with equal weights, beside clients that
    # of one peer which trains some.
    spec, clients = wanted.spec, asked.cohorts is not None
    if clients:
        spec = one_of_many(spec)
    elif asked.forms:
        spec = decided(spec, "allreduce", 1)
    wish = read_spec(spec)
    wish = replace(wish, options=asked.options) if clients else wish
    if not wanted.offers:
        raise NoPlan(
            "no peer is free, none has joined or all are in runs (`shoal peers` lists them): start "
            "some with `shoal join`, or wait for a run's end",
            "peers",
        )

    def planned(
        offers: tuple[PeerOffer, ...], network: Network | None
    ) -> tuple[PlanRequest, PlanWithReport, list[Alternative], Formation | None]:
        def planned_by(options: PlannerOptions) -> tuple[PlanRequest, PlanWithReport]:
            request = plan_request(spec, replace(wish, options=options), graph, offers, network)
            return request, make(request)

        request, found = or_deeper(asked if clients else wish, planned_by)
        if problem := bad_plan(found, ()):
            raise ValueError(problem)
        formation = None
        if asked.forms or clients:
            ask = FormReplicas(ReplicaId(""), 0, wanted.spec, offers, network)
            formation = formed(ask, graph, found).formation
        return request, found, [] if clients else _compared(request), formation

    found, left = without_culprits(planned, wanted.offers, wanted.network)
    request, (plan, report), others, formation = found
    report = with_left_out(report, left)
    kept = [a for a in report.predicted.alternatives if a.name not in (ALONE, REPLICAS)]
    predicted = replace(report.predicted, alternatives=(*others, *kept))
    made = PlanWithReport(plan, replace(report, predicted=predicted))
    risk = work_at_risk(request, graph, made, wish.recovery)
    return PreviewAnswer(
        plan=plan_to_proto(plan),
        report=report_to_proto(made.report),
        peers=wanted.peers,
        operators=_spans(graph, plan),
        formation=formation,
        step=_planned_step(request, plan),
        notes=[*_verdict(made), *risk, *wanted.notes, *_unknown(request, made)],
    )


def _refusal(wanted: PreviewWanted, code: str, text: str) -> PreviewAnswer:
    return PreviewAnswer(
        reason=Reason(code=code, text=text), peers=wanted.peers, notes=wanted.notes
    )


def _compared(request: PlanRequest) -> list[Alternative]:
    """One peer alone and whole replicas, each under the batching that suits it best: the plan was
    free to choose one, too. Larger microbatches take more memory, so where no peer can hold the
    model with some, none is looked at with more."""
    best: dict[str, Alternative] = {}
    plain = (request, *(o for o in request.others if not o.head_parts))
    for one in sorted(plain, key=lambda o: o.microbatch_size):
        judge = CostModel(one)
        for found in (alone(judge), replicas(judge)):
            text = found.text.replace(
                f"{one.microbatches} microbatches one after another",
                f"{count_of(one.microbatches, 'microbatch')} of {one.microbatch_size}",
            )
            found = replace(found, text=text)
            known = best.setdefault(found.name, found)
            if 0 < found.step_s < (known.step_s or math.inf):
                best[found.name] = found
        if not any(a.step_s for a in best.values()):
            break
    return list(best.values())


def _verdict(made: PlanWithReport) -> list[str]:
    """Whether a plan over this network is the right choice at all. Both sentences may hold: the
    first is about the same training, the second about another one."""
    step, alternatives = made.step_s, made.report.predicted.alternatives
    faster = {a.name: a for a in alternatives if 0 < a.step_s < step * WORTH_SAYING}
    one, many = faster.get(ALONE), faster.get(REPLICAS)
    notes = []
    if one is not None and len(made.plan.peers) > 1:
        notes.append(
            f"a pipeline over this network is {WRONG_CHOICE}: {one.text}, takes "
            f"{one.step_s:.3g} s for the same samples, the plan {step:.3g} s: "
            f"{step / one.step_s:.3g} times faster"
        )
    if many is not None and (one is None or many.step_s < one.step_s):
        notes.append(
            f"{many.text.partition(':')[0]} would take {many.step_s:.3g} s for the same samples, "
            f"the plan {step:.3g} s: the better choice where local steps are good enough"
        )
    return notes


def _unknown(request: PlanRequest, made: PlanWithReport) -> list[str]:
    """What the predictions rest on that nobody measured."""
    notes = []
    plan, offers = made.plan, {o.peer: o for o in request.offers}
    blind = [str(offers[p]) for p in plan.peers if not (offers[p].speeds or offers[p].flops_per_s)]
    if blind:
        named = some_of(blind)
        notes.append(f"the speed of {named} is not known and taken for that of an old core")
    network = request.links
    if network is None and len(plan.peers) > 1:
        notes.append("no link was measured: each is taken for 100 Mbit/s with 20 ms")
    elif network is not None and network.measured is not None:
        place = {peer: i for i, peer in enumerate(network.peers)}
        guessed = [
            f"{offers[link.source]} -> {offers[link.destination]}"
            for link in made.report.predicted.links
            if not network.measured[place[link.source], place[link.destination]]
        ]
        if guessed:
            notes.append(f"estimated from other links, not measured: {some_of(guessed)}")
    return notes


def _spans(graph: Graph, plan: Plan) -> list[OperatorSpan]:
    form = planned_graph(graph.bind(plan.microbatch_size), plan)
    costs = cost(form)
    total = sum(c.forward.flops + c.backward.flops for c in costs) or 1.0
    found = []
    for stage in plan.stages:
        part = stage_cost(costs, stage.start, stage.stop)
        ops = form.operators[stage.start : stage.stop]
        found.append(
            OperatorSpan(
                first=ops[0].name,
                last=ops[-1].name,
                modules=describe_interval(form, stage.start, stage.stop),
                share=(part.forward.flops + part.backward.flops) / total,
                parameter_bytes=part.parameter_bytes,
            )
        )
    return found


def _planned_step(request: PlanRequest, plan: Plan) -> list[PlannedRow]:
    """One training step as a plan expects it: a row for each peer of a plan of the request, or of
    one of its other divisions of a batch, with the codecs of its links. Seconds since the step's
    begin."""
    cost = CodedStepCost(CostModel(request.form_of(plan)), plan)
    played, program = cost.timeline(cost.of_plan(plan.codecs)), cost.program
    rows = []
    for i, peer in enumerate(program.peers[:MOST_ROWS]):
        own = slice(program.first[i], program.first[i + 1])
        rows.append(
            PlannedRow(
                peer=peer,
                actions=map(str, program.actions[own]),
                start_s=played.start[own],
                end_s=played.end[own],
            )
        )
    return rows
