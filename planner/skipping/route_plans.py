"""From a layout to a plan: the routes of its microbatches, and the order of the visits.

1. Routes of equal visits begin the search: in a circle those of `planner/routes/`, which also says
   who holds which stage; in a row such as do not look at the network.
2. They are bettered by the list scheduler with the real seconds of stages and links: two
   microbatches trade a stage, one takes its stages in another order, two change their turns.
3. Visits are listed under deeper and deeper bounds, as far as memory goes; the judge says which.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...dag.analysis.blocks import describe_interval
from ...dag.plan.cut import Stage, cut
from ...dag.plan.full_steps import FullSteps
from ...dag.plan.plan import Plan, Route, Visit
from ...dag.plan.routes import why_not_moved
from ...dag.schedule.orders.list_scheduler import Bounds
from ...dag.schedule.orders.schedules import LISTED, SCHEDULES, ZERO_BUBBLE, first_of, may_list
from ...dag.schedule.schedule import executed_s, with_visits
from ..base.interface import NoPlan
from ..cost.cost_model import CostModel
from ..cost.plan_cost import RouteSeconds, plan_seconds
from ..routes.route_rules import RouteRules, orders_of
from ..routes.route_search import RouteSearch, search_routes
from ..routes.route_start import even_orders
from ..routes.route_timing import RouteTimes
from ..search.depth import deeper, rooms
from .layouts import StageLayout

__all__ = ["RoutedPlan", "best_over", "even_routes", "found_circle"]

LOOK_AHEAD = 4
"""The most stages that a microbatch goes on by at once, where its length allows (SkipPipe)."""
SWAPS = 2
ROUGH, FINE, STARTS = 4_000, 40, 2
"""Moves of the search for a circle."""
MOST_TRIED = 160
"""Changes of routes that are tried, and the most visits of all of them."""
MOST_VISITS = 40_000
MOST_DEPTHS = 4
"""Depths that the judge looks at, the best by the list scheduler."""


@dataclass(frozen=True, slots=True)
class RoutedPlan:
    """A listed plan over a layout, and seconds of its step; infinite where it does not fit."""

    plan: Plan
    seconds: float
    layout: StageLayout


def rules_of(layout: StageLayout, *, reorder: bool, memory: int) -> RouteRules:
    """The ends count as one stage, which comes first."""
    length = layout.inner + 1 - layout.out
    ahead = max(LOOK_AHEAD, -(-layout.inner // (length - 1)))
    swaps = SWAPS if reorder else 0
    stages = layout.inner + 1
    return RouteRules(
        stages=stages, length=length, swaps=swaps, look_ahead=ahead, memory=max(1, memory)
    )


# ---------------------------------------------------------------- circles


def found_circle(
    judge: CostModel, layout: StageLayout, *, reorder: bool
) -> tuple[StageLayout, list[Route], float] | None:
    """The layout with its holders, and the routes of its microbatches, by a search with equal
    stages, with the seconds of its step by that; None: no routes keep the rules."""
    count, first = judge.request.microbatches, layout.sizes[0]
    lanes = -(-count // first) * first
    rules = rules_of(layout, reorder=reorder, memory=lanes // first)
    moves = RouteSearch(rough=ROUGH * STARTS, fine=FINE, starts=STARTS)
    try:
        found = search_routes(rules, _times(judge, layout, rules), layout.sizes, 1, moves)
    except ValueError:
        return None
    holders = [
        tuple(p for p, stage in enumerate(found.stage_of) if stage == k)
        for k in range(layout.inner + 1)
    ]
    held = layout.held((*holders, holders[0]))
    last, names = layout.inner + 1, [*judge.place]
    routes = [
        (*(Visit(k, names[p]) for k, p in path), Visit(last, names[path[0][1]]))
        for path in found.waves[0][:count]
    ]
    visited = {v.stage for route in routes for v in route}
    return (held, routes, found.step_s) if len(visited) == last + 1 else None


def _times(judge: CostModel, layout: StageLayout, rules: RouteRules) -> RouteTimes:
    cuts, n = layout.cuts, len(judge.offers)
    forward, backward = (
        (s[:, cuts[-2]] - s[:, cuts[1]]) / layout.inner for s in (judge.forward_s, judge.backward_s)
    )
    whole = judge.both_s
    ends = whole[:, -1] - whole[:, cuts[-2]] + whole[:, cuts[1]]
    with np.errstate(divide="ignore"):
        hold = judge.crossing_bytes(cuts[1]) / judge.rates
    latency = judge.network.latency_s.copy()
    for values in (hold, latency):
        np.fill_diagonal(values, 0.0)
    return RouteTimes(
        latency_s=np.asarray(latency, dtype=np.float64),
        hold_s=np.asarray(hold, dtype=np.float64),
        forward_s=np.asarray(forward, dtype=np.float64).reshape(n),
        backward_s=np.asarray(backward, dtype=np.float64).reshape(n),
        loss_s=np.asarray(ends, dtype=np.float64).reshape(n),
        memory=rules.memory,
        backward_first=True,
    )


# ---------------------------------------------------------------- routes over a layout


def even_routes(judge: CostModel, layout: StageLayout, *, reorder: bool) -> list[Route] | None:
    """Routes of equal visits over the lines of a layout in turn; None: no routes keep the rules."""
    count, last = judge.request.microbatches, layout.inner + 1
    names = [*judge.place]
    try:
        orders = even_orders(rules_of(layout, reorder=reorder, memory=count), count)
    except ValueError:
        return None
    lines = [layout.lines[m % len(layout.lines)] for m in range(count)]
    return [
        tuple(Visit(k, names[line[k]]) for k in (*order, last))
        for order, line in zip(orders, lines, strict=True)
    ]


@dataclass
class _Bettered:
    """Changes routes as long as the list scheduler's step becomes shorter."""

    plan: Plan
    stages: Sequence[Stage]
    times: RouteSeconds
    bounds: Bounds | None
    rules: RouteRules
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self) -> tuple[Route, ...]:
        routes = list(self.plan.routes)
        visits = 2 * sum(map(len, routes))
        best = self.seconds(routes)
        for _ in range(min(MOST_TRIED, MOST_VISITS // max(1, visits))):
            changed = self._changed(routes)
            if changed is None:
                continue
            seconds = self.seconds(changed)
            if seconds < best * (1 - 1e-9):
                routes, best = changed, seconds
        return tuple(routes)

    def seconds(self, routes: Sequence[Route]) -> float:
        plan = replace(self.plan, routes=tuple(routes))
        plan = _listed(plan, self.stages, self.times, self.bounds)
        return executed_s(plan, self.stages, self.times)

    def _changed(self, routes: list[Route]) -> list[Route] | None:
        kind, found = self.rng.random(), list(routes)
        a, b = self.rng.randrange(len(routes)), self.rng.randrange(len(routes))
        if kind < 0.3:
            found[a], found[b] = found[b], found[a]
            return found if routes[a] != routes[b] else None
        if kind < 0.75 or not self.rules.swaps:
            return self._traded(found, a, b)
        one = self._ordered(routes[a])
        found[a] = one or routes[a]
        return found if one not in (None, routes[a]) else None

    def _traded(self, found: list[Route], a: int, b: int) -> list[Route] | None:
        one, two = found[a], found[b]
        mine = {v.stage for v in one}
        its = {v.stage for v in two}
        give = [v for v in one if v.stage not in its]
        take = [v for v in two if v.stage not in mine]
        if not give or not take:
            return None
        x, y = self.rng.choice(give), self.rng.choice(take)
        first = self._ordered(tuple(y if v == x else v for v in one))
        second = self._ordered(tuple(x if v == y else v for v in two))
        if first is None or second is None:
            return None
        found[a], found[b] = first, second
        return found

    def _ordered(self, route: Route) -> Route | None:
        """The visits in an order that the rules permit."""
        visit = {v.stage: v for v in route}
        last = max(visit)
        orders = orders_of(self.rules, tuple(sorted(visit.keys() - {last})))
        if not orders:
            return None
        order = orders[self.rng.randrange(len(orders))]
        return (*(visit[k] for k in order), visit[last])


def _listed(
    plan: Plan, stages: Sequence[Stage], times: RouteSeconds, bounds: Bounds | None
) -> Plan:
    """The plan with its visits in order."""
    times.learn(plan)
    lists = SCHEDULES[plan.schedule].order(plan, stages, times, bounds)
    return with_visits(plan, stages, tuple(tuple(lists[p]) for p in plan.peers))


# ---------------------------------------------------------------- the best over a layout


def best_over(
    judge: CostModel,
    layout: StageLayout,
    routes: Sequence[Route],
    *,
    reorder: bool,
    recompute: bool,
) -> RoutedPlan | None:
    """The best plan over a layout that has its holders; `routes` begin the search. None: the graph
    cannot be cut so. Raises NoPlan where whoever checks a plan says that a stage may be left out by
    nobody."""
    candidate = layout.candidate(judge.request.microbatches, recompute)
    if not judge.cuttable(candidate):
        return None
    options = judge.request.options
    bare = judge.bare_plan(
        replace(candidate, schedule=_schedules(options.schedule)[0]),
        [*judge.place],
        evaluation_microbatches=judge.request.evaluation_microbatches,
        head_parts=judge.request.head_parts,
    )
    # Updates that wait for no norm rest on all stages being on all routes.
    plan = replace(bare, routes=tuple(routes), without_norm=False)
    stages = cut(judge.request.graph, [(s.start, s.stop) for s in plan.stages])
    for k in range(1, layout.inner + 1):
        if why := why_not_moved(stages, k):
            part = describe_interval(judge.request.graph, stages[k].start, stages[k].stop)
            raise NoPlan(f"plan.skip and plan.reorder: stage {k} ({part}) {why}", "model")
    times = RouteSeconds(judge, plan, stages)
    has = rooms(judge, candidate)
    bounds = list(_bounds(judge, has))
    if min(has) < 1 or not bounds:
        return RoutedPlan(plan, float("inf"), layout)
    rules = rules_of(layout, reorder=reorder, memory=len(routes))
    middle = bounds[len(bounds) // 2]
    bettered = _Bettered(plan, stages, times, middle, rules).run()
    plan = replace(plan, routes=bettered)
    listed: dict[object, tuple[float, int, Plan, int]] = {}
    for name in _schedules(options.schedule):
        plan = replace(plan, schedule=name)
        times = RouteSeconds(judge, plan, stages)
        for bound in bounds:
            found = _listed(plan, stages, times, bound)
            most = max(bound.values()) if bound else len(stages)
            seconds = executed_s(found, stages, times)
            listed.setdefault(found.visits, (seconds, len(listed), found, most))
    best = RoutedPlan(plan, float("inf"), layout)
    for _, _, found, most in sorted(listed.values(), key=lambda x: x[:2])[:MOST_DEPTHS]:
        found = with_full_steps(judge, found, stages, most)
        seconds = plan_seconds(judge, found)
        if seconds < best.seconds:
            best = RoutedPlan(found, seconds, layout)
    if best.seconds == float("inf"):  # the least that a stage keeps
        _, _, found, most = min(listed.values(), key=lambda x: x[3])
        found = with_full_steps(judge, found, stages, most)
        best = RoutedPlan(found, plan_seconds(judge, found), layout)
    return best


def with_full_steps(judge: CostModel, plan: Plan, stages: Sequence[Stage], most: int) -> Plan:
    """The plan with the steps of the run in which every microbatch visits all stages, if it has
    any: those that it leaves out at the holder which has fewest visits so far."""
    asked = judge.request.options.full_steps
    if asked is None:
        return plan
    load = Counter(v for route in plan.routes for v in route)
    holders = {
        k: [v for v in (Visit(k, p) for p in slot.holders) if v in load]
        for k, slot in enumerate(plan.stages)
    }
    routes = []
    for route in plan.routes:
        own = {v.stage: v for v in route}
        for k in (k for k in holders if k not in own):
            own[k] = min(holders[k], key=lambda v: load[v])
            load[own[k]] += 1
        routes.append(tuple(own[k] for k in holders))
    plan = replace(plan, full=FullSteps(*asked, tuple(routes)))
    bounds = dict.fromkeys(holders, most) if may_list(plan.schedule) else None
    times = RouteSeconds(judge, plan, stages)
    full = _listed(plan.in_full, stages, times, bounds)
    return replace(plan, full=FullSteps(*asked, full.routes, full.visits))


def _schedules(asked: str) -> tuple[str, ...]:
    """By which visits are listed; routes are searched with the first."""
    if asked == "auto":
        return LISTED, ZERO_BUBBLE
    return (asked,) if may_list(asked) else (first_of(asked),)


def _bounds(judge: CostModel, has: Sequence[int]) -> Iterator[Mapping[int, int] | None]:
    """Bounds that visits are listed under."""
    options = judge.request.options
    if not may_list(options.schedule):
        yield None
    elif options.in_flight is not None:
        # No more than there are microbatches can be asked for.
        if min(options.in_flight, judge.request.microbatches) <= min(has):
            yield dict.fromkeys(range(len(has)), options.in_flight)
    else:
        yield from deeper(has)
