"""A plan whose microbatches leave stages out, or visit them in another order, as the job allows
(`plan.skip`, `plan.reorder`; SkipPipe, arXiv 2502.19913).

The asked planner says what a step takes without that. Layouts in which the ends of the model lie
with one peer or some (`layouts.py`), and the planner's own row of peers, are given routes
(`route_plans.py`); what is shortest by the judge of all planners is the plan. Of a share to leave
out that the planner may choose, only what makes the step WORTH shorter is taken.

A loss is another one with other routes, so nothing here is done unless a job says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...dag.analysis.blocks import describe_interval
from ...dag.analysis.skippable import describe_skippable
from ...dag.plan.cut import cut, tied_groups
from ...dag.plan.plan import Plan, Route
from ...dag.plan.report import Alternative, PlanWithReport, Spare
from ...dag.plan.routes import swaps
from ...dag.schedule.orders.schedules import DEFAULT, first_of, interleaves
from ...job.words import count_of, size_text, some_of
from ..base.interface import NoPlan, Planner, PlanRequest
from ..cost.cost_model import CostModel
from ..cost.plan_cost import plan_report, plan_seconds
from ..cost.shortage import recomputes
from .layouts import StageLayout, circles, refuse_impossible_routes, rows, window
from .route_plans import RoutedPlan, best_over, even_routes, found_circle

__all__ = ["AUTO_SHARE", "IN_ALL_ORDER", "skipping"]

AUTO_SHARE = 0.25
"""The most that `skip = "auto"` leaves out: three quarters of a model are said to lose 2 % of
perplexity (SkipPipe)."""
WORTH = 0.9
"""Of the step's time in order, at most, where leaving out is the planner's choice."""
MOST_CIRCLES = 3
"""Of the circles that were found, as many are looked at closely, the best by their search."""
MOST_SEARCHED = 24
"""Circles that are searched, and the most offers they are searched among."""
MOST_OFFERS = 48
MOST_ROW, MOST_LINES = 8, 16
"""Peers of the longest row, and the most of them beside each other."""
CLOSE = 0.75
"""Of the asked share, at least, that a plan leaves out where any does."""
IN_ALL_ORDER = "every stage in order"
"""Name of the alternative: the plan without skipping and reordering."""


def skipping(request: PlanRequest, planner: Planner) -> PlanWithReport:
    """A plan with the routes that `request.options` allows. Raises NoPlan."""
    options = request.options
    share = AUTO_SHARE if options.skip is None else options.skip
    plain_request = _plain(request)
    try:
        plain: PlanWithReport | None = planner(plain_request)
    except NoPlan as error:  # a circle may still fit
        if error.code != "memory" or not share:
            raise
        plain = None
    optional = options.skip is None or not share
    try:
        found = _searched(request, planner, share, plain)
    except NoPlan as error:
        if plain is None or not optional:
            raise
        return _with_reasons(
            plain, [f"every microbatch visits all stages in order: {error.reason}"]
        )
    plain_s = plain.step_s if plain else float("inf")
    if plain is not None and optional and found[0].seconds > WORTH * plain_s:
        why = (
            f"every microbatch visits all stages in order: other routes would take "
            f"{found[0].seconds:.4g} s, expected at most {WORTH:.0%} of {plain_s:.4g} s"
        )
        return _with_reasons(plain, [why])
    return _told(*found, plain)


def _plain(request: PlanRequest) -> PlanRequest:
    # `plan.stages` counts those that may be left out.
    options = replace(request.options, skip=0.0, reorder=False, stages=None)
    others = tuple(map(_plain, request.others))
    return replace(request, options=options, others=others, running=None)


def _searched(
    request: PlanRequest, planner: Planner, share: float, plain: PlanWithReport | None
) -> tuple[RoutedPlan, CostModel]:
    """The best plan in the form of the request that the plain plan has, else in the first one that
    has any."""
    forms = [f for f in (request, *request.others) if not f.head_parts] or [request]
    if plain is not None:
        forms.sort(key=lambda f: f.microbatch_size != plain.plan.microbatch_size)
    refuse_impossible_routes(forms[0])
    refused: list[str] = []
    best: tuple[RoutedPlan, CostModel] | None = None
    tightest: NoPlan | None = None
    for form in forms:
        if best is not None:
            break
        judge = CostModel(replace(form, others=(), known_costs=form.costs))
        try:
            layouts = list(_layouts(judge, planner, share, plain))
        except NoPlan as error:
            tightest = tightest or error
            continue
        for layout, routes in layouts:
            if (why := _too_few(judge, layout)) != "":
                hint = "lower train.microbatch, or change plan.skip or plan.stages"
                refused.append(f"plan.skip: {why}; {hint}")
                continue
            for again in recomputes(judge):
                try:
                    found = best_over(
                        judge, layout, routes, reorder=request.options.reorder, recompute=again
                    )
                except NoPlan as error:
                    refused.append(error.reason)
                    break
                if found is None or found.seconds == float("inf"):
                    continue
                if best is None or _key(found, share) < _key(best[0], share):
                    best = found, judge
                break
    if best is None:
        raise _none(request, share, refused, tightest)
    return best


def _key(found: RoutedPlan, share: float) -> tuple[bool, float]:
    return found.layout.share < CLOSE * share, found.seconds


def _too_few(judge: CostModel, layout: StageLayout) -> str:
    needed, count = window(layout.inner, layout.out), judge.request.microbatches
    if count >= needed:
        return ""
    return (
        f"{count_of(count, 'microbatch')} cannot visit each of {layout.inner} stages as often, if "
        f"each leaves {layout.out} out: expected {needed} or more"
    )


def _none(
    request: PlanRequest, share: float, refused: Sequence[str], tightest: NoPlan | None
) -> NoPlan:
    if refused:
        return NoPlan(refused[0], "model")
    if tightest is not None:
        return tightest
    asked = request.options.in_flight
    if asked is not None:
        return NoPlan(
            f"plan.in_flight is {asked}, and no plan that leaves stages out has memory for so many "
            "microbatches at once: lower plan.in_flight or train.microbatch",
            "memory",
        )
    return NoPlan(
        f"plan.skip = {share:g} leaves out no whole stage, or no plan that does fits the peers' "
        "memory: expected a larger share, more stages (plan.stages), or more memory",
        "memory",
    )


def _layouts(
    judge: CostModel, planner: Planner, share: float, plain: PlanWithReport | None
) -> Iterator[tuple[StageLayout, list[Route]]]:
    request = judge.request
    reorder = request.options.reorder
    some = False
    for layout in _rows(judge, planner, share, plain):
        routes = even_routes(judge, layout, reorder=reorder)
        if routes is not None:
            some = True
            yield layout, routes
    if len(judge.offers) > MOST_OFFERS:
        return
    ranked = []
    for n, layout in zip(range(MOST_SEARCHED), circles(judge, share), strict=False):
        if _too_few(judge, layout):
            if not some:
                yield layout, []
            continue
        found = found_circle(judge, layout, reorder=reorder)
        if found is not None:
            ranked.append((found[2], n, found[0], found[1]))
    for _, _, layout, routes in sorted(ranked, key=lambda x: x[:2])[:MOST_CIRCLES]:
        yield layout, routes


def _rows(
    judge: CostModel, planner: Planner, share: float, plain: PlanWithReport | None
) -> Iterator[StageLayout]:
    """Rows over the peers of the asked planner's own pipelines: of its plain plan, in one pipeline,
    and in one of as many peers as there are."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    form, refused = _plain(judge.request), None
    asked = form.options.schedule
    schedule = DEFAULT if interleaves(asked) else first_of(asked)
    alone = replace(form.options, stages=None, pipelines=1, in_flight=None, schedule=schedule)
    plans = [plain.plan] if plain else []
    for stages in (None, min(len(judge.offers), MOST_ROW)):
        try:
            plans.append(planner(replace(form, options=replace(alone, stages=stages))).plan)
        except NoPlan as error:
            refused = refused or error
    for plan in plans:
        ways = dict.fromkeys(
            tuple(dict.fromkeys(judge.place[v.peer] for v in route)) for route in plan.routes
        )
        lines = tuple(ways)
        apart = len({p for line in lines for p in line}) == sum(map(len, lines))
        if lines not in seen and (apart or len(lines) == 1) and len(lines) <= MOST_LINES:
            seen.add(lines)
            yield from rows(judge, lines, share)
    if not seen and refused is not None and len(judge.offers) < 3:
        raise refused


# ---------------------------------------------------------------- what it says


def _with_reasons(planned: PlanWithReport, reasons: Sequence[str]) -> PlanWithReport:
    plan, report = planned
    return PlanWithReport(plan, replace(report, reasons=(*report.reasons, *reasons)))


def _told(found: RoutedPlan, judge: CostModel, plain: PlanWithReport | None) -> PlanWithReport:
    plan, layout, names = found.plan, found.layout, {o.peer: str(o) for o in judge.offers}
    plain_s = plain.step_s if plain else 0.0
    count = len(plan.routes)
    moved = swaps(plan)
    what = f"leaves {layout.share:.0%} of the blocks out" if layout.out else "visits all stages"
    order = f", neighbours change places in {_swapped(plan.routes)} of them" if moved else ""
    without = f"{plain_s:.4g} s in order" if plain_s else "in order no plan fits"
    if 0 < plain_s < found.seconds:
        without += ", so here the step is longer for it: visits and hops outweigh what is left out"
    reasons = [
        f"{len(plan.peers)} of {len(judge.offers)} peers in {len(plan.stages)} stages under "
        f"{plan.schedule}, {found.seconds:.4g} s for a step of {count} microbatches of "
        f"{plan.microbatch_size}, each of which {what}{order}; {without}"
    ]
    visits = Counter(v.stage for route in plan.routes for v in route)
    for k, slot in enumerate(plan.stages):
        who = some_of([names[h] for h in slot.holders], 8)
        part = describe_interval(judge.request.graph, slot.start, slot.stop)
        reasons.append(f"stage {k}: {part} on {who}, {visits[k]} of {count} microbatches")
    ways = Counter(plan.routes)
    for route, times in list(ways.items())[:6]:
        text = " -> ".join(f"{v.stage}@{names[v.peer]}" for v in route)
        reasons.append(f"route of {count_of(times, 'microbatch')}: {text}")
    if len(ways) > 6:
        reasons.append(f"and {len(ways) - 6} more routes")
    reasons += [*_copies(judge, plan), *describe_skippable(judge.request.graph)]
    full_s = 0.0
    if plan.full is not None:
        full_s = plan_seconds(judge, plan.in_full)
        before, since = plan.full.before, plan.full.since
        reasons.append(
            f"steps below {before} and from {since} on visit all stages in order, {full_s:.4g} s "
            "each"
        )
    used = {*plan.peers}
    hangs = "routes over others are shorter"
    spares = [Spare(o.peer, f"not needed: {hangs}") for o in judge.offers if o.peer not in used]
    others = []
    if plain is not None:
        text = f"{plain_s:.4g} s, {plain_s / found.seconds:.2f} times this plan's"
        others = [Alternative(IN_ALL_ORDER, plain_s, text), *plain.report.predicted.alternatives]
    told = plan_report(judge, plan, reasons=reasons, spares=spares, alternatives=others)
    predicted = replace(told.report.predicted, full_step_s=full_s)
    return PlanWithReport(plan, replace(told.report, predicted=predicted))


def _copies(judge: CostModel, plan: Plan) -> Iterator[str]:
    """What stages pay for weights that they share, such as those of one block that is used many
    times: each has a copy, on one peer, too."""
    graph = judge.request.graph
    groups = tied_groups(graph, cut(graph, [(s.start, s.stop) for s in plan.stages]))
    size = sum(graph.parameter_bytes[g.parameter] * (len(g.stages) - 1) for g in groups)
    if size:
        yield (
            f"{count_of(len(groups), 'weight')} of several stages: each of these keeps and updates "
            f"a copy of its own, {size_text(size)} more than the model has"
        )


def _swapped(routes: Sequence[Route]) -> int:
    return sum(list(r) != sorted(r, key=lambda v: v.stage) for r in routes)
