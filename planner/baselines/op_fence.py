"""Few slow crossings, small tensors on them, balanced stages: an OP-Fence style scheduler.

FusionLLM (arXiv 2410.12707) names the idea and publishes no algorithm; this one:

1. Groups of peers with fast links (`planner/network/communities.py`).
2. Of each grouping: the strongest group, the two strongest, …, all; of these all peers, or the
   fastest. An open path through them (`planner/network/order.py`), in both directions.
3. The chain is cut along the path by dynamic programming; peers may stay empty
   (`planner/network/pathcut.py`).
4. The same peers as several pipelines: a stretch of the path each (pipelines inside islands), or
   holders of one stage side by side on the path (stages inside islands); every peer alone with the
   whole graph (replicas).
5. What closed formulas find best is judged by the event calculation, up to a budget that counts
   actions. The best seconds win, not the best modularity.

Peers are looked at in an order that does not depend on their names or on who joined first, so the
plan does not either, unless two peers cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...dag.ir.graph import GraphError
from ...dag.plan.report import PlanWithReport, Spare
from ...dag.schedule.orders.schedules import interleaves
from ...job.words import count_of
from ..base.interface import PlanRequest
from ..cost.batchings import look_at_forms
from ..cost.candidate import Candidate
from ..cost.cost_model import CostModel
from ..cost.rows import Guess, RowBuilder
from ..cost.shortage import refuse_impossible, shortage
from ..network.communities import DENSE, groupings, rates
from ..network.order import grouped_path, narrowest

__all__ = ["MOST_ACTIONS", "Fence", "Fenced", "Pool", "candidates", "fenced", "op_fence"]

Floats = NDArray[np.float64]

MOST_ACTIONS = 70_000
"""Forwards and backwards of all candidates that are judged, exchanges of gradients included."""
ACTIONS_PER_OPERATOR = 4
"""What it takes to cut the graph for a candidate, in actions that are played."""
MOST_JUDGED = 48
LONGEST = 128
"""Most peers of one pipeline."""
WIDEST = 128
"""Most pipelines."""
MOST_PEERS = 256
"""Most peers of a plan."""
MOST_POOLS = 24
"""Most sets of peers that paths are laid through: of all sets, ordered by speed, every n-th."""
NEAR = 1.2
"""A guess that is this much above the best one may still be better when it is judged."""


def op_fence(request: PlanRequest) -> PlanWithReport:
    """Return the best plan over the fences of all forms of the request. Raises NoPlan."""
    refuse_impossible(request)
    every: list[Fenced] = []

    def look(form: PlanRequest) -> float:
        found = fenced(CostModel(form))
        if found is not None:
            every.append(found)
        return found.seconds if found is not None else np.inf

    look_at_forms(request, look)
    if not every:
        raise shortage(CostModel(request))
    found = min(every, key=lambda f: f.seconds)
    judge, candidate = found.judge, found.candidate
    used = set(candidate.peers)
    spares = [
        Spare(o.peer, "no candidate with it takes a shorter step")
        for i, o in enumerate(request.offers)
        if i not in used
    ]
    reasons = list(_reasons(judge, candidate, sum(f.judged for f in every)))
    return judge.plan(candidate, reasons=reasons, spares=spares)


@dataclass(frozen=True, slots=True)
class Fenced:
    """The best candidate of one form of a request."""

    seconds: float
    judge: CostModel
    candidate: Candidate
    judged: int


def fenced(judge: CostModel) -> Fenced | None:
    """What `op_fence` takes in one form; None: nothing fits."""
    best: tuple[float, Candidate] | None = None
    judged = 0
    for candidate in _affordable(candidates(judge), judge.operators):
        judged += 1
        try:
            seconds = judge.seconds(candidate)
        except GraphError:  # a buffer would be updated in one stage and read in another
            continue
        if np.isfinite(seconds) and (best is None or seconds < best[0]):
            best = seconds, candidate
    return None if best is None else Fenced(best[0], judge, best[1], judged)


def _affordable(found: Iterator[Candidate], operators: int) -> Iterator[Candidate]:
    """The first candidates, until the budget is spent; at least one."""
    left = MOST_ACTIONS
    for count, candidate in enumerate(found):
        left -= _actions(candidate) + ACTIONS_PER_OPERATOR * operators
        if count and (left < 0 or count >= MOST_JUDGED):
            return
        yield candidate


def _actions(candidate: Candidate) -> int:
    """About how many actions and messages a step of it has."""
    rows = len(candidate.pipelines)
    stages = len({s.stop for p in candidate.pipelines for s in p})
    visits = 2 * stages * sum(candidate.microbatches)
    return visits + (2 * stages * rows * rows if rows > 1 else 0)


def candidates(judge: CostModel) -> Iterator[Candidate]:
    """Different candidates, the best guesses first."""
    fence = Fence(judge)
    seen: set[Candidate] = set()
    for guess in sorted(fence.guesses(), key=lambda g: g.seconds):
        if guess.candidate not in seen:
            seen.add(guess.candidate)
            yield fence.rows.refined(guess).candidate


@dataclass(frozen=True, slots=True)
class Pool:
    """Peers of one or more groups, and the groups that they form."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.groups))


class Fence:
    """Makes guesses for one request, from all of its peers or from some."""

    def __init__(self, judge: CostModel) -> None:
        self.judge, self.rows, self.large = judge, RowBuilder(judge), False
        self.options, self.microbatches = judge.request.options, judge.request.microbatches
        self.speed: Floats = 1 / np.maximum(self.rows.whole_s, 1e-300)
        self.rate = rates(judge.network)
        self.cost: Floats = self.rows.latency + self.rows.typical_bytes * self.rows.both

    def with_microbatches(self, count: int) -> Fence:
        """Return the fence for another number of microbatches."""
        found = copy(self)
        found.rows = self.rows.with_microbatches(count)
        found.judge, found.microbatches = found.rows.judge, count
        return found

    def _order(self) -> list[int]:
        """The peers that can hold any operator, in an order that depends on no names: the fastest
        first; of equals by memory and by their links."""
        offers = self.judge.offers
        least = min(sum(size for _, size in c.reads) for c in self.judge.costs)
        links = np.sort(self.rate, axis=1)
        able = [i for i, o in enumerate(offers) if o.device_memory_bytes >= least]
        return sorted(
            able,
            key=lambda i: (
                -self.speed[i],
                -offers[i].device_memory_bytes,
                tuple(-links[i, :64].round(6)),
                float(self.judge.network.latency_s[i].sum()),
            ),
        )

    # ------------------------------------------------------------ which peers

    def _pools(self, order: Sequence[int]) -> Iterator[Pool]:
        """Peers that may be used together, each pool once; of very many peers, fewer pools."""
        grid = np.ix_(order, order)
        seen: set[Pool] = set()
        for grouping in groupings(self.rate[grid]):
            groups = [tuple(order[i] for i in group) for group in grouping]
            groups.sort(key=lambda g: -self.speed[list(g)].sum())
            for together in [groups[:c] for c in _sizes(len(groups))] + [[g] for g in groups[1:4]]:
                within = {p for g in together for p in g}
                members = [p for p in order if p in within]
                for size in _sizes(min(len(members), MOST_PEERS)):
                    kept = set(members[:size])
                    parts = (tuple(p for p in g if p in kept) for g in together)
                    pool = Pool(tuple(g for g in parts if g))
                    if pool not in seen:
                        seen.add(pool)
                        yield pool

    def _path(self, pool: Pool) -> list[int]:
        """Return the path, the same in either direction, the faster end first."""
        path = grouped_path(self.rate, self.cost, pool.groups)
        turned = path[::-1]
        return max(path, turned, key=lambda p: tuple(self.speed[p].tolist()))

    # ------------------------------------------------------------ candidates

    def guesses(self) -> Iterator[Guess]:
        order = self._order()
        if not order:
            return
        pools = sorted(self._pools(order), key=lambda p: (-self._speed_of(p), p.size))
        least = np.inf
        self.large = len(order) > DENSE
        most = MOST_POOLS // 2 if self.large else MOST_POOLS
        if len(pools) > most:
            chosen = np.linspace(0, len(pools) - 1, most)
            pools = [pools[round(i)] for i in chosen]
        for pool in pools:
            # All its peers busy all the time: no better than what there is already?
            if self.microbatches / self._speed_of(pool) > NEAR * least:
                break
            found = list(self.within(pool))
            least = min([least, *(g.seconds for g in found)])
            yield from found

    def within(self, pool: Pool) -> Iterator[Guess]:
        """The order within the peers of one pool."""
        wanted, path = self.options.pipelines, self._path(pool)
        if wanted in (None, 1):
            yield from self._one(path)
        for count in self._counts(len(path)) if wanted is None else (wanted,):
            if 1 < count <= len(path):
                yield from self._several(path, pool, count)

    def _speed_of(self, pool: Pool) -> float:
        return float(sum(self.speed[list(g)].sum() for g in pool.groups))

    def _counts(self, peers: int) -> list[int]:
        """Numbers of pipelines to try."""
        most = min(peers, self.microbatches, WIDEST)
        few = [2, 3, 4, 8, 16, 32, 64, 128, peers]
        return sorted({c for c in few if 1 < c <= most})

    def _one(self, path: list[int]) -> Iterator[Guess]:
        stages, interleaved = self.options.stages, interleaves(self.rows.schedule)
        for directed in (path, path[::-1]):
            if interleaved:
                for chunks in (2, 3, 4):
                    count = len(path) * chunks
                    if count <= self.judge.operators and stages in (None, count):
                        yield from _some(self.rows.circle(directed, chunks))
            if stages is None:
                if len(path) <= LONGEST:
                    yield from _some(self.rows.single(directed))
            elif len(path) == stages:
                yield from _some(self.rows.single(directed, exactly=True))
            if len(path) == 1:
                return

    def _several(self, path: list[int], pool: Pool, count: int) -> Iterator[Guess]:
        stages = self.options.stages
        exactly = stages is not None
        length = stages or len(path) // count
        if length * count > len(path) or length > LONGEST:
            return
        islands = self._stretches(path, count)
        if not exactly and length > 1 and count <= 4 and not self.large:
            yield from _some(self.rows.own(islands))
            if len(pool.groups) == count:
                yield from _some(self.rows.own([self._path(Pool((g,))) for g in pool.groups]))
        # Equally long rows for cuts at the same positions: the slowest peers of longer ones go.
        if all(len(row) >= length for row in islands):
            rows = [self._fastest(row, length) for row in islands]
            yield from _some(self.rows.aligned(rows, exactly=exactly))
        if length > 1:
            kept = self._fastest(path, length * count)
            side = [kept[k * count : (k + 1) * count] for k in range(length)]
            side = [sorted(group, key=lambda p: -self.speed[p]) for group in side]
            rows = [list(row) for row in zip(*side, strict=True)]
            yield from _some(self.rows.aligned(rows, exactly=exactly))

    def _stretches(self, path: list[int], count: int) -> list[list[int]]:
        """The path in `count` parts of about equal speed, each with a peer at least."""
        done = np.cumsum(self.speed[path])
        found, start = [], 0
        for c in range(1, count + 1):
            stop = int(np.searchsorted(done, done[-1] * c / count * (1 - 1e-12))) + 1
            stop = min(max(stop, start + 1), len(path) - (count - c))
            found.append(path[start : stop if c < count else len(path)])
            start = stop
        return found

    def _fastest(self, path: list[int], count: int) -> list[int]:
        kept = set(sorted(path, key=lambda p: -self.speed[p])[:count])
        return [p for p in path if p in kept]


def _some(guess: Guess | None) -> Iterator[Guess]:
    if guess is not None:
        yield guess


def _sizes(most: int) -> list[int]:
    """Numbers from `most` down to 1: halves, and 2 and 3."""
    found = {most, *range(1, min(most, 3) + 1)}
    size = most
    while size > 1:
        size = (size + 1) // 2
        found.add(size)
    return sorted(found, reverse=True)


def _reasons(judge: CostModel, candidate: Candidate, judged: int) -> Iterator[str]:
    offers, rate = judge.offers, rates(judge.network)
    rows = len(candidate.pipelines)
    yield (
        f"op-fence: {len(candidate.peers)} of {len(offers)} peers in {count_of(rows, 'pipeline')}, "
        f"the best of {judged} candidates from communities of fast links"
    )
    for shares, m in list(zip(candidate.pipelines, candidate.microbatches, strict=True))[:8]:
        path = [s.peer for s in shares]
        names = " - ".join(str(offers[p]) for p in path[:24]) + (" …" if len(path) > 24 else "")
        width = narrowest(rate, path)
        link = f", narrowest link {width / 1e6:.4g} MB/s" if np.isfinite(width) else ""
        yield f"{m} microbatches of a step go through {names}{link}"
