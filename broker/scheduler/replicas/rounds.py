"""What a round of some replicas takes: local steps by speed, then one sum of what they learnt.

**Local work.** Of M microbatches of a global step, R replicas make local steps of m = M / R each,
or of the nearest number that divides a round's microbatches (`local_microbatches`). A round is
`every` · M / m local steps together. Replica i makes h_i of them, at least one, so that all end
together: the h_i whose largest h_i · t_i is least.

**Contributions.** Each replica holds all N bytes of what is exchanged, and each of its peers those
of its stages (holders of one stage a part each). Replica i is the aggregator of a share f_i of
every segment: it gets the others' parts of that, and gives each the sum. So between i and k

    (f_i + f_k) · N · seconds per byte of a pair ≤ t    (1 + (R - 2) · f_i) · N · … of a line ≤ t

where the pair is as slow as the slowest pair of peers with a segment in common, by how much they
have in common, and a line as the slowest uplink or downlink of its peers, by what they hold. The
least t is a linear program, that of shares of gradients (broker/scheduler/search/collectives.py);
of many replicas the best of k equal aggregators, k = 1, 2, 4, …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....dag.cost.network import Network
from ..search.collectives import soonest

__all__ = ["Contribution", "Slots", "contributions", "local_microbatches", "local_steps"]

Floats = NDArray[np.float64]

MOST_PROGRAM = 16
"""Replicas up to which shares are found by the linear program."""
_FREE = 1e-12
"""Seconds per vector of a link without limit."""

Slots = Sequence[tuple[int, int, Sequence[int]]]
"""Stages of a replica: (start, stop, holders by number)."""


def local_microbatches(microbatches: int, replicas: int, every: int) -> int:
    """Of a local step: what divides a round's and is nearest to an equal part of a global step."""
    total, even = every * microbatches, microbatches / replicas
    divisors = (m for m in range(1, int(2 * even) + 1) if total % m == 0 and m * replicas <= total)
    return min(divisors, key=lambda m: (abs(m - even), m))


def local_steps(seconds: Sequence[float], total: int) -> tuple[int, ...]:
    """By replica, `total` together and each at least one: those that are all done soonest."""
    each = np.maximum(np.array(seconds, dtype=np.float64), 1e-12)
    count = np.maximum(1, np.floor(total / (1 / each).sum() / each)).astype(np.int64)
    while (over := int(count.sum()) - total) > 0:
        last = int(np.argmax(np.where(count > 1, count * each, -1.0)))
        count[last] -= min(over, 1)
    while count.sum() < total:
        count[int(np.argmin((count + 1) * each))] += 1
    return tuple(count.tolist())


@dataclass(frozen=True, slots=True)
class Contribution:
    """One exchange of all replicas' contributions."""

    seconds: float = 0.0
    shares: tuple[float, ...] = ()
    """By replica, of which part of the parameters it is the aggregator."""
    bytes: tuple[tuple[int, float], ...] = ()
    """By peer: what it sends, and as much what it receives."""
    between: tuple[int, ...] = ()
    """What the seconds hang on: the line of one peer, or the pair of two."""
    members: tuple[int, ...] = ()
    """The replicas that these are in."""


def contributions(
    replicas: Sequence[Slots], network: Network, rates: Floats, held: Floats, size_bytes: float
) -> Contribution:
    """`held` (operators + 1,): trained bytes of the first operators; `rates`: of the network."""
    if len(replicas) < 2 or not size_bytes or not held[-1]:
        return Contribution(shares=(1.0,) * len(replicas))
    peers, own, low, high = _intervals(replicas, held / held[-1])
    at = np.array([p for p, _ in peers])
    member = np.array([r for _, r in peers])
    first = np.flatnonzero(np.diff(member, prepend=-1))
    common = np.clip(np.minimum(high[:, None], high) - np.maximum(low[:, None], low), 0, None)
    # From intervals to peers.
    starts = np.flatnonzero(np.diff(own, prepend=-1))
    common = np.add.reduceat(np.add.reduceat(common, starts, axis=0), starts, axis=1)
    part = np.add.reduceat(high - low, starts)
    pair_s = size_bytes * common / np.minimum(rates, rates.T)[np.ix_(at, at)]
    line_s = size_bytes * part / np.minimum(network.up, network.down)[at]
    between = np.maximum.reduceat(np.maximum.reduceat(pair_s, first, axis=0), first, axis=1)
    line = np.maximum.reduceat(line_s, first)
    share = _shares(np.maximum(between, _FREE), np.maximum(line, _FREE))
    r = len(replicas)
    through_pair = (share[:, None] + share) * between
    np.fill_diagonal(through_pair, 0.0)
    through_line = (1 + (r - 2) * share) * line
    latency = network.latency_s[np.ix_(at, at)][member[:, None] != member].max()
    carried = np.maximum(part * (1 + (r - 2) * share[member]) * size_bytes, 0.0)
    sent = tuple((int(p), float(b)) for p, b in zip(at, carried, strict=True))
    who: tuple[int, ...]
    members: tuple[int, ...]
    if through_line.max() >= through_pair.max():
        i = int(through_line.argmax())
        mine = np.flatnonzero(member == i)
        who, members = (int(at[mine[line_s[mine].argmax()]]),), (i,)
    else:
        i, k = (int(x) for x in np.unravel_index(through_pair.argmax(), through_pair.shape))
        a, b = np.flatnonzero(member == i), np.flatnonzero(member == k)
        x, y = np.unravel_index(pair_s[np.ix_(a, b)].argmax(), (len(a), len(b)))
        who, members = (int(at[a[x]]), int(at[b[y]])), (i, k)
    seconds = float(max(through_line.max(), through_pair.max())) + 2 * float(latency)
    return Contribution(seconds, tuple(share.tolist()), sent, who, members)


def _intervals(
    replicas: Sequence[Slots], place: Floats
) -> tuple[list[tuple[int, int]], NDArray[np.int64], Floats, Floats]:
    """Peers with their replicas, in order; and what they hold as intervals of [0, 1], by peer."""
    peers: list[tuple[int, int]] = []
    rows: list[tuple[int, float, float]] = []
    for r, slots in enumerate(replicas):
        found: dict[int, list[tuple[float, float]]] = {}
        for start, stop, holders in slots:
            first, last = float(place[start]), float(place[stop])
            part = (last - first) / len(holders)
            for k, p in enumerate(holders):
                found.setdefault(p, []).append((first + k * part, first + (k + 1) * part))
        for p, intervals in found.items():
            rows += [(len(peers), a, b) for a, b in intervals]
            peers.append((p, r))
    own, low, high = zip(*rows, strict=True)
    return peers, np.array(own), np.array(low), np.array(high)


def _shares(pair: Floats, line: Floats) -> Floats:
    """Of which part each replica is the aggregator, given the seconds in which all of it passes a
    pair (R, R) and a line (R,)."""
    r = len(line)
    if r <= MOST_PROGRAM:
        made: Floats = soonest(1 / pair, 1 / line)
        made /= made.sum()
        return made
    apart = ~np.eye(r, dtype=bool)
    far = np.where(apart, pair, 0.0)
    order = np.argsort(np.maximum(np.median(far, axis=1), line), kind="stable")
    best, least, k = np.full(r, 1 / r), np.inf, 1
    while k < 2 * r:
        count = min(k, r)
        share = np.zeros(r)
        share[order[:count]] = 1 / count
        seconds = max(
            float(((share[:, None] + share) * far).max()),
            float(((1 + (r - 2) * share) * line).max()),
        )
        if seconds < least:
            best, least = share, seconds
        k *= 2
    return best
