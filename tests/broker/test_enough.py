"""What is said to be enough, is: a planner that gets it has a plan."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shoal.broker.scheduler.auto import auto
from shoal.broker.scheduler.cases import random_case
from shoal.broker.scheduler.enough import no_plan
from shoal.broker.scheduler.interface import NoPlan, PlanRequest
from shoal.broker.scheduler.judge import Judge
from shoal.broker.scheduler.shortage import fitting
from shoal.dag.plan import PeerId


def tight(seed: int, share: int) -> PlanRequest:
    request = random_case(seed, operators=6, peers=3, held=False)
    offers = tuple(
        dataclasses.replace(o, device_memory_bytes=o.device_memory_bytes // share)
        for o in request.offers
    )
    return dataclasses.replace(request, offers=offers, links=None)


def said(request: PlanRequest) -> str:
    with pytest.raises(NoPlan) as caught:
        auto(request)
    return caught.value.reason


@pytest.mark.parametrize("seed", range(6))
def test_as_many_more_peers_as_are_said_to_be_enough_are_and_one_less_is_not(seed: int) -> None:
    request = tight(seed, 8)
    found = re.search(r"(\d+) more peers? with the \S+ \S+ of peer-(\d+)", said(request))
    assert found, said(request)
    count, like = int(found[1]), request.offers[int(found[2])]
    joined = tuple(
        dataclasses.replace(like, peer=PeerId(f"new-{i}"), name=f"new-{i}") for i in range(count)
    )
    more = dataclasses.replace(request, offers=(*request.offers, *joined))
    auto(more)  # has a plan
    rooms = [o.device_memory_bytes for o in more.offers][:-1]
    assert all(fitting(Judge(request), rooms, again) is None for again in (False, True))


def test_an_optimizer_without_state_is_enough_where_it_is_said_to_be() -> None:
    held = 0
    for seed in range(8):
        request = tight(seed, 5)
        plain = dataclasses.replace(request.options, optimizer_slots=0)
        if 'optimizer = "sgd"' in str(no_plan(Judge(request)).reason):
            held += 1
            auto(dataclasses.replace(request, options=plain))  # has a plan
    assert held


def test_training_a_small_part_is_enough_where_it_is_said_to_be() -> None:
    held = 0
    for seed in range(8):
        request = tight(seed, 5)
        if "LoRA" in no_plan(Judge(request)).reason:
            held += 1
            frozen = (dataclasses.replace(p, trainable=False) for p in request.graph.parameters)
            graph = dataclasses.replace(request.graph, parameters=tuple(frozen))
            auto(dataclasses.replace(request, graph=graph))  # has a plan
    assert held
