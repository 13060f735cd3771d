"""Who meets whom: what every method promises, and what saps does."""

from __future__ import annotations

import itertools

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.benchmarks.gossip.mixing import pairs_of_rounds, second_eigenvalue
from shoal.broker.policies.pairs.selection import METHODS, PairSettings, pairs_of_round
from shoal.broker.policies.pairs.threshold import fastest_threshold

METHOD = st.sampled_from(list(METHODS))


def names(n):
    return tuple(f"r{i:03}" for i in range(n))


def uniform(n, seed=0, high=5.0):
    upper = np.triu(np.random.default_rng(seed).uniform(0, high, (n, n)), 1)
    return upper + upper.T


def islands(*sizes, inside=10.0, between=0.1):
    island = np.repeat(np.arange(len(sizes)), sizes)
    return np.where(island[:, None] == island, inside, between)


def connected(who, rounds):
    graph = networkx.Graph()
    graph.add_nodes_from(who)
    graph.add_edges_from(pair for pairs in rounds for pair in pairs)
    return networkx.is_connected(graph)


@given(METHOD, st.integers(0, 12), st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**9))
def test_nobody_is_in_two_pairs_and_one_at_most_is_left(method, n, seed, first):
    for pairs in pairs_of_rounds(method, seed, range(first, first + 3), names(n), uniform(n)):
        inside = [name for pair in pairs for name in pair]
        assert len(set(inside)) == len(inside) == n - n % 2
        assert list(pairs) == sorted(pairs)
        assert all(a < b for a, b in pairs)


@given(METHOD, st.integers(2, 12), st.integers(0, 99), st.data())
def test_the_order_of_names_changes_nothing(method, n, seed, data):
    who, bandwidth = names(n), uniform(n, seed)
    order = data.draw(st.permutations(range(n)))
    rounds, shuffled = range(5, 17), [who[i] for i in order]
    other = pairs_of_rounds(method, seed, rounds, shuffled, bandwidth[np.ix_(order, order)])
    assert other == pairs_of_rounds(method, seed, rounds, who, bandwidth)


@given(METHOD, st.integers(2, 10), st.integers(0, 99), st.integers(1, 12))
def test_rounds_before_the_recent_ones_change_nothing(method, n, seed, recent):
    who, bandwidth, settings = names(n), uniform(n, seed), PairSettings(recent=recent)
    met = pairs_of_rounds(method, seed, range(3, 17), who, bandwidth, settings)
    found = [
        pairs_of_round(method, seed, 17, who, bandwidth, known, settings)
        for known in (met, met[-recent:])
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["saps", "random-pairs"])
def test_seeds_and_rounds_give_other_pairs(method):
    def found(seed, first):
        return pairs_of_round(method, seed, first, names(32), uniform(32), settings=easy)

    easy = PairSettings(threshold=2.0)
    assert len({found(seed, first) for seed in range(5) for first in range(5)}) == 25


def test_a_link_is_as_fast_as_its_slower_direction():
    bandwidth = np.full((4, 4), 1.0)
    bandwidth[0, 1] = bandwidth[2, 3] = 9.0  # and back 1
    bandwidth[0, 2] = bandwidth[2, 0] = bandwidth[1, 3] = bandwidth[3, 1] = 5.0
    settings = PairSettings(threshold=4.0)
    pairs = pairs_of_round("saps", 0, 0, names(4), bandwidth, settings=settings)
    assert pairs == (("r000", "r002"), ("r001", "r003"))


def test_fast_links_are_taken_wherever_they_match_all():
    who, bandwidth = names(32), uniform(32)
    at = {name: i for i, name in enumerate(who)}
    settings = PairSettings(threshold=3.0)
    for pairs in pairs_of_rounds("saps", 1, range(200), who, bandwidth, settings):
        assert min(bandwidth[at[a], at[b]] for a, b in pairs) >= 3.0


@pytest.mark.parametrize("recent", [4, 6, 11])
def test_islands_meet_as_soon_as_they_were_apart_for_so_long(recent):
    who, bandwidth = names(12), islands(6, 6)
    settings = PairSettings(threshold=1.0, recent=recent)
    rounds = pairs_of_rounds("saps", 3, range(60), who, bandwidth, settings)
    across = [t for t, pairs in enumerate(rounds) if any(a < "r006" <= b for a, b in pairs)]
    assert across[0] == recent
    assert {b - a for a, b in itertools.pairwise(across)} == {recent + 1}


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(5, 8),
    st.sampled_from([None, 0.0, 1.0, 99.0]),
)
def test_all_are_connected_within_recent_rounds(sizes, seed, recent, threshold):
    """Also where no link is a fast one, or all are, and islands have one replica."""
    n = sum(sizes)
    who, bandwidth = names(n), islands(*sizes)
    settings = PairSettings(threshold=threshold, recent=recent)
    rounds = pairs_of_rounds("saps", seed, range(40), who, bandwidth, settings)
    for t in range(40 - 2 * recent):
        assert connected(who, rounds[t : t + 2 * recent])


def test_a_history_of_none_counts_neither_as_connected_nor_as_unconnected():
    """Where contacts begin as if all had met at round 0 parts stay apart; where they begin as if
    nobody had ever met, slow links are forced at once."""
    settings = PairSettings(threshold=1.0, recent=5)
    rounds = pairs_of_rounds("saps", 0, range(9), names(8), islands(4, 4), settings)
    slow = [sum(a < "r004" <= b for a, b in pairs) for pairs in rounds]
    assert slow[:5] == [0] * 5
    assert slow[5] >= 1


def test_those_who_left_do_not_connect():
    who, bandwidth = names(8), islands(4, 4)
    bridge = ((("r003", "zz"), ("r004", "zz")),) * 5
    settings = PairSettings(threshold=1.0, recent=5)
    inside = (("r000", "r001"), ("r002", "r003"), ("r004", "r005"), ("r006", "r007"))
    history = (inside, bridge[0], inside, bridge[0], inside)
    pairs = pairs_of_round("saps", 0, 5, who, bandwidth, history, settings)
    assert any(a < "r004" <= b for a, b in pairs)


def test_no_link_is_no_pair():
    bandwidth = np.zeros((5, 5))
    bandwidth[0, 1] = bandwidth[1, 0] = np.inf
    bandwidth[2, 3] = 1.0  # one way only
    bandwidth[3, 4], bandwidth[4, 3] = np.nan, 1.0
    for method in METHODS:
        met = {p for ps in pairs_of_rounds(method, 0, range(10), names(5), bandwidth) for p in ps}
        assert met == {("r000", "r001")}


@pytest.mark.parametrize("n", [2, 3, 6, 7])
def test_in_a_ring_everybody_meets_both_neighbours(n):
    who = names(n)
    rounds = pairs_of_rounds("ring", 0, range(2 * n), who, uniform(n))
    met = {pair for pairs in rounds for pair in pairs}
    assert met == {tuple(sorted((who[i], who[(i + 1) % n]))) for i in range(n)}


def test_the_threshold_leaves_two_matchings_and_little_more():
    """Whether a graph has two without a common edge cannot be said fast, so one is taken and
    another one looked for: now and then the highest threshold is missed."""
    shares = []
    for seed in range(20):
        rate = uniform(8, seed)
        found = fastest_threshold(rate)
        assert has_two(rate >= found)
        highest = max(value for value in np.unique(rate) if has_two(rate >= value))
        shares.append(found / highest)
    assert np.mean(shares) > 0.95
    assert shares.count(1.0) > len(shares) / 2


def has_two(edges):
    """Brute force: two perfect matchings without a common edge."""
    found = [frozenset(m) for m in perfect(edges, frozenset(range(len(edges))))]
    return any(not a & b for a in found for b in found)


def perfect(edges, left):
    if not left:
        yield ()
        return
    a = min(left)
    for b in left - {a}:
        if edges[a, b]:
            for rest in perfect(edges, left - {a, b}):
                yield ((a, b), *rest)


def test_the_threshold_of_few_links_takes_all_of_them():
    assert fastest_threshold(np.zeros((3, 3))) == 0.0
    assert fastest_threshold(np.zeros((0, 0))) == 0.0
    assert fastest_threshold(np.array([[0.0, 2.0], [2.0, 0.0]])) == 2.0
    path = np.diag([3.0, 1.0, 2.0], 1)
    assert fastest_threshold(path + path.T) == 1.0


def test_saps_spreads_over_two_alternating_partners_and_more():
    who = names(32)
    rho = second_eigenvalue(who, pairs_of_rounds("saps", 0, range(300), who, uniform(32)))
    assert rho < 0.95


@pytest.mark.parametrize(
    ("method", "who", "settings", "says"),
    [
        ("sap", names(2), {}, "saps"),
        ("saps", ("a", "a"), {}, "names"),
        ("saps", names(3), {}, "shape"),
        ("saps", names(2), {"threshold": -1.0}, "threshold"),
        ("saps", names(2), {"threshold": float("nan")}, "threshold"),
        ("saps", names(2), {"recent": 0}, "recent"),
    ],
)
def test_what_makes_no_sense_is_refused(method, who, settings, says):
    with pytest.raises(ValueError, match=says):
        pairs_of_round(method, 0, 0, who, uniform(2), (), PairSettings(**settings))
