"""Steps of a round, and the seconds of an exchange, against enumeration and a linear program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.scheduler.replicas.rounds import contributions, local_steps
from shoal.dag.cost.network import Network, uniform
from shoal.dag.plan.plan import PeerId


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


HELD = np.array([0.0, 10.0, 20.0, 30.0, 40.0])
"""Of four operators."""


def test_two_whole_replicas_send_each_other_all_of_it_over_their_link() -> None:
    network = uniform([PeerId("a"), PeerId("b")], 0.5, 100.0)
    found = contributions([[(0, 4, [0])], [(0, 4, [1])]], network, network.rates(), HELD, 1000.0)
    # Half as parts, half as sums; two phases.
    assert found.seconds == pytest.approx(10.0 + 2 * 0.5)
    assert found.between == (0, 1)
    assert dict(found.bytes) == {0: 1000.0, 1: 1000.0}


def test_peers_of_a_pipeline_send_what_they_hold_at_the_same_time() -> None:
    network = uniform([PeerId(p) for p in "abcd"], 0.0, 100.0)
    rows = [[(0, 1, [0]), (1, 4, [1])], [(0, 2, [2]), (2, 4, [3])]]
    found = contributions(rows, network, network.rates(), HELD, 1000.0)
    # b and d have half of the model in common.
    assert found.seconds == pytest.approx(5.0)
    assert found.between == (1, 3)
    assert dict(found.bytes) == pytest.approx({0: 250.0, 1: 750.0, 2: 500.0, 3: 500.0})


def test_holders_of_one_stage_send_a_part_each() -> None:
    network = uniform([PeerId(p) for p in "abc"], 0.0, 100.0)
    rows = [[(0, 4, [0, 1])], [(0, 4, [2])]]
    found = contributions(rows, network, network.rates(), HELD, 1000.0)
    assert found.seconds == pytest.approx(5.0)


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
