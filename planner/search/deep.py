"""Where visits are listed by the times of peers and links, plans pay that no textbook order would:
long pipelines, and a first peer that takes the end of the model as well, so that a weight of both
ends needs no link.

Pipelines through islands of fast links, and through several of them, are cut by the dynamic
programme of `planner/network/pathcut.py` as if any number of microbatches could be on their way;
the best by a closed formula are listed, and from the best of these other cuts and peers are tried,
each listed alone: no plan is compiled, and no link shared, before the judge has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from ...dag.cost.pace import VISIT_CALLS
from ...dag.cost.speed import Work
from ...dag.plan.plan import ScheduleName
from ...dag.schedule.orders.schedules import DEFAULT, TIMED, ZERO_BUBBLE
from ..cost.candidate import Candidate, Pipeline, StageShare
from ..cost.cost_model import CostModel
from ..cost.deep_rows import DeepRows
from ..network.communities import groupings
from .depth import Lister
from .moves import chain_moves
from .search import Search, SearchSpace
from .seeds import Seeds, tied_ends

__all__ = ["deep_starts"]

_NEVER = float("inf")

MOST_POOLS = 10
"""Sets of peers that pipelines are laid through."""
MOST_PEERS = 256
"""Peers up to which pipelines are looked for."""
LONGEST = 12
"""Peers of one pipeline."""
LISTED_FIRST = 10
"""Pipelines that are listed, the best by the closed formula."""
MOST_VISITS = 100_000
"""Visits that are listed in a search."""
DESCENTS = 2
"""Candidates that are improved."""
NEAR = 1.05
"""Of the least seconds, up to which a candidate is worth the judge's word."""
MOST_JUDGED = 2
"""Candidates that it says its word of."""
TRIED = 30
"""Neighbours that are listed in one round, the least by `bound`."""


class DeepSearch:
    """Looks for candidates whose steps are short once their visits are listed."""

    def __init__(self, judge: CostModel, space: SearchSpace) -> None:
        self.judge, self.space = judge, space
        self.rows = DeepRows(judge)
        self.seeds = Seeds(judge, space)
        self.search = Search(judge, space, 0)
        self.left = MOST_VISITS
        asked = judge.request.options.schedule
        self._shares: dict[StageShare, tuple[float, float, float]] = {}
        self.names: tuple[ScheduleName, ...] = (asked,) if asked in TIMED else TIMED
        self._known: dict[tuple[Candidate, str], float] = {}

    # ------------------------------------------------------------ seeds

    def pools(self) -> Iterator[list[int]]:
        """Sets of peers, each by speed: islands, several of them together, all."""
        speed = {p: i for i, p in enumerate(self.seeds.by_speed)}
        whole = self.rows.whole_s
        seen: dict[tuple[int, ...], None] = {}
        for grouping in groupings(self.seeds.rate):
            groups = sorted(grouping, key=lambda g: -sum(1 / whole[p] for p in g))
            for together in (groups[:1], groups[:2], groups[1:2], groups[:3], groups[2:3]):
                pool = sorted((p for g in together for p in g), key=speed.__getitem__)[:LONGEST]
                if len(pool) > 1:
                    seen[tuple(pool)] = None
        yield from map(list, [*seen][:MOST_POOLS])

    def pipelines(self) -> Iterator[Pipeline]:
        """Pipelines through each pool, by the closed formula: in both directions, and where a
        weight is at both ends of the model those whose first peer has the end as well."""
        ends = tied_ends(self.judge)
        for pool in self.pools():
            order = self.seeds.ordered(pool)
            for line in (order, order[::-1]):
                guess = self.rows.single(line)
                if guess is not None:
                    yield guess.candidate.pipelines[0]
            if ends is not None:
                for first in dict.fromkeys((pool[0], order[0], pool[-1])):
                    at = order.index(first)
                    found = self.rows.closed([*order[at:], *order[:at]], *ends)
                    if found is not None:
                        yield found

    # ------------------------------------------------------------ listing

    def fits(self, candidate: Candidate) -> bool:
        """Whether every peer has memory for a microbatch of each of its stages."""
        need: dict[int, int] = {}
        for start, stop, holders, again in candidate.slots():
            size = self.judge.stage_bytes(start, stop, 1, len(holders) > 1, again)
            for p in holders:
                need[p] = need.get(p, 0) + size
        return all(size <= self.judge.offers[p].device_memory_bytes for p, size in need.items())

    def bounds(self, candidate: Candidate) -> dict[int, int]:
        """By stage, how many microbatches its holders can keep."""
        judge, slots = self.judge, candidate.slots()
        count = sum(candidate.microbatches)
        spare: dict[int, int] = {o: judge.offers[o].device_memory_bytes for o in candidate.peers}
        sizes = [
            [judge.stage_bytes(a, b, live, len(h) > 1, again) for live in (1, 2)]
            for a, b, h, again in slots
        ]
        stages: dict[int, int] = {}
        for (one, _), (_, _, holders, _) in zip(sizes, slots, strict=True):
            for p in holders:
                spare[p] -= one
                stages[p] = stages.get(p, 0) + 1
        return {
            k: min(
                count,
                *(
                    1 + max(0, spare[p]) // stages[p] // (two - one) if two > one else count
                    for p in slots[k][2]
                ),
            )
            for k, (one, two) in enumerate(sizes)
        }

    def seconds(self, candidate: Candidate, name: ScheduleName) -> float:
        """About the seconds of a step whose visits are listed."""
        key = candidate, name
        if key not in self._known:
            bounds, count = self.bounds(candidate), sum(candidate.microbatches)
            self.left -= (2 + (name == ZERO_BUBBLE)) * count * len(bounds)
            first_whole = bounds[0] == count
            lister = Lister(self.judge, candidate, name, first_whole=first_whole)
            ended_s = lister.visits(bounds, free=True)[1]
            self._known[key] = ended_s + self.rows.after(candidate)
        return self._known[key]

    def least(self, candidate: Candidate) -> tuple[float, ScheduleName]:
        """Seconds under the better of the schedules that are tried, and its name."""
        return min((self.seconds(candidate, name), name) for name in self.names)

    # ------------------------------------------------------------ descent

    def near(self, candidate: Candidate) -> Iterator[Candidate]:
        """Neighbours of a candidate of one pipeline: other cuts, two peers exchanged, or one in
        the place of another."""
        if len(candidate.pipelines) > 1:
            return
        yield from chain_moves(self.judge, candidate, self.space)
        peers = candidate.peers
        unused = [p for p in self.seeds.by_speed if p not in set(peers)][:8]
        for p, q in combinations(peers, 2):
            yield candidate.with_peers({p: q, q: p})
        for p in peers:
            for q in unused:
                yield candidate.with_peers({p: q})

    def ranked(self, candidates: Iterable[Candidate]) -> list[tuple[float, int, Candidate]]:
        """Candidates that the space allows as (bound, number, candidate), the least bound
        first."""
        found = []
        for n, c in enumerate(dict.fromkeys(candidates)):
            if self.search.in_space(c):
                found.append((self.bound(c), n, c))
        return sorted(found, key=lambda x: x[:2])

    def bound(self, candidate: Candidate) -> float:
        """About what nothing goes below, where all that crosses a cut goes over its link and comes
        back: the largest, over peers and directions of links, of: the earliest arrival of a
        microbatch, all work, and the shortest way back of the last one."""
        judge, least = self.judge, 0.0
        work: dict[int, float] = {}
        soon: dict[int, tuple[float, float]] = {}
        for row, m in zip(candidate.pipelines, candidate.microbatches, strict=True):
            there = back = 0.0
            hops: list[tuple[float, float]] = []
            for k, s in enumerate(row):
                forward, backward, apart = self._visits(s)
                first, second = soon.get(s.peer, (_NEVER, _NEVER))
                soon[s.peer] = min(first, there), min(second, back)
                spent = m * (forward + backward + (apart if k else 0.0))
                work[s.peer] = work.get(s.peer, 0.0) + spent
                there, back = there + forward, back + backward
                if k + 1 < len(row) and (to := row[k + 1].peer) != s.peer:
                    size = judge.crossing_bytes(s.stop)
                    latency = judge.network.latency_s
                    forth_s, back_s = size / judge.rates[s.peer, to], size / judge.rates[to, s.peer]
                    hops.append((there + back + back_s, (m - 1) * max(forth_s, back_s)))
                    there += forth_s + latency[s.peer, to]
                    back += back_s + latency[to, s.peer]
            if len(row) > 1:
                least = max(least, there + back + max((x[1] for x in hops), default=0.0))
        least = max(least, *(soon[p][0] + w + soon[p][1] for p, w in work.items()))
        return float(least) + self.rows.after(candidate)

    def _visits(self, share: StageShare) -> tuple[float, float, float]:
        """Seconds of a forward, of a backward without gradients of weights, and of these, without
        what it costs to have them apart."""
        if share not in self._shares:
            judge, p = self.judge, share.peer
            unit = judge.per_unit[p, : len(Work._fields)]
            moved, _ = judge.chain.halves.work(share.start, share.stop)
            call, apart = VISIT_CALLS * Work(*unit).calls, float(unit @ moved)
            forward, backward = (
                float(s[p, share.stop] - s[p, share.start])
                for s in (judge.forward_s, judge.backward_s)
            )
            again = forward if share.recompute else 0.0
            self._shares[share] = forward + call, backward - apart + again + call, apart
        return self._shares[share]

    def descend(self, start: Candidate, name: ScheduleName) -> Candidate:
        """Return a candidate, reached by better and better neighbours, that none of its own is
        better than, of those that are listed."""
        best, least, better = start, self.seconds(start, name), True
        while better and self.left > 0:
            better, tried = False, 0
            for bound, _, c in self.ranked(self.near(best)):
                if bound >= least or self.left < 0 or tried >= TRIED:
                    break
                if not self.fits(c) or not self.judge.cuttable(c):
                    continue
                tried += 1
                seconds = self.seconds(c, name)
                if seconds < least * (1 - 1e-6):
                    best, least, better = c, seconds, True
                    break
        return best

    def run(self, known: Sequence[Candidate]) -> list[Candidate]:
        """The candidates whose steps are about the shortest, the best first."""
        m = self.judge.request.microbatches
        seeds = [Candidate((p,), (m,), DEFAULT) for p in self.pipelines()]
        listed: dict[Candidate, float] = {}
        for _, _, c in self.ranked(seeds):
            if len(listed) >= LISTED_FIRST or self.left < 0:
                break
            if self.fits(c) and self.judge.cuttable(c):
                listed[c] = self.least(c)[0]
        for c in known:
            listed[c] = self.least(c)[0]
        for c in sorted(listed, key=listed.__getitem__)[:DESCENTS]:
            found = self.descend(c, self.least(c)[1])
            listed[found] = self.least(found)[0]
        least = min(listed.values())
        ranked = sorted(listed, key=listed.__getitem__)
        return [c for c in ranked if listed[c] < NEAR * least][:MOST_JUDGED]


def deep_starts(
    judge: CostModel, space: SearchSpace, known: Sequence[Candidate]
) -> list[Candidate]:
    """The candidates that are worth listing, the best first, of those that are known and of others
    that are found for the purpose."""
    few = len(judge.offers) <= MOST_PEERS and len(judge.offers) > 1
    open_ = few and space.pipelines in (None, 1) and not judge.request.beside
    if not open_ or judge.request.microbatches < 2 or judge.request.options.in_flight is not None:
        return list(known)
    return DeepSearch(judge, space).run(known)
