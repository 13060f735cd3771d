"""What a plan costs whose routes no candidate has: some stages left out, others in another order.

times = RouteSeconds(judge, plan)        seconds of visits and messages, for list scheduling
plan_seconds(judge, plan)                of a step, by the judge's event calculation
plan_report(judge, plan)                 the plan with what it is expected to cost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...dag.cost.estimate import summarize
from ...dag.cost.play import play
from ...dag.plan.action import Action, Kind
from ...dag.plan.cut import Stage
from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import Alternative, PlanReport, PlanWithReport, Spare
from ...dag.plan.routes import crossings
from ...dag.schedule.orders.list_scheduler import Visited
from ...dag.schedule.orders.schedules import ZERO_BUBBLE
from .cost_model import CostModel
from .predicted import predicted, pure_shares

__all__ = ["RouteSeconds", "plan_report", "plan_seconds"]


class RouteSeconds:
    """Seconds of the visits and messages of any routes over the stages of a plan, as its peers and
    links take alone; what frames cost a CPU, and what links take from one another, is left to the
    judge."""

    def __init__(self, judge: CostModel, plan: Plan, stages: Sequence[Stage]) -> None:
        self._judge, self._plan, self._stages = judge, plan, stages
        self._place = {o.peer: i for i, o in enumerate(judge.offers)}
        self._halved = plan.schedule == ZERO_BUBBLE
        self._visits: dict[tuple[PeerId, Kind, int], float] = {}
        self._messages: dict[tuple[Visited, Visited], tuple[float, float]] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        """By (source, target) of neighbours on some route, forward."""
        self._known: set[tuple[int, ...]] = set()

    def learn(self, plan: Plan) -> None:
        """Look at the routes of a plan over the same stages."""
        for route in plan.routes:
            order = tuple(v.stage for v in route)
            if order in self._known:
                continue
            self._known.add(order)
            sizes: dict[tuple[int, int], int] = {}
            for c in crossings(self._stages, route):
                port = next(p for p in self._stages[c.source].sends if p.value == c.made)
                ends = c.source, c.target
                sizes[ends] = sizes.get(ends, 0) + port.spec.size_bytes
            for ends, size in sizes.items():
                self._bytes[ends] = max(size, self._bytes.get(ends, 0))
                self._messages.clear()

    def visit(self, peer: PeerId, action: Action) -> float:
        key = peer, action.kind, action.stage
        if key not in self._visits:
            slot, p = self._plan.stages[action.stage], self._place[peer]
            forward, backward = (
                float(s[p, slot.stop] - s[p, slot.start])
                for s in (self._judge.forward_s, self._judge.backward_s)
            )
            if self._halved:  # about; the judge knows it
                backward /= 2
            again = forward if slot.recompute else 0.0
            self._visits[key] = {
                Kind.BACKWARD: backward + again,
                Kind.WEIGHT: backward,
            }.get(action.kind, forward)
        return self._visits[key]

    def message(self, source: Visited, target: Visited) -> tuple[float, float]:
        key = source, target
        if key not in self._messages:
            p, q = self._place[source[0]], self._place[target[0]]
            a, b = source[2], target[2]
            ends = (b, a) if source[1] is Kind.BACKWARD else (a, b)
            hold = self._bytes.get(ends, 0) / float(self._judge.rates[p, q])
            self._messages[key] = hold, float(self._judge.network.latency_s[p, q])
        return self._messages[key]


def plan_seconds(judge: CostModel, plan: Plan) -> float:
    """The duration of a step of a listed plan over the judge's offers; infinite where a peer has
    not the memory for it. Its evaluation does not count. Raises PlanError."""
    offers = {o.peer: o for o in judge.offers}
    needed = judge.plan_bytes(plan)
    if any(size > offers[p].device_memory_bytes for p, size in needed.items()):
        return float("inf")
    place = {o.peer: i for i, o in enumerate(judge.offers)}
    peers = [place[p] for p in plan.peers]
    structure = judge.structure_of(_trained(plan))
    seconds = structure.seconds(judge.per_unit[peers])
    hosts = judge.hosts(peers)
    if hosts is None:
        step_s, exact = structure.wiring.unshared.step_s(
            structure.size_bytes, seconds, judge.network, peers, judge.rates
        )
        if exact:
            return step_s
    return play(structure.program, seconds, judge.network.part(peers), hosts).step_s


def plan_report(
    judge: CostModel,
    plan: Plan,
    *,
    reasons: Sequence[str] = (),
    spares: Sequence[Spare] = (),
    alternatives: Sequence[Alternative] = (),
) -> PlanWithReport:
    """A listed plan with what it is expected to cost. Raises PlanError."""
    place = {o.peer: i for i, o in enumerate(judge.offers)}
    peers = [place[p] for p in plan.peers]
    structure = judge.structure_of(_trained(plan))
    seconds = structure.seconds(judge.per_unit[peers])
    network, device = judge.network.part(peers), judge.plan_bytes(plan)
    played = play(structure.program, seconds, network, judge.hosts(peers))
    crossing, edge = judge.chain.crossing_bytes, [0] * len(peers)
    for (i, k), live in structure.peak_live.items():
        slot = plan.stages[k]
        edge[i] += 2 * (crossing(slot.start) + crossing(slot.stop)) * live
    prediction = predicted(
        summarize(structure.program, played, network),
        {p: judge.offers[i] for p, i in zip(plan.peers, peers, strict=True)},
        pure=pure_shares(
            structure.program.owner, judge.bare_seconds(structure, peers), seconds, len(peers)
        ),
        device_bytes=[device[p] for p in plan.peers],
        host_bytes=edge,
        alternatives=alternatives,
    )
    return PlanWithReport(plan, PlanReport(prediction, tuple(reasons), tuple(spares)))


def _trained(plan: Plan) -> Plan:
    return replace(plan, evaluation_routes=(), evaluations=())
