"""Which members of a round are near each other, against what their exchange sends."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shoal.broker.policies.segments import Replicated, segments
from shoal.dag.cost.network import Network
from shoal.dag.plan.outline import Outline, StageOutline
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.planner.network.places import exchange_s, places_of

ELEMENTS = 12_000_000
FAST, SLOW = 1e8, 1e6


def network(of: list[int], line: float = np.inf) -> Network:
    """Peers in these places, with fast links inside."""
    at, n = np.array(of), len(of)
    rate = np.where(at[:, None] == at[None, :], FAST, SLOW)
    lines = np.full(n, line)
    return Network(tuple(PeerId(f"p{i}") for i in range(n)), np.zeros((n, n)), rate, lines, lines)


def whole(name: str) -> Replicated:
    slot = StageSlot(0, 1, (PeerId(name),))
    outline = Outline((StageOutline(0, makes_loss=True, elements=ELEMENTS),), ())
    return Replicated(Plan((slot,), ((Visit(0, PeerId(name)),),), 1, outline=outline), 1)


def sent(net: Network, near: dict[PeerId, int]) -> dict[tuple[str, str], float]:
    """Bytes of each pair in an exchange that is divided as the broker divides it."""
    found = Counter[tuple[str, str]]()
    for s in segments([whole(p) for p in net.peers], places=near):
        n = s.span[1] - s.span[0]
        for giver in s.givers:
            to = next((p.gatherer for p in s.places if giver.peer in p.givers), s.aggregator)
            found[giver.peer, to] += 4 * n
        for place in s.places:
            found[place.gatherer, s.aggregator] += 8 * n
        for taker in s.takers:
            found[s.takes_from(taker), taker] += 4 * n
    return {pair: float(n) for pair, n in found.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("of", [[0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 2, 2, 2, 2]])
def test_its_seconds_are_those_of_the_slowest_pair(of: list[int]) -> None:
    """Or nearly: who adds up which part with whom takes turns."""
    net = network(of)
    near = places_of(net, ELEMENTS)
    assert [near[p] for p in net.peers] == of
    rate = net.bandwidth
    index = {p: i for i, p in enumerate(net.peers)}
    for places in ({}, near):
        groups: dict[int, list[int]] = {}
        for p in net.peers:
            groups.setdefault(places.get(p, 100 + index[p]), []).append(index[p])
        said = exchange_s(net, rate, tuple(map(tuple, groups.values())))
        pairs = sent(net, places)
        slow = [n / rate[index[a], index[b]] for (a, b), n in pairs.items()]
        mean = sum(pairs.values()) / len(pairs)
        assert mean > 0
        assert 0.5 * max(slow) < said * 4 * ELEMENTS < 1.01 * max(slow)


@pytest.mark.parametrize("of", [[0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 0]])
def test_who_is_alone_or_all_at_one_place_has_none(of: list[int]) -> None:
    assert places_of(network(of), ELEMENTS) == {}


def test_of_a_small_vector_few_would_carry_whole_sums() -> None:
    assert places_of(network([0, 0, 0, 1, 1, 1]), 6 * 4096 - 1) == {}
    assert places_of(network([0, 0, 0, 1, 1, 1]), 6 * 4096)


def test_where_lines_are_shared_places_save_more_than_pairs_say() -> None:
    """A line that all that a peer sends goes through, near and far, is no reason for places."""
    net = network([0, 0, 0, 1, 1, 1], line=SLOW)
    assert places_of(net, ELEMENTS)
