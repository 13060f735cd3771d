"""Peers into groups by search: S groups of D peers, where a group holds one stage and the groups
follow each other; the d-th peers of neighbouring groups work in one pipeline.

What a grouping costs is an objective's matter. It has three parts, so that a swap of two peers
recomputes only what it touches:

    inside(group)           seconds of a group for itself (exchange of gradients)
    between(a, b)           seconds between two groups: the dearest pair of their best matching
    total(inside, between)  seconds of all, and the order of the groups

Peers of one kind are interchangeable (all their links are equal), so parts are remembered by the
kinds of a group and a swap within a kind is never tried. Of a few peers all groupings are tried.
Otherwise the search starts from groupings that the
network suggests: every group takes peers from few of its islands or from many, with every number of
peers per island between. Then swaps of one or several peers between two groups, accepted as in
simulated annealing (Kirkpatrick et al. 1983) with a seeded generator.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .matching import kinds_of, match

__all__ = ["Arrangement", "Islands", "Objective", "divisions", "every_division", "group", "starts"]

# Divisions of peers into equal groups: those that islands of fast links suggest, and all.

Islands = Sequence[Sequence[int]]
"""Peers that lie together; every peer is in one."""


def starts(islands: Islands, groups: int, size: int) -> Iterator[list[list[int]]]:
    """Groupings that islands suggest: a group takes c peers at a time from the island that has most
    left, for each c that divides `size`. 1: across as many islands as there are; `size`: inside of
    one where it is large enough."""
    for c in range(1, size + 1):
        if size % c:
            continue
        left = [list(island) for island in islands]
        found = []
        for _ in range(groups):
            group: list[int] = []
            used: set[int] = set()
            while len(group) < size:
                # An island that it has nothing of yet, where such a one has enough peers.
                i = max(
                    range(len(left)),
                    key=lambda i: (min(len(left[i]), c), i not in used, len(left[i]), -i),
                )
                take = min(c, size - len(group))
                group += left[i][:take]
                del left[i][:take]
                used.add(i)
            found.append(group)
        yield found


def divisions(groups: int, size: int) -> int:
    """How many divisions of groups · size peers there are, whatever the order of the groups."""
    found = 1
    for left in range(groups * size, 0, -size):
        found *= math.comb(left - 1, size - 1)  # whom the first of those left is with
    return found


def every_division(peers: Sequence[int], size: int) -> Iterator[list[list[int]]]:
    """All of them; each group begins with the first peer that is in none before it."""
    if not peers:
        yield []
        return
    head, rest = peers[0], peers[1:]
    for others in itertools.combinations(rest, size - 1):
        left = [p for p in rest if p not in others]
        for more in every_division(left, size):
            yield [[head, *others], *more]


Floats = NDArray[np.float64]
Kinds = tuple[int, ...]
"""The kinds of the peers of a group, ascending."""
Groups = Sequence[Sequence[int]]

GUIDE = 0.05
"""How much of the mean of all parts is added to the seconds: most objectives only feel the worst
part, and a search over a plain finds no way."""
EVERY = 300
"""Most divisions that are tried all: nine peers in three groups."""
HOT, COLD = 0.05, 0.0005
"""The first and the last temperature, in the seconds of the start."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`groups[s]` (D,) holds stage s; `groups[s][d]` works in pipeline d."""

    groups: tuple[tuple[int, ...], ...]
    seconds: float
    """By the objective."""


class Objective:
    """What a grouping of P peers costs.

    `exchange` (P, P): seconds that peer i spends on peer j of its group, one after another or, with
    `at_once`, at the same time, and on its diagonal the least seconds of a peer; a group takes as
    long as its slowest member. `hop` (P, P), symmetric: seconds of a transfer between two peers of
    neighbouring groups. `total` takes insides (S,) and distances (S, S) and must not fall when one
    of them rises.
    """

    def __init__(
        self,
        exchange: Floats,
        hop: Floats,
        total: Callable[[Floats, Floats], tuple[float, tuple[int, ...]]],
        *,
        at_once: bool = False,
    ) -> None:
        self.hop, self.total, self.at_once = hop, total, at_once
        self.kinds = kinds_of(exchange, hop)
        count = max(self.kinds) + 1
        self._exchange, self._hop = np.zeros((count, count)), np.zeros((count, count))
        members = [[p for p, k in enumerate(self.kinds) if k == kind] for kind in range(count)]
        for a in range(count):
            for b in range(count):
                # Within a kind any two; one that is alone never meets itself.
                i, j = members[a][0], members[b][-1]
                self._exchange[a, b], self._hop[a, b] = exchange[i, j], hop[i, j]
        self._least = np.array([exchange[m[0], m[0]] for m in members])
        self._inside: dict[Kinds, float] = {}
        self._between: dict[tuple[Kinds, Kinds], float] = {}

    def kinds_in(self, members: Iterable[int]) -> Kinds:
        return tuple(sorted(self.kinds[p] for p in members))

    def inside(self, kinds: Kinds) -> float:
        if kinds not in self._inside:
            each = self._exchange[np.ix_(kinds, kinds)].copy()
            np.fill_diagonal(each, 0.0)
            spent = each.max(1) if self.at_once else each.sum(1)
            self._inside[kinds] = float(np.maximum(spent, self._least[list(kinds)]).max())
        return self._inside[kinds]

    def between(self, a: Kinds, b: Kinds) -> float:
        key = (a, b) if a <= b else (b, a)
        if key not in self._between:
            self._between[key] = match(self._hop[np.ix_(*key)])[0]
        return self._between[key]

    def at_least(self, a: Kinds, others: Sequence[Kinds]) -> Floats:
        """Lower bounds of the distances from one group to several, shape (others,)."""
        hop = self._hop[np.array(a)[:, None, None], np.array(others)]  # (D, others, D)
        bound: Floats = np.maximum(hop.min(2).max(0), hop.min(0).max(1))
        return bound


class _State:
    """A grouping with its parts."""

    def __init__(self, objective: Objective, groups: Groups) -> None:
        self.objective = objective
        self.groups = [list(g) for g in groups]
        self.kinds = [objective.kinds_in(g) for g in groups]
        self.inside = np.array([objective.inside(k) for k in self.kinds])
        self.between = np.zeros((len(groups), len(groups)))
        self._measure(range(len(groups)))

    def _measure(self, changed: Iterable[int]) -> None:
        for a in changed:
            for b in range(len(self.groups)):
                if a != b:
                    between = self.objective.between(self.kinds[a], self.kinds[b])
                    self.between[a, b] = self.between[b, a] = between
        self.seconds, self.order = self.objective.total(self.inside, self.between)

    @property
    def energy(self) -> float:
        return self.seconds + GUIDE * float(self.inside.mean() + self.between.mean())

    def swapped(
        self, a: int, b: int, give: Sequence[int], take: Sequence[int], most: float
    ) -> _State | None:
        """With the peers `give` of group a and `take` of group b exchanged; None: its energy is
        above `most`."""
        new = copy(self)
        new.groups, new.kinds = list(self.groups), list(self.kinds)
        new.groups[a] = [p for p in self.groups[a] if p not in give] + list(take)
        new.groups[b] = [p for p in self.groups[b] if p not in take] + list(give)
        new.inside, new.between = self.inside.copy(), self.between.copy()
        for g in (a, b):
            new.kinds[g] = self.objective.kinds_in(new.groups[g])
            new.inside[g] = self.objective.inside(new.kinds[g])
        for g in (a, b):
            new.between[g] = new.between[:, g] = self.objective.at_least(new.kinds[g], new.kinds)
            new.between[g, g] = 0.0
        new.seconds, new.order = self.objective.total(new.inside, new.between)
        if new.energy > most:
            return None
        new._measure((a, b))
        return new if new.energy <= most else None

    def arrangement(self) -> Arrangement:
        """In the order of the groups, matched into pipelines."""
        found = [tuple(self.groups[self.order[0]])]
        for g in self.order[1:]:
            members = self.groups[g]
            _, column = match(self.objective.hop[np.ix_(found[-1], members)])
            found.append(tuple(members[c] for c in column))
        return Arrangement(tuple(found), self.seconds)


def group(
    objective: Objective,
    islands: Sequence[Islands],
    groups: int,
    size: int,
    *,
    seed: int = 0,
    steps: int = 1000,
    annealed: int = 3,
) -> Arrangement:
    """The cheapest grouping that was found of groups · size peers. `islands`: ways of dividing just
    these peers, each a source of starts. The best starts are annealed, `steps` swaps each; of few
    enough divisions all are tried."""
    if divisions(groups, size) <= EVERY:
        peers = sorted(p for island in islands[0] for p in island)
        every = (_State(objective, g) for g in every_division(peers, size))
        return min(every, key=lambda s: s.seconds).arrangement()
    rng = random.Random(seed)
    found: dict[tuple[Kinds, ...], _State] = {}
    for division in islands:
        for start in starts(division, groups, size):
            key = tuple(sorted(objective.kinds_in(g) for g in start))
            if key not in found:
                found[key] = _State(objective, start)
    ranked = sorted(found.values(), key=lambda s: s.seconds)
    best = [_annealed(start, rng, steps) for start in ranked[:annealed]]
    return min(best, key=lambda s: s.seconds).arrangement()


def _annealed(state: _State, rng: random.Random, steps: int) -> _State:
    best, n, kind = state, len(state.groups), state.objective.kinds
    if n < 2:
        return best
    hot, cold = HOT * state.energy, COLD * state.energy
    if hot <= 0:
        return best  # Nothing costs anything.
    for step in range(steps):
        a, b = rng.sample(range(n), 2)
        one, two = rng.choice(state.groups[a]), rng.choice(state.groups[b])
        if kind[one] == kind[two]:
            continue
        # Half of the time several of a kind: an island moves as a block.
        give = [one, *(p for p in state.groups[a] if kind[p] == kind[one] and p != one)]
        take = [two, *(p for p in state.groups[b] if kind[p] == kind[two] and p != two)]
        most = min(len(give), len(take))
        count = rng.randint(1, most) if rng.random() < 0.5 else 1
        heat = hot * (cold / hot) ** (step / steps)
        limit = state.energy - heat * math.log(1.0 - rng.random())
        new = state.swapped(a, b, give[:count], take[:count], limit)
        if new is not None:
            state = new
            if new.seconds < best.seconds:
                best = new
    return best
