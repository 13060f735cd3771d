"""What is said to be enough, is: a planner that gets it has a plan."""

from __future__ import annotations

import dataclasses
import re

from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import PlanRequest
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.cost.shortage import fitting
from shoal.planner.schedulers.auto import auto
from shoal.planner.search.enough import SMALL_PART, no_plan
from shoal.tests.planner.cases import random_case


def tight(seed: int, share: int) -> PlanRequest:
    request = random_case(seed, operators=6, peers=3, held=False)
    offers = tuple(
        dataclasses.replace(o, device_memory_bytes=o.device_memory_bytes // share)
        for o in request.offers
    )
    return dataclasses.replace(request, offers=offers, links=None)


def test_as_many_more_peers_as_are_said_to_be_enough_are_and_one_less_is_not() -> None:
    held = 0
    for seed in range(8):
        request = random_case(seed, operators=8, peers=2, held=False)
        judge = CostModel(request)
        room = max(judge.stage_bytes(i, i + 1, 1) for i in range(judge.operators)) * 5 // 4
        offers = tuple(dataclasses.replace(o, device_memory_bytes=room) for o in request.offers)
        request = dataclasses.replace(request, offers=offers, links=None)
        judge = CostModel(request)
        found = re.search(r"(\d+) more peers? with the", no_plan(judge).reason)
        if found is None or any(fitting(judge, [room] * len(offers), r) for r in (False, True)):
            continue
        held += 1
        joined = tuple(
            dataclasses.replace(offers[0], peer=PeerId(f"new-{i}"), name=f"new-{i}")
            for i in range(int(found[1]))
        )
        auto(dataclasses.replace(request, offers=(*offers, *joined)))  # has a plan
        rooms = [room] * (len(offers) + len(joined) - 1)
        assert all(fitting(judge, rooms, again) is None for again in (False, True))
    assert held >= 3


def test_an_optimizer_without_state_is_enough_where_it_is_said_to_be() -> None:
    held = 0
    for seed in range(8):
        request = tight(seed, 5)
        plain = dataclasses.replace(request.options, optimizer_slots=0, state_bytes=0)
        if 'optimizer = "sgd"' in str(no_plan(CostModel(request)).reason):
            held += 1
            auto(dataclasses.replace(request, options=plain))  # has a plan
    assert held


def test_training_a_small_part_is_enough_where_it_is_said_to_be() -> None:
    held = 0
    for seed in range(8):
        request = tight(seed, 5)
        if "LoRA" in no_plan(CostModel(request)).reason:
            held += 1
            frozen = (dataclasses.replace(p, trainable=False) for p in request.graph.parameters)
            graph = dataclasses.replace(request.graph, parameters=tuple(frozen))
            auto(dataclasses.replace(request, graph=graph))  # has a plan
    assert held


def test_who_trains_a_small_part_already_is_not_told_to() -> None:
    request = random_case(0, operators=6, peers=3, held=False)
    sizes = [p.spec.size_bytes for p in request.graph.parameters]
    for trained in (set(range(len(sizes))), {sizes.index(min(sizes))}):
        parameters = tuple(
            dataclasses.replace(p, trainable=i in trained)
            for i, p in enumerate(request.graph.parameters)
        )
        graph = dataclasses.replace(request.graph, parameters=parameters)
        judge = CostModel(dataclasses.replace(request, graph=graph, known_costs=request.costs))
        small = sum(sizes[i] for i in trained) <= SMALL_PART * sum(sizes)
        assert small == (len(trained) == 1)
        assert ("LoRA" in no_plan(judge).reason) == (not small)
