"""Links that nobody measured, from O(n) that somebody did."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.network.completion import communities, community_means, complete, shared_ends
from shoal.sim.scenario.topologies import load


def clustered(n, sites, seed):
    """Sites on a map, rates by pair of sites with noise, and home uplinks below many of them."""
    rng = np.random.default_rng(seed)
    place, site = rng.uniform(0, 1, (sites, 2)), rng.integers(0, sites, n)
    apart = np.sqrt(((place[site][:, None] - place[site][None]) ** 2).sum(-1))
    mile = rng.uniform(0, 0.004, n)
    latency = 0.001 + 0.05 * apart + (mile[:, None] + mile[None]) / 2
    between = np.exp(rng.normal(np.log(2e7), 0.5, (sites, sites)))
    between = np.sqrt(between * between.T)
    np.fill_diagonal(between, 1e8)
    rates = between[site][:, site] * np.exp(rng.normal(0, 0.1, (n, n)))
    up = np.exp(rng.normal(np.log(3e7), 1, n))
    rates = np.minimum(rates, np.minimum(up[:, None], 5 * up[None]))
    return latency, rates, [f"site-{k}" for k in site]


def of_the_literature(name, nodes):
    topology = load(name)
    at = np.repeat(np.arange(len(topology.places)), nodes)
    grid = np.ix_(at, at)
    return topology.latency_s[grid], topology.bandwidth[grid], [topology.places[k] for k in at]


def against_landmarks(n, seed, landmarks=4):
    """(n, n) which pairs were measured: everyone with a few."""
    measured = np.zeros((n, n), dtype=bool)
    measured[:, random.Random(seed).sample(range(n), landmarks)] = True
    measured |= measured.T
    np.fill_diagonal(measured, False)
    return measured


def error(found, true, where):
    return float(np.median(np.abs(found / true - 1)[where]))


def errors(latency, rates, groups, seed):
    """Median relative error where nothing was measured: ours, community means, global mean."""
    n = len(groups)
    measured = against_landmarks(n, seed)
    unknown = ~measured & ~np.eye(n, dtype=bool)
    partial = np.where(measured, latency, np.nan), np.where(measured, rates, np.nan)
    full = complete(*partial, groups)
    assert np.array_equal(full.latency_s[measured], latency[measured])
    assert np.array_equal(full.bandwidth[measured], rates[measured])
    logs = np.log(partial[1])
    labels = communities(groups, partial[0])
    overall = np.nanmean(logs)
    means, _ = community_means(logs, labels)
    means = np.where(np.isnan(means), np.where(np.isnan(means.T), overall, means.T), means)
    by_community = np.exp(means)[labels[:, None], labels[None, :]]
    return (
        error(full.bandwidth, rates, unknown),
        error(by_community, rates, unknown),
        error(np.full((n, n), np.exp(overall)), rates, unknown),
        error(full.latency_s, latency, unknown),
    )


CASES = {
    "skippipe_gcp_12": lambda seed: of_the_literature("skippipe_gcp_12", 4),
    "dtfm_world_10": lambda seed: of_the_literature("dtfm_world_10", 4),
    "clustered": lambda seed: clustered(60, 6, seed),
}
MOST = {"skippipe_gcp_12": 0.06, "dtfm_world_10": 0.06, "clustered": 0.2}


@pytest.mark.parametrize("case", CASES)
def test_linear_many_probes_predict_the_rest_better_than_means_do(case):
    ours, by_community, overall, latency = np.mean(
        [errors(*CASES[case](seed), seed) for seed in range(4)], axis=0
    )
    assert ours < by_community < overall
    assert ours < MOST[case]
    assert latency < 0.06


@pytest.mark.parametrize("case", CASES)
def test_peers_that_name_no_place_are_grouped_by_their_latencies(case):
    latency, rates, groups = CASES[case](1)
    ours, by_community, overall, _ = errors(latency, rates, [""] * len(groups), 1)
    assert ours < min(by_community, overall)


def test_alike_peers_become_one_community_and_named_places_stay_apart():
    latency = np.full((6, 6), np.nan)
    for i in range(2, 6):
        latency[i, 0] = latency[0, i] = 0.01 if i < 4 else 0.1
        latency[i, 1] = latency[1, i] = 0.1 if i < 4 else 0.01
    labels = communities(["x", "y", "", "", "", ""], latency)
    assert labels.tolist() == [0, 1, 2, 2, 3, 3]


def test_equal_rates_show_an_uplink_and_different_ones_do_not():
    rates = np.full((5, 5), np.nan)
    rates[0, 1:4] = 2.5e6, 2.4e6, 2.45e6
    rates[1, [0, 2, 3]] = 1e7, 3e7, 9e7
    rates[2, 0] = 1e7
    assert shared_ends(rates).tolist() == [2.5e6, np.inf, np.inf, np.inf, np.inf]


def test_nothing_measured_gives_what_the_caller_assumes():
    nothing = np.full((3, 3), np.nan)
    full = complete(nothing, nothing, [""] * 3, latency_s_if_none=0.5, bandwidth_if_none=7.0)
    assert full.latency_s[0, 1] == 0.5
    assert full.bandwidth[2, 1] == 7.0
    assert np.isinf(np.diag(full.bandwidth)).all()
    assert not np.diag(full.latency_s).any()


def test_the_same_measurements_give_the_same_matrices():
    latency, rates, groups = clustered(40, 5, 3)
    measured = against_landmarks(40, 3)
    partial = np.where(measured, latency, np.nan), np.where(measured, rates, np.nan)
    first, second = complete(*partial, groups), complete(*partial, groups)
    assert np.array_equal(first.bandwidth, second.bandwidth)
    assert np.array_equal(first.latency_s, second.latency_s)


def test_wrong_shapes_and_impossible_numbers_are_refused():
    nothing = np.full((2, 2), np.nan)
    with pytest.raises(ValueError, match="expected both"):
        complete(nothing, nothing, ["a"])
    with pytest.raises(ValueError, match="not positive"):
        complete(nothing, np.zeros((2, 2)), ["a", "b"])


@given(data=st.data())
def test_any_sparse_measurements_give_usable_numbers_everywhere(data):
    n = data.draw(st.integers(1, 7))
    groups = data.draw(st.lists(st.sampled_from(["", "a", "b"]), min_size=n, max_size=n))
    latency, rates = np.full((n, n), np.nan), np.full((n, n), np.nan)
    for _ in range(data.draw(st.integers(0, 12))):
        i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
        if data.draw(st.booleans()):
            latency[i, j] = data.draw(st.floats(0, 60))
        if data.draw(st.booleans()):
            rates[i, j] = data.draw(st.floats(1e-3, 1e12))
    full = complete(latency, rates, groups)
    off = ~np.eye(n, dtype=bool)
    assert np.isfinite(full.latency_s).all()
    assert (full.latency_s >= 0).all()
    assert np.isfinite(full.bandwidth[off]).all()
    assert (full.bandwidth > 0).all()
    known = off & ~np.isnan(rates)
    assert np.array_equal(full.bandwidth[known], rates[known])
