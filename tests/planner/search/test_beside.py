"""Plans for data that stays with its peers: nobody else ever reads it, and they are good plans."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.broker.events import MakePlan, RunId
from shoal.dag.analysis.beside import beside_data
from shoal.dag.capture.capture import capture
from shoal.dag.ir.graph import Input, Operator, Ref, TensorSpec
from shoal.dag.plan.plan import PeerId, Plan, PlanError
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.planner.answers.planning import make_plan
from shoal.planner.base.interface import NoPlan, PeerOffer, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.schedulers import PLANNERS, plan
from shoal.tests.planner.cases import random_case

LABELS = TensorSpec((1,), "float32")


def product(op: Operator) -> Operator:
    *data, weight = op.args
    if not any(read.startswith("param:") for read in op.reads):
        return op
    return replace(op, target="aten.matmul.default", args=(data[0], weight, *data[1:]))


def request_of(seed: int, local: tuple[str, ...], holders: int = 1, **size: int) -> PlanRequest:
    """A random case whose last operator reads labels, and whose operators with weights are products
    of what they read first."""
    request, rng = random_case(seed, held=False, **size), random.Random(seed)
    graph = request.graph
    parameters = tuple(  # of as many bytes
        replace(p, spec=TensorSpec((*p.spec.shape, 2), "bfloat16")) for p in graph.parameters
    )
    *before, last = map(product, graph.operators)
    last = replace(last, args=(*last.args, Ref("in:y")))
    graph = replace(
        graph,
        inputs=(*graph.inputs, Input("y", LABELS)),
        parameters=parameters,
        operators=(*before, last),
    )
    peers = [o.peer for o in request.offers]
    has = frozenset(rng.sample(peers, min(holders, len(peers))))
    return replace(request, graph=graph, local=local, holders=has, others=())


def readers(request: PlanRequest, made: Plan) -> set[str]:
    """Who holds an operator that must run beside the data."""
    return {
        peer
        for i in request.beside
        for stage in made.plan.stages
        if stage.start <= i < stage.stop
        for peer in stage.holders
    }


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    local=st.sampled_from([("x",), ("y",), ("x", "y")]),
    holders=st.integers(1, 3),
    scheduler=st.sampled_from(sorted(PLANNERS)),
)
def test_no_planner_gives_the_data_to_anybody_else(
    seed: int, local: tuple[str, ...], holders: int, scheduler: str
) -> None:
    request = request_of(seed, local, holders, operators=6, peers=4)
    options = replace(request.options, scheduler=scheduler)
    try:
        made = plan(replace(request, options=options))
    except NoPlan:
        return
    assert request.beside
    assert readers(request, made) <= request.holders


def best_of_all(judge: CostModel) -> float:
    """Every way to give each operator to a peer, in one pipeline."""
    best, m = math.inf, judge.request.microbatches
    for given_to in itertools.product(range(len(judge.offers)), repeat=judge.operators):
        shares, start = [], 0
        for stop in range(1, judge.operators + 1):
            if stop == judge.operators or given_to[stop] != given_to[start]:
                shares.append(StageShare(given_to[start], start, stop))
                start = stop
        best = min(best, judge.seconds(Candidate((tuple(shares),), (m,), "gpipe")))
    return best


@pytest.mark.parametrize("seed", [1, 6, 12, 23])
@pytest.mark.parametrize("local", [("x",), ("x", "y")])
def test_auto_finds_a_plan_where_there_is_one_and_a_good_one(
    seed: int, local: tuple[str, ...]
) -> None:
    request = request_of(seed, local, operators=5, peers=3)
    options = replace(request.options, pipelines=1, schedule="gpipe", recompute=False)
    request = replace(request, options=options)
    best = best_of_all(CostModel(request))
    if best == math.inf:
        with pytest.raises(NoPlan):
            plan(request)
        return
    made = plan(request)
    assert made.report.predicted.step_s <= 1.05 * best
    assert readers(request, made) <= request.holders


def test_a_holder_with_too_little_memory_is_named_with_what_is_short() -> None:
    request = request_of(3, ("x",))
    (holder,) = request.holders
    offers = tuple(
        replace(o, device_memory_bytes=10 if o.peer == holder else 2**40) for o in request.offers
    )
    with pytest.raises(NoPlan, match=r"needs .* more on a peer with the data: .* 10 B is") as short:
        plan(replace(request, offers=offers))
    assert short.value.code == "memory"
    assert short.value.short_bytes > 0


def test_a_peer_without_the_data_is_told_apart_from_one_without_memory() -> None:
    request = request_of(3, ("x", "y"), operators=4)
    made = plan(request)
    assert {s.peer for s in made.report.spares} | set(made.plan.peers) == {
        o.peer for o in request.offers
    }
    assert not any("too little memory" in s.reason for s in made.report.spares)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.relu(self.first(x))), y)


def test_a_plan_by_hand_gives_the_data_to_nobody_whatever_the_spec_claims(world) -> None:
    """A submitter who says nothing of data that stays, and has it read by a peer of their own."""
    module = Regression()
    graph = capture(module, {"x": torch.zeros(2, 4), "y": torch.zeros(2, 2)}).graph
    cut = max(beside_data(graph, ("x",))) + 1
    assert cut < len(graph.operators)
    for owner, stranger in (("a", "b"), ("b", "a")):
        spec = world.spec()
        spec.plan.CopyFrom(plan_to_proto(world.plan("a", "b")))
        spec.plan.stages[0].stop = spec.plan.stages[1].start = cut
        spec.plan.stages[1].stop = len(graph.operators)
        kept = ((spec.data.hash, ("x",)),)
        offers = (
            PeerOffer(PeerId(owner), device_memory_bytes=2**30, manifests=kept),
            PeerOffer(PeerId(stranger), device_memory_bytes=2**30),
        )
        ask = MakePlan(RunId("r"), 1, spec, offers, None)
        if owner == "a":
            assert make_plan(ask, graph).local == ("x",)
            continue
        with pytest.raises(PlanError, match="lacks the data that must not leave its peer"):
            make_plan(ask, graph)
