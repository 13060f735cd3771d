"""Pipelines whose stages change places: cuts against all cuts, and what cannot be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from shoal.dag.analysis.blocks import blocks
from shoal.dag.capture.capture import capture
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId
from shoal.dag.plan.routes import swaps
from shoal.dag.schedule.flow import Flow
from shoal.examples.gpt import gpt
from shoal.planner.base.interface import NoPlan, PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import from_plan
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.schedulers import plan

LAYERS = 9


def captured(module: nn.Module, *, labels: bool = True) -> Graph:
    text = torch.zeros(2, 8, dtype=torch.int64)
    return capture(module, {"x": text, "y": text} if labels else {"x": text.float()}).graph


@cache
def nine_blocks() -> Graph:
    return captured(gpt(LAYERS, 16, 1, 8, 0.0))


def request_of(
    speeds: list[float], graph: Graph | None = None, memory: int = 1 << 30, **options: object
) -> PlanRequest:
    offers = tuple(
        PeerOffer(PeerId(f"p{i}"), f"h{i}", device_memory_bytes=memory, flops_per_s=s)
        for i, s in enumerate(speeds)
    )
    asked = PlannerOptions(swaps=True, scheduler="uniform", **options)  # type: ignore[arg-type]
    return PlanRequest((graph or nine_blocks()).bind(2), offers, 5, 2, 1, asked)


@pytest.mark.parametrize("speeds", [[1e9, 2e9, 1e9, 4e9], [3e9, 1e9, 2e9, 2e9, 1e9], [1e9] * 6])
def test_no_other_way_with_equal_pairs_is_much_faster(speeds: list[float]) -> None:
    """The oracle judges every way to share the blocks out, with the peers in this order. Of nine
    over four peers no way gives both pairs equal numbers: then they differ by one."""
    request = request_of(speeds)
    found, judge = plan(request), CostModel(request)
    starts = [b.start for b in blocks(request.graph) if b.name.startswith("blocks.")]
    stop = next(b.stop for b in blocks(request.graph) if b.name == f"blocks.{LAYERS - 1}")
    candidate = from_plan(found.plan, {o.peer: i for i, o in enumerate(request.offers)})
    n = len(found.plan.stages) - 2

    def odd(shared: tuple[int, ...]) -> int:
        return abs(shared[0] - shared[1]) + abs(shared[-1] - shared[-2])

    def seconds(shared: tuple[int, ...]) -> float:
        cuts = [*starts, stop]
        inner = [cuts[i] for i in itertools.accumulate(shared, initial=0)]
        at = dict(zip([s.start for s in found.plan.stages], [0, *inner], strict=True))
        at[judge.operators] = judge.operators
        moved = tuple(
            tuple(replace(s, start=at[s.start], stop=at[s.stop]) for s in pipeline)
            for pipeline in candidate.pipelines
        )
        return judge.seconds(replace(candidate, pipelines=moved))

    bounds = [(s.start, s.stop) for s in found.plan.stages[1:-1]]
    counts = tuple(sum(a <= start < b for start in starts) for a, b in bounds)
    ways = [w for w in itertools.product(range(1, LAYERS), repeat=n) if sum(w) == LAYERS]
    least = min(map(odd, ways))
    assert odd(counts) == least
    assert seconds(counts) == pytest.approx(found.report.predicted.step_s)
    assert seconds(counts) <= 1.02 * min(seconds(w) for w in ways if odd(w) == least)


def test_who_has_what_and_which_way_microbatches_go() -> None:
    request = request_of([1e9] * 5)
    found = plan(request)
    assert swaps(found.plan) == ((1, 2), (4, 5))
    a, b, *_, y, z = (s.holders[0] for s in found.plan.stages[1:-1])
    assert (found.plan.stages[0].holders, found.plan.stages[-1].holders) == ((a, b), (z, y))
    orders = [[v.stage for v in route] for route in found.plan.routes]
    assert orders == [[0, 2, 1, 3, 5, 4, 6] if m % 2 else [*range(7)] for m in range(5)]
    assert [route[0].peer for route in found.plan.routes] == [a, b, a, b, a]
    assert [[v.stage for v in route] for route in found.plan.evaluation_routes] == [[*range(7)]]
    assert found.report.predicted.step_s > 0
    assert "change places in every second microbatch" in found.report.reasons[0]
    stages = cut(request.graph, [(s.start, s.stop) for s in found.plan.stages])
    Flow(found.plan, stages, tied_groups(request.graph, stages))  # raises where it cannot be
    place = {o.peer: i for i, o in enumerate(request.offers)}
    candidate = from_plan(found.plan, place)
    assert candidate.swaps
    assert CostModel(request).seconds(candidate) == pytest.approx(found.report.predicted.step_s)


def test_a_smaller_pool_is_refused_so_that_more_peers_heal_it() -> None:
    with pytest.raises(NoPlan, match="3 peers are there: expected 4 or more") as refused:
        plan(request_of([1e9] * 3))
    assert refused.value.code == "peers"
    with pytest.raises(NoPlan) as refused:
        plan(request_of([1e9] * 4, memory=20_000))
    assert refused.value.code == "memory"


def test_with_less_memory_stages_compute_their_forward_again() -> None:
    plenty = request_of([1e9] * 4)
    needs = max(p.device_bytes for p in plan(plenty).report.predicted.peers)
    found = plan(request_of([1e9] * 4, memory=needs - 1))
    assert [s.recompute for s in found.plan.stages] == [False, True, True, True, True, False]
    with pytest.raises(NoPlan, match="do not fit"):
        plan(request_of([1e9] * 4, memory=needs - 1, recompute=False))
    asked = plan(replace(plenty, options=replace(plenty.options, recompute=True)))
    assert [s.recompute for s in asked.plan.stages] == [False, True, True, True, True, False]


def test_a_model_without_a_row_of_blocks_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.tanh(self.one(x))).square().mean()

    with pytest.raises(NoPlan, match="expected 4 repeated blocks or more") as refused:
        plan(request_of([1e9] * 4, captured(Flat(), labels=False)))
    assert refused.value.code == "model"
    alone = replace(request_of([1e9] * 4), microbatches=1)
    with pytest.raises(NoPlan, match="two microbatches"):
        plan(alone)
