"""What a round of some replicas takes: local steps by speed, then one sum of what they learnt.

**Local work.** Of M microbatches of a global step, R replicas make local steps of M / R each. A
round is `every` · R local steps together. Replica i makes h_i of them, at least one, so that all
end together: the h_i whose largest h_i · t_i is least.

**Contributions.** Each replica holds all N bytes of what is exchanged, and each of its peers those
of its stages (holders of one stage a part each). Each replica is the aggregator of the R-th part of
every segment (broker/rounds/segments.py): it gets the others' parts of that, and gives each the
sum. So between two of them

    2 / R · N · seconds per byte of a pair ≤ t    (1 + (R - 2) / R) · N · … of a line ≤ t

where the pair is as slow as the slowest pair of peers with a segment in common, by how much they
have in common, and a line as the slowest uplink or downlink of its peers, by what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....dag.cost.network import Network

__all__ = ["Contribution", "Slots", "contributions", "local_steps"]

Floats = NDArray[np.float64]

Slots = Sequence[tuple[int, int, Sequence[int]]]
"""Stages of a replica: (start, stop, holders by number)."""


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
        return Contribution()
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
    r = len(replicas)
    through_pair = 2 / r * between
    np.fill_diagonal(through_pair, 0.0)
    through_line = (1 + (r - 2) / r) * line
    latency = network.latency_s[np.ix_(at, at)][member[:, None] != member].max()
    carried = np.maximum(part * (1 + (r - 2) / r) * size_bytes, 0.0)
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
    return Contribution(seconds, sent, who, members)


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
