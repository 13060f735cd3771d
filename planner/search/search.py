"""Local search over candidates, by the judge: cheap bounds first, the event calculation last.

Two kinds of moves, in turn:

- other peers in the same places: all assignments of one structure are bounded at once, all
  permutations where they are few, otherwise swaps, moves and replacements;
- another structure (moves.py), each with the best assignment that one such batch finds.

A candidate's key is (bytes that do not fit, seconds): a search may begin at a plan that does not
fit and first mends that. What has a bound of at least the best seconds is never played. The search
pays for every candidate with the actions and operators that it looks at, ten times for a structure
of a new wiring, and ends when its budget is spent: it counts work, never seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...dag.plan.plan import ScheduleName
from ...dag.schedule.orders.schedules import CHAINED
from ..cost.candidate import Candidate
from ..cost.cost_model import CostModel

__all__ = ["Search", "SearchResult", "SearchSpace", "weight"]

MOST_PERMUTATIONS = 130
"""Permutations that are bounded at once; above, the neighbourhood of the present one."""
MOST_ROWS = 400
"""Assignments of one batch."""
MISPLACED_BYTES = 1 << 50
"""What a peer that lacks the data counts for, in bytes that do not fit: more than any memory."""
_BETTER = 1 - 1e-9
"""A gain below this is rounding, and no reason to move."""

Key = tuple[float, float]
"""Bytes over the memory of the peers, and seconds of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What a search may choose."""

    pipelines: int | None = None
    """How many; None: any number."""
    stages: int | None = None
    """Shares of each pipeline; None: any number."""
    schedules: tuple[ScheduleName, ...] = CHAINED
    recompute: tuple[bool, ...] = (False, True)
    repeats: bool = True
    """Whether a pipeline may come back to a peer."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A candidate that was judged."""

    candidate: Candidate
    key: Key

    @property
    def fits(self) -> bool:
        return self.key[0] <= 0

    @property
    def seconds(self) -> float:
        return self.key[1] if self.fits else float("inf")


Moves = Callable[[CostModel, Candidate, SearchSpace], Iterator[Candidate]]


def weight(judge: CostModel, candidate: Candidate) -> int:
    """Cost of compiling and playing a candidate, in units of the search's budget: its actions,
    and what the holders of each stage exchange."""
    slots = len({s.stop for p in candidate.pipelines for s in p})
    holders = len(candidate.pipelines)
    actions = 2 * slots * sum(candidate.microbatches)
    # All pairs of a row, or of all holders, send at once, and each change shares the links out
    # again among them.
    pairs = holders * (holders - 1)
    if rows := judge.rows(holders):
        pairs = 2 * holders * (holders - 1) // rows
    exchange = slots * pairs
    crowd = exchange * pairs // 2
    return 50 + judge.operators + 6 * (actions + exchange) + crowd


class Search:
    """One search over one request. `budget`: see the module."""

    def __init__(self, judge: CostModel, space: SearchSpace, budget: int) -> None:
        self.judge, self.space, self.budget = judge, space, budget
        self.spent = 0
        self.rooms = np.array([o.device_memory_bytes for o in judge.offers], dtype=np.int64)
        self._known: dict[Candidate, Key] = {}
        self._batches: dict[tuple[Candidate, tuple[int, ...]], Candidate] = {}

    @property
    def open(self) -> bool:
        return self.spent < self.budget

    def allows(self, candidate: Candidate) -> bool:
        """Whether a candidate is one of the space's, of the request's microbatches, and its graph
        can be cut so (a buffer that is updated belongs to one stage)."""
        return self.in_space(candidate) and self.judge.cuttable(candidate)

    def in_space(self, candidate: Candidate) -> bool:
        """`allows` without the graph."""
        space = self.space
        return (
            (space.pipelines is None or len(candidate.pipelines) == space.pipelines)
            and all(m >= 1 for m in candidate.microbatches)
            and sum(candidate.microbatches) == self.judge.request.microbatches
            and candidate.schedule in space.schedules
            and all(
                s.start < s.stop and s.recompute in space.recompute
                for p in candidate.pipelines
                for s in p
            )
            and (space.stages is None or all(len(p) == space.stages for p in candidate.pipelines))
            and (
                space.repeats
                or all(len({s.peer for s in p}) == len(p) for p in candidate.pipelines)
            )
        )

    # ------------------------------------------------------------ keys

    def over(self, candidate: Candidate) -> float:
        """Bytes by which its peers' memory is exceeded, summed."""
        need = self.judge.device_bytes(candidate)
        over = sum(max(0, size - int(self.rooms[p])) for p, size in need.items())
        return float(over + MISPLACED_BYTES * self.judge.misplaced(candidate))

    def bound(self, candidate: Candidate) -> Key:
        self._pay(candidate)
        return self.over(candidate), self.judge.bound(candidate)

    def tell(self, candidate: Candidate, seconds: float) -> None:
        """What another planner has found by the same judge: it fits and need not be played."""
        self._known[candidate] = (0.0, seconds)

    def key(self, candidate: Candidate) -> Key:
        """What does not fit is bounded, not played."""
        if candidate not in self._known:
            self._pay(candidate)
            over = self.over(candidate)
            seconds = self.judge.bound(candidate) if over else self.judge.seconds(candidate)
            self._known[candidate] = (over, seconds)
        return self._known[candidate]

    def _pay(self, candidate: Candidate, times: float = 1.0) -> None:
        full = weight(self.judge, candidate)
        again = 50 + (full - self.judge.operators) // 6
        self.spent += int(times * again) + (0 if self.judge.knows(candidate) else full)

    # ------------------------------------------------------------ who

    def assigned(self, candidate: Candidate, fresh: tuple[int, ...] = ()) -> Candidate:
        """Return the structure with the best peers that one batch finds, by bound. `fresh`: peers
        that have just come in: those are tried against all others that are unused."""
        known = (candidate, fresh)
        if known in self._batches:
            return self._batches[known]
        rows = _assignments(candidate.peers, len(self.rooms), fresh)
        self._pay(candidate, 1 + len(rows) / 40)
        need = np.array(list(self.judge.device_bytes(candidate).values()), dtype=np.int64)
        over = np.maximum(0, need - self.rooms[rows]).sum(1)
        if self.judge.request.beside:
            bound = np.array(self.judge.bound_to_data(candidate))
            over = over + MISPLACED_BYTES * (bound & ~self.judge.may_have[rows]).sum(1)
        rows = rows[over == over.min()]
        best = rows[int(np.argmin(self.judge.bound_many(candidate, rows)))]
        found = candidate.with_peers(dict(zip(candidate.peers, best.tolist(), strict=True)))
        self._batches[known] = found
        return found

    # ------------------------------------------------------------ descent

    def improve(self, start: Candidate, moves: Moves, rounds: int = 40) -> SearchResult:
        """To a candidate that no move makes better, or as far as the budget goes."""
        best = SearchResult(start, self.key(start))
        for _ in range(rounds):
            before = best
            best = self._better(best, [self.assigned(best.candidate)])
            if not self.open:
                break
            tried = []
            for other in moves(self.judge, best.candidate, self.space):
                if self.spent >= self.budget:
                    break
                if self.allows(other):
                    fresh = tuple(set(other.peers) - set(best.candidate.peers))
                    tried.append(self.assigned(other, fresh) if fresh else other)
                    if not fresh and len(other.peers) <= 5:
                        tried.append(self.assigned(other))
            best = self._better(best, tried)
            if best is before:
                break
        return best

    def _better(self, best: SearchResult, tried: list[Candidate]) -> SearchResult:
        """The best of several candidates, least bound first."""
        ranked = []
        for n, candidate in enumerate(dict.fromkeys(tried)):
            if candidate in self._known:
                bound = self._known[candidate]
            elif self.allows(candidate):
                bound = self.bound(candidate)
            else:
                continue
            ranked.append((bound, n, candidate))
        for bound, _, candidate in sorted(ranked, key=lambda x: x[:2]):
            if not _less(bound, best.key):
                break
            key = self.key(candidate)
            if _less(key, best.key):
                best = SearchResult(candidate, key)
        return best


def _less(a: Key, b: Key) -> bool:
    return a[0] < b[0] or (a[0] == b[0] and a[1] < b[1] * _BETTER)


def _assignments(peers: tuple[int, ...], count: int, fresh: tuple[int, ...]) -> NDArray[np.int64]:
    """Rows of peers for the places of a structure, the present one first."""
    k = len(peers)
    total = 1
    for i in range(k):
        total *= count - i
    if total <= MOST_PERMUTATIONS:
        every = list(itertools.permutations(range(count), k))
        return np.array([peers, *every], dtype=np.int64)
    rows = [peers]
    used = set(peers)
    unused = [p for p in range(count) if p not in used]
    for i in [peers.index(p) for p in fresh] or range(k):
        rows += [(*peers[:i], u, *peers[i + 1 :]) for u in unused]
    if not fresh:
        for i, j in itertools.combinations(range(k), 2):
            row = list(peers)
            row[i], row[j] = row[j], row[i]
            rows.append(tuple(row))
        for i in range(k):
            for j in range(k):
                if abs(i - j) > 1:
                    row = list(peers)
                    row.insert(j, row.pop(i))
                    rows.append(tuple(row))
    if len(rows) > MOST_ROWS:
        step = len(rows) / MOST_ROWS
        rows = [rows[int(i * step)] for i in range(MOST_ROWS)]
    return np.array(rows, dtype=np.int64)
