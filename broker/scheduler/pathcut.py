"""Cutting a chain of operators along a path of unequal peers: which peers of the path, and where.

    stage(k, i, j) = F_k(i..j) + B_k(i..j)                              seconds for one microbatch
    link(l, k, i)  = bytes cut at i · seconds per byte, slower direction
    bottleneck     = max over stages and links
    fill           = Σ stages + Σ links, both directions, with latencies
    step           = fill + (M - 1) · bottleneck                        for M microbatches

Peers of the path may stay empty, so a slow one can be worth nothing. For a bound τ on the
bottleneck the stages of peer k that end at j begin in a window [low_k(j), j), because seconds and
memory only grow with an interval; so "can the first j operators end with peer k" and the least fill
under τ are both found in O(K · reach · n log n) vector operations. The least bottleneck is found by
bisection, and of several τ above it the one with the shortest step is taken: with few microbatches
a shorter pipeline wins. Up to `reach` - 1 peers in a row may stay empty between two others, any
number at the ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Path", "PathCut", "best_cut", "least_bottleneck", "soonest_fill"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOOSER = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0, np.inf)
"""Bounds that are tried, in least bottlenecks."""


@dataclass(frozen=True, eq=False)
class Path:
    """K peers in order, and n + 1 positions at which the chain may be cut (both ends included)."""

    seconds: Floats
    """(K, n + 1): of the first j positions on peer k, forward and backward, one microbatch."""
    lows: Sequence[Ints]
    """By peer (n + 1,): least start of an interval that ends at j and fits its memory."""
    crossing: Floats
    """(n + 1,): bytes that cross each position, in each direction."""
    slower: Floats
    """(K, K): seconds per byte in the slower direction."""
    both: Floats
    """(K, K): seconds per byte there and back."""
    latency: Floats
    """(K, K): seconds there and back."""
    reach: int = 1
    """1: every peer has a stage."""

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True)
class PathCut:
    """`peers[s]` (place in the path) has the positions [cuts[s], cuts[s + 1])."""

    peers: tuple[int, ...]
    cuts: tuple[int, ...]
    bottleneck_s: float
    fill_s: float

    def step_s(self, microbatches: int) -> float:
        return self.fill_s + (microbatches - 1) * self.bottleneck_s


def least_bottleneck(path: Path, tolerance: float = 1e-9) -> PathCut | None:
    """The cut whose bottleneck is least, within `tolerance`, and of these the one that fills
    soonest; None: nothing fits the memory."""
    found = soonest_fill(path, np.inf)
    if found is None:
        return None
    low, high = 0.0, found.bottleneck_s
    while high - low > tolerance * high:
        middle = (low + high) / 2
        better = soonest_fill(path, middle) if _possible(path, middle) else None
        if better is None:
            low = middle
        else:
            found, high = better, min(middle, better.bottleneck_s)
    return found


def best_cut(path: Path, microbatches: int, tolerance: float = 1e-3) -> PathCut | None:
    """The cut with the shortest step of those that were tried; None: nothing fits the memory."""
    tight = least_bottleneck(path, tolerance)
    if tight is None:
        return None
    tried = [tight]
    for factor in LOOSER:
        looser = soonest_fill(path, tight.bottleneck_s * factor)
        if looser is not None:
            tried.append(looser)
    return min(tried, key=lambda c: c.step_s(microbatches))


def _windows(path: Path, most_s: float) -> list[Ints]:
    """By peer, the least start of an interval that ends at j, fits, and takes at most `most_s`."""
    found = []
    for seconds, low in zip(path.seconds, path.lows, strict=True):
        if np.isfinite(most_s):
            # Rounding must not forbid an interval that is exactly as long as the bound.
            light = np.searchsorted(seconds, seconds - most_s * (1 + 1e-12), side="left")
            low = np.maximum(low, light)
        found.append(low)
    return found


def _before(path: Path, k: int) -> range:
    """The places of the path that may come right before k."""
    return range(max(0, k - path.reach), k)


def _possible(path: Path, most_s: float) -> bool:
    """Whether some cut has no stage and no link above `most_s`."""
    n = path.seconds.shape[1]
    ends: list[NDArray[np.bool_]] = []
    at = np.arange(n)
    for k, low in enumerate(_windows(path, most_s)):
        starts = np.zeros(n, dtype=bool)
        starts[0] = path.reach > 1 or k == 0
        for p in _before(path, k):
            starts |= ends[p] & (path.crossing * path.slower[p, k] <= most_s)
        count = np.concatenate(([0], np.cumsum(starts)))
        ends.append(count[at] > count[np.minimum(low, at)])
        if ends[-1][-1] and (path.reach > 1 or k == len(path) - 1):
            return True
    return False


def soonest_fill(path: Path, most_s: float) -> PathCut | None:
    """Of the cuts without a stage or link above `most_s` the one that fills soonest."""
    n = path.seconds.shape[1]
    ends: list[Floats] = []
    came: list[Ints] = []  # by peer and start: the peer before, -1: it is the first
    began: list[Ints] = []  # by peer and end: the start
    for k, low in enumerate(_windows(path, most_s)):
        starts, previous = np.full(n, np.inf), np.full(n, -1, dtype=np.int64)
        if path.reach > 1 or k == 0:
            starts[0] = 0.0
        for p in _before(path, k):
            cost = ends[p] + (path.crossing * path.both[p, k] + path.latency[p, k])
            cost[path.crossing * path.slower[p, k] > most_s] = np.inf
            better = cost < starts
            starts[better], previous[better] = cost[better], p
        seconds = path.seconds[k]
        least, where = _window_least(starts - seconds, low)
        ends.append(least + seconds)
        came.append(previous)
        began.append(where)
    last = [
        float(e[-1]) if path.reach > 1 or k == len(path) - 1 else np.inf for k, e in enumerate(ends)
    ]
    k = int(np.argmin(last))
    if not np.isfinite(last[k]):
        return None
    fill_s, j = last[k], n - 1
    peers, cuts, bottleneck = [], [j], 0.0
    while k >= 0:
        i = int(began[k][j])
        bottleneck = max(bottleneck, float(path.seconds[k, j] - path.seconds[k, i]))
        p = int(came[k][i])
        if p >= 0:
            bottleneck = max(bottleneck, float(path.crossing[i] * path.slower[p, k]))
        peers.append(k)
        cuts.append(i)
        k, j = p, i
    return PathCut(tuple(peers[::-1]), tuple(cuts[::-1]), bottleneck, fill_s)


def _window_least(values: Floats, low: Ints) -> tuple[Floats, Ints]:
    """For every j the least of values[low[j]:j] and where it is; inf for an empty window."""
    n = len(values)
    at = np.arange(n)
    length = np.maximum(at - low, 0)
    table = [at.astype(np.int64)]  # table[s][i]: where the least of the 2^s values from i on is
    while 2 ** len(table) <= int(length.max(initial=0)):
        half = 2 ** (len(table) - 1)
        left = table[-1][: n - 2 * half + 1]
        right = table[-1][half:][: len(left)]
        table.append(np.where(values[right] < values[left], right, left))
    least, where = np.full(n, np.inf), np.zeros(n, dtype=np.int64)
    for s, places in enumerate(table):
        j = np.flatnonzero((length >= 2**s) & (length < 2 ** (s + 1)))
        if not len(j):
            continue
        a, b = places[low[j]], places[j - 2**s]
        where[j] = np.where(values[b] < values[a], b, a)
        least[j] = values[where[j]]
    return least, where
