"""A plan for SkipPipe's twelve places without skipping, under the rules of skippipe.py.

As everywhere in Shoal, every pipeline cuts the model for itself and gets microbatches by its pace.
The search begins with a pipeline in each island of fast links and goes on by simulated annealing:
nodes change places, within a pipeline or between two, layers and microbatches move, a node leaves
one pipeline for another. Its objective is the step and a little of the mean of all microbatches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.benchmarks.planning.skippipe import LAYERS_HELD, Delays, Route, ends_s
from shoal.dag.cost.network import Network
from shoal.planner.cost.candidate import share_out
from shoal.planner.network.communities import groupings, linked, rates
from shoal.planner.network.order import shortest_path

__all__ = ["Rows", "describe", "first", "search"]

GUIDE = 0.3
"""How much of the mean is added to the step."""
HOT, COLD = 0.01, 0.0003
"""Temperatures, in steps of the start."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Pipelines as routes, and the microbatches of each."""

    routes: tuple[Route, ...]
    microbatches: tuple[int, ...]

    def each(self) -> list[Route]:
        """The route of every microbatch, in the order in which they begin."""
        order = share_out(self.microbatches, sum(self.microbatches))
        return [self.routes[p] for p in order]


def first(network: Network, d: Delays, layers: int, microbatches: int) -> list[Rows]:
    """For each way of dividing the nodes into islands that allows it, a pipeline in each island."""
    least = -(-layers // LAYERS_HELD)
    rate = rates(network)
    found = []
    for division in (*groupings(rate), *linked(rate, len(network))):
        if len(division) * least <= len(network):
            islands = [list(g) for g in division]
            found.append(_in_islands(islands, d, layers, microbatches))
    return found


def _in_islands(islands: list[list[int]], d: Delays, layers: int, microbatches: int) -> Rows:
    """In the order of the shortest path; layers as even as they go, more of them late, where fewer
    microbatches are live."""
    least = -(-layers // LAYERS_HELD)
    edge = np.array(d.edge)
    while min(map(len, islands)) < least:
        # The nearest node of an island that can spare it.
        small = min(islands, key=len)
        _, giver, node = min(
            (float(edge[n, small].min()), i, n)
            for i, island in enumerate(islands)
            if len(island) > least
            for n in island
        )
        islands[giver].remove(node)
        small.append(node)
    routes = []
    for island in islands:
        order = shortest_path(edge[np.ix_(island, island)])[1]
        n = len(island)
        routes.append(tuple((island[i], (layers + k) // n) for k, i in enumerate(order)))
    turns = share_out([len(r) for r in routes], microbatches)
    return Rows(tuple(routes), tuple(turns.count(p) for p in range(len(routes))))


def search(
    d: Delays,
    starts: Sequence[Rows],
    *,
    seed: int = 0,
    steps: int = 4000,
    loss_at_first: bool = False,
    backward_first: bool = True,
) -> tuple[float, Rows]:
    """Seconds of a step and the pipelines of the best plan that was found from the best start."""
    rng = random.Random(seed)

    def cost(rows: Rows) -> tuple[float, float]:
        ends = ends_s(d, rows.each(), loss_at_first=loss_at_first, backward_first=backward_first)
        return max(ends) + GUIDE * sum(ends) / len(ends), max(ends)

    rows = min(starts, key=cost)
    now, seconds = cost(rows)
    best = seconds, rows
    hot, cold = HOT * now, COLD * now
    for step in range(steps):
        other = _moved(rows, rng)
        if other is None:
            continue
        energy, seconds = cost(other)
        heat = hot * (cold / hot) ** (step / steps)
        if energy <= now - heat * math.log(1.0 - rng.random()):
            now, rows = energy, other
            if seconds < best[0]:
                best = seconds, other
    return best


def _moved(rows: Rows, rng: random.Random) -> Rows | None:
    """A neighbour; None: this draw is none."""
    routes = [list(r) for r in rows.routes]
    counts = list(rows.microbatches)
    a, b = rng.randrange(len(routes)), rng.randrange(len(routes))
    one, two = routes[a], routes[b]
    i, j = rng.randrange(len(one)), rng.randrange(len(two))
    kind = rng.random()
    if kind < 0.15:
        if a == b or counts[a] < 2:
            return None
        counts[a] -= 1
        counts[b] += 1
    elif kind < 0.5:
        # Two nodes change places, half of the time in one pipeline.
        if rng.random() < 0.5:
            two, j = one, rng.randrange(len(one))
        (x, m), (y, n) = one[i], two[j]
        one[i], two[j] = (y, m), (x, n)
    elif kind < 0.65:
        # A node goes to another place of its pipeline, the layers stay where they are.
        layers = [n for _, n in one]
        nodes = [x for x, _ in one]
        nodes.insert(rng.randrange(len(one)), nodes.pop(i))
        routes[a] = list(zip(nodes, layers, strict=True))
    elif kind < 0.9:
        j = rng.randrange(len(one))
        if i == j or one[i][1] < 2 or one[j][1] >= LAYERS_HELD:
            return None
        one[i], one[j] = (one[i][0], one[i][1] - 1), (one[j][0], one[j][1] + 1)
    elif a == b or not _leaves(one, i, two, rng):
        return None
    return Rows(tuple(map(tuple, routes)), tuple(counts))


def _leaves(
    one: list[tuple[int, int]], i: int, two: list[tuple[int, int]], rng: random.Random
) -> bool:
    """Node i of a pipeline goes to another, where it takes half of the longest stage."""
    layers = sum(n for _, n in one)
    longest = max(range(len(two)), key=lambda k: two[k][1])
    if (len(one) - 1) * LAYERS_HELD < layers or two[longest][1] < 2:
        return False
    node, left = one.pop(i)
    while left:
        k = min(range(len(one)), key=lambda k: (one[k][1], rng.random()))
        one[k] = (one[k][0], one[k][1] + 1)
        left -= 1
    other, n = two[longest]
    two[longest] = (other, n - n // 2)
    two.insert(rng.randrange(len(two) + 1), (node, n // 2))
    return True


def describe(rows: Rows, places: Sequence[str]) -> str:
    """`places`: of every node. Stages as PLACE x LAYERS, by pipeline."""
    return "; ".join(
        f"{m} through " + " ".join(f"{places[x]} x{n}" for x, n in route)
        for route, m in zip(rows.routes, rows.microbatches, strict=True)
    )
