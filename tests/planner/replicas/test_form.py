"""What replicas are formed of, and what holds of every formation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planner.base.interface import NoPlan, PlannerOptions, PlanRequest
from shoal.planner.replicas.division import Judge
from shoal.planner.replicas.form import form
from shoal.planner.replicas.formation import Formation
from shoal.planner.replicas.pace import SLOWER, Paces
from shoal.planner.replicas.search import every_division, searched
from shoal.tests.planner.cases import random_case
from shoal.tests.planner.replicas.chains import request_in_places

DENSE = 4.0


def who(formation: Formation) -> set[frozenset[str]]:
    return {frozenset(r.peers) for r in formation.replicas}


def sets(*groups: str) -> set[frozenset[str]]:
    return {frozenset(f"p{i}" for i in group) for group in groups}


# ---------------------------------------------------------------- who is with whom


@pytest.mark.parametrize("each", [2, 3])
def test_two_islands_that_each_hold_the_model_are_two_replicas(each: int) -> None:
    """The slow link between them is crossed once a round, not by every microbatch."""
    request = request_in_places([0] * each + [1] * each, [1.3 / each] * 2 * each, [1] * 2 * each)
    found = form(request, None, 100, DENSE)
    assert who(found) == sets("012"[:each], "012345"[each : 2 * each])
    assert all(r.slowest_link == 1e9 for r in found.replicas)
    assert found.round.slowest_link == 1e6


def test_a_strong_peer_and_four_weak_ones_are_two_replicas() -> None:
    request = request_in_places([0, 1, 1, 1, 1], [2] + [0.4] * 4, [4] + [1] * 4)
    found = form(request, None, 100, DENSE)
    assert who(found) == sets("0", "1234")
    strong, weak = found.replicas
    assert strong.steps > weak.steps
    assert found.samples_per_s > 1.5 * strong.samples / strong.step_s


def test_who_would_slow_a_round_is_left_out_and_told_why() -> None:
    places = [0, 1, 1, 1, 1, 2]
    request = request_in_places(places, [2] + [0.4] * 4 + [2], [4] + [1] * 4 + [0.001])
    found = form(request, None, 100, DENSE)
    assert who(found) == sets("0", "1234")
    [spare] = found.left_out
    assert spare.peer == "p5"
    assert "as a replica of its own it makes a local step in" in spare.reason


def test_equal_weights_where_an_exchange_would_cost_more_than_it_brings() -> None:
    request = request_in_places([0, 1], [2, 2], [4, 1], slow=1e3)
    found = form(request, None, 1, DENSE)
    assert who(found) == sets("0")
    assert found.round.exchange_s == 0.0
    assert found.reasons[0].startswith("one replica")


def test_of_nearly_as_many_samples_the_fewest_replicas() -> None:
    """Alike, in one place, and each can hold the model: more replicas give a little more."""
    request = request_in_places([0] * 4, [2] * 4, [1] * 4)
    found = form(request, None, 100, DENSE)
    [four] = [a for a in found.alternatives if a.name == "4 replicas"]
    assert len(found.replicas) < 4
    assert found.samples_per_s >= 0.95 * found.round.batch / four.step_s


# ---------------------------------------------------------------- how many


def test_as_many_replicas_as_asked_for() -> None:
    request = request_in_places([0, 0, 1, 1], [2] * 4, [1] * 4)
    for count in (1, 2, 4):
        assert len(form(request, count, 10, DENSE).replicas) == count


@pytest.mark.parametrize("peers", [6, 18])
def test_as_many_stages_as_asked_for_in_each(peers: int) -> None:
    """Nobody is left over, and each could hold the model alone; few peers and many."""
    request = request_in_places([0] * peers, [2] * peers, [1] * peers)
    options = replace(request.options, stages=3, pipelines=1)
    request = replace(request, options=options, microbatches=12)
    found = form(request, peers // 3, 10, DENSE)
    assert [len(r.peers) for r in found.replicas] == [3] * (peers // 3)


def test_too_many_replicas_name_the_memory_that_is_short() -> None:
    request = request_in_places([0, 0, 1, 1], [0.6] * 4, [1] * 4)
    with pytest.raises(NoPlan, match=r"4 replicas hold the model 4 times.* short by ") as caught:
        form(request, 4, 100, DENSE)
    assert caught.value.code == "memory"
    judge = Judge(Paces(request), 100, DENSE)
    offered = sum(o.device_memory_bytes for o in request.offers)
    assert caught.value.short_bytes == 4 * judge.paces.needed - offered
    with pytest.raises(NoPlan, match="3 replicas share 8 microbatches"):
        form(request_in_places([0] * 4, [2] * 4, [1] * 4), 3, 100, DENSE)
    with pytest.raises(NoPlan, match="5 replicas need as many peers, 4 are on offer"):
        form(request, 5, 100, DENSE)
    one = replace(request, microbatches=1)
    with pytest.raises(NoPlan, match="2 replicas share 1 microbatches of a step"):
        form(one, 2, 100, DENSE)
    with pytest.raises(NoPlan, match="a round has 0 steps"):
        form(request, None, 0, DENSE)


def test_peers_that_hold_it_nowhere_are_told_as_for_one_plan() -> None:
    request = request_in_places([0, 0], [0.3, 0.3], [1, 1])
    with pytest.raises(NoPlan, match=r"needs .* more"):
        form(request, None, 100, DENSE)


# ---------------------------------------------------------------- what holds of each


def holds(request: PlanRequest, found: Formation, every: int) -> None:
    memory = {o.peer: o.device_memory_bytes for o in request.offers}
    used = [p for r in found.replicas for p in r.peers]
    assert len(used) == len(set(used)), "nobody is in two"
    assert {*used, *(s.peer for s in found.left_out)} == memory.keys()
    assert all(s.reason for s in found.left_out)
    for r in found.replicas:
        assert set(r.peers) == set(r.made.plan.peers)
        assert all(p.device_bytes <= memory[p.peer] for p in r.made.report.predicted.peers)
        assert len(r.made.plan.routes) * request.microbatch_size == r.samples
        assert r.steps >= 1
    samples = sum(r.steps * r.samples for r in found.replicas)
    assert samples == found.round.samples == every * found.round.batch
    assert found.round.local_s == max(r.steps * r.step_s for r in found.replicas)
    assert 0 <= found.round.exposed_s <= found.round.exchange_s


@settings(max_examples=10)
@given(st.integers(0, 10_000), st.sampled_from([1, 10, 100]), st.sampled_from([0.0, 0.3, 1.0]))
def test_every_formation_fits_and_shares_the_round_out(
    seed: int, every: int, overlap: float
) -> None:
    request = random_case(seed, operators=8, peers=4)
    try:
        found = form(request, None, every, DENSE, overlap=overlap)
    except NoPlan:
        return
    holds(request, found, every)
    assert found == form(request, None, every, DENSE, overlap=overlap)


def test_what_rounds_keep_needs_memory() -> None:
    """Peers that hold the model just so do not hold another copy of its weights."""

    def request(**options: int) -> PlanRequest:
        return request_in_places([0, 1], [1.1, 1.1], [1, 1], options=PlannerOptions(**options))

    assert len(form(request(), 2, 100, DENSE).replicas) == 2
    for kept in ("round_bytes", "exchange_bytes"):
        with pytest.raises(NoPlan, match="short by"):
            form(request(**{kept: 24}), 2, 100, DENSE)


def test_an_optimizer_without_state_is_no_help_where_rounds_keep_more() -> None:
    """SGD leaves what rounds keep as it is."""
    helps = [
        'optimizer = "sgd"' in refused(request_in_places([0], [0.9], [1], options=options))
        for options in (PlannerOptions(), PlannerOptions(round_bytes=40))
    ]
    assert helps == [True, False]


def refused(request: PlanRequest) -> str:
    with pytest.raises(NoPlan) as why:
        form(request, 1, 100, DENSE)
    return str(why.value)


def test_an_exchange_hides_behind_the_next_round() -> None:
    request = request_in_places([0, 1], [2, 2], [1, 1], slow=1e5)
    shown, partly, hidden = (form(request, 2, 10, DENSE, overlap=o) for o in (0.0, 0.1, 1.0))
    assert shown.round.exposed_s == shown.round.exchange_s == hidden.round.exchange_s > 0
    hides = partly.round.exchange_s - partly.round.exposed_s
    assert hides == pytest.approx(0.1 * partly.round.local_s)
    assert hidden.round.exposed_s == 0.0
    assert hidden.samples_per_s > partly.samples_per_s > shown.samples_per_s


# ---------------------------------------------------------------- the search


def best_of_all(judge: Judge, divisions: Iterable[list[set[int]]]) -> dict[int, float]:
    """By number of replicas that may be, the most samples/s."""
    most: dict[int, float] = {}
    for groups in divisions:
        found = judge.of(groups)
        if found is not None and judge.allows(count := len(found.peers)):
            most[count] = max(most.get(count, 0.0), found.samples_per_s)
    return most


@pytest.mark.parametrize("seed", range(10))
def test_the_search_finds_nearly_what_brute_force_finds(seed: int) -> None:
    request = random_case(seed, operators=8, peers=5, held=False)
    judge = Judge(Paces(request), 20, DENSE)
    most = best_of_all(judge, every_division(range(len(request.offers))))
    found = searched(Judge(Paces(request), 20, DENSE))
    if not most:
        assert not found
        return
    assert found[0].samples_per_s >= 0.98 * max(most.values())
    for count, value in most.items():
        asked = searched(Judge(Paces(request), 20, DENSE), count)
        assert asked[0].samples_per_s >= 0.98 * value


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3))])
def test_islands_of_many_peers_hold_no_slow_link(seed: int) -> None:
    """Each island of fast links can hold the model; beyond what all divisions are looked at of."""
    rng = np.random.default_rng(seed)
    places = sorted([*rng.integers(0, 3, 6).tolist(), 0, 0, 1, 1, 2, 2])
    rooms = [0.7] * len(places)
    request = request_in_places(places, rooms, rng.uniform(1, 3, len(places)).tolist())
    request = replace(request, microbatches=60)  # up to six replicas may be
    found = form(request, None, 100, DENSE)
    place = {f"p{i}": p for i, p in enumerate(places)}
    assert all(len({place[p] for p in r.peers}) == 1 for r in found.replicas)
    assert all(r.slowest_link * SLOWER >= 1e9 for r in found.replicas)
    holds(request, found, 100)
