"""Several pipelines of as many stages, by grouping: who holds which stage, and which peers work
together.

For D pipelines of S stages over the M microbatches of a request, by closed formulas:

    step = S · stage + Σ hops + (M / D - 1) · max(stage, widest hop / 2) + largest exchange

where a hop is there and back and the holders of a stage exchange its gradients, 2 / D of them with
each other holder. A small exchange wants the holders of a stage in one island of fast links, small
hops want pipelines inside islands: the search (planner/network/grouping.py) weighs both.
Where to cut, who stays empty and how many microbatches each pipeline gets is found behind it
(planner/cost/rows.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...dag.schedule.orders.schedules import interleaves
from ..cost.cost_model import CostModel
from ..cost.rows import Guess, RowBuilder
from ..network.communities import groupings, rates
from ..network.grouping import Islands, Objective, group
from ..network.order import shortest_path

__all__ = ["candidates_in", "shapes"]

Floats = NDArray[np.float64]

MOST_SHAPES = 6
"""Numbers of pipelines and stages that are tried."""
MOST_PEERS = 64
"""Peers of a grouping."""
WIDEST = 16
"""Most pipelines."""
LONGEST = 12
"""Most stages: so many groups are ordered exactly."""
STEPS = 4
"""Swaps for each peer of a grouping."""
DIVISIONS = 4
"""Ways of dividing the peers into islands."""


def shapes(judge: CostModel) -> list[tuple[int, int]]:
    """(pipelines, stages) that options, peers, microbatches and operators allow, at most
    MOST_SHAPES: with as many peers as there are, then with fewer."""
    options, m = judge.request.options, judge.request.microbatches
    peers = min(len(judge.offers), MOST_PEERS)
    most = min(LONGEST, judge.operators)
    found: dict[tuple[int, int], None] = {}
    for part in (1, 2, 4):
        for d in (2, 3, 4, 6, 8, 12, WIDEST) if options.pipelines is None else (options.pipelines,):
            s = min(most, peers // part // d) if options.stages is None else options.stages
            if 2 <= d <= min(m, WIDEST) and 2 <= s <= most and s * d <= peers:
                found[d, s] = None
    return list(found)[:MOST_SHAPES]


def candidates_in(judge: CostModel) -> Iterator[Guess]:
    """Different candidates with their guessed seconds, the best guesses first."""
    if interleaves(judge.request.options.schedule) or judge.request.microbatches < 2:
        return
    rows = RowBuilder(judge)
    found = []
    for d, s in shapes(judge):
        for peers in _choices(judge, rows, d * s):
            groups = _grouped(judge, rows, peers, d, s)
            pipelines = list(zip(*groups, strict=True))
            exactly = judge.request.options.stages is not None
            for guess in (
                rows.aligned(pipelines, exactly=exactly),
                rows.own(pipelines, exactly=exactly),
            ):
                if guess is not None:
                    found.append(guess)
    seen = set()
    for guess in sorted(found, key=lambda g: g.seconds):
        if guess.candidate not in seen:
            seen.add(guess.candidate)
            yield guess


def _choices(judge: CostModel, rows: RowBuilder, count: int) -> Iterator[tuple[int, ...]]:
    """Which peers: the fastest, and those of the largest islands of fast links."""
    by_speed = np.argsort(rows.whole_s, kind="stable").tolist()
    fastest = tuple(sorted(by_speed[:count]))
    yield fastest
    if count == len(by_speed):
        return
    pool = sorted(by_speed[: 4 * MOST_PEERS])
    rate = rates(judge.network.part(pool))
    division = next(groupings(rate))
    place = {p: n for n, p in enumerate(by_speed)}
    chosen: list[int] = []
    for island in sorted(division, key=lambda i: (-len(i), i)):
        members = sorted((pool[i] for i in island), key=lambda p: place[p])
        chosen += members[: count - len(chosen)]
    if tuple(sorted(chosen)) != fastest:
        yield tuple(sorted(chosen))


def _grouped(
    judge: CostModel, rows: RowBuilder, peers: Sequence[int], pipelines: int, stages: int
) -> tuple[tuple[int, ...], ...]:
    """The holders of each stage; the d-th of all are one pipeline."""
    at = list(peers)
    grid = np.ix_(at, at)
    size = float(rows.trainable_bytes[-1]) / stages
    crossing = float(np.median([judge.crossing_bytes(p) for p in judge.even_cuts(stages)[1:-1]]))
    latency = rows.latency[grid] / 2
    exchange = 2 * (latency + size / pipelines * rows.slower[grid])
    # All that a peer exchanges passes its own end.
    np.fill_diagonal(exchange, 2 * size * (pipelines - 1) / pipelines / rows.end[at])
    hop = crossing * rows.both[grid] + rows.latency[grid]
    np.fill_diagonal(hop, 0.0)
    stage = float(rows.whole_s[at].mean()) / stages
    more = judge.request.microbatches / pipelines - 1
    orders: dict[bytes, tuple[float, tuple[int, ...]]] = {}

    def total(inside: Floats, between: Floats) -> tuple[float, tuple[int, ...]]:
        key = between.tobytes()
        if key not in orders:
            # The shortest, or the one whose widest hop is short.
            tried = []
            for power in (1, 4):
                _, order = shortest_path(between**power)
                hops = between[order[:-1], order[1:]]
                slowest = max(stage, float(hops.max()) / 2)
                tried.append((float(hops.sum()) + more * slowest, order))
            orders[key] = min(tried)
        seconds, order = orders[key]
        return stages * stage + seconds + float(inside.max()), order

    objective = Objective(exchange, hop, total, at_once=True)
    division = _divisions(judge, at)
    found = group(objective, division, stages, pipelines, steps=STEPS * len(at), annealed=2)
    return tuple(tuple(at[i] for i in g) for g in found.groups)


def _divisions(judge: CostModel, peers: Sequence[int]) -> list[Islands]:
    """Into islands, the peers numbered as they come."""
    rate = rates(judge.network.part(peers))
    found: list[Islands] = [g for g, _ in zip(groupings(rate), range(DIVISIONS), strict=False)]
    everyone = tuple(range(len(peers)))
    return found if (everyone,) in found else [*found, (everyone,)]
