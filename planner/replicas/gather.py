"""Divisions to begin from.

**Gathered along fast links.** Every peer that can hold the model alone is a replica. The others
find together over their fastest links: level by level, each half as fast as the one before, the
groups with least memory first; a group that can hold the model is a replica and takes no more. So
each replica is as small, and its links as fast, as memory allows. Fewer replicas come of it in two
ways: the slowest go on finding together, in the same order; or some stay and the others do not.

The same from groups that the network suggests (planner/network/communities.py) in place of
single peers. And **packed by memory** alone, whatever the links: those with most of it first, each
into the replica that has least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from .pace import Paces

__all__ = ["Group", "gathered", "seeds"]

Group = frozenset[int]

MOST_STARTS = 3
"""Groupings of the network that are begun from."""
MOST_CHOICES = 70
"""Ways of choosing some of the groups up to which all are tried: four of eight."""
MANY = 64
"""Peers from which on only single peers and the first grouping are."""


def seeds(paces: Paces, counts: Sequence[int]) -> Iterator[list[Group]]:
    """Divisions into so many replicas, where the peers suffice; the judge says what fits."""
    n = len(paces.judge.offers)
    single = [frozenset({p}) for p in range(n)]
    starts = [single]
    most = MOST_STARTS if n <= MANY else 1
    starts += [[frozenset(g) for g in grouping] for grouping in paces.islands[:most]]
    for start in starts:
        groups = gathered(paces, start)
        for count in counts:
            if count <= len(groups):
                yield from _some(paces, groups, count)
                yield _joined(paces, groups, count)
    for count in counts:
        if count <= n:
            yield _packed(paces, count)


def gathered(paces: Paces, start: Sequence[Group]) -> list[Group]:
    """Groups that may hold the model, as many as come of it; the rest of the peers are in none."""
    return [g for g in _joined(paces, start, 1, closing=True) if paces.may_hold(g)]


def _some(paces: Paces, groups: Sequence[Group], count: int) -> Iterator[list[Group]]:
    """Return so many of the groups: the fastest, and of few groups any."""
    ranked = sorted(groups, key=lambda g: (-paces.speed[list(g)].sum(), min(g)))
    chosen = itertools.combinations(ranked, count)
    few = math.comb(len(ranked), count) <= MOST_CHOICES
    yield from map(list, itertools.islice(chosen, None if few else 1))


def _joined(
    paces: Paces, start: Sequence[Group], count: int, *, closing: bool = False
) -> list[Group]:
    """Groups that find together until `count` are left; `closing`: those that hold the model stay
    as they are."""
    of = {p: i for i, g in enumerate(start) for p in g}
    groups: dict[int, set[int]] = {i: set(g) for i, g in enumerate(start)}
    weight = paces.rooms.astype(np.float64) if closing else paces.speed
    size = {i: float(weight[list(g)].sum()) for i, g in groups.items()}
    open_ = {i for i, g in groups.items() if not (closing and paces.may_hold(g))}
    near: dict[int, set[int]] = {i: set() for i in groups}
    for pairs in paces.levels:
        for p, q in pairs:
            a, b = of.get(p, -1), of.get(q, -1)
            if a != b and a in open_ and b in open_:
                near[a].add(b)
                near[b].add(a)
        ready = sorted((i for i in open_ if near[i]), key=lambda i: (size[i], i))
        while ready and len(groups) > count:
            a = ready.pop(0)
            if a not in open_ or not near[a]:
                continue
            b = min(near[a], key=lambda i: (size[i], i))
            for p in groups.pop(b):
                of[p] = a
                groups[a].add(p)
            size[a] += size.pop(b)
            open_.discard(b)
            for i in near.pop(b):
                near[i].discard(b)
                if i != a:
                    near[i].add(a)
                    near[a].add(i)
            if closing and paces.may_hold(groups[a]):
                open_.discard(a)
                for i in near[a]:
                    near[i].discard(a)
                near[a] = set()
            ready = sorted((i for i in open_ if near[i]), key=lambda i: (size[i], i))
    return [frozenset(g) for g in groups.values()]


def _packed(paces: Paces, count: int) -> list[Group]:
    bins: list[set[int]] = [set() for _ in range(count)]
    held = [0] * count
    for p in sorted(range(len(paces.rooms)), key=lambda p: (-int(paces.rooms[p]), p)):
        i = held.index(min(held))
        bins[i].add(p)
        held[i] += int(paces.rooms[p])
    return [frozenset(b) for b in bins]
