"""From rows of peers to candidates: where to cut, who stays empty, how many microbatches each row
gets, and a guess of the step's seconds by closed formulas, by which a planner sorts what it judges.

    step  = max over rows of fill + (microbatches of the row - 1) · bottleneck       (pathcut.py)
          + update      max over peers of (6 + 2 · slots) · trainable bytes / its memory speed
          + sync                                                where a stage has several holders
    stage = forward + backward + 3 · trainable bytes · (m - 1)/m / memory speed   (dag/cost/pace.py)
    sync  = max over peers of Σ over its stages of
            max(2 · bytes / parts / least rate, 2 · bytes · (holders - 1) / holders / least end)
            with as many parts as holders, or as members of a row where they exchange in rows

Rows may be cut each for itself (`own`), or all at the same positions (`aligned`), which keeps the
number of stages small.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.speed import Work
from ...dag.ir.graph import GraphError
from ...dag.schedule.orders.schedules import SCHEDULES, first_of, interleaves
from ..network.pathcut import Path, best_cut, slowest_circle
from .candidate import Candidate, StageShare
from .cost_model import CostModel
from .partition import IntervalMemory
from .shortage import recomputes

__all__ = ["Guess", "RowBuilder", "in_proportion"]

Floats = NDArray[np.float64]

POSITIONS = 128
"""Positions that are tried for up to 32 stages: 4 for each; more for longer rows."""
FINE = 4
"""How many times as many are tried where the peers are settled."""
MOST_POSITIONS = 1024
REACH = 4
"""In long rows, one more than the peers in a row that may stay empty; short rows have no limit."""
SHORT = 16


@dataclass(frozen=True, slots=True)
class Guess:
    """A candidate and about how long its step takes."""

    seconds: float
    candidate: Candidate


class RowBuilder:
    """Makes candidates for one request. Peers are indices of its offers."""

    def __init__(self, judge: CostModel, *, updates: bool = True) -> None:
        """`updates`: whether what passes over weights and their gradients counts."""
        request = judge.request
        self.fine = False
        """Whether many positions are tried."""
        self.judge, self.microbatches = judge, request.microbatches
        self.schedule = first_of(request.options.schedule)
        slots = request.options.optimizer_slots
        rates = judge.network.rates()
        there, back = 1 / rates, 1 / rates.T
        self.slower: Floats = np.maximum(there, back)
        self.both: Floats = there + back
        latency = judge.network.latency_s
        self.latency: Floats = latency + latency.T
        np.fill_diagonal(self.latency, 0.0)
        self.end = np.minimum(judge.network.up, judge.network.down)
        self.trainable_bytes: Floats = judge.chain.trained[1]
        self.passes = 6 + 2 * slots
        self._byte_s = judge.per_unit[:, Work._fields.index("memory")] * updates
        self.whole_s: Floats = judge.forward_s[:, -1] + judge.backward_s[:, -1]
        """(P,): one microbatch of the whole graph, forward and backward."""
        crossing = [judge.crossing_bytes(i) for i in range(1, judge.operators)]
        self.typical_bytes = float(np.median(crossing)) if crossing else 0.0
        """Of what a cut sends there and back, the median."""

    def with_microbatches(self, count: int) -> RowBuilder:
        """Return the builder for another number of microbatches."""
        found = copy(self)
        found.judge, found.microbatches = self.judge.with_microbatches(count), count
        return found

    # ------------------------------------------------------------ one row

    def single(self, peers: Sequence[int], *, exactly: bool = False) -> Guess | None:
        """One pipeline; peers may stay empty unless `exactly`. None: nothing fits."""
        for recompute in recomputes(self.judge):
            shares = self.row(peers, self.microbatches, False, recompute, exactly=exactly)
            if shares is not None:
                candidate = Candidate((shares,), (self.microbatches,), self.schedule)
                return Guess(self.seconds(candidate), candidate)
        return None

    def circle(self, peers: Sequence[int], chunks: int) -> Guess | None:
        """One interleaved pipeline that goes through all peers `chunks` times."""
        for recompute in recomputes(self.judge):
            again = list(peers) * chunks
            shares = self.row(again, self.microbatches, False, recompute, chunks=chunks)
            if shares is not None:
                candidate = Candidate((shares,), (self.microbatches,), "interleaved")
                return Guess(self.seconds(candidate), candidate)
        return None

    @property
    def _bound(self) -> bool:
        """Whether the schedule bounds what is on its way."""
        return SCHEDULES[self.schedule].bounded

    def _live(self, stages: int, stage: int, microbatches: int, among: int) -> int:
        """For how many microbatches a stage needs memory."""
        return SCHEDULES[self.schedule].live(stages, stage, microbatches, among)

    def row(
        self,
        peers: Sequence[int],
        microbatches: int,
        shared: bool,
        recompute: bool,
        *,
        exactly: bool = False,
        chunks: int = 1,
        among: int = 1,
    ) -> tuple[StageShare, ...] | None:
        """The shares of a row that is cut for itself; None: nothing fits. Peers may stay empty
        unless `exactly`. `among`: rows, all with their own cuts."""
        path = self._path(
            [[p] for p in peers],
            microbatches,
            shared,
            recompute,
            exactly=exactly or chunks > 1,
            chunks=chunks,
            among=among,
        )
        at = self._positions(len(peers))
        found = best_cut(path, microbatches, bound=self._bound)
        if found is None and not exactly and len(peers) > 2 and chunks == 1:
            # A long row keeps more microbatches live: perhaps the larger half fits.
            half = sorted(peers, key=lambda p: -self._memory(p))[: (len(peers) + 1) // 2]
            rest = [p for p in peers if p in set(half)]
            return self.row(rest, microbatches, shared, recompute, among=among)
        if found is None:
            return None
        if len(found.peers) < len(peers) and not exactly:
            # With fewer stages fewer microbatches are live: cut again without the empty ones.
            used = [peers[k] for k in found.peers]
            path = self._path(
                [[p] for p in used], microbatches, shared, recompute, exactly=True, among=among
            )
            again = best_cut(path, microbatches, bound=self._bound)
            if again is not None:  # its positions may be coarser, so that nothing fits
                found, at, peers = again, self._positions(len(used)), used
        return tuple(
            StageShare(peers[k], int(at[a]), int(at[b]), recompute)
            for k, (a, b) in zip(found.peers, itertools.pairwise(found.cuts), strict=True)
        )

    # ------------------------------------------------------------ several rows

    def own(self, rows: Sequence[Sequence[int]], *, exactly: bool = False) -> Guess | None:
        """Each row is cut for itself; rows that nothing fits on, or that are too slow for one
        microbatch, are left out."""
        for recompute in recomputes(self.judge):
            speed = [sum(1 / self.whole_s[p] for p in row) for row in rows]
            live = in_proportion(speed, self.microbatches)
            shares = [
                self.row(row, max(1, m), True, recompute, exactly=exactly, among=len(rows))
                for row, m in zip(rows, live, strict=True)
            ]
            kept = [s for s in shares if s is not None]
            if len(kept) == len(rows) if exactly else kept:
                guess = self._combined(kept)
                if guess is not None:
                    return guess
        return None

    def aligned(self, rows: Sequence[Sequence[int]], *, exactly: bool = False) -> Guess | None:
        """Rows of equal length, all cut at the same positions; a place of all rows may stay empty
        unless `exactly`."""
        each = max(1, self.microbatches // len(rows))
        groups = list(zip(*rows, strict=True))
        for recompute in recomputes(self.judge):
            path = self._path(groups, each, len(rows) > 1, recompute, exactly=exactly)
            found = best_cut(path, each, bound=self._bound)
            if found is None:
                continue
            at = self._positions(len(groups))
            spans = list(zip(found.peers, itertools.pairwise(found.cuts), strict=True))
            shares = [
                tuple(StageShare(row[k], int(at[a]), int(at[b]), recompute) for k, (a, b) in spans)
                for row in rows
            ]
            guess = self._combined(shares)
            if guess is not None:
                return guess
        return None

    def _combined(self, shares: Sequence[tuple[StageShare, ...]]) -> Guess | None:
        """Microbatches by throughput; rows that get none are left out."""
        each = max(1, self.microbatches // len(shares))
        rate = [1 / max(self._pace(row, each)[1], 1e-300) for row in shares]
        given = in_proportion(rate, self.microbatches)
        kept = [(row, m) for row, m in zip(shares, given, strict=True) if m]
        if not kept:
            return None
        candidate = Candidate(
            tuple(row for row, _ in kept), tuple(m for _, m in kept), self.schedule
        )
        return Guess(self.seconds(candidate), candidate)

    def refined(self, guess: Guess) -> Guess:
        """Return these rows of peers cut more finely, where that is better; and cut again, where
        rows that were left out have left them more microbatches than fit."""
        candidate = guess.candidate
        if interleaves(candidate.schedule):
            return guess
        if self.judge.operators >= POSITIONS:
            self.fine = True
            found = self._again(candidate)
            self.fine = False
            if found is not None and found.seconds < guess.seconds:
                guess = found
        if self._over(guess.candidate):
            guess = self._again(guess.candidate) or guess
        return guess

    def _again(self, candidate: Candidate) -> Guess | None:
        rows = [[s.peer for s in row] for row in candidate.pipelines]
        if len(rows) == 1:
            return self.single(rows[0], exactly=True)
        if len({tuple(s.stop for s in row) for row in candidate.pipelines}) == 1:
            return self.aligned(rows, exactly=True)
        return self.own(rows, exactly=True)

    def _over(self, candidate: Candidate) -> bool:
        """Whether some memory is too small."""
        try:
            return not self.judge.fits(candidate)
        except GraphError:  # this cut cannot be: the planner will find out
            return False

    # ------------------------------------------------------------ paths

    def _positions(self, stages: int) -> NDArray[np.int64]:
        return self._needs_of(stages).positions

    def _needs_of(self, stages: int) -> IntervalMemory:
        most = POSITIONS
        while most < 4 * stages and most < MOST_POSITIONS:
            most *= 2
        most = min(most * (FINE if self.fine else 1), MOST_POSITIONS)
        return self.judge.needs(most)

    def _memory(self, peer: int) -> int:
        return self.judge.offers[peer].device_memory_bytes

    def _path(
        self,
        groups: Sequence[Sequence[int]],
        microbatches: int,
        shared: bool,
        recompute: bool,
        *,
        exactly: bool = False,
        chunks: int = 1,
        among: int = 1,
    ) -> Path:
        """A path whose k-th place has the holders `groups[k]`, which share the microbatches."""
        judge, n = self.judge, len(groups)
        needs = self._needs_of(n)
        at = needs.positions
        # Of several rows a faster one gets more microbatches than the mean.
        most = min(self.microbatches, -(-3 * microbatches // 2))
        lows, seconds = [], []
        for k, group in enumerate(groups):
            # The stages are those of all rows together, and so is what is live.
            live = self._live(n, k, most, among)
            room = min(self._memory(p) for p in group) // chunks
            lows.append(needs.low(room, live, recompute, shared))
            members = list(group)
            each = judge.forward_s[members] * (1 + recompute) + judge.backward_s[members]
            passes = (3 * (microbatches - 1) + self.passes) / microbatches
            each = each + passes * self._byte_s[members][:, None] * self.trainable_bytes
            # Together they are as fast as one peer with the mean of their speeds.
            scale = len(members) / (1 / np.maximum(each[:, -1], 1e-300)).sum()
            mean = each.mean(0)
            seconds.append(mean[at] * (scale / max(mean[-1], 1e-300)))
        # Links from one place to another: each row's own; the worst of them sets the pace.
        rows = [np.ix_(row, row) for row in map(list, zip(*groups, strict=True))]
        crossing = np.array([judge.crossing_bytes(int(p)) for p in at], np.float64)
        return Path(
            np.array(seconds),
            lows,
            crossing,
            np.max([self.slower[row] for row in rows], axis=0),
            np.max([self.both[row] for row in rows], axis=0),
            np.max([self.latency[row] for row in rows], axis=0),
            1 if exactly else (n if n <= SHORT else REACH),
        )

    # ------------------------------------------------------------ guesses

    def _pace(self, shares: Sequence[StageShare], microbatches: int) -> tuple[float, float, float]:
        """(fill, period, update) of a row."""
        judge = self.judge
        busy: dict[int, float] = {}
        held: dict[int, float] = {}
        stages: list[float] = []
        worst = 0.0
        for s in shares:
            f = judge.forward_s[s.peer, s.stop] - judge.forward_s[s.peer, s.start]
            b = judge.backward_s[s.peer, s.stop] - judge.backward_s[s.peer, s.start]
            size = self.trainable_bytes[s.stop] - self.trainable_bytes[s.start]
            passed = size * self._byte_s[s.peer]
            stages.append(float(f * (1 + s.recompute) + b))
            busy[s.peer] = busy.get(s.peer, 0.0) + stages[-1] + 3 * passed
            held[s.peer] = held.get(s.peer, 0.0) + self.passes * passed
        for k, (s, t) in enumerate(itertools.pairwise(shares)):
            if s.peer != t.peer:
                size = judge.crossing_bytes(t.start)
                stages[k] += float(size * self.both[s.peer, t.peer] + self.latency[s.peer, t.peer])
                worst = max(worst, size * self.slower[s.peer, t.peer])
        period = max(worst, *busy.values())
        if self._bound and len(busy) == len(shares):
            period = max(period, slowest_circle(stages, microbatches))
        return sum(stages), float(period), float(max(held.values()))

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step in closed form, to rank many candidates before any is compiled."""
        rows = zip(candidate.pipelines, candidate.microbatches, strict=True)
        paces = [(self._pace(row, m), m) for row, m in rows]
        longest = max(fill + (m - 1) * slow + update for (fill, slow, update), m in paces)
        return longest + self.sync(candidate)

    def sync(self, candidate: Candidate) -> float:
        if len(candidate.pipelines) < 2:
            return 0.0
        judge, spent = self.judge, dict[int, float]()
        for start, stop, holders, _ in candidate.slots():
            n, size = len(holders), self.trainable_bytes[stop] - self.trainable_bytes[start]
            if n < 2 or not size:
                continue
            members = list(holders)
            parts = n / max(1, judge.rows(n))
            pair = 2 * size / parts * float(self.slower[np.ix_(members, members)].max())
            end = 2 * size * (n - 1) / n / float(self.end[members].min())
            for p in members:
                spent[p] = spent.get(p, 0.0) + max(pair, end)
        return max(spent.values(), default=0.0)


def in_proportion(weights: Sequence[float], count: int) -> list[int]:
    """`count` whole shares in about these proportions: each next one to whoever would be done with
    it first."""
    given = [0] * len(weights)
    for _ in range(count):
        i = min(range(len(weights)), key=lambda i: ((given[i] + 1) / weights[i], i))
        given[i] += 1
    return given
