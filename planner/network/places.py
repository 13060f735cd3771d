"""Which members of a round are near each other, so that of each place one sum crosses slow links.
Pure.

R members add up a vector of N bytes in R equal parts. Each gives all others their parts and the
result of its own: 2·N/R on every pair. In places, of m members that of one peer, with sums of 8
bytes an element in place of 4, a member sends

    to one of its own place            2·N/m
    to one of another, of m' members   N/R · (2/m + 1/m')

An exchange takes as long as its slowest pair, or the line of who sends or receives most. So it is
where every peer has a part to add up: of fewer parts few pairs would carry whole sums, where all
carry halves without places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId
from ...dag.rounds.vector import part_elements
from .communities import Grouping, linked

__all__ = ["exchange_s", "may_have_places", "places_of"]

Floats = npt.NDArray[np.float64]

_LEAST, _MOST = 4, 512
"""So many peers are looked at, for places."""
_WORTH = 0.8
"""Places are for an exchange that takes at most so much of what it takes without."""


def may_have_places(peers: int, elements: int) -> bool:
    """Whether places are looked for among so many, whatever their links: each has a part."""
    return _LEAST <= peers <= _MOST and elements >= peers * part_elements(elements, peers)


def places_of(network: Network, elements: int) -> dict[PeerId, int]:
    """Return by peer the number of its place; empty where places save little. `elements`: of the
    vector."""
    n = len(network.peers)
    if not may_have_places(n, elements):
        return {}
    rate = np.minimum(network.bandwidth, network.bandwidth.T)
    np.fill_diagonal(rate, np.inf)
    alone: Grouping = tuple((i,) for i in range(n))
    tried = {grouping: exchange_s(network, rate, grouping) for grouping in linked(rate)}
    best = min(tried, key=lambda grouping: tried[grouping], default=alone)
    if tried.get(best, np.inf) > _WORTH * exchange_s(network, rate, alone):
        return {}
    return {network.peers[i]: at for at, group in enumerate(best) for i in group}


def exchange_s(network: Network, rate: Floats, grouping: Grouping) -> float:
    """Return how long the exchange of one byte takes in these places. rate: (P, P) bytes/s, of
    pairs. A line carries what its fastest pair does at least, whatever else is known of it."""
    n = len(rate)
    place, members = np.empty(n, np.int64), np.empty(n)
    for at, group in enumerate(grouping):
        place[list(group)], members[list(group)] = at, len(group)
    near = place[:, None] == place[None, :]
    sums = np.where(members > 1, 2.0 / members, 1.0)[:, None]
    sent = np.where(near, 2.0 / members, (sums + 1.0 / members[None, :]) / n)
    np.fill_diagonal(sent, 0.0)
    pairs = float((sent / rate).max())
    fastest = np.where(np.eye(n, dtype=bool), 0.0, rate).max(1)
    up, down = (np.maximum(line, fastest) for line in (network.up, network.down))
    return max(pairs, float((sent.sum(1) / up).max()), float((sent.sum(0) / down).max()))
