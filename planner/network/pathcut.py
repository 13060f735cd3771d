"""Cutting a chain of operators along a path of unequal peers: which peers of the path, and where.

    stage(k, i, j) = F_k(i..j) + B_k(i..j)                              seconds for one microbatch
    link(l, k, i)  = bytes cut at i · seconds per byte, slower direction
    bottleneck     = max over stages and links
    fill           = Σ stages + Σ links, both directions, with latencies
    period         = max(bottleneck, max over s of (Σ stages and links from s on) / live(s))
    step           = fill + (M - 1) · period                            for M microbatches

live(s) is the number of microbatches that stage s may have on their way: under 1F1B the number of
stages from it on, so that a link takes as much of the pace as a stage does; without a bound (GPipe)
links hide behind stages.

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
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

__all__ = [
    "Path",
    "PathCut",
    "best_cut",
    "least_bottleneck",
    "possible",
    "slowest_circle",
    "soonest_fill",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOOSER = (1.2, 2.0)
"""Bounds that are tried, in least bottlenecks, before none."""
_SMALL = 12_000
"""Positions times the longest window up to which a table of all windows is faster than one of
powers of two."""


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

    @classmethod
    def without_links(cls, seconds: Floats, lows: Sequence[Ints], crossing: Floats) -> Path:
        """A path whose links take no time."""
        nothing = np.zeros((len(seconds), len(seconds)))
        return cls(seconds, lows, crossing, nothing, nothing, nothing)


@dataclass(frozen=True, slots=True)
class PathCut:
    """`peers[s]` (place in the path) has the positions [cuts[s], cuts[s + 1])."""

    peers: tuple[int, ...]
    cuts: tuple[int, ...]
    bottleneck_s: float
    fill_s: float
    stages_s: tuple[float, ...]
    """By stage, seconds of one microbatch and of the link to the next stage, both directions."""

    def step_s(self, microbatches: int, *, bound: bool = True) -> float:
        """`bound`: at most K - s microbatches are on their way from stage s of K on."""
        period = self.bottleneck_s
        if bound:
            period = max(period, slowest_circle(self.stages_s, microbatches))
        return self.fill_s + (microbatches - 1) * period


def slowest_circle(stages_s: Sequence[float], microbatches: int) -> float:
    """The longest average wait for a microbatch to come back, when as many are on their way from a
    stage as there are stages from it on; 0 where that is all of them."""
    slowest = rest = 0.0
    for live, seconds in enumerate(reversed(stages_s), 1):
        rest += seconds
        if live < microbatches:
            slowest = max(slowest, rest / live)
    return slowest


def least_bottleneck(
    path: Path, tolerance: float = 1e-9, loose: PathCut | None = None
) -> PathCut | None:
    """The cut whose bottleneck is least, within `tolerance`, and of these the one that fills
    soonest; None: nothing fits the memory. `loose`: the one that fills soonest of all, if that is
    known."""
    found = loose or soonest_fill(path, np.inf)
    if found is None:
        return None
    # All peers together cannot be faster than this.
    whole = np.maximum(path.seconds[:, -1], 1e-300)
    low, high = float(1 / (1 / whole).sum()) * (1 - 1e-9), found.bottleneck_s
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if possible(path, middle):
            high = middle
        else:
            low = middle
    return soonest_fill(path, high) or found


def best_cut(
    path: Path, microbatches: int, *, bound: bool = True, tolerance: float = 0.02
) -> PathCut | None:
    """The cut with the shortest step of those that were tried; None: nothing fits the memory."""
    loose = soonest_fill(path, np.inf)
    tight = loose and least_bottleneck(path, tolerance, loose)
    if loose is None or tight is None:
        return None
    bounds = (tight.bottleneck_s * factor for factor in LOOSER)
    looser = [soonest_fill(path, most_s) for most_s in bounds if most_s < loose.bottleneck_s]
    tried = filter(None, [tight, *looser, loose])
    return min(tried, key=lambda c: c.step_s(microbatches, bound=bound))


def _windows(path: Path, most_s: float) -> list[Ints]:
    """By peer, the least start of an interval that ends at j, fits, and takes at most `most_s`."""
    found = []
    for seconds, low in zip(path.seconds, path.lows, strict=True):
        if np.isfinite(most_s):
            # Rounding must not forbid an interval that is exactly as long as the bound.
            light = seconds.searchsorted(seconds - most_s * (1 + 1e-12), side="left")
            low = np.maximum(low, light)
        found.append(low)
    return found


def possible(path: Path, most_s: float = np.inf) -> bool:
    """Whether some cut fits the memory and has no stage and no link above `most_s`."""
    n, short = path.seconds.shape[1], path.reach == 1
    ends = np.zeros((len(path), n), dtype=bool)
    count = np.zeros(n + 1, dtype=np.int64)
    at = np.arange(n)
    for k, low in enumerate(_windows(path, most_s)):
        first = max(0, k - path.reach)
        open_ = path.crossing * path.slower[first:k, k, None] <= most_s * (1 + 1e-12)
        starts: NDArray[np.bool_] = np.logical_or.reduce(ends[first:k] & open_, axis=0)
        starts[0] = k == 0 or not short
        starts.cumsum(out=count[1:])
        ends[k] = count[at] > count[np.minimum(low, at)]
        if ends[k, -1] and (k == len(path) - 1 or not short):
            return True
    return False


def soonest_fill(path: Path, most_s: float) -> PathCut | None:
    """The cut whose pipeline fills soonest, among those without a stage or link above `most_s`;
    None where there is no such cut."""
    n, short = path.seconds.shape[1], path.reach == 1
    ends = np.full((len(path), n), np.inf)
    came: list[Ints] = []  # by peer and start: the peer before, -1: it is the first
    began: list[Ints] = []  # by peer and end: the start
    columns = np.arange(n)
    for k, low in enumerate(_windows(path, most_s)):
        first = max(0, k - path.reach)
        starts, previous = np.full(n, np.inf), np.full(n, -1, dtype=np.int64)
        if k:
            link = path.crossing * path.both[first:k, k, None] + path.latency[first:k, k, None]
            link += ends[first:k]
            if np.isfinite(most_s):
                link[path.crossing * path.slower[first:k, k, None] > most_s * (1 + 1e-12)] = np.inf
            previous = link.argmin(axis=0)
            starts = link[previous, columns]
            previous += first
        if k == 0 or not short:
            starts[0], previous[0] = 0.0, -1
        seconds = path.seconds[k]
        least, where = _window_least(starts - seconds, low)
        ends[k] = least + seconds
        came.append(previous)
        began.append(where)
    last = ends[:, -1].copy()
    if short:
        last[:-1] = np.inf
    k = int(np.argmin(last))
    if not np.isfinite(last[k]):
        return None
    fill_s, j = float(last[k]), n - 1
    peers, cuts, bottleneck, hop_s = [], [j], 0.0, 0.0
    stages: list[float] = []
    while k >= 0:
        i = int(began[k][j])
        seconds_ = float(path.seconds[k, j] - path.seconds[k, i])
        stages.append(seconds_ + hop_s)
        bottleneck = max(bottleneck, seconds_)
        p = int(came[k][i])
        if p >= 0:
            bottleneck = max(bottleneck, float(path.crossing[i] * path.slower[p, k]))
            hop_s = float(path.crossing[i] * path.both[p, k] + path.latency[p, k])
        peers.append(k)
        cuts.append(i)
        k, j = p, i
    return PathCut(tuple(peers[::-1]), tuple(cuts[::-1]), bottleneck, fill_s, tuple(stages[::-1]))


def _window_least(values: Floats, low: Ints) -> tuple[Floats, Ints]:
    """For every j the least of values[low[j]:j] and where it is; inf for an empty window."""
    n = len(values)
    at = np.arange(n)
    length = np.maximum(at - low, 0)
    width = int(length.max(initial=0))
    if not width:
        return np.full(n, np.inf), np.zeros(n, dtype=np.int64)
    if n * width <= _SMALL:
        before = np.concatenate((np.full(width, np.inf), values))
        # Row j: values[j - width:j].
        windows = as_strided(before, (n, width), 2 * before.strides, writeable=False)
        inside = np.arange(width) >= (width - length)[:, None]
        found = np.where(inside, windows, np.inf)
        places = found.argmin(axis=1)
        return found[at, places], np.maximum(places + at - width, 0)
    table = [at.astype(np.int64)]  # table[s][i]: where the least of the 2^s values from i on is
    while 2 ** len(table) <= width:
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
