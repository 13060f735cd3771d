"""Steps of a round, and the seconds of an exchange, against enumeration and a linear program."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.policies.segments import Replicated, segments
from shoal.dag.cost.network import Network, uniform
from shoal.dag.plan.outline import Outline, StageOutline
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.rounds.vector import part_elements
from shoal.planner.network.places import places_of
from shoal.planner.replicas.rounds import contributions, local_steps


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=3), st.integers(0, 9))
def test_the_slowest_replica_is_done_as_soon_as_any_division_lets_it(
    seconds: list[float], more: int
) -> None:
    total = len(seconds) + more
    steps = local_steps(seconds, total)
    assert sum(steps) == total
    assert min(steps) >= 1
    every = itertools.product(range(1, total + 1), repeat=len(seconds))
    least = min(
        max(h * s for h, s in zip(way, seconds, strict=True)) for way in every if sum(way) == total
    )
    assert max(h * s for h, s in zip(steps, seconds, strict=True)) == pytest.approx(least)


HELD = np.array([0.0, 10.0, 20.0, 30.0, 40.0]) * 1e8
"""Of four operators, so long that all of them can be divided."""


def test_two_whole_replicas_send_each_other_all_of_it_over_their_link() -> None:
    network = uniform([PeerId("a"), PeerId("b")], 0.5, 100.0)
    found = contributions([[(0, 4, [0])], [(0, 4, [1])]], network, network.rates(), HELD, 1000.0)
    # Half as parts, half as sums; two phases, and four words with the broker.
    assert found.seconds == pytest.approx(10.0 + 6 * 0.5)
    assert found.between == (0, 1)
    assert dict(found.bytes) == {0: 1000.0, 1: 1000.0}


def test_peers_of_a_pipeline_send_what_they_hold_at_the_same_time() -> None:
    network = uniform([PeerId(p) for p in "abcd"], 0.0, 100.0)
    rows = [[(0, 1, [0]), (1, 4, [1])], [(0, 2, [2]), (2, 4, [3])]]
    found = contributions(rows, network, network.rates(), HELD, 1000.0)
    # b has three quarters of the model; its line is taken to be as fast as its fastest pair.
    assert found.seconds == pytest.approx(7.5)
    assert found.between == (1,)
    assert dict(found.bytes) == pytest.approx({0: 250.0, 1: 750.0, 2: 500.0, 3: 500.0})


def test_the_first_holder_of_a_stage_gives_and_the_others_take_sums() -> None:
    network = uniform([PeerId(p) for p in "abc"], 0.0, 100.0)
    rows = [[(0, 4, [0, 1])], [(0, 4, [2])]]
    found = contributions(rows, network, network.rates(), HELD, 1000.0)
    # Half of each sum goes to b, too.
    assert dict(found.bytes) == pytest.approx({0: 1500.0, 1: 0.0, 2: 1500.0})
    assert found.seconds == pytest.approx(15.0)


def test_what_is_too_short_to_be_divided_goes_there_and_back() -> None:
    network = uniform([PeerId("a"), PeerId("b")], 0.0, 100.0)
    rows = [[(0, 4, [0])], [(0, 4, [1])]]
    found = contributions(rows, network, network.rates(), HELD / 1e8, 1000.0)
    assert found.seconds == pytest.approx(20.0)


@given(st.data())
def test_bytes_are_those_of_the_segments_that_are_exchanged(data: st.DataObject) -> None:
    """Of operators with 100,000 elements each, which two replicas cut anywhere."""
    held = np.arange(5) * 4e5
    plans, slots = [], list[list[tuple[int, int, list[int]]]]()
    for r in range(2):
        cuts = sorted(data.draw(st.sets(st.integers(1, 3), max_size=2)))
        bounds, number = [0, *cuts, 4], itertools.count(10 * r)
        mine = [
            (a, b, [next(number) for _ in range(data.draw(st.integers(1, 2)))])
            for a, b in itertools.pairwise(bounds)
        ]
        stages = tuple(StageSlot(a, b, tuple(PeerId(str(h)) for h in hs)) for a, b, hs in mine)
        route = tuple(Visit(k, s.holders[0]) for k, s in enumerate(stages))
        outlines = tuple(
            StageOutline(k, makes_loss=b == 4, elements=(b - a) * 100_000)
            for k, (a, b, _) in enumerate(mine)
        )
        plans.append(Replicated(Plan(stages, (route,), 1, outline=Outline(outlines, ())), 1))
        slots.append(mine)
    sent = Counter[int]()
    for s in segments(plans):
        size = 4 * (s.span[1] - s.span[0])
        sent.update({int(g.peer): size for g in s.givers if g.peer != s.aggregator})
        sent[int(s.aggregator)] += size * sum(t != s.aggregator for t in s.takers)
    network = uniform([PeerId(str(i)) for i in range(20)], 0.0, 1e6)
    found = dict(contributions(slots, network, network.rates(), held, 1.6e6).bytes)
    # A segment of 100,000 elements is one slice: whose it is evens out, in the mean, only.
    assert sum(found.values()) == pytest.approx(sum(sent.values()))
    assert {p for p, size in sent.items() if size} <= {p for p, size in found.items() if size}


def test_one_replica_exchanges_nothing() -> None:
    network = uniform([PeerId("a")], 0.1, 1.0)
    assert contributions([[(0, 4, [0])]], network, network.rates(), HELD, 1e9).seconds == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_the_seconds_are_those_of_the_slowest_line_or_pair(seed: int) -> None:
    """Replicas of one peer: each gives the others' parts and takes the sums, link by link."""
    rng = np.random.default_rng(seed)
    r = int(rng.integers(2, 6))
    names = tuple(PeerId(f"p{i}") for i in range(r))
    rate = np.exp(rng.normal(4, 1, (r, r)))
    end = np.exp(rng.normal(5, 1, r))
    network = Network(names, np.zeros((r, r)), rate, end, end.copy())
    found = contributions([[(0, 4, [i])] for i in range(r)], network, network.rates(), HELD, 1000.0)
    sent = np.zeros((r, r))
    for aggregator in range(r):
        for other in set(range(r)) - {aggregator}:
            sent[other, aggregator] += 1000.0 / r  # a part of its contribution
            sent[aggregator, other] += 1000.0 / r  # the sum
    pairs = sent / np.minimum(network.rates(), network.rates().T)
    assert found.seconds == pytest.approx(max(pairs.max(), (sent.sum(1) / end).max()))
    assert dict(found.bytes) == pytest.approx(dict(enumerate(sent.sum(1))))


@pytest.mark.parametrize("seed", range(6))
def test_where_numbers_go_as_they_are_seconds_are_those_of_the_brokers_plan(seed: int) -> None:
    """Of a million numbers, by members in two places: over its parts, adders and sums of places."""
    rng, elements = np.random.default_rng(seed), 1_000_000
    r = int(rng.integers(4, 9))
    names, place = [PeerId(f"p{i}") for i in range(r)], rng.integers(0, 2, r)
    near = place[:, None] == place
    far = float(np.exp(rng.normal(10, 1)))
    network = Network(
        *(tuple(names), np.zeros((r, r)), np.where(near, 1e7, far)),
        *(np.full(r, 1e8), np.full(r, 1e8)),
    )
    outline = Outline((StageOutline(0, makes_loss=True, elements=elements),), ())
    whole = [
        Replicated(Plan((StageSlot(0, 4, (n,)),), ((Visit(0, n),),), 1, outline=outline), 1, i)
        for i, n in enumerate(names)
    ]
    sent, at = np.zeros((r, r)), names.index
    places = places_of(network, elements)
    assert bool(places) == (Counter(place.tolist()).most_common(1)[0][1] < r)
    for s in segments(whole, places=places, part=part_elements(elements, r)):
        size = 4 * (s.span[1] - s.span[0])
        for giver in s.givers:
            to = next((p.gatherer for p in s.places if giver.peer in p.givers), s.aggregator)
            sent[at(giver.peer), at(to)] += size
        for gathered in s.places:
            sent[at(gathered.gatherer), at(s.aggregator)] += 2 * size
        for taker in s.takers:
            sent[at(s.takes_from(taker)), at(taker)] += size
    np.fill_diagonal(sent, 0.0)
    found = contributions(
        [[(0, 4, [i])] for i in range(r)],
        *(network, network.rates(), HELD / HELD[-1] * 4 * elements, 4.0 * elements),
        goes_whole=True,
    )
    assert found.seconds == pytest.approx((sent / network.rates()).max(), rel=0.01)
