"""Planning for many peers and operators, by counts: the seconds are in
benchmarks/planning/scale.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.dag.cost.cost import OperatorCost
from shoal.dag.cost.network import Network
from shoal.dag.cost.speed import Work
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId
from shoal.dag.schedule.flow import Flow
from shoal.planner.base.interface import PeerOffer, PlanRequest
from shoal.planner.baselines.op_fence import op_fence
from shoal.planner.cost.batchings import look_at_forms
from shoal.planner.schedulers.auto import auto
from shoal.tests.dag.schedule.checker import check

GIB = 2**30
ROOM = 2 * GIB
PARAMETER = TensorSpec((2048, 2048), "float32")
VALUE = TensorSpec((4, 2**18), "float32")


def chain_of(operators: int) -> tuple[Graph, tuple[OperatorCost, ...]]:
    """Linears with a parameter of 16 MiB each and results of 4 MiB, then the loss."""
    names = ["in:x", *(f"linear{i}" for i in range(operators - 1)), "loss"]
    scalar = TensorSpec((), "float32")
    found, costs = [], []
    for i in range(operators):
        loss = i == operators - 1
        spec = scalar if loss else VALUE
        reads = () if loss else (f"param:w{i}",)
        target = "aten.sum.default" if loss else "aten.linear.default"
        args = tuple(Ref(v) for v in (names[i], *reads))
        found.append(Operator(names[i + 1], target, args, (), (Output(spec, True),)))
        work = Work(product=1e9 * (1 + i % 3), memory=1e6, calls=1)
        size = PARAMETER.size_bytes
        costs.append(
            OperatorCost(
                work,
                work + work,
                0 if loss else size,
                spec.size_bytes,
                tuple((v, size) for v in reads),
                ((i, spec.size_bytes),),
                ((i, spec.size_bytes),),
                spec.size_bytes,
                spec.size_bytes,
            )
        )
    parameters = tuple(Parameter(f"w{i}", PARAMETER) for i in range(operators - 1))
    graph = Graph((Input("x", VALUE),), parameters, (), tuple(found), "loss", batch=4)
    return graph, tuple(costs)


def clusters_of(peers: int, seed: int) -> tuple[tuple[PeerOffer, ...], Network]:
    rng = np.random.default_rng(seed)
    at = rng.integers(0, max(1, peers // 12), peers)
    together = at[:, None] == at[None, :]
    bandwidth = np.exp(rng.normal(np.log(np.where(together, 500e6, 10e6)), 0.5))
    names = tuple(PeerId(f"p{i}") for i in range(peers))
    end = np.exp(rng.normal(np.log(300e6), 0.5, peers))
    network = Network(names, np.where(together, 5e-4, 0.04), bandwidth, end, end.copy())
    offers = tuple(
        PeerOffer(p, p, device_memory_bytes=ROOM, flops_per_s=float(s))
        for p, s in zip(names, np.exp(rng.normal(np.log(1e12), 0.6, peers)), strict=True)
    )
    return offers, network


@pytest.mark.slow
def test_a_hundred_peers_and_three_hundred_operators() -> None:
    graph, costs = chain_of(300)
    offers, network = clusters_of(100, seed=3)
    request = PlanRequest(graph, offers, 16, 4, links=network, known_costs=costs)
    made = auto(request)
    # 300 · 16 MiB · 4 (weight, gradient, two slots) do not fit into fewer than ten peers.
    assert len(made.plan.peers) >= 10
    assert all(0 < p.device_bytes <= ROOM for p in made.report.predicted.peers)
    stages = cut(graph, [(s.start, s.stop) for s in made.plan.stages])
    tied = tied_groups(graph, stages)
    flow = Flow(made.plan, stages, tied)
    check(made.plan, stages, tied, {peer: flow.actions(peer) for peer in made.plan.peers})
    assert len(made.plan.routes) == 16
    assert {s.peer for s in made.report.spares} == {o.peer for o in offers} - set(made.plan.peers)
    assert made.report.predicted.step_s <= op_fence(request).report.predicted.step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("seconds", "looked"),
    [
        ({1: 9.0, 2: 8.0, 4: 5.0, 8: 7.0, 16: 6.0}, [4, 2, 8]),
        ({1: 9.0, 2: 3.0, 4: 5.0, 8: 7.0, 16: 6.0}, [4, 2, 8, 1]),
        ({1: 9.0, 2: 3.0, 4: np.inf, 8: np.inf, 16: np.inf}, [4, 2, 1]),
        ({1: np.inf, 2: np.inf, 4: np.inf, 8: np.inf, 16: np.inf}, [4, 2, 1, 8, 16]),
    ],
)
def test_sizes_are_looked_at_down_the_valley(seconds: dict[int, float], looked: list[int]) -> None:
    graph, costs = chain_of(3)
    offers, network = clusters_of(2, seed=0)
    forms = {
        size: PlanRequest(graph, offers, 16 // size, size, links=network, known_costs=costs)
        for size in seconds
    }
    found: list[int] = []

    def look(form: PlanRequest) -> float:
        found.append(form.microbatch_size)
        return seconds[form.microbatch_size]

    others = tuple(form for size, form in forms.items() if size != 4)
    look_at_forms(replace(forms[4], others=others), look)
    assert found == looked
