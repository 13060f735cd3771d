"""From a few measured links to all of them.

With O(n) probes most pairs are unknown. They follow from what pairs have in common, in log space,
because both latency and bandwidth spread over factors:

1. Communities: peers of one site, and peers whose measured latencies are alike.
2. Latency: communities become points (3 coordinates and a height, the last mile) whose distances
   fit the measured ones, as in network coordinates (Vivaldi: Dabek et al., SIGCOMM 2004), within
   the bounds of the triangle inequality over well-measured peers.
3. Bandwidth between communities is the mean of what was measured between them, or, each term
   fitted to what the ones before leave, and regularised,

       log bandwidth(c, d) = a + b · log latency(c, d)      long paths carry less per connection
                           + out(c) + in(d)                 good and bad ends
                           + u(c) · v(d)                    low rank, alternating least squares

   and how a pair of peers differs from its communities follows by the last two terms again.
4. No pair of two communities carries more than an uplink or downlink that shows (`shared_ends`).

Measured numbers stay exactly as they are; estimates are given to a millionth, so that they are the
same on every processor (`planner/base/interface.py`). Pure and deterministic; 1,000 peers
take under a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..base.interface import without_last_digits

__all__ = ["Completed", "communities", "community_means", "complete", "shared_ends"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ALIKE = 0.15
"""Root mean square difference of log latencies up to which two peers count as one site."""
_DIMENSIONS = 3
_EMBED_ITERATIONS = 400
_EMBED_STEP = 0.5
_LANDMARKS = 16
_END_WEIGHT = 0.5
"""Regularisation of out and in, in measured pairs' worth."""
_RANK_WEIGHT = 1.0
_RANK_SWEEPS = 8
_SLOPE_WEIGHT = 0.1
_EQUAL = 1.15
"""Rates of a peer that differ by no more than this factor show its uplink or downlink."""
_BEYOND = float(np.log(4.0))
"""How far an estimate may lie beyond everything that was measured."""


@dataclass(frozen=True, eq=False)
class Completed:
    """(P, P) each; rows send. Diagonals are 0 and infinite."""

    latency_s: Floats
    bandwidth: Floats


def complete(
    latency_s: Floats,
    bandwidth: Floats,
    groups: Sequence[str],
    *,
    rank: int = 2,
    latency_s_if_none: float = 0.03,
    bandwidth_if_none: float = 12.5e6,
) -> Completed:
    """Fills (P, P) measurements; NaN: unknown. `groups`: the site of each peer, "" for unknown.

    Where nothing at all is known the two last arguments stand. Raises ValueError for shapes that
    differ, and for measured numbers that are not positive (a latency may be 0).
    """
    n = len(groups)
    if latency_s.shape != (n, n) or bandwidth.shape != (n, n):
        raise ValueError(
            f"latency {latency_s.shape} and bandwidth {bandwidth.shape}: expected both {(n, n)}, "
            f"for {n} peers"
        )
    off = ~np.eye(n, dtype=bool)
    if (latency_s[off] < 0).any() or (bandwidth[off] <= 0).any():
        raise ValueError("a measured latency is negative, or a measured bandwidth not positive")
    latency = np.where(off, latency_s, np.nan)
    rates = np.where(off, bandwidth, np.nan)
    labels = communities(groups, latency)
    full_latency = _latency(latency, labels, latency_s_if_none)
    full_rates = _bandwidth(rates, full_latency, labels, rank, bandwidth_if_none)
    np.fill_diagonal(full_latency, 0.0)
    np.fill_diagonal(full_rates, np.inf)
    return Completed(full_latency, full_rates)


def communities(groups: Sequence[str], latency_s: Floats) -> Ints:
    """(P,) community of each peer, numbered by first appearance. Peers without a site join the
    first community whose mean latencies to at least two common peers are like theirs."""
    n = len(groups)
    logs = np.log(np.maximum(_both_ways(latency_s), 1e-6))
    seen = ~np.isnan(logs)
    values = np.where(seen, logs, 0.0)
    labels = np.full(n, -1, dtype=np.int64)
    names: dict[str, int] = {}
    sums, counts = np.zeros((n, n)), np.zeros((n, n))
    for i, group in enumerate(groups):
        if group:
            labels[i] = names.setdefault(group, len(names))
            sums[labels[i]] += values[i]
            counts[labels[i]] += seen[i]
    total = len(names)
    for alone in np.flatnonzero(labels < 0):
        (columns,) = np.nonzero(seen[alone])
        there = counts[:total, columns]
        common = there > 0
        apart = sums[:total, columns] / np.maximum(there, 1) - values[alone, columns]
        enough = common.sum(axis=1) >= 2
        square = (np.where(common, apart, 0.0) ** 2).sum(axis=1)
        alike = enough & (square <= _ALIKE**2 * np.maximum(common.sum(axis=1), 1))
        found = np.flatnonzero(alike)
        labels[alone] = found[0] if len(found) else total
        total += not len(found)
        sums[labels[alone]] += values[alone]
        counts[labels[alone]] += seen[alone]
    return labels


def community_means(values: Floats, labels: Ints) -> tuple[Floats, Floats]:
    """(C, C) means of what is known between communities, NaN where nothing is, and how many."""
    size = int(labels.max(initial=-1)) + 1
    rows, columns = np.nonzero(~np.isnan(values))
    at = labels[rows] * size + labels[columns]
    counts = np.bincount(at, minlength=size * size).reshape(size, size).astype(np.float64)
    sums = np.bincount(at, values[rows, columns], size * size).reshape(size, size)
    with np.errstate(invalid="ignore"):
        return sums / counts, counts


# ---------------------------------------------------------------- latency


def _latency(latency: Floats, labels: Ints, if_none: float) -> Floats:
    """(P, P), everywhere; measured where it was, in this direction or in the other."""
    logs = np.log(np.maximum(_both_ways(latency), 1e-6))
    means, _ = community_means(logs, labels)
    means = _both_ways(means)
    known = ~np.isnan(means)
    if not known.any():
        return np.where(np.isnan(latency), if_none, latency)
    between = np.exp(means)
    guess = _embedded(between)
    within = np.diag(between)
    least = np.nanmin(np.where(known, between, np.nan))
    typical = np.exp(np.nanmean(np.log(within))) if (~np.isnan(within)).any() else least / 4
    near = np.minimum(typical, np.nanmin(np.where(known, between, guess), axis=1))
    diagonal = np.eye(len(within), dtype=bool)
    guess = np.where(diagonal, near[:, None], guess)
    logs_of_pairs = np.where(known, means, np.log(guess))
    full = logs_of_pairs[labels[:, None], labels[None, :]]
    # A peer that is nearer or farther than its community: half of the round trip is each end's.
    rest = np.where(np.isnan(logs), 0.0, logs - full)
    count = (~np.isnan(logs)).sum(axis=1)
    end = rest.sum(axis=1) / (count + 2.0) / 2
    full = full + end[:, None] + end[None, :]
    found = np.where(np.isnan(logs), without_last_digits(np.exp(full)), _both_ways(latency))
    return np.where(np.isnan(latency), found, latency)


def _embedded(between: Floats) -> Floats:
    """(C, C) latencies of points that fit the known ones: relative stress, gradient descent."""
    size = len(between)
    rows, columns = np.nonzero(~np.isnan(np.where(np.eye(size, dtype=bool), np.nan, between)))
    if not len(rows):
        return np.full((size, size), np.nanmedian(between))
    wanted = between[rows, columns]
    scale = float(np.median(wanted))
    rng = np.random.default_rng(0)  # fixed: where points start is no matter of chance
    at = rng.normal(scale=scale / 2, size=(size, _DIMENSIONS))
    height = np.full(size, scale / 20)
    weight = (np.minimum(scale / wanted, 10.0)) ** 2
    degree = np.maximum(np.bincount(rows, weight, size), 1e-9)
    iterations = _EMBED_ITERATIONS if size <= 200 else _EMBED_ITERATIONS // 2
    for iteration in range(iterations):
        apart = at[rows] - at[columns]
        distance = np.maximum(np.sqrt((apart**2).sum(axis=1)), 1e-9)
        error = wanted - distance - height[rows] - height[columns]
        pull = weight * error
        step = _EMBED_STEP * (1.0 - 0.8 * iteration / iterations)
        for d in range(_DIMENSIONS):
            force = np.bincount(rows, pull * apart[:, d] / distance, size)
            at[:, d] += step * force / degree
        height += 0.3 * step * np.bincount(rows, pull, size) / degree
        np.maximum(height, 0.0, out=height)
    distance = np.sqrt(((at[:, None, :] - at[None, :, :]) ** 2).sum(axis=2))
    guess = distance + height[:, None] + height[None, :]
    low, high = _bounds(between)
    return np.asarray(np.clip(guess, low, np.maximum(low, high)))


def _bounds(between: Floats) -> tuple[Floats, Floats]:
    """(C, C) least and greatest latency that the triangle inequality allows, over the communities
    that were measured against most others."""
    size = len(between)
    low, high = np.full((size, size), 1e-6), np.full((size, size), np.inf)
    counts = (~np.isnan(between)).sum(axis=0)
    for k in np.argsort(-counts, kind="stable")[:_LANDMARKS]:
        to = between[:, k].copy()
        to[k] = np.nan
        low = np.fmax(low, np.abs(to[:, None] - to[None, :]))
        high = np.fmin(high, to[:, None] + to[None, :])
    return low, high


# ---------------------------------------------------------------- bandwidth


def _bandwidth(rates: Floats, latency: Floats, labels: Ints, rank: int, if_none: float) -> Floats:
    """(P, P), everywhere; see the module for the terms."""
    logs = np.log(rates)
    known = ~np.isnan(logs)
    if not known.any():
        return np.full_like(rates, if_none)
    distance, _ = community_means(np.log(np.maximum(latency, 1e-5)), labels)
    between = _between(community_means(logs, labels)[0], np.nan_to_num(distance), rank)
    fitted = between[labels[:, None], labels[None, :]]
    fitted = fitted + _terms(np.where(known, logs - fitted, np.nan), rank)
    ends = np.log(np.minimum(shared_ends(rates)[:, None], shared_ends(rates.T)[None, :]))
    fitted = np.where(labels[:, None] == labels[None, :], fitted, np.minimum(fitted, ends))
    low, high = logs[known].min() - _BEYOND, logs[known].max() + _BEYOND
    estimated = without_last_digits(np.exp(np.clip(fitted, low, high)))
    return np.asarray(np.where(known, rates, estimated))


def shared_ends(rates: Floats) -> Floats:
    """(P,) bytes/s of the senders' uplinks as far as (P, P) measured rates show them, else inf;
    of the receivers' downlinks for the transposed ones.

    Paths differ and the uplink is the same. So it shows where two thirds of a peer's rates, and two
    at least, are as great as the greatest; that one is it. Rates that differ show paths only: the
    uplink carries more than any of them, and nobody knows how much.
    """
    known = ~np.isnan(rates)
    filled = np.where(known, rates, 0.0)
    greatest = filled.max(axis=1, initial=0.0)
    equal = (known & (filled >= greatest[:, None] / _EQUAL)).sum(axis=1)
    shows = (equal >= 2) & (3 * equal >= 2 * known.sum(axis=1))
    return np.asarray(np.where(shows, greatest, np.inf))


def _between(means: Floats, distance: Floats, rank: int) -> Floats:
    """(C, C) log bandwidths between communities: the means where there are some."""
    size = len(means)
    within = np.eye(size, dtype=bool)
    known = ~np.isnan(means)
    apart = known & ~within
    if apart.any():
        fitted = _by_distance(np.where(apart, means, np.nan), distance)
        fitted += _terms(np.where(apart, means - fitted, np.nan), rank)
        # The other direction, where only that is known: paths differ less than their ends do.
        other = np.where(apart, means - fitted, 0.0).T
        fitted += np.where(known, 0.0, 0.5 * other)
    else:
        fitted = np.full_like(means, np.nanmean(means))
    # Inside of a site nothing follows from its distance to others: as inside of other sites, or
    # at least as fast as the best way out of it.
    inside = np.diag(means)
    best_out = np.where(within, -np.inf, np.where(known, means, fitted)).max(
        axis=1, initial=-np.inf
    )
    typical = np.nanmean(inside) if (~np.isnan(inside)).any() else -np.inf
    guess = np.maximum(typical, best_out)
    guess = np.where(np.isfinite(guess), guess, np.nanmean(means))
    fitted = np.where(within, guess[:, None], fitted)
    return np.asarray(np.where(known, means, fitted))


def _by_distance(values: Floats, distance: Floats) -> Floats:
    """a + b · distance, where distance is a log latency: b <= 0, and near 0 from little data."""
    known = ~np.isnan(values)
    x, y = distance[known], values[known]
    centre, mean = x.mean(), y.mean()
    slope = ((x - centre) * (y - mean)).sum() / (((x - centre) ** 2).sum() + _SLOPE_WEIGHT)
    return np.asarray(mean + min(0.0, slope) * (distance - centre))


def _terms(rest: Floats, rank: int) -> Floats:
    """out(i) + in(j) + u(i) · v(j), fitted to the known entries."""
    rows, columns = np.nonzero(~np.isnan(rest))
    n, values = len(rest), rest[rows, columns]
    out, into = _ends(rows, columns, values, n)
    fitted = out[:, None] + into[None, :]
    left = values - fitted[rows, columns]
    return np.asarray(fitted + _low_rank(rows, columns, left, n, rank) if rank else fitted)


def _ends(rows: Ints, columns: Ints, rest: Floats, n: int) -> tuple[Floats, Floats]:
    """(P,) each: what senders and receivers have in common over their links; alternating means."""
    out, into = np.zeros(n), np.zeros(n)
    sent, received = np.bincount(rows, minlength=n), np.bincount(columns, minlength=n)
    for _ in range(_RANK_SWEEPS):
        out = np.bincount(rows, rest - into[columns], n) / (sent + _END_WEIGHT)
        into = np.bincount(columns, rest - out[rows], n) / (received + _END_WEIGHT)
    return out, into


def _low_rank(rows: Ints, columns: Ints, rest: Floats, n: int, rank: int) -> Floats:
    """(P, P) of that rank, nearest to the rest where it is known: alternating least squares."""
    angle = np.arange(n)[:, None] * np.arange(1, rank + 1)[None, :]
    v = 0.1 * np.cos(angle)
    u = np.zeros((n, rank))
    for _ in range(_RANK_SWEEPS):
        u = _solve(rows, v[columns], rest, n)
        v = _solve(columns, u[rows], rest, n)
    return np.asarray(u @ v.T)


def _solve(rows: Ints, features: Floats, rest: Floats, n: int) -> Floats:
    """(P, r): for each row the ridge regression of its known entries on their features."""
    rank = features.shape[1]
    gram = np.empty((n, rank, rank))
    right = np.empty((n, rank))
    for a in range(rank):
        right[:, a] = np.bincount(rows, features[:, a] * rest, n)
        for b in range(rank):
            gram[:, a, b] = np.bincount(rows, features[:, a] * features[:, b], n)
    gram += _RANK_WEIGHT * np.eye(rank)
    return np.asarray(np.linalg.solve(gram, right[:, :, None])[:, :, 0])


def _both_ways(values: Floats) -> Floats:
    """Each entry, or where it is unknown the one of the other direction."""
    return np.asarray(np.where(np.isnan(values), values.T, values))
