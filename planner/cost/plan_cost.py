"""What a plan costs whose routes no candidate has: stages left out, or in another order."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.estimate import summarize
from ...dag.cost.pace import VISIT_CALLS
from ...dag.cost.program import FRAME_BYTES
from ...dag.cost.speed import Work
from ...dag.plan.action import Action, Kind
from ...dag.plan.cut import Stage
from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import Alternative, PlanReport, PlanWithReport, Spare
from ...dag.plan.routes import crossings
from ...dag.schedule.orders.list_scheduler import Visited
from ...dag.schedule.orders.schedules import ZERO_BUBBLE
from .cost_model import CostModel, Structure

__all__ = ["RouteSeconds", "plan_report", "plan_seconds"]


class RouteSeconds:
    """Seconds of the visits and messages of any routes over the stages of a plan, as its peers and
    links take alone; what links take from one another is left to the judge."""

    def __init__(
        self,
        judge: CostModel,
        plan: Plan,
        stages: Sequence[Stage],
        peers: Mapping[PeerId, int] | None = None,
        whole: Collection[int] = (),
    ) -> None:
        """`peers`: their numbers among the judge's offers, if they go by other names; `whole`:
        stages with backwards as they are under zero bubble, too."""
        self._judge, self._plan, self._stages = judge, plan, stages
        self._place = peers or judge.place
        self._whole = range(len(stages)) if plan.schedule != ZERO_BUBBLE else whole
        self._visits: dict[tuple[PeerId, Kind, int], float] = {}
        self._messages: dict[tuple[Visited, Visited], tuple[float, float]] = {}
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}
        """By (source, target) of neighbours on some route, forward: values and bytes."""
        self._known: set[tuple[int, ...]] = set()
        self.learn(plan)

    def learn(self, plan: Plan) -> None:
        """Look at the routes of a plan over the same stages."""
        for route in plan.routes:
            order = tuple(v.stage for v in route)
            if order in self._known:
                continue
            self._known.add(order)
            sizes: dict[tuple[int, int], tuple[int, int]] = {}
            for c in crossings(self._stages, route):
                port = next(p for p in self._stages[c.source].sends if p.value == c.made)
                ends = c.source, c.target
                count, size = sizes.get(ends, (0, 0))
                sizes[ends] = count + 1, size + port.spec.size_bytes + FRAME_BYTES
            for ends, found in sizes.items():
                self._sizes[ends] = max(found, self._sizes.get(ends, (0, 0)))
                self._messages.clear()
                self._visits.clear()

    def visit(self, peer: PeerId, action: Action) -> float:
        key = peer, action.kind, action.stage
        if key not in self._visits:
            self._visits[key] = self._seconds(self._place[peer], action.kind, action.stage)
        return self._visits[key]

    def _seconds(self, p: int, kind: Kind, stage: int) -> float:
        judge, slot = self._judge, self._plan.stages[stage]
        *per_unit, frame_s, byte_s = judge.per_unit[p].tolist()
        unit, halves = Work(*per_unit), judge.chain.halves

        def of(seconds: NDArray[np.float64]) -> float:
            return float(seconds[p, slot.stop] - seconds[p, slot.start])

        def worked(work: Work) -> float:
            return math.fsum(a * b for a, b in zip(work, unit, strict=True))

        call = VISIT_CALLS * unit.calls
        ends_s = sum(n * frame_s + size * byte_s for n, size in self._ends(stage))
        if kind not in (Kind.BACKWARD, Kind.WEIGHT):
            return float(of(judge.forward_s) + call + ends_s)
        trained = judge.chain.trained[1, slot.stop] - judge.chain.trained[1, slot.start]
        visits = max(1, len(self._plan.routes) // len(slot.holders))
        sums = 3 * float(trained) * unit.memory * (visits - 1) / visits
        if kind is Kind.WEIGHT:
            return worked(halves.work(slot.start, slot.stop)[1]) + sums + call
        again = of(judge.forward_s) if slot.recompute else 0.0
        halved = stage not in self._whole and self._stages[stage].trainable
        apart = worked(halves.work(slot.start, slot.stop)[0]) if halved else -sums
        return float(of(judge.backward_s) - apart + again + call + ends_s)

    def _ends(self, stage: int) -> list[tuple[int, int]]:
        """Values and bytes that come and go with a visit from or to other peers."""
        holders = [set(s.holders) for s in self._plan.stages]
        return [
            found
            for (a, b), found in self._sizes.items()
            if stage in (a, b) and (holders[a] != holders[b] or len(holders[a]) > 1)
        ]

    def message(self, source: Visited, target: Visited) -> tuple[float, float]:
        key = source, target
        if key not in self._messages:
            p, q = self._place[source[0]], self._place[target[0]]
            a, b = source[2], target[2]
            ends = (b, a) if source[1] is Kind.BACKWARD else (a, b)
            hold = self._sizes.get(ends, (0, 0))[1] / float(self._judge.rates[p, q])
            self._messages[key] = hold, float(self._judge.network.latency_s[p, q])
        return self._messages[key]


def plan_seconds(judge: CostModel, plan: Plan) -> float:
    """The duration of a step of a listed plan over the judge's offers; infinite where a peer has
    not the memory for it. Its evaluation does not count. Raises PlanError."""
    offers = {o.peer: o for o in judge.offers}
    needed = judge.plan_bytes(plan)
    if any(size > offers[p].device_memory_bytes for p, size in needed.items()):
        return float("inf")
    return judge.step_s(*_without_evaluations(judge, plan))


def plan_report(
    judge: CostModel,
    plan: Plan,
    *,
    reasons: Sequence[str] = (),
    spares: Sequence[Spare] = (),
    alternatives: Sequence[Alternative] = (),
) -> PlanWithReport:
    """A listed plan with what it is expected to cost. Raises PlanError."""
    structure, peers = _without_evaluations(judge, plan)
    played, part = judge.played(structure, peers), judge.network.part(peers)
    estimate = summarize(structure.program, played, part)
    prediction = judge.prediction(structure, peers, estimate, alternatives)
    return PlanWithReport(plan, PlanReport(prediction, tuple(reasons), tuple(spares)))


def _without_evaluations(judge: CostModel, plan: Plan) -> tuple[Structure, list[int]]:
    """A plan as the judge knows it, and its peers among the judge's offers."""
    structure = judge.structure_of(replace(plan, evaluation_routes=(), evaluations=()))
    return structure, [judge.place[p] for p in plan.peers]
