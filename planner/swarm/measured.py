"""What a microbatch takes each peer at each stage, as whoever waits for it would measure: the
longer of its compute and of what its own lines take for what comes and goes; and stages of equal
work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...dag.plan.plan import ScheduleName
from ...dag.schedule.orders.schedules import SCHEDULES
from ..cost.cost_model import CostModel
from ..network.pathcut import Path, least_bottleneck, possible

__all__ = ["MeasuredPeers"]

Floats = NDArray[np.float64]

MOST_POSITIONS = 256
"""Positions to cut at that are looked at where memory decides."""
SLACK = 0.1
"""How far from an even cut, in stages, one with fewer bytes across may be."""


class MeasuredPeers:
    """The offers of a judge's request, which are numbered. `cuts`: stage k has the operators
    from cuts[k] to cuts[k + 1]; `again`: by stage, whether it computes its forward again."""

    def __init__(self, judge: CostModel) -> None:
        self.judge = judge
        self.memory = np.array([o.device_memory_bytes for o in judge.offers])
        total = judge.both_s
        self.done: Floats = (total / total[:, -1:]).mean(0)
        """(operators + 1,): the share of a microbatch that is done before each position."""
        self.crossing = np.array([judge.crossing_bytes(i) for i in range(judge.operators + 1)])
        self.per_byte: Floats = 1 / judge.rates
        np.fill_diagonal(self.per_byte, 0.0)

    def fastest(self, cuts: Sequence[int], again: Sequence[bool]) -> list[int]:
        """All offers, the one first that would carry most microbatches a second over all stages."""
        speed = 1 / self._takes_all(cuts, again)
        found: list[int] = np.argsort(-speed.mean(0), kind="stable").tolist()
        return found

    def cuts(self, stages: int, again: bool) -> Iterator[tuple[int, ...]]:
        """Where the peers, on average, have done equal parts, both ends included; and, where they
        differ, as equal ones as fit into the memory of half of the peers with others beside."""
        n, even = self.judge.operators, [0]
        for k in range(1, stages):
            first, last = even[-1] + 1, n - (stages - k)
            off = np.abs(self.done[first : last + 1] - k / stages) * stages
            near = np.flatnonzero(off <= max(SLACK, float(off.min())))
            across = self.crossing[first + near]
            even.append(first + int(near[np.lexsort((off[near], across))[0]]))
        yield (*even, n)
        needs, room = self.judge.needs(MOST_POSITIONS), int(np.median(self.memory))
        shared = stages < len(self.memory)
        lows = [needs.low(room, stages - k, again, shared) for k in range(stages)]
        at = needs.positions
        seconds = np.tile(self.done[at], (stages, 1))
        path = Path.without_links(seconds, lows, self.crossing[at].astype(float))
        if possible(path) and (found := least_bottleneck(path, 1e-3)) is not None:
            yield tuple(int(at[c]) for c in found.cuts)

    def seconds(
        self,
        cuts: Sequence[int],
        again: Sequence[bool],
        peers: int,
        spare: int,
        schedule: ScheduleName,
    ) -> Floats:
        """(stages, offers): what a microbatch takes each of them, infinite where one lacks the
        data, or memory for `spare` times the microbatches that a stage keeps if so many `peers` are
        spread evenly."""
        request, stages, found = self.judge.request, len(again), self._takes_all(cuts, again)
        for k, (a, b) in enumerate(itertools.pairwise(cuts)):
            live = (
                stages - k
                if SCHEDULES[schedule].bounded
                else request.microbatches * stages // peers
            )
            live = min(request.microbatches, max(1, live) * spare)
            needed = self.judge.stage_bytes(a, b, live, peers > stages, again[k])
            able = self.memory >= needed
            if any(a <= i < b for i in request.beside):
                able = able & self.judge.may_have
            found[k, ~able] = np.inf
        return found

    def _takes_all(self, cuts: Sequence[int], again: Sequence[bool]) -> Floats:
        """Return the seconds over lines to everybody, for who is beside it is not known."""
        everyone, spans = range(len(self.memory)), itertools.pairwise(cuts)
        return np.array(
            [
                self.takes(a, b, r, everyone, everyone)
                for (a, b), r in zip(spans, again, strict=True)
            ]
        )

    def takes(
        self, a: int, b: int, again: bool, before: Sequence[int], behind: Sequence[int]
    ) -> Floats:
        """(offers,): seconds of a microbatch at a stage between these."""
        forward, backward = self.judge.forward_s, self.judge.backward_s
        compute = (forward[:, b] - forward[:, a]) * (1 + again) + backward[:, b] - backward[:, a]
        line, ends = np.zeros((2, len(compute))), ((a, before), (b, behind))
        for at, others in ends:
            size, others = self.crossing[at], list(others)
            line[0] += size * self.per_byte[others].mean(0)  # what comes
            line[1] += size * self.per_byte[:, others].mean(1)  # what goes
        found: Floats = np.maximum(compute, line.max(0))
        return found
