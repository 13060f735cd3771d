"""SkipPipe's placement of nodes, made anew from its description (arXiv 2502.19913).

A memetic search that does not know of skipping, for the least DP + 2 · PP: DP is the dearest pair
inside a stage; PP the shortest closed tour of the stages, stage 0 first, over bottleneck matchings
of delay plus forward.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["placed_by_tour"]

Floats = NDArray[np.float64]

POPULATION, TRIALS, CROSSED, LOCAL = 200, 8000, 5, 4


def placed_by_tour(
    delay: Floats, forward_s: float, sizes: Sequence[int], seed: int, trials: int = TRIALS
) -> list[list[int]]:
    """The nodes of each stage, in the order of the tour."""
    rng = random.Random(seed)
    first = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    population: list[tuple[float, list[int]]] = []
    for _ in range(POPULATION):
        rng.shuffle(first)
        population.append((_fitness(delay, forward_s, first, len(sizes))[0], first[:]))
    for _ in range(trials):
        a, b = rng.randrange(POPULATION), rng.randrange(POPULATION)
        child = population[b][1][:]
        for node in rng.sample(range(len(child)), CROSSED):
            child[node] = population[a][1][node]
        _repair(child, sizes)
        cost = _fitness(delay, forward_s, child, len(sizes))[0]
        for _ in range(LOCAL):
            x, y = rng.randrange(len(child)), rng.randrange(len(child))
            child[x], child[y] = child[y], child[x]
            other = _fitness(delay, forward_s, child, len(sizes))[0]
            if other > cost:
                child[x], child[y] = child[y], child[x]
            cost = min(cost, other)
        worse = max(a, b, key=lambda i: population[i][0])
        if cost < population[worse][0]:
            population[worse] = cost, child
    best = min(population)[1]
    tour = _fitness(delay, forward_s, best, len(sizes))[1]
    return [[n for n, s in enumerate(best) if s == stage] for stage in tour]


def _repair(child: list[int], sizes: Sequence[int]) -> None:
    counts = Counter(child)
    for node, stage in enumerate(child):
        if counts[stage] > sizes[stage]:
            to = next(s for s, size in enumerate(sizes) if counts[s] < size)
            child[node] = to
            counts[stage] -= 1
            counts[to] += 1


def _fitness(
    delay: Floats, forward_s: float, stage_of: Sequence[int], stages: int
) -> tuple[float, tuple[int, ...]]:
    of = [[n for n, s in enumerate(stage_of) if s == stage] for stage in range(stages)]
    dearest = max(float(delay[np.ix_(nodes, nodes)].max()) for nodes in of)
    between = np.zeros((stages, stages))
    for a, b in itertools.combinations(range(stages), 2):
        few, many = sorted((of[a], of[b]), key=len)
        ways = _ways(len(few), len(many))
        costs = delay[np.ix_(few, many)][np.arange(len(few)), ways].max(1)
        between[a, b] = between[b, a] = costs.min() + forward_s
    tours = _tours(stages)
    lengths = between[tours, np.roll(tours, -1, axis=1)].sum(1)
    at = int(lengths.argmin())
    return dearest + 2 * float(lengths[at]), tuple(tours[at].tolist())


_KNOWN: dict[tuple[str, int, int], NDArray[np.int64]] = {}


def _ways(few: int, many: int) -> NDArray[np.int64]:
    key = ("ways", few, many)
    if key not in _KNOWN:
        _KNOWN[key] = np.array(list(itertools.permutations(range(many), few)))
    return _KNOWN[key]


def _tours(stages: int) -> NDArray[np.int64]:
    key = ("tours", stages, 0)
    if key not in _KNOWN:
        rest = itertools.permutations(range(1, stages))
        _KNOWN[key] = np.array([(0, *order) for order in rest])
    return _KNOWN[key]
