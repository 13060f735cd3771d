"""SWARM (arXiv 2301.11913) as a planner: stages cut evenly, as many holders of each as there are,
and every microbatch routed hop by hop (`routing.py`).

1. For a number of stages the graph is cut where the peers, on average, have done equal parts of
   their work, near there where fewest bytes cross; or as evenly as memory allows.
2. The peers, or the fastest of them, are put on stages so that all carry as much (`balance.py`).
   What a microbatch takes a peer is the longer of its compute and its lines (`measured.py`).
3. The event calculation that judges all planners says which number of stages and of peers is best.

Of a run under way the stages stay, and holders move between them with hysteresis. Newcomers join,
and the graph is cut anew, where the step becomes shorter by LEAST_GAIN.

In SWARM trainers route by what they see from second to second, and a holder does what comes first.
Here routes and the order of each holder belong to the plan, and change when the run is looked at
again (`broker/placement/reconsider.py`) or after a loss. The order is made as if all took equally
long (`dag/schedule/orders/`), so a fast holder waits for microbatches that went to slow ones
before it; under 1F1B more, which bounds how many are on their way.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ...dag.analysis.blocks import describe_interval
from ...dag.plan.plan import ScheduleName
from ...dag.plan.report import PlanWithReport, Spare
from ...dag.schedule.orders.schedules import CHAINED, first_of, interleaves
from ...job.words import count_of, some_of
from ..base.interface import NoPlan, PlanRequest
from ..cost.candidate import Candidate, StageShare
from ..cost.cost_model import CostModel
from ..cost.shortage import recomputes, refuse_impossible, shortage
from ..search.collectives import with_collectives
from .balance import LEAST_GAIN, Holders, assigned, rebalanced
from .measured import MeasuredPeers
from .routing import round_robin

__all__ = ["swarm"]

STAGES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of stages that are tried, where the job names none."""
PARTS = (1.0, 0.75, 0.5, 0.33, 0.25, 0.17, 0.12)
"""Of the peers, the fastest first: so many are tried."""
SPARES = (1, 2, 4)
"""Times the microbatches that a stage keeps if all are equally wide: for so many it has memory."""
WINDOW = 256
"""Microbatches that are routed; further ones take the same ways again."""
MOST_NAMED = 8
"""Holders of a stage in the plan's reasons."""


@dataclass(frozen=True, slots=True)
class _Swarm:
    """Stage k has the operators from cuts[k] to cuts[k + 1]; `again`: whether it computes its
    forward again."""

    cuts: tuple[int, ...]
    holders: Holders
    again: tuple[bool, ...]
    schedule: ScheduleName


@dataclass(frozen=True, slots=True)
class _Found:
    seconds: float
    """Of a step."""
    swarm: _Swarm
    candidate: Candidate


def swarm(request: PlanRequest) -> PlanWithReport:
    """Plan even stages with many holders, each microbatch routed by itself. Raises NoPlan."""
    refuse_impossible(request)
    options = request.options
    if options.pipelines is not None or interleaves(options.schedule) or options.swaps:
        raise NoPlan(
            'scheduler = "swarm" routes every microbatch by itself: expected no plan.pipelines, '
            'no schedule = "interleaved" and no "neighbour+" in recovery.ladder',
            "model",
        )
    return _Planner(request).plan()


class _Planner:
    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.judge = judge = CostModel(request)
        asked = request.options.schedule
        self.schedules: tuple[ScheduleName, ...] = (
            CHAINED if asked == "auto" else (first_of(asked),)
        )
        self.measured = MeasuredPeers(judge)

    def plan(self) -> PlanWithReport:
        found: _Found | None = None
        for options in (self._kept(), self._kept(join=True), self._anew()):
            best = self._best(options)
            if best and (found is None or found.seconds > best.seconds * (1 + LEAST_GAIN)):
                found = best
        if found is None:
            raise shortage(self.judge)
        return self._told(found)

    def _best(self, options: Iterable[_Swarm]) -> _Found | None:
        best = None
        for option in dict.fromkeys(options):
            candidate = self._candidate(option)
            if self.judge.cuttable(candidate):
                seconds = self.judge.seconds(candidate)
                if seconds < (best.seconds if best else np.inf):
                    best = _Found(seconds, option, candidate)
        return best

    def _anew(self) -> Iterator[_Swarm]:
        judge, asked = self.judge, self.request.options.stages
        most = min(len(judge.offers), judge.operators)
        for again in recomputes(judge):
            for stages in (asked,) if asked else (s for s in STAGES if s <= most):
                for cuts in dict.fromkeys(self.measured.cuts(stages, again)):
                    yield from self._spread(cuts, (again,) * stages)

    def _spread(self, cuts: tuple[int, ...], again: tuple[bool, ...]) -> Iterator[_Swarm]:
        fastest = self.measured.fastest(cuts, again)
        for part, spare, by in itertools.product(PARTS, SPARES, self.schedules):
            peers = fastest[: max(len(again), round(part * len(fastest)))]
            seconds = self.measured.seconds(cuts, again, len(peers), spare, by)
            holders = assigned(seconds, peers)
            if holders is not None:
                yield _Swarm(cuts, holders, again, by)

    def _kept(self, join: bool = False) -> Iterator[_Swarm]:
        """The stages of the plan under way with their holders as they are now; with `join` all
        others come to them."""
        plan, request = self.request.running, self.request
        if plan is None or len({*plan.peers}) < sum(len(s.holders) for s in plan.stages):
            return  # another planner's, in which a peer has several stages
        if request.options.stages not in (None, len(plan.stages)):
            return
        cuts = (0, *(s.stop for s in plan.stages))
        if cuts[-1] != self.judge.operators or plan.head_parts != request.head_parts:
            return
        place = self.judge.place
        had = tuple(tuple(place[p] for p in s.holders if p in place) for s in plan.stages)
        again = tuple(s.recompute for s in plan.stages)
        others = [p for p in range(len(place)) if join and not any(p in of for of in had)]
        for spare, by in itertools.product(SPARES, self.schedules):
            peers = sum(map(len, had)) + len(others)
            holders = rebalanced(had, self.measured.seconds(cuts, again, peers, spare, by), others)
            if holders is not None:
                yield _Swarm(cuts, holders, again, by)

    def _candidate(self, option: _Swarm) -> Candidate:
        """One pipeline for each way that a microbatch takes."""
        holders, spans = option.holders, list(itertools.pairwise(option.cuts))
        seconds = []
        for k, (a, b) in enumerate(spans):
            before, behind = holders[max(0, k - 1)], holders[min(k + 1, len(spans) - 1)]
            takes = self.measured.takes(a, b, option.again[k], before, behind)
            seconds.append({p: float(takes[p]) for p in holders[k]})
        count = self.request.microbatches
        ways = round_robin(seconds, min(count, WINDOW))
        each, more = divmod(count, len(ways))
        return Candidate(
            tuple(
                tuple(
                    StageShare(p, a, b, again)
                    for p, (a, b), again in zip(way, spans, option.again, strict=True)
                )
                for way in ways
            ),
            tuple(each + (i < more) for i in range(len(ways))),
            option.schedule,
        )

    def _told(self, found: _Found) -> PlanWithReport:
        judge, offers = self.judge, self.judge.offers
        candidate = with_collectives(judge, found.candidate)
        used = set(candidate.peers)
        step_s = judge.seconds(candidate)
        stages = len(found.swarm.holders)
        reasons = [
            f"{len(used)} of {count_of(len(offers), 'peer')} in {count_of(stages, 'stage')} of "
            f"about equal work, each of {judge.request.microbatches} microbatches routed by "
            f"itself under {candidate.schedule}, {step_s:.4g} s for a step"
        ]
        for k, (a, b) in enumerate(itertools.pairwise(found.swarm.cuts)):
            visits = Counter[int]()
            for way, count in zip(candidate.pipelines, candidate.microbatches, strict=True):
                visits[way[k].peer] += count
            names = [f"{offers[p]} ({m})" for p, m in visits.most_common()]
            part = describe_interval(judge.request.graph, a, b)
            reasons.append(f"stage {k}: {part} on {some_of(names, MOST_NAMED)}")
        spares = []
        for p, offer in enumerate(offers):
            if any(p in of for of in found.swarm.holders):
                why = "others of its stage have done all microbatches before it would have done one"
            else:
                why = "the step is longer with it, or it has too little memory for a stage"
            if p not in used:
                spares.append(Spare(offer.peer, why))
        return judge.plan(candidate, reasons=reasons, spares=spares)
