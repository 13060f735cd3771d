"""The planner `swarm`: even stages, every microbatch on a way of its own, holders that stay."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from shoal.dag.cost.network import uniform
from shoal.dag.plan.plan import PeerId, Plan
from shoal.planner.base.interface import NoPlan, PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.baselines.baselines import equal_compute
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.schedulers import plan
from shoal.planner.swarm.swarm import swarm
from shoal.tests.planner.cases import random_case
from shoal.tests.planner.replicas.chains import chain_graph


def request_of(
    speeds: list[float],
    microbatches: int = 24,
    *,
    room: float = 5.0,
    **asked: object,
) -> PlanRequest:
    """Peers of these speeds on fast links, each with memory for that share of the model."""
    graph, costs = chain_graph(12)
    names = [PeerId(f"p{i}") for i in range(len(speeds))]
    options = PlannerOptions(scheduler="swarm", **asked)  # type: ignore[arg-type]
    request = PlanRequest(
        graph,
        tuple(PeerOffer(p, flops_per_s=s) for p, s in zip(names, speeds, strict=True)),
        microbatches,
        1,
        options=options,
        links=uniform(names, 0.001, 1e9),
        known_costs=costs,
    )
    whole = CostModel(request).stage_bytes(0, 12, 1)
    offers = tuple(replace(o, device_memory_bytes=int(room * whole)) for o in request.offers)
    return replace(request, offers=offers)


def visits(found: Plan) -> list[Counter[PeerId]]:
    """By stage, how many microbatches each holder has."""
    return [Counter(route[k].peer for route in found.routes) for k in range(len(found.stages))]


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_holds_whatever_graph_peers_and_links_are(seed: int) -> None:
    request = random_case(seed, held=False)
    request = replace(request, options=replace(request.options, pipelines=None))
    try:
        found, report = swarm(request)
    except NoPlan:
        with pytest.raises(NoPlan):  # no more than of equal stages of one holder each
            equal_compute(request)
        return
    found.validate(len(request.costs))
    assert len(found.routes) == request.microbatches
    assert all(len(s.holders) == len(of) for s, of in zip(found.stages, visits(found), strict=True))
    memory = {o.peer: o.device_memory_bytes for o in request.offers}
    assert all(p.device_bytes <= memory[p.peer] for p in report.predicted.peers)
    assert {s.peer for s in report.spares} | set(found.peers) == set(memory)
    assert swarm(request) == (found, report)


def test_many_holders_of_two_stages_share_their_microbatches_by_speed() -> None:
    request = request_of([1e9, 1e9, 2e9, 2e9, 3e9, 3e9], stages=2)
    found, report = plan(request)
    assert [len(s.holders) for s in found.stages] == [3, 3]
    for of in visits(found):
        assert sorted(of.values()) == [4, 8, 12]
    assert len(set(found.routes)) > 3, "more ways than in pipelines"
    assert "each of 24 microbatches routed by itself" in report.reasons[0]


def test_under_way_its_stages_stay_and_a_newcomer_joins_the_one_that_carries_least() -> None:
    before = plan(request_of([1e9, 1e9, 2e9, 2e9], stages=2)).plan
    now = request_of([1e9, 1e9, 1.6e9, 2e9, 1e9], stages=2)
    after = plan(replace(now, running=before)).plan
    assert [s.stop for s in after.stages] == [s.stop for s in before.stages]
    had = [set(s.holders) for s in before.stages]
    slow = next(k for k, of in enumerate(had) if "p2" in of)
    had[slow].add(PeerId("p4"))
    assert [set(s.holders) for s in after.stages] == had


def test_of_a_stage_that_lost_all_holders_another_one_takes_it() -> None:
    before = plan(request_of([1e9, 1e9, 1e9, 1e9], stages=2)).plan
    gone = before.stages[0].holders
    now = request_of([1e9, 1e9, 1e9, 1e9], stages=2)
    keep = [i for i, o in enumerate(now.offers) if o.peer not in gone]
    left = replace(
        now,
        offers=tuple(now.offers[i] for i in keep),
        links=now.network.part(keep),
        running=before,
    )
    after = plan(left).plan
    assert set(after.peers) == {PeerId(p) for p in before.peers} - set(gone)
    assert [s.stop for s in after.stages] == [s.stop for s in before.stages]


def test_small_changes_of_speed_move_nobody() -> None:
    rng = random.Random(3)
    speeds = [10 ** rng.uniform(9, 10) for _ in range(9)]
    running = plan(request_of(speeds, stages=3)).plan
    stages = [set(s.holders) for s in running.stages]
    for _ in range(10):
        swung = [s * rng.uniform(0.98, 1.02) for s in speeds]
        running = plan(replace(request_of(swung, stages=3), running=running)).plan
        assert [set(s.holders) for s in running.stages] == stages


def test_it_begins_from_no_plan_in_which_a_peer_has_several_stages() -> None:
    request = request_of([1e9, 1e9, 1e9])
    other = plan(replace(request, options=PlannerOptions(schedule="interleaved"))).plan
    twice = replace(other, stages=tuple(replace(s, holders=(PeerId("p0"),)) for s in other.stages))
    assert plan(replace(request, running=twice)).plan == plan(request).plan


def test_a_peer_too_slow_for_one_microbatch_is_spare_and_the_report_says_so() -> None:
    request = request_of([1e9, 1e9, 1e9, 1e9, 1e7], 12, stages=2)
    found, report = plan(request)
    assert "p4" not in found.peers
    assert [s.peer for s in report.spares] == ["p4"]


def test_who_would_lengthen_the_step_by_its_line_is_left_out() -> None:
    request = request_of([1e9] * 4, 16, stages=2)
    assert len(swarm(request).plan.peers) == 4
    links = request.network
    links.bandwidth[3, :3] = links.bandwidth[:3, 3] = 2e4
    found, report = swarm(replace(request, links=links))
    assert "p3" not in found.peers
    assert "p3" in {s.peer for s in report.spares}


@pytest.mark.parametrize("asked", [{"pipelines": 2}, {"schedule": "interleaved"}, {"swaps": True}])
def test_what_it_cannot_do_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(NoPlan, match="routes every microbatch by itself"):
        swarm(request_of([1e9, 1e9], **asked))


def test_too_little_memory_is_said_with_its_amount() -> None:
    with pytest.raises(NoPlan, match=r"needs|no peer has enough") as told:
        swarm(request_of([1e9, 1e9], room=0.2))
    assert told.value.code == "memory"
