"""The gradient of a tied vocabulary matrix, which is as large as the matrix, crosses a link only
where that is cheaper: what a step sends is added up here from the plan's own transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import cost
from shoal.dag.cost.memory import MemoryModel
from shoal.dag.cost.network import Network
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId, Plan
from shoal.dag.schedule.flow import Flow
from shoal.examples.gpt import Block
from shoal.net.links.frame import Role
from shoal.peer.compute.exchange import TransferSpecs
from shoal.peer.compute.frame_codecs.codings import Codings
from shoal.planner.base.interface import PeerOffer, PlanRequest
from shoal.planner.schedulers.auto import auto

WORDS, WIDTH, BATCH, LENGTH, MICROBATCHES = 8000, 64, 2, 32, 8
MATRIX = 4 * WORDS * WIDTH
"""Bytes."""
PORT = 4 * BATCH * LENGTH * WIDTH
"""Bytes of the residual stream of a microbatch."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 2, 0.0) for _ in range(24))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@pytest.fixture(scope="module")
def graph() -> Graph:
    x = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return capture(Tied(), {"x": x, "y": x}).graph.bind(BATCH)


def request_of(graph: Graph, bandwidth: float) -> PlanRequest:
    """Two peers, neither of which has room for the model; bandwidth in bytes/s."""
    names = (PeerId("p0"), PeerId("p1"))
    costs, apart = cost(graph), 1 - np.eye(2)
    whole = MemoryModel(graph, costs).stage(0, len(graph.operators)).peak(8, 1)
    offers = tuple(
        PeerOffer(p, device_memory_bytes=int(0.8 * whole), flops_per_s=2e10) for p in names
    )
    rate, free = np.where(apart, bandwidth, np.inf), np.full(2, np.inf)
    links = Network(names, 0.01 * apart, rate, free, free)
    return PlanRequest(graph, offers, MICROBATCHES, BATCH, links=links, known_costs=costs)


def sent(graph: Graph, plan: Plan) -> dict[Role, int]:
    """Bytes over links in a step, by role."""
    assert not plan.head_parts
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    flow = Flow(plan, stages, tied_groups(graph, stages))
    codings = Codings(TransferSpecs(flow, graph), plan.codecs)
    found: dict[Role, int] = dict.fromkeys(Role, 0)
    for transfer in flow.taken_by:
        if not transfer.is_local:
            found[transfer.role] += codings.of(transfer).size_bytes
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("megabits", "crosses"), [(5, False), (20, False), (1000, True)])
def test_both_ends_lie_on_one_peer_where_the_link_is_slow(
    graph: Graph, megabits: float, crosses: bool
) -> None:
    """Closed, a step sends the residual stream once more and nothing as large as the matrix."""
    found: Any = auto(request_of(graph, megabits * 1e6 / 8))
    by_role = sent(graph, found.plan)
    ends = found.plan.stages[0].holders, found.plan.stages[-1].holders
    assert (ends[0] != ends[1]) == crosses
    assert (by_role[Role.SYNC] >= 2 * MATRIX) == crosses
    assert crosses or by_role[Role.SYNC] < 1000, "losses, norms"
    ways = 1 if crosses else 2
    assert by_role[Role.ACTIVATION] == by_role[Role.ACTIVATION_GRAD] == ways * MICROBATCHES * PORT
