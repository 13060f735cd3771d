"""Orders of peers: open paths that first make the narrowest link as wide as possible, then cost
least in total.

Up to EXACT nodes by dynamic programming over sets of nodes, O(n²·2ⁿ) in vector operations: one pass
for the width, one for the cost over links that are at least as wide. Beyond that from the nearest
neighbour, improved by 2-opt and Or-opt moves until none helps: first on (1 / rate)⁴, which shrinks
the largest, then on the cost with everything narrower forbidden. Both matrices are symmetric.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["EXACT", "grouped_path", "narrowest", "shortest_path", "widest_path"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT = 12
"""Most nodes of the exact search: 12 · 12 · 4,096 entries."""
_FAR = 1e9
"""How many times the sum of all costs a forbidden link costs: moves avoid it, but stay numbers."""


def narrowest(rate: Floats, path: Sequence[int]) -> float:
    """The least rate along a path; inf for one node."""
    return min((float(rate[a, b]) for a, b in itertools.pairwise(path)), default=np.inf)


def widest_path(
    rate: Floats,
    cost: Floats,
    enter: tuple[Floats, Floats] | None = None,
    leave: tuple[Floats, Floats] | None = None,
) -> list[int]:
    """All n nodes in order. `enter`, `leave`: (rates, costs), each (n,), of the link by which the
    path would be entered at a node, and left from it; None: it begins or ends there."""
    n = len(rate)
    none = (np.full(n, np.inf), np.zeros(n))
    enter, leave = enter or none, leave or none
    if n == 1:
        return [0]
    if n > EXACT:
        return _improved(rate, cost, enter, leave)
    width, _ = _search(-rate, -enter[0], -leave[0], largest=True)
    narrow = np.nextafter(-width, 0.0) if np.isfinite(width) else -width
    far = _FAR * (1.0 + cost.sum() + enter[1].sum() + leave[1].sum())

    def wide(rates: Floats, costs: Floats) -> Floats:
        return np.where(rates >= narrow, costs, far)

    return _search(
        wide(rate, cost), wide(enter[0], enter[1]), wide(leave[0], leave[1]), largest=False
    )[1]


@functools.cache
def _levels(n: int) -> tuple[tuple[Ints, Ints], ...]:
    """By size of sets of n nodes, from one: every set, and a node outside of it."""
    found = []
    for level in range(1, n):
        pairs = [
            (m, j)
            for m in range(1 << n)
            if m.bit_count() == level
            for j in range(n)
            if not (m >> j) & 1
        ]
        rows = np.array(pairs, dtype=np.int64)
        found.append((rows[:, 0], rows[:, 1]))
    return tuple(found)


def _search(
    cost: Floats, enter: Floats, leave: Floats, *, largest: bool
) -> tuple[float, list[int]]:
    """The least (largest link, or sum of links) of an open path over all nodes, and the path."""
    n = len(cost)
    join = np.maximum if largest else np.add
    best = np.full((1 << n, n), np.inf)
    best[1 << np.arange(n), np.arange(n)] = enter
    for nodes, j in _levels(n):
        best[nodes | (1 << j), j] = join(best[nodes], cost[j]).min(1)
    nodes_left = (1 << n) - 1
    ends = join(best[nodes_left], leave)
    path = [int(ends.argmin())]
    while nodes_left := nodes_left ^ (1 << path[-1]):
        path.append(int(join(best[nodes_left], cost[path[-1]]).argmin()))
    return float(ends.min()), path[::-1]


def shortest_path(distance: Floats) -> tuple[float, tuple[int, ...]]:
    """The open path over all n nodes with the least sum of a symmetric matrix (n, n): exact up to
    EXACT nodes, improved by exchanges beyond."""
    n = len(distance)
    if n > EXACT:
        path = widest_path(np.ones_like(distance), distance)
        return float(distance[path[:-1], path[1:]].sum()), tuple(path)
    length, path = _search(distance, np.zeros(n), np.zeros(n), largest=False)
    return length, tuple(path)


def _improved(
    rate: Floats, cost: Floats, enter: tuple[Floats, Floats], leave: tuple[Floats, Floats]
) -> list[int]:
    """Greedy, 2-opt, Or-opt; see the module. The ends are two more nodes, n and n + 1."""
    n = len(rate)
    rates, costs = np.full((n + 2, n + 2), np.inf), np.zeros((n + 2, n + 2))
    rates[:n, :n], costs[:n, :n] = rate, cost
    for node, (r, c) in ((n, enter), (n + 1, leave)):
        rates[node, :n] = rates[:n, node] = r
        costs[node, :n] = costs[:n, node] = c
    finite = rates[np.isfinite(rates)]
    unit = finite.min() if finite.size else 1.0
    narrowness = (unit / rates) ** 4
    # Of equally narrow links the cheaper one.
    narrowness += 1e-9 * costs / (costs.max() or 1.0)
    path = _local(narrowness, _greedy(narrowness, n))
    width = min(rates[a, b] for a, b in itertools.pairwise(path))
    far = _FAR * (1.0 + costs.sum())
    path = _local(np.where(rates >= width, costs, far), path)
    return path[1:-1]


def _greedy(cost: Floats, n: int) -> list[int]:
    path, left = [n], np.ones(n, dtype=bool)
    for _ in range(n):
        j = int(np.argmin(np.where(left, cost[path[-1], :n], np.inf)))
        path.append(j)
        left[j] = False
    return [*path, n + 1]


def _local(cost: Floats, path: list[int], most_moves: int = 10_000) -> list[int]:
    """The best move of the whole neighbourhood at a time; the ends of the path stay."""
    at = np.array(path, dtype=np.int64)
    n = len(at)
    for _ in range(most_moves):
        c = cost[np.ix_(at, at)]
        link = np.diagonal(c, 1)  # link[i]: from place i to the next
        # 2-opt: turns round the places i+1 ... j, for j > i.
        gain = link[:, None] + link[None, :] - c[:-1, :-1] - c[1:, 1:]
        gain[np.tril_indices(n - 1)] = 0.0
        best = np.unravel_index(int(gain.argmax()), gain.shape)
        move, most = (int(best[0]), int(best[1]), 0), float(gain[best])
        # Or-opt: takes out places i ... i+s-1 and puts them between j and j+1.
        for s in (1, 2, 3):
            first = np.arange(1, n - s)
            if not len(first):
                continue
            saved = link[first - 1] + link[first + s - 1] - c[first - 1, first + s]
            paid = c[first][:, :-1] + c[first + s - 1][:, 1:]  # entered at its first node
            turned = c[first + s - 1][:, :-1] + c[first][:, 1:]
            gain = saved[:, None] + link[None, :] - np.minimum(paid, turned)
            j = np.arange(n - 1)[None, :]
            gain[(j >= first[:, None] - 1) & (j < first[:, None] + s)] = 0.0
            best = np.unravel_index(int(gain.argmax()), gain.shape)
            if gain[best] > most:
                most, move = float(gain[best]), (int(first[best[0]]), int(best[1]), s)
        if most <= 1e-12 * max(float(link.sum()), 1e-300):
            break
        i, j_, s = move
        if s == 0:
            at[i + 1 : j_ + 1] = at[i + 1 : j_ + 1][::-1].copy()
            continue
        part = at[i : i + s].copy()
        a, b = at[j_], at[j_ + 1]
        if cost[a, part[0]] + cost[part[-1], b] > cost[a, part[-1]] + cost[part[0], b]:
            part = part[::-1]
        rest = np.concatenate((at[:i], at[i + s :]))
        place = (j_ if j_ < i else j_ - s) + 1
        at = np.concatenate((rest[:place], part, rest[place:]))
    return [int(i) for i in at]


def grouped_path(rate: Floats, cost: Floats, groups: Sequence[Sequence[int]]) -> list[int]:
    """First the order of the groups, by the best link between each two, then the path through each,
    which enters from where the one before ended and leaves where the next one is near."""
    if len(groups) == 1:
        only = list(groups[0])
        inside = np.ix_(only, only)
        return [only[i] for i in widest_path(rate[inside], cost[inside])]
    g = len(groups)
    wide, near = np.full((g, g), np.inf), np.zeros((g, g))
    for a in range(g):
        for b in range(a + 1, g):
            between = np.ix_(groups[a], groups[b])
            wide[a, b] = wide[b, a] = rate[between].max()
            near[a, b] = near[b, a] = cost[between].min()
    order = widest_path(wide, near)
    path: list[int] = []
    for place, a in enumerate(order):
        members = list(groups[a])
        enter = (rate[path[-1], members], cost[path[-1], members]) if path else None
        leave = None
        if place + 1 < g:
            to = np.ix_(members, groups[order[place + 1]])
            leave = (rate[to].max(1), cost[to].min(1))
        inside = np.ix_(members, members)
        path += [members[i] for i in widest_path(rate[inside], cost[inside], enter, leave)]
    return path
