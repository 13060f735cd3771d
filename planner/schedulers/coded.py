"""Planning with codecs: a plan whose links carry what the job's [codec] asks for.

1. The planner finds a plan as if nothing was compressed, and its links get codecs
   (planner/codecs/codecs.py).
2. It plans once more over links as fast as codecs would make them, since a placement that is wrong
   over slow links may be right over compressed ones. That plan gets codecs in turn, by the links as
   they are.
3. The shorter step of the two wins.

Where no codec is asked for, the planner's plan is returned as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...compression.codec import fitting, parse
from ...dag.cost.network import Floats, Network
from ...dag.ir.graph import TensorSpec
from ...dag.plan.plan import Plan
from ...dag.plan.report import Alternative, PlanReport, PlanWithReport, Spare
from ..base.interface import CODED_ROLES, CodecOptions, NoPlan, Planner, PlanRequest
from ..codecs.carried import CodedStepCost
from ..codecs.codec_table import table
from ..codecs.codecs import choose
from ..cost.candidate import from_plan
from ..cost.cost_model import CostModel
from ..search.reasons import stage_reasons
from .alternatives import ALONE, REPLICAS

__all__ = ["UNCOMPRESSED", "plan_with_codecs", "relaxed", "with_codecs"]

UNCOMPRESSED = "uncompressed"
"""Name of the alternative: the best plan that was found without codecs."""
WORTH_PLANNING = 0.95
"""Codecs that leave more of a tensor's bytes than this are no reason to plan again."""


def plan_with_codecs(request: PlanRequest, planner: Planner) -> PlanWithReport:
    """Makes a plan with the planner, and chooses the codecs of its links. Raises NoPlan as the
    planner does."""
    dense = planner(request)
    if not request.options.codecs.asked:
        return dense
    judge = CostModel(request.form_of(dense.plan))
    first = with_codecs(judge, dense)
    again = _again(request, planner, dense.plan, judge)
    best = first
    if again is not None and 0 < again.step_s < first.step_s:
        best = again
    return PlanWithReport(best.plan, _beside(best, dense.report))


def with_codecs(judge: CostModel, planned: PlanWithReport) -> PlanWithReport:
    """The plan with codecs on its links, and its prediction with them where it has one. The plan is
    one of the judge's request."""
    plan, report = planned
    carried = CodedStepCost(judge, plan, report.predicted)
    chosen = choose(carried, judge.request.options.codecs)
    predicted = report.predicted
    if predicted.step_s:
        predicted = carried.prediction(chosen.choice, chosen.errors)
    reasons = (*report.reasons, *chosen.reasons)
    codecs = carried.choices(chosen.choice)
    if plan.full is not None:  # which may have links of their own
        whole = CodedStepCost(judge, plan.in_full)
        known = {(c.source, c.destination, c.role) for c in codecs}
        also = whole.choices(choose(whole, judge.request.options.codecs).choice)
        codecs += tuple(c for c in also if (c.source, c.destination, c.role) not in known)
        seconds = whole.seconds(whole.of_plan(codecs))
        predicted = replace(predicted, full_step_s=seconds if report.predicted.full_step_s else 0.0)
    return PlanWithReport(
        replace(plan, codecs=codecs),
        replace(report, predicted=predicted, reasons=reasons),
    )


# ---------------------------------------------------------------- planning again


def _again(
    request: PlanRequest, planner: Planner, dense: Plan, judge: CostModel
) -> PlanWithReport | None:
    """Step 2; None: nothing to gain, or the same plan."""
    links = relaxed(judge)
    if links is None:
        return None

    def over(form: PlanRequest) -> PlanRequest:
        costs = vars(form).get("costs", form.known_costs)  # found already, or not yet
        return replace(form, links=links, known_costs=costs, others=tuple(map(over, form.others)))

    try:
        found, report = planner(over(request))
    except NoPlan:
        return None
    if (found.stages, found.routes, found.schedule) == (dense.stages, dense.routes, dense.schedule):
        return None
    own = CostModel(request.form_of(found))
    found, report = with_codecs(own, PlanWithReport(found, replace(report, reasons=())))
    step_s = report.predicted.step_s
    moved = request.options.reroutes
    hangs = next(iter(report.predicted.bottlenecks), "")
    told = replace(
        report,
        reasons=(
            f"{len(found.peers)} of {len(own.offers)} peers under {found.schedule}, {step_s:.4g} s "
            "for a step: placed for links that are compressed",
            *(() if moved else stage_reasons(own, from_plan(found, own.place))),
            *report.reasons,
        ),
        spares=tuple(Spare(s.peer, f"not needed: {hangs}") for s in report.spares),
    )
    return PlanWithReport(found, told)


def relaxed(judge: CostModel) -> Network | None:
    """The request's links as fast as the cheapest codec that each role may have there would make
    them, roles counted alike; None: hardly faster. "adatopk" and "auto" leave fast links alone:
    with them none gets faster than the fastest is now."""
    options, network = judge.request.options.codecs, judge.network
    factors = {role: _factor(judge, role, options) for role in CODED_ROLES}
    if np.mean(list(factors.values())) > WORTH_PLANNING:
        return None
    rates = judge.rates[~np.eye(len(network), dtype=bool)]
    rates = rates[np.isfinite(rates)]
    if not len(rates):
        return None

    def faster(now: Floats) -> Floats:
        seconds = np.zeros_like(now)
        for role, factor in factors.items():
            match options.of(role):
                case "adatopk" | "auto":
                    then = np.maximum(now, np.minimum(now / factor, rates.max()))
                case _:
                    then = now / factor
            seconds += 1 / then / len(factors)
        with np.errstate(divide="ignore"):
            found: Floats = 1 / seconds
        return found

    bandwidth = network.bandwidth.copy()
    np.fill_diagonal(bandwidth, np.inf)
    return replace(
        network, bandwidth=faster(bandwidth), up=faster(network.up), down=faster(network.down)
    )


def _factor(judge: CostModel, role: str, options: CodecOptions) -> float:
    """Bytes of the graph's largest value under the cheapest codec of a role on a slow link, over
    those that it has."""
    graph = judge.request.graph
    specs = [o.spec for op in graph.operators for o in op.outputs if o.spec and o.grad]
    spec = max(specs, key=lambda s: s.size_bytes, default=TensorSpec((1,), "float32"))
    if role == "sync":
        spec = TensorSpec((spec.elements,), "float32")
    match options.of(role):
        case "none":
            return 1.0
        case "adatopk":
            return 1 / options.ratio
        case "auto":
            texts = [r.codec for r in table()[role]["slow"] if r.error <= options.error_budget]
        case text:
            texts = [text]
    sizes = [fitting(parse(text), spec).size_bytes(spec) for text in texts]
    return min(sizes, default=spec.size_bytes) / spec.size_bytes


# ---------------------------------------------------------------- what it says


def _beside(planned: PlanWithReport, dense: PlanReport) -> PlanReport:
    """The report with what its plan is compared with, which is uncompressed."""
    plan, report = planned
    alternatives = tuple(_compared(planned, dense))
    spares = report.spares
    if plan.codecs and spares == dense.spares:
        spares = tuple(Spare(s.peer, f"{s.reason} (without codecs)") for s in spares)
    predicted = replace(report.predicted, alternatives=alternatives)
    return replace(report, predicted=predicted, spares=spares)


def _compared(planned: PlanWithReport, dense: PlanReport) -> Iterator[Alternative]:
    plan, step_s = planned.plan, planned.step_s
    if plan.codecs:
        yield Alternative(
            UNCOMPRESSED,
            dense.predicted.step_s,
            f"the best plan found without codecs: {_times(dense.predicted.step_s, step_s)}",
        )
    for other in dense.predicted.alternatives:
        if plan.codecs and other.step_s and other.name not in (ALONE, REPLICAS):
            text = f"{other.step_s:.4g} s uncompressed, {_times(other.step_s, step_s)}"
            other = replace(other, text=text)
        yield other


def _times(other_s: float, step_s: float) -> str:
    return f"{other_s / step_s:.2f} times this plan's step"
