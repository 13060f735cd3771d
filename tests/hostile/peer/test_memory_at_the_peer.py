"""A peer estimates what an assignment takes before it builds any of it, whoever made the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.dag.plan.plan import PeerId, Plan
from shoal.dag.transforms.vocabulary import planned_graph
from shoal.peer.compute.build import build_work
from shoal.peer.compute.order import BuildOrder, OfferError
from shoal.peer.core.assignment import STOP_AT
from shoal.peer.shell.workbench import code_of, said_of
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.cost_model import CostModel
from shoal.tests.peer.conftest import make_case
from shoal.tests.peer.sync.test_ahead import ahead

__all__ = ["make_case"]


class Wide(nn.Module):
    """What its microbatches keep is far more than what stands."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
        self.last = nn.Linear(64, 1)

    def forward(self, x: Any, y: Any) -> Any:
        return ((self.last(self.layers(x)) - y) ** 2).mean()


@pytest.fixture
def case(make_case: Any) -> Any:
    x = np.random.default_rng(0).normal(size=(600, 4)).astype("f4")
    return make_case(Wide(), x=x, y=x[:, :1], batch=512, microbatch=128)


def judged(case: Any, plan: Plan) -> dict[PeerId, int]:
    """What the broker counts for each peer."""
    size = plan.microbatch_size
    graph = planned_graph(case.captured.graph.bind(size), plan)
    slots = PlannerOptions(
        optimizer_slots=case.train.optimizer_slots, state_bytes=case.train.state_bytes
    )
    offers = tuple(PeerOffer(p, device_memory_bytes=2**30) for p in plan.peers)
    request = PlanRequest(graph, offers, len(plan.routes), size, options=slots)
    return CostModel(request).plan_bytes(plan)


class Unread(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read, so something was built")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("holders", [["a", "b"], ["a b", "c"], ["a b", "c d"]])
def test_what_the_broker_finds_to_fit_is_built_and_what_it_does_not_is_refused(
    case: Any, schedule: str, holders: list[Any]
) -> None:
    plan = case.plan(2, holders, schedule=schedule)
    if holders == ["a b", "c d"]:  # whole pipelines, whose holders can step ahead
        plan = ahead(plan)
        before = judged(case, replace(plan, exchanges=()))
        trained = sum(p.numel() * p.element_size() for p in case.module.parameters())
        more = sum(judged(case, plan).values()) - sum(before.values())
        assert more == 2 * trained, "each of two holders keeps W beside its x"
    world = case.world(plan)
    for peer, needed in judged(case, plan).items():
        work = world.devices[peer]._work
        standing = work.standing_bytes
        order: BuildOrder = work.order
        # As the broker allows at the least: to the byte.
        build_work(replace(order, memory_bytes=needed), torch.device("cpu"))
        small = int(needed / STOP_AT) - 1
        hostile = replace(order, memory_bytes=small, weights=Unread())
        with pytest.raises(OfferError, match="this peer offers") as refused:
            build_work(hostile, torch.device("cpu"))
        assert code_of(refused.value, "build") == "memory"
        assert f"the stages of {peer} take about" in said_of(refused.value)
        if peer == "a" and schedule == "gpipe":
            assert standing < small / 2, "what stands alone would have been let in"
