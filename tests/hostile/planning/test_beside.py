"""Honest models whose first operators with weights give their inputs away, and a submitter's plan
that computes them where the data is and nothing more: the broker refuses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.broker.events import MakePlan, RunId
from shoal.dag.capture.capture import capture
from shoal.dag.plan.plan import PeerId, PlanError
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.planner.answers.planning import make_plan
from shoal.planner.base.interface import PeerOffer

from ...broker.conftest import make_plan as plan_of
from ...broker.conftest import make_spec

FLOATS = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class Honest(nn.Module):
    """A first part with weights, and two layers behind it."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.head = first, nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.relu(self.layer(self.first(x)))), y)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


CASES: dict[str, tuple[nn.Module, Tensor, Callable[[Tensor, nn.Module], Tensor]]] = {
    "a table of positions": (Positions(), FLOATS, lambda sent, first: sent - first.table),
    "an embedding": (
        nn.Embedding(10, 6),
        IDS,
        lambda sent, first: torch.cdist(sent, first.weight.expand(2, 10, 6)).argmin(-1),
    ),
    "a scaling at each position": (
        nn.Conv1d(5, 5, 1, groups=5),
        FLOATS,
        lambda sent, first: (sent - first.bias[:, None]) / first.weight[:, :, 0],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_neighbour_who_knows_the_weights_would_read_the_data_and_gets_no_such_plan(
    name: str,
) -> None:
    first, x, undone = CASES[name]
    with torch.no_grad():
        found = undone(first(x), first)
    assert torch.allclose(found.float(), x.float(), atol=1e-4), "what would cross the link is x"

    graph = capture(Honest(first), {"x": x, "y": torch.zeros(2, 5, 4)}).graph
    linear = [i for i, op in enumerate(graph.operators) if "linear" in op.target]
    for cut, may in ((linear[0], False), (linear[0] + 1, True)):
        spec = make_spec()
        spec.plan.CopyFrom(plan_to_proto(plan_of("clinic", "stranger")))
        spec.plan.stages[0].stop = spec.plan.stages[1].start = cut
        spec.plan.stages[1].stop = len(graph.operators)
        offers = (
            PeerOffer(
                PeerId("clinic"),
                device_memory_bytes=1 << 20,
                manifests=((spec.data.hash, ("x",)),),
            ),
            PeerOffer(PeerId("stranger"), device_memory_bytes=1 << 20),
        )
        ask = MakePlan(RunId("r"), 1, spec, offers, None)
        if may:
            assert make_plan(ask, graph).local == ("x",)
            continue
        with pytest.raises(PlanError, match="lacks the data that must not leave its peer"):
            make_plan(ask, graph)


class Carried(nn.Module):
    """Ids that are looked up, and carried along past two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 4)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        h = h + self.one(h)
        return F.mse_loss(self.head(h + self.two(h)), y)


@pytest.mark.parametrize(
    ("owners", "add", "may"),
    [
        ((True, True), 1, True),  # behind the sum of rows and of what a layer made of them
        ((True, True), 0, False),  # in front of it, rows cross
        ((False, False), 1, False),
        ((True, False), 1, False),
    ],
)
def test_sums_leave_where_every_owner_lets_them_and_nowhere_else(
    owners: tuple[bool, bool], add: int, may: bool
) -> None:
    graph = capture(Carried(), {"x": IDS, "y": torch.zeros(2, 5, 4)}).graph
    first = next(i for i, op in enumerate(graph.operators) if "add" in op.target)
    spec, cut = make_spec(), first + add
    spec.plan.CopyFrom(plan_to_proto(plan_of("clinic", "stranger")))
    spec.plan.stages[0].stop = spec.plan.stages[1].start = cut
    spec.plan.stages[1].stop = len(graph.operators)
    has = spec.data.hash
    offers = (
        *(
            PeerOffer(
                PeerId(name),
                device_memory_bytes=1 << 20,
                manifests=((has, ("x",)),),
                blended=frozenset([has] if lets else []),
            )
            for name, lets in zip(("clinic", "clinic-2"), owners, strict=True)
        ),
        PeerOffer(PeerId("stranger"), device_memory_bytes=1 << 20),
    )
    ask = MakePlan(RunId("r"), 1, spec, offers, None)
    if may:
        assert make_plan(ask, graph).local == ("x",)
        return
    with pytest.raises(PlanError, match="lacks the data that must not leave its peer"):
        make_plan(ask, graph)
