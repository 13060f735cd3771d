"""Which collective adds up the gradients of each stage's holders: the one whose step is shortest by
the event calculation, of

- all-to-all, in equal shares, and in shares that follow lines and pairs;
- places, by groups of fast links, in such shares; rows of about √n;
- a ring and a tree, along a path of fast links;

the first two at once or in chunks.

Gradients that may be compressed stay with all-to-all: in any other what a codec loses would be lost
several times on the way; and in equal shares, whole, where a codec is named, for in chunks it would
choose among less. A plan is searched with a fixed collective (`CostModel.exchange`), and the choice
is made for what was found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ...dag.plan.strategies import parse_strategy
from ..cost.candidate import Candidate, GradientSum
from ..cost.cost_model import CostModel
from ..network.communities import Grouping, groupings, rates
from ..network.order import grouped_path

__all__ = ["shares", "with_collectives"]

Floats = NDArray[np.float64]

MOST_HOLDERS = 64
"""Holders of a stage up to which others than the fixed one are tried."""
MOST_GROUPINGS = 3
FEW, MORE = 4, (16, 32, 64)
"""Chunks with which all are tried; and with which the best of them are, while that pays."""
MOST_PARTS = 1 << 13
"""Chunks times pairs up to which several are tried, which takes a second each; else only the best
way with the first of MORE."""
BEST = 2
"""So many ways in chunks are tried with more, or else with none."""
EVEN, EVENER = 0.995, 0.96
"""Shares are as even as gets so much of what uneven ones get. The evener ones are sooner done where
a slow line is shared by pairs of which only some are narrow: it is shared out fairly, so what goes
to one that is given more than the others comes last."""
HALVINGS = 6
FINE = 1000
"""Shares are in whole parts of so many."""
BETTER = 0.999
"""A step that is shorter than so much of another is worth another collective."""


def with_collectives(judge: CostModel, candidate: Candidate) -> Candidate:
    """The candidate with the collective that makes its step shortest, one for all stages of the
    same holders; itself where none does, where the job names one, or a codec."""
    options = judge.request.options
    if parse_strategy(judge.strategy).traits.collective:
        return candidate
    if options.collective != "auto" or options.codecs.sync not in ("none", "auto"):
        return candidate
    best, least = candidate, judge.seconds(candidate)
    start = best

    def tried(option: GradientSum) -> float:
        nonlocal best, least
        other = replace(start, sums=(*start.sums, option))
        seconds = judge.seconds(other)
        if seconds < BETTER * least:
            best, least = other, seconds
        return seconds

    groups = {holders for _, _, holders, _ in candidate.slots() if 1 < len(holders) <= MOST_HOLDERS}
    for holders in sorted(groups):
        start = best
        times = [(tried(option), option) for option in _options(judge, holders)]
        cuts = sorted((t for t in times if t[1].chunks > 1), key=lambda t: t[0])
        more = [c for c in MORE if c * len(holders) ** 2 <= MOST_PARTS]
        for few_s, cut in cuts[: BEST if more else 1]:
            seconds = few_s
            for chunks in more or MORE[:1]:
                more_s = tried(replace(cut, chunks=chunks))
                if more_s >= seconds:
                    break
                seconds = more_s
            if seconds == few_s:
                tried(replace(cut, chunks=1))
    return best


def _options(judge: CostModel, holders: tuple[int, ...]) -> Iterator[GradientSum]:
    n = len(holders)
    ways = [shares(judge, holders, even=even) for even in (EVEN, EVENER)]
    for way in dict.fromkeys([(), *(w for w in ways if len({*w}) > 1)]):
        yield GradientSum(holders, "all-to-all", weights=way, chunks=FEW)
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
            weights = shares(judge, holders, grouping)
            yield GradientSum(holders, "hierarchical", places, weights, FEW)
    path = tuple(grouped_path(rate, cost, [at]))
    yield GradientSum(holders, "ring", (path,))
    yield GradientSum(holders, "tree", (path,))


def shares(
    judge: CostModel, holders: Sequence[int], places: Grouping | None = None, even: float = EVEN
) -> tuple[int, ...]:
    """How much of the sum each holder makes, so that all are done at once. Where i makes the share
    f_i of N bytes in time t, parts and totals of i and k meet on the pair, and others' on its line:

        (f_i + f_k)·N ≤ t·pair_ik        (1 + (n - 2)·f_i)·N ≤ t·line_i        Σ f = 1

    The least t by a linear program in f/t. Of `places`, each makes its share together, and a member
    that of its own which its lines to other places have of theirs."""
    network, at, n = judge.network, np.array(holders), len(holders)
    rate = network.rates()[np.ix_(at, at)]
    np.fill_diagonal(rate, 0.0)
    places = places or tuple((i,) for i in range(n))
    place = np.empty(n, dtype=int)
    for r, group in enumerate(places):
        place[list(group)] = r
    pair = np.zeros((len(places), len(places)))
    np.add.at(pair, (place[:, None], place[None, :]), rate)
    line = np.minimum(network.up[at], network.down[at])
    out = np.where(place[:, None] != place[None, :], rate, 0.0)
    out = np.minimum(line, np.minimum(out.sum(axis=1), out.sum(axis=0)))
    line = np.bincount(place, out, len(places)).astype(np.float64)
    if not np.isfinite(rate).all():
        return (1,) * n
    whole = _made(np.minimum(pair, pair.T), line, even)[place]
    parts = np.rint(FINE * whole * out / line[place]).astype(int)
    return tuple(int(p) for p in parts)


def _program(pair: Floats, line: Floats) -> tuple[Floats, Floats]:
    """Rows and bounds of that program, in f/t."""
    n = len(line)
    i, k = np.triu_indices(n, 1)
    pairs = np.zeros((len(i), n))
    pairs[np.arange(len(i)), i] = pairs[np.arange(len(i)), k] = 1.0
    rows = np.vstack([pairs, np.ones((n, n)) + (n - 2) * np.eye(n)])
    return rows, np.concatenate([pair[i, k], line])


def _made(pair: Floats, line: Floats, enough: float) -> Floats:
    """The shares, as even as gets `enough` of the most."""
    n = len(line)
    rows, bounds = _program(pair, line)
    found = _largest(rows, bounds)
    most = float(found.sum())
    rows, low, high = np.vstack([rows, np.eye(n)]), 1 / n, 1.0
    cap = low
    for _ in range(HALVINGS):
        even = _largest(rows, np.concatenate([bounds, np.full(n, cap * most)]))
        if even.sum() >= enough * most:
            found, high = even, cap
        else:
            low = cap
        if high <= low:
            break
        cap = math.sqrt(low * high)
    made: Floats = found / found.sum()
    return made


def _largest(rows: Floats, bounds: Floats) -> Floats:
    """x ≥ 0 of the largest sum with rows·x ≤ bounds, all of them positive, by the simplex method
    in dictionary form."""
    m, n = rows.shape
    table = np.vstack([np.column_stack([rows, bounds]), [-1.0] * n + [0.0]])
    inside, outside = np.arange(n, n + m), np.arange(n)
    for _ in range(4 * n):
        j = int(np.argmin(table[-1, :-1]))
        if table[-1, j] >= -1e-9:
            break
        column = table[:, j].copy()
        ratio = np.full(m, np.inf)
        up = column[:-1] > 1e-9
        ratio[up] = table[:-1, -1][up] / column[:-1][up]
        r = int(np.argmin(ratio))
        row = table[r] / column[r]
        table -= np.outer(column, row)
        table[r], table[:, j] = row, -column / column[r]
        table[r, j] = 1 / column[r]
        inside[r], outside[j] = outside[j], inside[r]
    found = np.zeros(n + m)
    found[inside] = table[:-1, -1]
    return found[:n]
