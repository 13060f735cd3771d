"""What a round of some replicas takes: local steps by speed, then one sum of what they learnt.

**Local work.** Of M microbatches of a global step, R replicas make local steps of M / R each. A
round is `every` · R local steps together. Replica i makes h_i of them, at least one, so that all
end together: the h_i whose largest h_i · t_i is least.

**Contributions.** Each replica holds all N bytes of what is exchanged, and the first holder of each
stage gives them. Each replica adds up the R-th part of every segment (broker/policies/segments.py):
it gets the others' parts of that, and gives each the sum, and so to other holders of the stage.
Between two givers

    2 / R · N · seconds per byte of a pair ≤ t    (1 + (R - 2) / R) · N · … of a line ≤ t

where the pair is as slow as the slowest pair of peers with a segment in common, by how much they
have in common, and a line as the slowest uplink or downlink of its peers, by what they hold. A line
of which nothing is known is as fast as the peer's fastest pair: all of them share it. What is too
short to be divided goes there whole before any of it comes back: the longest such segment counts
once more. In front of the parts, between them and behind them are words with the broker, who is
taken to be as far away as the others.

Where numbers go as they are, segments are divided further, and members near each other give one
sum, by the same functions as the broker's plan of an exchange has (`part_elements`, `places_of`).
With m and m' members in the places of two givers, one sends the other, of N bytes,

    2 / m   in one place      (2 / m + 1 / m') / R   from one to another, of one alone 1 for 2 / m
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.network import Network
from ...dag.rounds.vector import part_elements
from ...dag.rounds.wiring import UNDIVIDED
from ..network.places import places_of

__all__ = [
    "MOST_TIMES",
    "Contribution",
    "Slots",
    "at_least",
    "contributions",
    "line_rates",
    "local_steps",
]

Floats = NDArray[np.float64]

Slots = Sequence[tuple[int, int, Sequence[int]]]
"""Stages of a replica: (start, stop, holders by number)."""

_WAYS = 6
"""Latencies in a row: of "ready", the plan, parts, sums, "made" and the next round's beginning."""
MOST_TIMES = 4.0
"""How much faster than the next one a replica is taken to be. How long a step takes is a replica's
own word, as it may report steps that it has not made."""


def at_least(seconds: Sequence[float]) -> list[float]:
    """Seconds of a step, of each replica: of the fastest no less than the next one's, divided by
    MOST_TIMES. 0: not known."""
    known = sorted(s for s in seconds if s > 0)
    least = known[1] / MOST_TIMES if len(known) > 1 else 0.0
    return [max(s, least) if s > 0 else s for s in seconds]


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
    replicas: Sequence[Slots],
    network: Network,
    rates: Floats,
    held: Floats,
    size_bytes: float,
    *,
    goes_whole: bool = False,
) -> Contribution:
    """`held` (operators + 1,): trained bytes of the first operators; `rates`: of the network.
    `goes_whole`: whether numbers go as they are."""
    if len(replicas) < 2 or not size_bytes or not held[-1]:
        return Contribution()
    peers, own, first, low, high = _intervals(replicas, held / held[-1])
    at = np.array([p for p, _ in peers])
    member = np.array([r for _, r in peers])
    r, square = len(replicas), np.ix_(at, at)
    common = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    np.maximum(common, 0.0, out=common)
    elements, least, near = int(held[-1] / 4), UNDIVIDED, np.eye(len(own), dtype=bool)
    if goes_whole:
        least = min(part_elements(elements, r), UNDIVIDED)
        near |= _near(network, at, elements)[np.ix_(own, own)]
    m = _givers_near(common, first, near, high - low)
    # Givers exchange parts and sums; other holders of a stage get sums of each giver's share.
    apart = member[own][:, None] != member[own]
    given = common * (apart & first[:, None] & first)
    gives = given * _shares(m, 1 / m, near, r)
    # Of few slices one of a place gives more sums than others do: a pair waits for the most.
    slices = min(int(m.max()), max(1, elements // least // r))
    longest = given * _shares(m, np.ceil(slices / m - 1e-9) / slices, near, r)
    by_place = np.where(m > 1, near / m, 1 / r)
    hands = np.where(first[:, None] & ~first, common * by_place, 0.0)
    crossing, handed = _by_peer(gives, own), _by_peer(hands, own)
    longest = _by_peer(longest, own)
    sent = crossing.sum(axis=1) + handed.sum(axis=1)
    got = crossing.sum(axis=0) + handed.sum(axis=0)
    rate = rates[square]
    pair_s = size_bytes * (longest + handed + handed.T) / np.minimum(rate, rate.T)
    up, down = line_rates(network.up, rates)[at], line_rates(network.down, rates.T)[at]
    line_s = size_bytes * np.maximum(sent / up, got / down)
    latency = float((network.latency_s[square] * (member[:, None] != member)).max())
    slowest = int(line_s.argmax())
    where, pace = [slowest], min(up[slowest], down[slowest])
    if pair_s.max() >= line_s[slowest] * (1 - 1e-9):
        where = [int(x) for x in np.unravel_index(pair_s.argmax(), pair_s.shape)]
        pace = min(rate[where[0], where[1]], rate[where[1], where[0]])
    again = _undivided(np.concatenate((low, high)), r, elements, least) * size_bytes / pace
    return Contribution(
        float(max(line_s[slowest], pair_s.max())) + float(again) + _WAYS * latency,
        tuple(zip(at.tolist(), (size_bytes * sent).tolist(), strict=True)),
        tuple(int(at[x]) for x in where),
        tuple(int(member[x]) for x in where),
    )


def _by_peer(values: Floats, own: NDArray[np.int64]) -> Floats:
    """From intervals to peers."""
    starts = np.flatnonzero(np.diff(own, prepend=-1))
    return np.add.reduceat(np.add.reduceat(values, starts, axis=0), starts, axis=1)


def line_rates(ends: Floats, rates: Floats) -> Floats:
    """(P,) bytes/s of what all flows of a peer share. Where that is not known, it is as fast as its
    fastest pair. `rates`: from these to others, or to these."""
    apart = np.where(np.eye(len(rates), dtype=bool), 0.0, rates)
    return np.where(np.isfinite(ends), ends, apart.max(axis=1))


def _near(network: Network, at: NDArray[np.int64], elements: int) -> NDArray[np.bool_]:
    """(peers, peers): whether two of these are of one place, where the broker makes places."""
    members = [*dict.fromkeys(at.tolist())]
    place = places_of(network.part(members), elements) if len(members) > 1 else {}
    of = np.array([place.get(network.peers[p], -1 - p) for p in at.tolist()])
    found: NDArray[np.bool_] = of[:, None] == of
    return found


def _givers_near(
    common: Floats, first: NDArray[np.bool_], near: NDArray[np.bool_], long: Floats
) -> Floats:
    """(intervals,): how many give what an interval has, in its place, in the mean; 1 at least."""
    shared = (common * (first[:, None] & near)).sum(axis=0)
    found: Floats = np.maximum(1.0, np.divide(shared, long, out=np.ones_like(long), where=long > 0))
    return found


def _shares(m: Floats, turn: Floats, near: NDArray[np.bool_], replicas: int) -> Floats:
    """(intervals, intervals): what one giver sends another, of what both have. m: how many give it
    in the place of each; `turn`: the share of sums that it gives for its place."""
    sums = np.where(m > 1, 2 * turn, 1.0)[:, None]
    inside = 2 / replicas + 2 * (1 - m / replicas) * turn
    return np.where(near, inside, (sums + turn) / replicas)


def _undivided(cuts: Floats, replicas: int, elements: int, least: int) -> float:
    """The longest part that fewer replicas than all add up, as a share of the vector. `least`:
    elements of one that is divided no further."""
    long = np.diff(np.unique(cuts))
    slices = np.clip(long * elements // least, 1, replicas)
    return float((long / slices)[slices < replicas].max(initial=0.0))


def _intervals(
    replicas: Sequence[Slots], place: Floats
) -> tuple[list[tuple[int, int]], NDArray[np.int64], NDArray[np.bool_], Floats, Floats]:
    """Peers with their replicas, in order; and what they hold as intervals of [0, 1], by peer, and
    whether it is they who give it."""
    peers: list[tuple[int, int]] = []
    rows: list[tuple[int, bool, float, float]] = []
    for r, slots in enumerate(replicas):
        found: dict[int, list[tuple[bool, float, float]]] = {}
        for start, stop, holders in slots:
            for k, p in enumerate(holders):
                span = k == 0, float(place[start]), float(place[stop])
                found.setdefault(p, []).append(span)
        for p, intervals in found.items():
            rows += [(len(peers), *span) for span in intervals]
            peers.append((p, r))
    own, first, low, high = zip(*rows, strict=True)
    return peers, np.array(own), np.array(first), np.array(low), np.array(high)
