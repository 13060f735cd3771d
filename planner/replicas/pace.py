"""How long a set of peers takes for a local step: what a search over divisions asks thousands of
times.

The closed formulas of `op-fence` (planner/baselines/op_fence.py) guess at pipelines
through just these peers, and at several side by side; the best few are judged by the event
calculation. Peers that are not worth their link stay without a share, so a set may use fewer peers
than it has. Everything is remembered by (set, microbatches).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...dag.ir.graph import GraphError
from ...dag.schedule.orders.schedules import interleaves
from ..base.interface import PlanRequest
from ..baselines.op_fence import Fence, Pool
from ..cost.candidate import Candidate, StageShare
from ..cost.cost_model import CostModel
from ..cost.rows import RowBuilder
from ..cost.shortage import least_bytes
from ..network.communities import Grouping, edges, groupings
from ..search.seeds import tied_tail

__all__ = ["MOST_PEERS", "SLOWER", "Pace", "Paces", "links"]

JUDGED = 2
"""Guesses of a set that are judged."""
MOST_PEERS = 64
"""Of larger sets those in the fastest islands count."""
MOST_VISITS = 20_000
"""Visits of a step up to which it is played; beyond, a shorter step tells how far the guess is
off."""
SLOWER = 4.0
"""A link is slow if both its ends have a link that is so many times as fast."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What some peers do as one replica. `candidate` has a local step's microbatches."""

    seconds: float
    candidate: Candidate
    slow: int
    """Slow links inside."""

    @property
    def peers(self) -> frozenset[int]:
        """Return the peers that have a share."""
        return frozenset(self.candidate.peers)


class Paces:
    """The paces of one request, whose other forms are not looked at."""

    def __init__(self, request: PlanRequest) -> None:
        self.judge = CostModel(replace(request, others=(), known_costs=request.costs))
        self.fence = Fence(self.judge)
        self.rate: NDArray[np.float64] = self.fence.rate
        n = len(self.judge.offers)
        apart = np.where(np.eye(n, dtype=bool), 0.0, self.rate)
        self.best_rate: NDArray[np.float64] = apart.max(axis=1, initial=0.0)
        self.islands: list[Grouping] = list(groupings(self.rate))
        self.levels = _levels(self.rate)
        """Pairs of peers by the power of two that their rate reaches, the fastest first."""
        self.needed = least_bytes(self.judge, 0, self.judge.operators)
        """Bytes of the whole model with one microbatch."""
        self.rooms = np.array([o.device_memory_bytes for o in self.judge.offers], np.int64)
        self.speed: NDArray[np.float64] = self.fence.speed
        self.spent = 0
        """Peers of all sets that were looked at: what a search's budget counts."""
        self._fences: dict[int, Fence] = {}
        self._known: dict[tuple[frozenset[int], int], Pace | None] = {}
        self._tail = tied_tail(self.judge)
        options = request.options  # an interleaved peer holds several stages
        stages = 1 if interleaves(options.schedule) else options.stages or 1
        self._least = stages * (options.pipelines or 1)

    def of(self, peers: Collection[int], microbatches: int) -> Pace | None:
        """None: they cannot hold the model."""
        key = frozenset(peers), microbatches
        if key not in self._known:
            self.spent += len(key[0]) + 2
            self._known[key] = self._best(key[0], microbatches) if self.may_hold(key[0]) else None
        return self._known[key]

    def pace(self, seconds: float, candidate: Candidate) -> Pace:
        """The pace of a plan that somebody made for some of the peers."""
        return Pace(seconds, candidate, sum(self.is_slow(a, b) for a, b in links(candidate)))

    def may_hold(self, peers: Collection[int]) -> bool:
        """Whether they are enough, and all their memory is; cheap, and not yet a cut that fits."""
        return len(peers) >= self._least and bool(self.rooms[list(peers)].sum() >= self.needed)

    def is_slow(self, a: int, b: int) -> bool:
        return bool(self.rate[a, b] * SLOWER < min(self.best_rate[a], self.best_rate[b]))

    def _best(self, peers: frozenset[int], microbatches: int) -> Pace | None:
        if microbatches not in self._fences:
            self._fences[microbatches] = self.fence.with_microbatches(microbatches)
        fence = self._fences[microbatches]
        guesses = sorted(fence.within(self.pool(peers)), key=lambda g: g.seconds)
        found: tuple[float, Candidate] | None = None
        for candidate in dict.fromkeys(
            c for g in guesses[:JUDGED] for c in self._both(g.candidate)
        ):
            seconds = _seconds(fence.rows, candidate)
            if np.isfinite(seconds) and (found is None or seconds < found[0]):
                found = seconds, candidate
        return None if found is None else self.pace(*found)

    def pool(self, peers: frozenset[int]) -> Pool:
        """In islands, where the peers are many; of very many those in the fastest ones."""
        if len(peers) <= MOST_PEERS // 4:
            return Pool((tuple(sorted(peers)),))
        parts = [tuple(p for p in group if p in peers) for group in self.islands[0]]
        parts = sorted((g for g in parts if g), key=lambda g: (-self.speed[list(g)].sum(), g))
        kept, left = [], MOST_PEERS
        for part in parts:
            fastest = sorted(part, key=lambda p: (-self.speed[p], p))[:left]
            kept.append(tuple(sorted(fastest)))
            left -= len(fastest)
            if not left:
                break
        return Pool(tuple(kept))

    def _both(self, candidate: Candidate) -> Iterator[Candidate]:
        """Where the end of the model reads a weight of its beginning, also with the first peer
        taking the end: the weight's gradients then need no link."""
        yield candidate
        tail, options = self._tail, self.judge.request.options
        if tail is None or options.stages is not None or interleaves(candidate.schedule):
            return
        closed = []
        for row in candidate.pipelines:
            first, last = row[0], row[-1]
            if len(row) == 1 or last.start >= tail:
                return
            end = StageShare(first.peer, tail, last.stop, first.recompute)
            closed.append((*row[:-1], replace(last, stop=tail), end))
        yield replace(candidate, pipelines=tuple(closed))


def _levels(rate: NDArray[np.float64]) -> list[list[tuple[int, int]]]:
    pairs = edges(rate)
    free = np.finfo(np.float64).max
    _, exponent = np.frexp([min(float(rate[i, j]), free) for i, j in pairs])
    found: dict[int, list[tuple[int, int]]] = {}
    for pair, level in zip(pairs, exponent.tolist(), strict=True):
        found.setdefault(level, []).append(pair)
    return [found[level] for level in sorted(found, reverse=True)]


def _seconds(rows: RowBuilder, candidate: Candidate) -> float:
    """Seconds of a step; inf: it does not fit."""
    judge = rows.judge
    total = sum(candidate.microbatches)
    try:
        visits = 2 * len(candidate.slots()) * total
        if visits <= MOST_VISITS:
            return judge.seconds(candidate)
        # As many microbatches as fill the longest pipeline twice, at least.
        least = 2 * max(map(len, candidate.pipelines)) / min(candidate.microbatches)
        part = max(MOST_VISITS / visits, min(1.0, least))
        short = replace(
            candidate, microbatches=tuple(max(1, round(m * part)) for m in candidate.microbatches)
        )
        return judge.seconds(short) * rows.seconds(candidate) / rows.seconds(short)
    except GraphError:  # a buffer would be updated in one stage and read in another
        return float("inf")


def links(candidate: Candidate) -> set[tuple[int, int]]:
    """Pairs of peers that follow each other, or hold one stage."""
    found = set()
    for row in candidate.pipelines:
        found |= {(a.peer, b.peer) for a, b in pairwise(row) if a.peer != b.peer}
    for _, _, holders, _ in candidate.slots():
        found |= {(a, b) for i, a in enumerate(holders) for b in holders[:i]}
    return {(min(pair), max(pair)) for pair in found}
