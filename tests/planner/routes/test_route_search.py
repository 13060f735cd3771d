"""Routes keep their rules whatever the network, and are as good as any on small ones."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.benchmarks.schedules.route_checks import (
    broken_rules,
    cheapest_round_trips,
    stage_sets,
    step_bound_s,
)
from shoal.planner.routes.route_rules import RouteRules, orders_of
from shoal.planner.routes.route_search import Routes, RouteSearch, search_routes
from shoal.planner.routes.route_start import even_orders, placed
from shoal.planner.routes.route_timing import RouteClock, RouteTimes

QUICK = RouteSearch(rough=300, fine=60, starts=2)
SMALL = RouteRules(stages=3, length=2, swaps=1, look_ahead=2, memory=1)


def network(nodes: int, seed: int, memory: int = 3, *, hold: bool = False) -> RouteTimes:
    """Nodes at random points of a square, by distance."""
    rng = np.random.default_rng(seed)
    at = rng.random((nodes, 2))
    latency = 0.2 + np.linalg.norm(at[:, None] - at[None], axis=2)
    np.fill_diagonal(latency, 0.0)
    forward = rng.uniform(0.2, 0.6, nodes)
    return RouteTimes(
        latency_s=latency,
        hold_s=0.3 * latency * hold,
        forward_s=forward,
        backward_s=1.5 * forward,
        loss_s=forward / 4,
        rest_s=0.1,
        memory=memory,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[RouteRules, list[int], int]:
    stages = draw(st.integers(2, 8))
    length = draw(st.integers(max(2, (stages + 1) // 2), stages))
    memory = draw(st.integers(1, 3))
    rules = RouteRules(
        stages=stages, length=length, memory=memory, swaps=draw(st.integers(0, 2)), look_ahead=4
    )
    first = draw(st.integers(1, 3))
    least = math.ceil(rules.visits_per_stage(first * memory) / memory)
    sizes = [first] + [least + draw(st.integers(0, 1)) for _ in range(stages - 1)]
    return rules, sizes, draw(st.integers(1, 3))


@settings(max_examples=25, deadline=None)
@given(cases(), st.integers(0, 99), st.booleans())
def test_routes_keep_all_rules_and_the_bound(
    case: tuple[RouteRules, list[int], int], seed: int, hold: bool
) -> None:
    rules, sizes, waves = case
    times = network(sum(sizes) + seed % 2, seed, rules.memory, hold=hold)
    found = search_routes(rules, times, sizes, waves, replace(QUICK, seed=seed))
    assert sorted(found.stage_of) == sorted(placed(sizes, len(found.stage_of)))
    for wave in found.waves:
        assert not broken_rules(rules, found.stage_of, wave)
    jobs = list[tuple[int, float, float, int, int]]()
    assert max(RouteClock(times).run(found.waves, (), jobs)) == found.step_s
    assert found.step_s >= step_bound_s(rules, times, sizes, waves) - 1e-9
    if math.isfinite(found.step_s):
        done = [(k, a, b, m, step < rules.length) for k, a, b, m, step in jobs]
        assert len(done) == sum(sizes[:1]) * rules.memory * waves * (2 * rules.length + 1)
        assert not broken_rules(rules, found.stage_of, (), done)


@settings(max_examples=10, deadline=None)
@given(cases(), st.integers(0, 99))
def test_one_seed_gives_one_result(case: tuple[RouteRules, list[int], int], seed: int) -> None:
    rules, sizes, waves = case
    times = network(sum(sizes), seed, rules.memory)
    options = replace(QUICK, seed=seed)
    assert search_routes(rules, times, sizes, waves, options) == search_routes(
        rules, times, sizes, waves, options
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_small_search_finds_the_best_of_all_routes(seed: int) -> None:
    """Two first nodes and one for each other stage: all placements and routes are tried."""
    times, sizes = network(4, seed, 1), [2, 1, 1]
    clock, best = RouteClock(times), math.inf
    for stage_of in set(itertools.permutations(placed(sizes, 4))):
        of = [[n for n in range(4) if stage_of[n] == s] for s in range(3)]
        for other in itertools.permutations((1, 2)):
            wave = tuple(((0, of[0][k]), (s, of[s][0])) for k, s in enumerate(other))
            for second in (
                wave,
                tuple((a[0], b[1]) for a, b in zip(wave, wave[::-1], strict=True)),
            ):
                best = min(best, max(clock.run([wave, second])))
    found = search_routes(
        SMALL, times, sizes, 2, RouteSearch(seed=seed, rough=2000, fine=600, starts=2)
    )
    assert found.step_s == pytest.approx(best)


def test_whoever_listens_hears_of_better_and_better_routes() -> None:
    told: list[Routes] = []
    options = RouteSearch(rough=200, fine=400, starts=1)
    best = search_routes(
        RouteRules(), network(20, 0), [5, 3, 3, 3, 3, 3], 2, options, told=told.append
    )
    steps = [r.step_s for r in told]
    assert steps == sorted(steps, reverse=True)
    assert told[-1] == best


@given(st.integers(2, 7), st.integers(0, 2), st.integers(1, 5), st.data())
def test_orders_are_those_that_the_checker_accepts(
    stages: int, swaps: int, ahead: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(2, stages))
    if ahead * (length - 1) < stages - 1:
        with pytest.raises(ValueError, match="never visited"):
            RouteRules(stages=stages, length=length, look_ahead=ahead)
        return
    rules = RouteRules(stages=stages, length=length, swaps=swaps, look_ahead=ahead, memory=stages)
    listed = {o for s in stage_sets(rules) for o in orders_of(rules, s)}
    for order in itertools.permutations(range(stages), length):
        path = tuple((s, s) for s in order)
        problems = [p for p in broken_rules(rules, range(stages), [path]) if "microbatch" in p]
        assert (order in listed) == (not problems)


@given(cases())
def test_even_orders_visit_every_stage_equally(case: tuple[RouteRules, list[int], int]) -> None:
    rules, sizes, _ = case
    lanes = sizes[0] * rules.memory
    counts = [0] * rules.stages
    for order in even_orders(rules, lanes):
        for stage in order[1:]:
            counts[stage] += 1
    assert max(counts) <= rules.visits_per_stage(lanes)


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_cheapest_round_trips_are_those_of_all_orders(length: int, seed: int) -> None:
    times = network(6, seed)
    hop, visit = times.hop_s(), times.visit_s()
    for v, found in enumerate(cheapest_round_trips(times, length)):
        others = itertools.permutations([n for n in range(6) if n != v], length - 1)
        best = min(
            sum(hop[a, b] + hop[b, a] + visit[a] for a, b in zip((v, *o), (*o, v), strict=True))
            for o in others
        )
        assert found == pytest.approx(best + times.loss_s.min())


def test_each_broken_rule_is_named_with_its_visit() -> None:
    rules, stage_of = RouteRules(stages=4, length=3, swaps=1, look_ahead=2, memory=1), (0, 1, 2, 3)
    for path, words in (
        (((1, 1), (2, 2), (3, 3)), "begins with stage 1"),
        (((0, 0), (1, 1)), "visits 2 stages: expected 3"),
        (((0, 0), (3, 3), (2, 2)), "goes from stage 0 to 3"),
        (((0, 0), (1, 1), (1, 1)), "twice"),
        (((0, 0), (1, 2), (2, 2)), "node 2 for stage 1"),
    ):
        assert any(words in p for p in broken_rules(rules, stage_of, [path])), words
    overlap = [(3, 0.0, 1.0, 0, True), (3, 0.5, 2.0, 1, False)]
    assert "at once, from second 0.5" in broken_rules(rules, stage_of, (), overlap)[0]
    backwards = [(3, 0.0, 1.0, 0, False), (3, 0.5, 2.0, 1, False)]
    assert not broken_rules(rules, stage_of, (), backwards)
