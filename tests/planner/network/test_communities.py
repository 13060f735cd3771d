"""Groups by bandwidth and paths through them, against brute force and the facts of the networks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.network import order
from shoal.planner.network.communities import DENSE, edges, groupings, linked, louvain, weights
from shoal.planner.network.order import grouped_path, narrowest, widest_path
from shoal.sim.scenario.topologies import Topology, load

Floats = np.ndarray


def total(cost: np.ndarray, path: Sequence[int]) -> float:
    """The sum of the costs along a path."""
    return sum(float(cost[a, b]) for a, b in itertools.pairwise(path))


def links(seed: int, n: int) -> tuple[Floats, Floats]:
    """Symmetric rates over a factor of 1,000 and costs."""
    rng = np.random.default_rng(seed)
    rate = 10 ** rng.uniform(5, 8, (n, n))
    rate = np.minimum(rate, rate.T)
    np.fill_diagonal(rate, np.inf)
    cost = rng.uniform(0.001, 0.2, (n, n)) + 1e5 / rate
    cost = np.minimum(cost, cost.T)
    np.fill_diagonal(cost, 0.0)
    return rate, cost


def places(topology: Topology) -> Floats:
    rate = topology.bandwidth.copy()
    np.fill_diagonal(rate, np.inf)
    return rate


def named(topology: Topology, groups: tuple[tuple[int, ...], ...]) -> set[frozenset[str]]:
    return {frozenset(topology.places[i] for i in group) for group in groups}


@pytest.mark.parametrize("seed", range(5))
def test_twelve_regions_fall_into_three_groups(seed: int) -> None:
    topology = load("skippipe_gcp_12")
    assert named(topology, louvain(places(topology), seed)) == {
        frozenset(("Belgium", "Germany", "London", "NL")),
        frozenset(("Canada", "Iowa", "LA", "Oregon")),
        frozenset(("Australia", "Japan", "Singapore", "Taiwan")),
    }


@pytest.mark.parametrize("seed", range(5))
def test_ten_regions_fall_into_two_groups(seed: int) -> None:
    topology = load("dtfm_world_10")
    east = {"Tokyo", "Seoul", "Singapore", "Sydney"}
    assert named(topology, louvain(places(topology), seed)) == {
        frozenset(east),
        frozenset(topology.places) - east,
    }


def test_the_widest_path_through_twelve_regions() -> None:
    topology = load("skippipe_gcp_12")
    rate = places(topology)
    cost = topology.latency_s + 1e6 / rate
    np.fill_diagonal(cost, 0.0)
    path = widest_path(rate, cost)
    assert sorted(path) == list(range(12))
    assert narrowest(rate, path) == 31_981_568
    # Group by group it is as wide, and so is what local search finds.
    assert narrowest(rate, grouped_path(rate, cost, louvain(rate, 0))) == 31_981_568


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seed", range(4))
def test_the_path_is_the_widest_and_of_these_the_cheapest(n: int, seed: int) -> None:
    rate, cost = links(seed, n)
    every = [list(p) for p in itertools.permutations(range(n))]
    width = max(narrowest(rate, p) for p in every)
    best = min(total(cost, p) for p in every if narrowest(rate, p) == width)
    found = widest_path(rate, cost)
    assert narrowest(rate, found) == width
    assert total(cost, found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
def test_ends_of_a_path_count_as_links(seed: int) -> None:
    rate, cost = links(seed, 7)
    inside = np.ix_(range(1, 6), range(1, 6))
    enter, leave = (rate[0, 1:6], cost[0, 1:6]), (rate[6, 1:6], cost[6, 1:6])
    every = [[0, *p, 6] for p in itertools.permutations(range(1, 6))]
    width = max(narrowest(rate, p) for p in every)
    best = min(total(cost, p) for p in every if narrowest(rate, p) == width)
    found = [0, *(1 + i for i in widest_path(rate[inside], cost[inside], enter, leave)), 6]
    assert narrowest(rate, found) == width
    assert total(cost, found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(6))
def test_local_search_comes_close_to_the_exact_path(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate, cost = links(seed, 9)
    exact = widest_path(rate, cost)
    monkeypatch.setattr(order, "EXACT", 3)
    found = widest_path(rate, cost)
    assert sorted(found) == list(range(9))
    assert narrowest(rate, found) >= 0.5 * narrowest(rate, exact)


def test_a_long_path_stays_inside_its_clusters() -> None:
    cluster = np.arange(40) % 4
    together = cluster[:, None] == cluster
    rate = np.where(together, 1e9, 1e6)
    np.fill_diagonal(rate, np.inf)
    cost = 1e6 / rate
    np.fill_diagonal(cost, 0.0)
    for path in (widest_path(rate, cost), grouped_path(rate, cost, louvain(rate, 0))):
        assert sorted(path) == list(range(40))
        assert sum(cluster[a] != cluster[b] for a, b in itertools.pairwise(path)) == 3


@given(st.integers(0, 10_000), st.integers(2, 8))
def test_groupings_are_partitions_and_the_last_is_everyone(seed: int, n: int) -> None:
    rate, _ = links(seed, n)
    found = list(groupings(rate))
    assert len(set(found)) == len(found)
    assert found[-1] == (tuple(range(n)),)
    for grouping in found:
        assert sorted(i for group in grouping for i in group) == list(range(n))


@given(st.integers(0, 10_000), st.integers(3, 8))
def test_single_linkage_is_what_hangs_together_above_a_rate(seed: int, n: int) -> None:
    rate, _ = links(seed, n)
    for grouping in linked(rate):
        group = {i: k for k, members in enumerate(grouping) for i in members}
        across = max(rate[i, j] for i in range(n) for j in range(n) if group[i] != group[j])
        for members in grouping:
            reached, ahead = {members[0]}, [members[0]]
            while ahead:
                i = ahead.pop()
                new = {j for j in members if rate[i, j] > across} - reached
                reached |= new
                ahead += new
            assert reached == set(members)


def test_a_thinned_graph_keeps_everyone_connected_and_finds_the_clusters() -> None:
    rng = np.random.default_rng(0)
    cluster = rng.integers(0, 6, 200)
    rate = np.where(cluster[:, None] == cluster, 1e8, 1e6) * rng.uniform(0.8, 1.2, (200, 200))
    rate = np.minimum(rate, rate.T)
    np.fill_diagonal(rate, np.inf)
    assert len(rate) > DENSE
    assert len(edges(rate)) < 200 * 10
    truth = {frozenset(np.flatnonzero(cluster == c).tolist()) for c in range(6)}
    assert truth in [set(map(frozenset, g)) for g in groupings(rate)]


def test_weights_of_an_unknown_network_are_equal() -> None:
    rate = np.full((3, 3), np.inf)
    assert weights(rate).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    rate[0, 1] = rate[1, 0] = 1e6
    assert weights(rate)[0].tolist() == pytest.approx([0, 1, np.log2(3)])
