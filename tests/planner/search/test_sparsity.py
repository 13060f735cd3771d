"""A stage sends as much of its gradients as costs no time by the event calculation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.dag.cost.speed import Speeds
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.strategies import parse_strategy
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.search.sparsity import FREE, with_ratios

from .test_collectives import network

MOST = 1000.0


def two_stages(speed: float, rate: float, strategy: str) -> tuple[CostModel, Candidate]:
    """Two pipelines of two stages with a million trained numbers each; only the first one's
    gradients are worth waiting for."""
    row, one = TensorSpec((2,), "float32"), TensorSpec((), "float32")
    weight = TensorSpec((1_000_000,), "float32")

    def op(name: str, target: str, *args: str) -> Operator:
        spec = one if "mean" in target else row
        return Operator(name, target, tuple(map(Ref, args)), (), (Output(spec, True),))

    ops = (
        op("w", "aten.mean.default", "param:p"),
        op("a", "aten.add.Tensor", "in:x", "w"),
        op("v", "aten.mean.default", "param:q"),
        op("b", "aten.add.Tensor", "a", "v"),
    )
    parameters = (Parameter("p", weight), Parameter("q", weight))
    graph = Graph((Input("x", row),), parameters, (), ops, "b").bind(2)
    links = network([rate] * 4)
    offers = tuple(
        PeerOffer(p, device_memory_bytes=1 << 34, speeds=Speeds.of_flops(speed))
        for p in links.peers
    )
    options = PlannerOptions(strategy=strategy)
    judge = CostModel(PlanRequest(graph, offers, 4, 2, options=options, links=links))
    pipelines = tuple((StageShare(i, 0, 2), StageShare(i + 2, 2, 4)) for i in range(2))
    return judge, Candidate(pipelines, (2, 2))


@pytest.mark.parametrize("speed", [1e8, 1e10])
@pytest.mark.parametrize("rate", [1e5, 1e7, 1e9, 1e12])
def test_ratios_are_the_smallest_that_cost_no_time(speed: float, rate: float) -> None:
    judge, candidate = two_stages(speed, rate, f"lags:ratio={MOST}")
    found = with_ratios(judge, candidate)
    least = judge.seconds(replace(candidate, ratios=(MOST, MOST)))
    assert judge.seconds(found) <= FREE * least
    for stage, ratio in enumerate(found.ratios):
        assert 1 <= ratio <= MOST
        less = [*found.ratios]
        less[stage] = ratio / 1.2
        if ratio >= 1.2:  # the greedy choice goes from the last stage to the first
            assert judge.seconds(replace(found, ratios=tuple(less))) > least
    plan = judge.plan(found).plan
    named = [parse_strategy(e.strategy).options["ratio"] for e in plan.exchanges]
    assert named == pytest.approx(found.ratios)


def test_what_is_sent_hangs_on_the_link() -> None:
    """Behind a fast one much goes, behind a slow one no more than the job says; and the last stage,
    whose gradients are there first, never less than the first."""
    first, last = zip(
        *(with_ratios(*two_stages(1e9, rate, f"lags:ratio={MOST}")).ratios for rate in RATES),
        strict=True,
    )
    assert list(last) == sorted(last, reverse=True)
    assert last[-1] < 10 < 100 < last[0]
    assert first[0] == MOST
    assert all(b <= a for a, b in zip(first, last, strict=True))


RATES = (1e5, 1e6, 1e7, 1e8, 1e11)


def test_a_strategy_without_ratios_keeps_its_candidate() -> None:
    judge, candidate = two_stages(1e9, 1e7, "gtopk:ratio=100")
    assert with_ratios(judge, candidate) is candidate
