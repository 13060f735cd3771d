"""Matchings of general graphs against networkx and a plain loop."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.policies.pairs.matching import ALONE, maximal, maximum, weights


def edges_of(n, pairs):
    edges = np.zeros((n, n), dtype=bool)
    for a, b in pairs:
        edges[a, b] = edges[b, a] = a != b
    return edges


def random_edges(n, degree, seed):
    upper = np.triu(np.random.default_rng(seed).random((n, n)) < degree / n, 1)
    return upper | upper.T


def alone(n):
    return np.full(n, ALONE)


def matched(edges, key=0):
    order = weights(key, len(edges))
    return maximum(edges, order, maximal(edges, order, alone(len(edges))))


def check(edges, mates):
    """It is a matching by edges of the graph; how many are in it."""
    inside = np.flatnonzero(mates != ALONE)
    assert (mates[mates[inside]] == inside).all()
    assert edges[inside, mates[inside]].all()
    return inside.size


def most(edges):
    """The oracle."""
    graph = networkx.from_numpy_array(edges)
    return 2 * len(networkx.max_weight_matching(graph, maxcardinality=True))


@st.composite
def graphs(draw):
    n = draw(st.integers(0, 14))
    nodes = st.integers(0, max(0, n - 1))
    return edges_of(n, draw(st.lists(st.tuples(nodes, nodes), max_size=30)) if n else [])


@given(edges=graphs(), key=st.integers(0, 2**64 - 1))
def test_as_many_are_matched_as_can_be(edges, key):
    mates = matched(edges, key)
    assert check(edges, mates) == most(edges)


@pytest.mark.parametrize("n", [30, 60, 100])
@pytest.mark.parametrize("degree", [0.7, 1.5, 2.5, 4, 20, 100])
def test_as_many_are_matched_in_larger_graphs(n, degree):
    for seed in range(3):
        edges = random_edges(n, degree, seed)
        assert check(edges, matched(edges, seed)) == most(edges)


def test_odd_circles_on_stalks_are_matched_through():
    """Triangles that hang on a path: each search has to go around a blossom."""
    pairs = []
    for i in range(12):
        a = 5 * i
        pairs += [(a, a + 1), (a + 1, a + 2), (a + 2, a), (a + 2, a + 3), (a + 3, a + 4)]
        pairs += [(a + 4, a + 5)]
    edges = edges_of(61, pairs)
    for key in range(20):
        assert check(edges, matched(edges, key)) == most(edges)


@given(edges=graphs(), key=st.integers(0, 2**64 - 1))
def test_maximal_takes_the_lightest_edges_first(edges, key):
    n, order = len(edges), weights(key, len(edges))
    expected = alone(n)
    pairs = [(a, b) for a in range(n) for b in range(a) if edges[a, b]]
    for a, b in sorted(pairs, key=lambda pair: int(order[pair])):
        if expected[a] == expected[b] == ALONE:
            expected[a], expected[b] = b, a
    assert maximal(edges, order, alone(n)).tolist() == expected.tolist()


@given(edges=graphs(), key=st.integers(0, 2**64 - 1), data=st.data())
def test_who_was_matched_stays_so(edges, key, data):
    order, begun = weights(key, len(edges)), alone(len(edges))
    pairs = [(a, b) for a in range(len(edges)) for b in range(a) if edges[a, b]]
    for a, b in data.draw(st.permutations(pairs))[:3]:
        if begun[a] == begun[b] == ALONE:
            begun[a], begun[b] = b, a
    before = begun.copy()
    grown = maximal(edges, order, begun)
    assert (grown[before != ALONE] == before[before != ALONE]).all()
    full = maximum(edges, order, begun)
    assert (full[before != ALONE] != ALONE).all()
    assert check(edges, full) == most(edges)
    assert (begun == before).all()


def test_weights_are_symmetric_and_the_same_everywhere():
    order = weights(7, 5)
    assert (order == order.T).all()
    assert len(set(order[np.triu_indices(5, 1)].tolist())) == 10
    assert order[0, 1:3].tolist() == [17999647800233651019, 13714039014900415397]


def test_every_pair_meets_equally_often():
    edges = ~np.eye(8, dtype=bool)
    counts = np.zeros((8, 8))
    for key in range(2800):
        mates = matched(edges, key)
        counts[np.arange(8), mates] += 1
    expected = 2800 / 7
    chi2 = ((counts[np.triu_indices(8, 1)] - expected) ** 2 / expected).sum()
    assert chi2 < 28 + 5 * (2 * 28) ** 0.5
