"""A step time that no routes on a network can be below, whatever they are: for the reader of a
search's result.

With c(v) the cheapest round trip of a microbatch through L nodes, v among them (forward, loss and
backward, nobody in the way), W waves and K lanes:

    on average    lanes are busy for Σ of their round trips, and each visit of v is one of L of a
                  round trip of at least c(v):  step ≥ Σ visits(v) · c(v) / L / K, with every node
                  as often as it may be, the cheap ones first, and with the wait of lanes that begin
                  at one node
    farthest      where every place is needed, some microbatch of the last wave visits the farthest
                  v, and its lane has W - 1 round trips before that:  step ≥ (W - 1) · min c + c(v)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .route_rules import RouteRules
from .route_timing import RouteTimes

__all__ = ["cheapest_round_trips", "step_bound_s"]

Floats = NDArray[np.float64]


def cheapest_round_trips(times: RouteTimes, length: int) -> Floats:
    """(N,): at most the seconds of the cheapest round trip of `length` nodes with each node. Walks
    that turn back at once are left out, longer repetitions are not: exact up to 4 nodes."""
    hop = times.hop_s()
    visit = times.visit_s()
    n = len(visit)
    edge = hop + hop.T + visit[None, :]
    np.fill_diagonal(edge, np.inf)
    found = np.full(n, np.inf)
    for v in range(n):
        # walk[p, k]: the cheapest walk from v that ends with p -> k.
        walk = np.full((n, n), np.inf)
        walk[v] = edge[v]
        for _ in range(length - 2):
            walk = _without_return(walk) + edge
        # The last edge leads back to v, and not from where the first one led when L is 2.
        back = walk.min(0) + edge[:, v] if length == 2 else (_without_return(walk) + edge)[:, v]
        found[v] = float(back.min())
    return found + float(times.loss_s.min())


def _without_return(walk: Floats) -> Floats:
    """(k, t): the cheapest walk that ends in k and came there from another node than t."""
    n = len(walk)
    first = walk.argmin(0)
    least = walk[first, np.arange(n)]
    others = walk.copy()
    others[first, np.arange(n)] = np.inf
    second = others.min(0)
    found: Floats = np.repeat(least[:, None], n, axis=1)
    found[np.arange(n), first] = second
    return found


def step_bound_s(rules: RouteRules, times: RouteTimes, sizes: Sequence[int], waves: int) -> float:
    """Seconds that a step takes at least. `sizes`: nodes by stage."""
    lanes = sizes[0] * rules.memory
    trips = cheapest_round_trips(times, rules.length)
    # Node by node as many visits as it may have, the cheapest first.
    left, most, total = waves * lanes * rules.length, waves * rules.memory, 0.0
    for trip in np.sort(trips):
        visits = min(left, most)
        total += visits * float(trip)
        left -= visits
    between = float(times.forward_s.min()) + times.rest_s
    waits = between * (rules.memory - 1) / 2
    average = total / rules.length / lanes + waits
    farthest = float(trips.min()) * waves
    if waves * lanes * rules.length > most * (len(trips) - 1):
        farthest += float(trips.max() - trips.min())
    return max(average, farthest)
