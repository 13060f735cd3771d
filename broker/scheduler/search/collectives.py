"""Which collective adds up the gradients of each stage's holders: the one whose step is shortest by
the event calculation, of

- all-to-all, in equal shares, and in shares that follow the links, at once or in chunks;
- rows of about √n; rows that are places, by groups of fast links;
- a ring and a tree, along a path of fast links.

Gradients that may be compressed stay with all-to-all: in any other what a codec loses would be lost
several times on the way; and in equal shares, whole, where a codec is named, for in chunks it would
choose among less. A plan is searched with a fixed collective (`CostModel.exchange`), and the choice
is made for what was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ..cost.candidate import Candidate, GradientSum
from ..cost.judge import CostModel
from ..network.communities import groupings, rates
from ..network.order import grouped_path

__all__ = ["shares", "with_collectives"]

Floats = NDArray[np.float64]

MOST_HOLDERS = 64
"""Holders of a stage up to which others than the fixed one are tried."""
MOST_GROUPINGS = 3
CHUNKS = (1, 4, 16)
FINE = 1000
"""Shares are in whole parts of so many."""
BETTER = 0.999
"""A step that is shorter than so much of another is worth another collective."""


def with_collectives(judge: CostModel, candidate: Candidate) -> Candidate:
    """The candidate with the collective that makes its step shortest, one for all stages of the
    same holders; itself where none does, where the job names one, or a codec."""
    options = judge.request.options
    if options.collective != "auto" or options.codecs.sync not in ("none", "auto"):
        return candidate
    best, least = candidate, judge.seconds(candidate)
    groups = {holders for _, _, holders, _ in candidate.slots() if 1 < len(holders) <= MOST_HOLDERS}
    for holders in sorted(groups):
        start = best
        for option in _options(judge, holders):
            other = replace(start, sums=(*start.sums, option))
            seconds = judge.seconds(other)
            if seconds < BETTER * least:
                best, least = other, seconds
    return best


def _options(judge: CostModel, holders: tuple[int, ...]) -> Iterator[GradientSum]:
    n = len(holders)
    weights = shares(judge, holders)
    ways = [(), weights] if len({*weights}) > 1 else [()]
    for chunks in CHUNKS:
        for way in ways:
            yield GradientSum(holders, "all-to-all", weights=way, chunks=chunks)
    if n < 3 or judge.request.options.codecs.sync != "none":
        return
    at = list(holders)
    rate = rates(judge.network)
    latency = judge.network.latency_s
    cost = latency + latency.T
    yield GradientSum(holders, "two-level")
    for grouping in islice(groupings(rate[np.ix_(at, at)]), MOST_GROUPINGS):
        places = tuple(tuple(at[i] for i in group) for group in grouping)
        if 1 < len(places) < n:
            yield GradientSum(holders, "hierarchical", places)
    path = tuple(grouped_path(rate, cost, [at]))
    yield GradientSum(holders, "ring", (path,))
    yield GradientSum(holders, "tree", (path,))


def shares(judge: CostModel, holders: Sequence[int]) -> tuple[int, ...]:
    """How much of the sum each holder makes, so that all are done at once: one that makes the share
    f of N bytes sends and gets (1 + (n - 2)·f)·N of them over its line."""
    network, at, n = judge.network, np.array(holders), len(holders)
    pairs = network.rates()[np.ix_(at, at)]
    np.fill_diagonal(pairs, 0.0)
    line: Floats = np.minimum(
        np.minimum(network.up[at], network.down[at]),
        np.minimum(pairs.sum(axis=1), pairs.sum(axis=0)),
    )
    if n < 3 or not np.isfinite(line).all():
        return (1,) * n
    # f = max(0, (line·t - 1) / (n - 2)) for the least t with Σ f = 1: those of least line get none.
    order = np.sort(line)[::-1]
    t = 0.0
    for k in range(1, n + 1):
        t = float((n - 2 + k) / order[:k].sum())
        if k == n or order[k] * t <= 1:
            break
    f = np.maximum(0.0, (line * t - 1) / (n - 2))
    parts = np.rint(FINE * f / f.sum()).astype(int)
    return tuple(int(p) for p in parts)
