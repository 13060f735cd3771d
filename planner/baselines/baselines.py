"""The two planners that the literature compares with.

- `uniform`: every stage has equally many operators (GPipe's default, and the random order of the
  decentralised-training papers: joining is no order of speed or place).
- `equal_compute`: every stage takes equally long, peers faster or slower; within SLACK of the best,
  the cut with the fewest bytes across. Blind to bandwidth.

Both take the peers in the order of joining:

- `stages = N`: the first N peers (N · pipelines of them) that are enough; if these have too little
  memory, those with the most memory;
- otherwise all peers. While no cut fits, or there are more peers than operators, the peer with the
  least memory becomes a spare.

Where equal shares do not fit, they are as equal as memory allows. With `pipelines = P` the peers
form P rows of as many stages, which share the microbatches evenly. Under "interleaved" every peer
has CHUNKS stages where that fits. Forwards are computed again only where nothing fits without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...dag.plan.plan import ScheduleName
from ...dag.plan.report import PlanWithReport, Spare
from ...dag.schedule.orders.schedules import SCHEDULES, first_of, interleaves
from ...job.words import size_text, some_of
from ..base.interface import NoPlan, PlanRequest
from ..cost.candidate import Candidate, StageShare
from ..cost.cost_model import CostModel
from ..cost.shortage import recomputes, refuse_impossible, shortage
from ..network.pathcut import Path, least_bottleneck, possible, soonest_fill

__all__ = ["CHUNKS", "equal_compute", "uniform"]

Floats = NDArray[np.float64]

CHUNKS = 2
"""Stages of a peer under "interleaved", where the graph has operators for them."""
MOST_HOLDERS = 8
"""Of a stage, named in the plan's reasons."""
SLACK = 0.05
"""How much above the best bottleneck a stage may be for a cheaper cut."""
MOST_POSITIONS = 1024
"""Positions that are tried where equal shares do not fit."""


def uniform(request: PlanRequest, judge: CostModel | None = None) -> PlanWithReport:
    """Equal operators. `judge`: the request's, where there is one already. Raises NoPlan."""
    return _Baseline(request, "operators", judge).plan()


def equal_compute(request: PlanRequest, judge: CostModel | None = None) -> PlanWithReport:
    """Equal seconds. `judge` as for `uniform`. Raises NoPlan."""
    return _Baseline(request, "compute", judge).plan()


@dataclass(frozen=True, slots=True)
class _Grid:
    """The chosen peers: rows[p][k] holds stage k of pipeline p; the others with their reasons."""

    rows: tuple[tuple[int, ...], ...]
    spares: tuple[Spare, ...]

    @classmethod
    def of(
        cls, peers: Sequence[int], pipelines: int, chunks: int, spares: Sequence[Spare]
    ) -> _Grid:
        each = len(peers) // pipelines
        rows = (tuple(peers[p * each : (p + 1) * each]) * chunks for p in range(pipelines))
        return cls(tuple(rows), tuple(spares))

    @property
    def stages(self) -> int:
        return len(self.rows[0])

    def holders(self, stage: int) -> tuple[int, ...]:
        return tuple(row[stage] for row in self.rows)


class _Baseline:
    def __init__(self, request: PlanRequest, equal: str, judge: CostModel | None) -> None:
        refuse_impossible(request)
        self.request, self.equal = request, equal
        self.judge = judge or CostModel(request)
        self.pipelines = request.options.pipelines or 1

    @property
    def schedule(self) -> ScheduleName:
        return first_of(self.request.options.schedule)

    def plan(self) -> PlanWithReport:
        widest: _Grid | None = None
        for recompute in recomputes(self.judge):
            for grid in self._grids():
                widest = widest or grid
                for cuts in self._cuts(grid, recompute):
                    candidate = self._candidate(grid, cuts, recompute)
                    if self.judge.fits(candidate):
                        reasons = list(self._reasons(grid, cuts, recompute))
                        return self.judge.plan(candidate, reasons=reasons, spares=grid.spares)
        assert widest is not None, "there is at least one grid"
        rooms = [self._room(widest, k) for k in range(widest.stages)]
        live = max(self._live(k, widest.stages) for k in range(widest.stages))
        raise shortage(self.judge, rooms, live)

    def _candidate(self, grid: _Grid, cuts: Sequence[int], recompute: bool) -> Candidate:
        each, more = divmod(self.request.microbatches, self.pipelines)
        return Candidate(
            tuple(
                tuple(
                    StageShare(p, a, b, recompute)
                    for p, a, b in zip(row, cuts, cuts[1:], strict=False)
                )
                for row in grid.rows
            ),
            tuple(each + (p < more) for p in range(self.pipelines)),
            self.schedule,
        )

    # ------------------------------------------------------------ who

    def _grids(self) -> Iterator[_Grid]:
        """The best first; there is at least one."""
        request, options = self.request, self.request.options
        offers, operators, pipelines = request.offers, len(request.graph.operators), self.pipelines
        everyone = range(len(offers))
        chunks = CHUNKS if interleaves(self.schedule) else 1
        if options.stages is not None:
            if options.stages % chunks or options.stages < 2 * chunks:
                chunks = 1
            size = options.stages // chunks * pipelines
            if len(offers) < size:
                raise NoPlan(f"{size} peers are needed, {len(offers)} are on offer", "peers")
            by_memory = sorted(everyone, key=lambda i: -offers[i].device_memory_bytes)[:size]
            why = f"the job asks for {options.stages} stages"
            why += f" in {pipelines} pipelines" if pipelines > 1 else ""
            for chosen in (list(everyone)[:size], sorted(by_memory)):
                spares = [Spare(offers[i].peer, why) for i in everyone if i not in chosen]
                yield _Grid.of(chosen, pipelines, chunks, spares)
            return
        left = list(everyone)
        spares = []
        while len(left) >= pipelines:
            stages = len(left) // pipelines
            if stages <= operators:
                odd = left[stages * pipelines :]
                why = f"{len(left)} peers do not divide into {pipelines} pipelines"
                several = chunks > 1 and stages > 1 and stages * chunks <= operators
                # Stages that share a peer's memory equally may not fit where one does.
                for each in (chunks, 1) if several else (1,):
                    yield _Grid.of(
                        left[: stages * pipelines],
                        pipelines,
                        each,
                        spares + [Spare(offers[i].peer, why) for i in odd],
                    )
            # The later one of equals goes, so that who joined first stays; of very many, several.
            for _ in range(max(1, len(left) // 16)):
                least = min(reversed(left), key=lambda i: offers[i].device_memory_bytes)
                left.remove(least)
                memory = size_text(offers[least].device_memory_bytes)
                why = (
                    f"more peers ({len(offers)}) than operators ({operators})"
                    if stages > operators
                    else f"its memory ({memory}) is the least and too small for a stage beside the "
                    "others"
                )
                spares = [*spares, Spare(offers[least].peer, why)]
                stages = len(left) // pipelines

    def _room(self, grid: _Grid, stage: int) -> int:
        """Device bytes of the stage's smallest holder, divided among the stages that it has."""
        chunks = grid.rows[0].count(grid.rows[0][stage])
        offers = self.request.offers
        return min(offers[p].device_memory_bytes for p in grid.holders(stage)) // chunks

    def _live(self, stage: int, stages: int) -> int:
        """Microbatches of one pipeline between their forward and their backward in a stage."""
        each = -(-self.request.microbatches // self.pipelines)
        return SCHEDULES[self.schedule].live(stages, stage, each)

    # ------------------------------------------------------------ where

    def _cuts(self, grid: _Grid, recompute: bool) -> Iterator[tuple[int, ...]]:
        """The cut with equal shares; for operators then the most equal that fits."""
        n, stages = len(self.request.graph.operators), grid.stages
        if self.equal == "operators":
            yield tuple((k * n + stages // 2) // stages for k in range(stages + 1))
        needs = self.judge.needs(MOST_POSITIONS)
        at = needs.positions
        crossing = np.array([self.judge.crossing_bytes(int(p)) for p in at], np.float64)
        seconds = np.array([self._shares(grid.holders(k), recompute)[at] for k in range(stages)])
        nothing, across = np.zeros((stages, stages)), np.ones((stages, stages))
        slack = SLACK if self.equal == "compute" else 0.0
        lows = [
            needs.low(
                self._room(grid, k), self._live(k, stages), recompute, len(grid.holders(k)) > 1
            )
            for k in range(stages)
        ]
        path = Path(seconds, lows, crossing, nothing, nothing, nothing)
        if not possible(path):
            return
        tight = least_bottleneck(path, 1e-9 if stages <= 64 else 1e-3)
        assert tight is not None, "what is possible has a least bottleneck"
        # A byte across counts more than all seconds together.
        dear = replace(path, both=across * (1 + float(seconds[:, -1].sum())))
        found = soonest_fill(dear, tight.bottleneck_s * (1 + slack)) or tight
        yield tuple(int(at[c]) for c in found.cuts)

    def _shares(self, holders: Sequence[int], recompute: bool) -> Floats:
        """(operators + 1,): what the first j operators count for a stage."""
        judge = self.judge
        if self.equal == "operators":
            return np.arange(judge.operators + 1, dtype=np.float64)
        slowest = max(holders, key=lambda p: judge.forward_s[p, -1] + judge.backward_s[p, -1])
        seconds: Floats = judge.forward_s[slowest] * (1 + recompute) + judge.backward_s[slowest]
        return seconds

    # ------------------------------------------------------------ why

    def _reasons(self, grid: _Grid, cuts: Sequence[int], recompute: bool) -> Iterator[str]:
        chain, n = self.judge.chain, self.judge.operators
        sizes = [b - a for a, b in itertools.pairwise(cuts)]
        total = chain.flops(0, n) or 1.0
        flops = [chain.flops(a, b) / total for a, b in itertools.pairwise(cuts)]
        plural = "s" if grid.stages > 1 else ""
        if self.equal == "operators":
            yield (
                f"equal operators: {grid.stages} stage{plural} of {min(sizes)} to {max(sizes)} "
                "operators over the peers in the order of joining, whatever their speeds and links"
            )
        else:
            yield (
                f"equal compute: {grid.stages} stage{plural} over the peers in the order of "
                f"joining, FLOPs in proportion to their speeds, whatever their links; within "
                f"{SLACK:.0%} of the best cut, the one with the fewest bytes across"
            )
        if recompute:
            yield "every stage computes its forward again: without, no cut fits"
        for k in range(min(grid.stages, 32)):
            ops, offers = self.request.graph.operators, self.request.offers
            a, b = cuts[k], cuts[k + 1]
            holders = some_of([str(offers[p]) for p in grid.holders(k)], MOST_HOLDERS, " + ")
            yield (
                f"stage {k} [{a}, {b}) from {ops[a].name} to {ops[b - 1].name} on {holders}: "
                f"{flops[k]:.1%} of the FLOPs"
            )
