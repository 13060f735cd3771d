"""Groups of peers: parts against brute force, the search against all groupings, published cases."""

from __future__ import annotations

import importlib
import itertools
import random
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.base.interface import PlannerOptions
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.network import grouping
from shoal.planner.network.grouping import Objective, divisions, every_division, group, starts
from shoal.planner.network.matching import kinds_of, match
from shoal.planner.network.order import shortest_path
from shoal.planner.search.parallel import candidates_in, shapes
from shoal.sim.scenario.topologies import load
from shoal.tests.planner.cases import random_case

SEEDS = st.integers(0, 2**32 - 1)


def symmetric(rng: np.random.Generator, n: int, values: int = 1000) -> np.ndarray:
    """(n, n) with zeros on the diagonal; few `values` make ties."""
    found = np.triu(rng.integers(1, values + 1, (n, n)).astype(float), 1)
    return found + found.T


@given(SEEDS, st.integers(1, 6), st.sampled_from([3, 1000]))
def test_matching_equals_brute_force(seed: int, n: int, values: int) -> None:
    cost = np.random.default_rng(seed).integers(0, values, (n, n)).astype(float)
    seconds, columns = match(cost)
    best = min(
        max(cost[i, c] for i, c in enumerate(order)) for order in itertools.permutations(range(n))
    )
    assert sorted(columns) == list(range(n))
    assert seconds == best == max(cost[i, c] for i, c in enumerate(columns))


@given(SEEDS, st.integers(1, 6))
def test_path_equals_brute_force(seed: int, n: int) -> None:
    distance = symmetric(np.random.default_rng(seed), n)
    seconds, path = shortest_path(distance)
    lengths = [
        sum(distance[a, b] for a, b in itertools.pairwise(order))
        for order in itertools.permutations(range(n))
    ]
    assert sorted(path) == list(range(n))
    assert seconds == min(lengths) == sum(distance[a, b] for a, b in itertools.pairwise(path))


def test_long_paths_are_paths() -> None:
    distance = symmetric(np.random.default_rng(0), 20)
    seconds, path = shortest_path(distance)
    assert sorted(path) == list(range(20))
    assert seconds == pytest.approx(sum(distance[a, b] for a, b in itertools.pairwise(path)))


@given(SEEDS)
def test_kinds_are_the_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    places = rng.integers(0, 3, 7)
    table = rng.permutation(9).reshape(3, 3).astype(float)
    kinds = kinds_of(table[np.ix_(places, places)])
    for i, j in itertools.combinations(range(7), 2):
        alike = kinds[i] == kinds[j]
        assert alike or places[i] != places[j]
        if alike and places[i] != places[j]:  # only where the places cannot be told apart
            order = list(range(7))
            order[i], order[j] = j, i
            one = table[np.ix_(places, places)]
            assert np.array_equal(one, one[np.ix_(order, order)])


def total(inside: np.ndarray, between: np.ndarray) -> tuple[float, tuple[int, ...]]:
    length, order = shortest_path(between)
    return float(inside.max()) + 2 * length, order


def costs(exchange: np.ndarray, hop: np.ndarray, groups: list[list[int]]) -> float:
    """DT-FM's formula, written out."""
    inside = max(sum(exchange[i, j] for j in g if j != i) for g in groups for i in g)
    best = float("inf")
    for order in itertools.permutations(groups):
        length = 0.0
        for a, b in itertools.pairwise(order):
            length += min(
                max(hop[i, j] for i, j in zip(a, way, strict=True))
                for way in itertools.permutations(b)
            )
        best = min(best, length)
    return inside + 2 * best


@pytest.mark.parametrize(("groups", "size"), [(3, 2), (2, 3), (1, 4), (4, 1), (3, 3)])
def test_every_division_is_there_once(groups: int, size: int) -> None:
    found = [frozenset(map(frozenset, g)) for g in every_division(list(range(groups * size)), size)]
    assert len(found) == len(set(found)) == divisions(groups, size)
    assert all({len(g) for g in division} == {size} for division in found)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("values", [3, 1000])
@pytest.mark.parametrize("every", [0, 300])
def test_search_equals_brute_force(
    seed: int, values: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six peers as three stages of two holders; with ties and without, by annealing and by trying
    all."""
    monkeypatch.setattr(grouping, "EVERY", every)
    rng = np.random.default_rng(seed)
    exchange, hop = symmetric(rng, 6, values), symmetric(rng, 6, values)
    objective = Objective(exchange, hop, total)
    found = group(objective, [[range(6)]], 3, 2, steps=300)
    best = min(costs(exchange, hop, g) for g in every_division(list(range(6)), 2))
    assert found.seconds <= best * (1.0 if every else 1.1)
    assert found.seconds == costs(exchange, hop, [list(g) for g in found.groups])
    # The d-th members of neighbouring groups are matched.
    again = group(objective, [[range(6)]], 3, 2, steps=300)
    assert again == found, "equal requests give equal answers"


@pytest.mark.parametrize(("count", "size"), [(8, 8), (4, 3), (1, 5), (5, 1)])
def test_starts_hold_every_peer_once(count: int, size: int) -> None:
    rng = random.Random(count)
    peers = list(range(count * size))
    rng.shuffle(peers)
    cuts = sorted(rng.sample(range(1, len(peers)), 3))
    islands = [peers[a:b] for a, b in itertools.pairwise([0, *cuts, len(peers)])]
    for groups in starts(islands, count, size):
        assert [len(g) for g in groups] == [size] * count
        assert sorted(p for g in groups for p in g) == list(range(count * size))


# ---------------------------------------------------------------- published cases


@pytest.fixture
def published() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.planning.published")


def test_case_0_costs_what_was_published(published: ModuleType) -> None:
    """One pipeline in each instance: 2.912 s of exchange and 0.528 s of hops."""
    topology = load("dtfm_case_0_datacenter")
    objective, stages, holders = published.dtfm(topology)
    groups = [list(range(s, 64, 8)) for s in range(stages)]
    kinds = [objective.kinds_in(g) for g in groups]
    assert max(objective.inside(k) for k in kinds) == pytest.approx(2.912, rel=1e-3)
    hops = [objective.between(a, b) for a, b in itertools.pairwise(kinds)]
    assert 2 * sum(hops) == pytest.approx(0.528, rel=1e-3)
    assert {len(g) for g in groups} == {holders}


def test_case_3_hops_inside_places(published: ModuleType) -> None:
    objective, stages, _ = published.dtfm(load("dtfm_case_3_regional"))
    hop = objective.hop[0, 1]
    assert 2 * (stages - 1) * hop == pytest.approx(26.460, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("dtfm_case_0_datacenter", 3.445),
        ("dtfm_case_1_spot", 31.67),
        ("dtfm_case_2_universities", 16.11),
        ("dtfm_case_3_regional", 34.84),
        ("dtfm_case_4_worldwide", 49.28),
    ],
)
def test_search_reaches_the_bars(published: ModuleType, name: str, most: float) -> None:
    found = published.planned(load(name))
    assert found.seconds <= most
    assert sorted(p for g in found.groups for p in g) == list(range(64))


@pytest.mark.parametrize(("forward_s", "theirs"), [(0.44, 79.940), (1.76, 154.20)])
def test_full_pipeline_replayed(published: ModuleType, forward_s: float, theirs: float) -> None:
    """SkipPipe's own code looks at a waiting forward every 0.1 s; we begin it at once."""
    ours = published.replayed_s(forward_s)
    assert theirs * 0.99 < ours <= theirs


def test_routes_keep_the_rules(published: ModuleType) -> None:
    """Every plan of the search holds all layers once per route, no node twice and none over its
    parameters; and memory alone lengthens a step, it stops none."""
    plans = importlib.import_module("shoal.benchmarks.planning.skippipe_plan")
    topology = load("skippipe_gcp_12")
    d = published.delays(topology)
    begin = plans.first(topology.network(), d, published.LAYERS, published.MICROBATCHES)
    seconds, rows = plans.search(d, begin, steps=200)
    assert seconds <= min(max(published.ends_s(d, r.each())) for r in begin[:1])
    for found in (*begin, rows):
        nodes = [node for route in found.routes for node, _ in route]
        assert len(nodes) == len(set(nodes))
        assert all(sum(n for _, n in route) == published.LAYERS for route in found.routes)
        assert all(0 < n <= published.LAYERS_HELD for route in found.routes for _, n in route)
        assert sum(found.microbatches) == published.MICROBATCHES == len(found.each())


def test_one_microbatch_takes_the_sum(published: ModuleType) -> None:
    """All forwards, the loss, all backwards, and the edges between them."""
    topology = load("skippipe_gcp_12")
    d = replace(published.delays(topology), job_s=0.0, first_s=0.0)
    route = tuple((n, 4) for n in (0, 12, 1, 13, 2, 14))
    path = sum(d.edge[a][b] for (a, _), (b, _) in itertools.pairwise(route))
    back = d.edge[14][0]
    compute = 24 * 0.44 * 2.5 + 0.44
    (end,) = published.ends_s(d, [route], loss_at_first=False)
    assert end == pytest.approx(compute + 2 * path)
    (end,) = published.ends_s(d, [route])
    assert end == pytest.approx(compute + 2 * path + 2 * back)


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("seed", range(6))
def test_candidates_of_requests(seed: int) -> None:
    request = random_case(seed, operators=12, peers=9, held=False)
    request = replace(request, microbatches=8)
    judge = CostModel(request)
    found = list(candidates_in(judge))
    assert bool(found) <= bool(shapes(judge))
    for guess in found:
        candidate = guess.candidate
        assert sum(candidate.microbatches) == 8
        assert all(p[0].start == 0 and p[-1].stop == judge.operators for p in candidate.pipelines)
        assert len(candidate.peers) == sum(map(len, candidate.pipelines))
    assert [g.candidate for g in candidates_in(CostModel(request))] == [g.candidate for g in found]


def test_shapes_keep_to_the_options() -> None:
    request = random_case(0, operators=12, peers=5, held=False)
    asked = replace(request, microbatches=8, options=PlannerOptions(pipelines=2, stages=2))
    assert shapes(CostModel(asked)) in ([(2, 2)], [])
    assert not list(candidates_in(CostModel(replace(asked, microbatches=1))))
