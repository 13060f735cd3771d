"""From which rate on a link counts as a fast one, where the user says nothing.

The highest rate at which everybody who can have a partner has two to alternate between: links of at
least this rate have a matching as large as all links have, and again one without the links of the
first. With one matching alone the same pairs would meet in every round, and only forced slow links
would mix them: on 32 replicas with rates of U(0, 5) that gives ρ of 0.98, with two 0.92.

It is found by bisection with one first matching each time, so it may be a little too low where
another first one would have left a second.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .matching import ALONE, Bools, maximal, maximum, weights

__all__ = ["fastest_threshold"]

PARTNERS = 2


def fastest_threshold(rate: NDArray[np.float64]) -> float:
    """`rate` (n, n), symmetric, 0: no link. The slowest link's where there are no two such
    matchings at all, 0 where there is no link."""
    values = np.unique(rate[rate > 0])
    if not values.size:
        return 0.0
    order = weights(0, len(rate))
    most = _matched(rate > 0, order)[0]

    def enough(threshold: float) -> bool:
        edges = rate >= threshold
        for _ in range(PARTNERS):
            found, edges = _matched(edges, order)
            if found < most:
                return False
        return True

    high = len(values) - 1
    if most == len(rate) > PARTNERS:  # everybody has so many links of this rate
        partners = np.sort(rate, axis=1)[:, -PARTNERS]
        high = max(0, int(np.searchsorted(values, partners.min(), "right")) - 1)
    low, step = high, 1  # downwards from there, for graphs with few links are searched fast
    while low > 0 and not enough(values[low]):
        low, high, step = max(0, low - step), low - 1, 2 * step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if enough(values[middle]) else (low, middle - 1)
    return float(values[low])


def _matched(edges: Bools, order: NDArray[np.uint64]) -> tuple[int, Bools]:
    """How many have a partner in a maximum matching, and the edges that are not in it."""
    alone = np.full(len(edges), ALONE, dtype=np.int64)
    mates = maximum(edges, order, maximal(edges, order, alone))
    matched = np.flatnonzero(mates != ALONE)
    rest = edges.copy()
    rest[matched, mates[matched]] = False
    return matched.size, rest
