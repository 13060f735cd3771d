"""Requests for plans whose step times are recorded: DT-FM's five cases, the testbeds with three
published models, and synthetic peers by the hundred."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from shoal.benchmarks.planning import scale, testbeds
from shoal.benchmarks.planning.graphs import graph_of
from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import OperatorCost, cost
from shoal.dag.ir.graph import Graph
from shoal.examples.gpt import gpt
from shoal.planner.base.interface import PlannerOptions, PlanRequest
from shoal.sim.scenario.scenario import SCENARIOS, Scenario

Known = tuple[Graph, tuple[OperatorCost, ...]]

DTFM = (
    *("dtfm-0-datacenter", "dtfm-1-spot", "dtfm-2-universities"),
    *("dtfm-3-regional", "dtfm-4-worldwide"),
)


@cache
def _byte_gpt() -> Known:
    """The model of the scenarios of DT-FM, as `job_overrides` there has it."""
    with torch.device("meta"):
        module = gpt(8, 256, 8, 128, 0.0)
    text = torch.zeros(4, 128, dtype=torch.int64, device="meta")
    graph = capture(module, {"x": text, "y": text}).graph.bind(4)
    return graph, cost(graph)


@cache
def _published(model: str) -> Known:
    graph = graph_of(model).bind(testbeds.BATCH[model][1])
    return graph, cost(graph)


def _dtfm(name: str) -> PlanRequest:
    """64 cards, 64 microbatches of 4; the planner is free to choose stages and pipelines."""
    scenario, (graph, costs) = Scenario.from_toml(SCENARIOS / f"{name}.toml"), _byte_gpt()
    return PlanRequest(
        graph,
        scenario.offers(),
        64,
        4,
        options=PlannerOptions(),
        links=scenario.network(),
        known_costs=costs,
    )


def _testbed(size: int, model: str) -> PlanRequest:
    scenario = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
    return testbeds.request_of(scenario, model, _published(model))


def _synthetic(peers: int, operators: int) -> PlanRequest:
    return scale.request_of(peers, scale.graph_of(operators))


CASES: dict[str, Callable[[], PlanRequest]] = {
    **{name: partial(_dtfm, name) for name in DTFM},
    **{
        f"testbed-{size} {model}": partial(_testbed, size, model)
        for size in (8, 24, 48)
        for model in testbeds.BATCH
    },
    "synthetic-24": partial(_synthetic, 24, 150),
    "synthetic-200": partial(_synthetic, 200, 500),
}
