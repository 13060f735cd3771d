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
    common = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    np.maximum(common, 0.0, out=common)
    if len(own) > len(at):  # from intervals to peers
        starts = np.flatnonzero(np.diff(own, prepend=-1))
        common = np.add.reduceat(np.add.reduceat(common, starts, axis=0), starts, axis=1)
    part = np.bincount(own, high - low)
    r, square = len(replicas), np.ix_(at, at)
    apart = member[:, None] != member
    rate = rates[square]
    pair_s = common * apart / np.minimum(rate, rate.T) * (size_bytes * 2 / r)
    carried = part * (size_bytes * (1 + (r - 2) / r))
    line_s = carried / np.minimum(network.up, network.down)[at]
    latency = float((network.latency_s[square] * apart).max())
    slowest = int(line_s.argmax())
    where = [slowest]
    if pair_s.max() > line_s[slowest]:
        where = [int(x) for x in np.unravel_index(pair_s.argmax(), pair_s.shape)]
    return Contribution(
        float(max(line_s[slowest], pair_s.max())) + 2 * latency,
        tuple(zip(at.tolist(), carried.tolist(), strict=True)),
        tuple(int(at[x]) for x in where),
        tuple(int(member[x]) for x in where),
    )


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
