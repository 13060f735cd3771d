"""The baselines: shares, memory, spares, and what they say when something is short."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.dag.cost.cost import cost, stage_cost
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.planner.base.interface import NoPlan, PeerOffer, Planner, PlannerOptions, PlanRequest
from shoal.planner.baselines.baselines import SLACK, equal_compute, uniform
from shoal.planner.cost.cost_model import CostModel

GIB = 2**30


def flops(graph: Graph, start: int, stop: int) -> float:
    """Of a microbatch, forward and backward."""
    part = stage_cost(cost(graph), start, stop)
    return part.forward.flops + part.backward.flops


def chain_graph(layers: int, width: int = 8, wide_at: int = -1) -> Graph:
    """linear, relu, linear, relu, …, then a sum as the loss; the layer `wide_at` is wider."""
    operators: list[Operator] = []
    parameters: list[Parameter] = []
    value, size = "in:x", width
    for i in range(layers):
        out = 16 * width if i == wide_at else width
        parameters.append(Parameter(f"w{i}", TensorSpec((out, size), "float32")))
        spec = TensorSpec((4, out), "float32")
        args = (Ref(value), Ref(f"param:w{i}"))
        operators.append(
            Operator(f"linear{i}", "aten.linear.default", args, (), (Output(spec, True),))
        )
        operators.append(
            Operator(
                f"relu{i}", "aten.relu.default", (Ref(f"linear{i}"),), (), (Output(spec, True),)
            )
        )
        value, size = f"relu{i}", out
    scalar = Output(TensorSpec((), "float32"), True)
    operators.append(Operator("loss", "aten.sum.default", (Ref(value),), (), (scalar,)))
    return Graph(
        inputs=(Input("x", TensorSpec((4, width), "float32")),),
        parameters=tuple(parameters),
        buffers=(),
        operators=tuple(operators),
        loss="loss",
        batch=4,
    )


def offers(*memory: int, speed: float = 0.0) -> tuple[PeerOffer, ...]:
    return tuple(
        PeerOffer(f"p{i}", f"p{i}", device_memory_bytes=m, flops_per_s=speed)
        for i, m in enumerate(memory)
    )


def request(graph: Graph, peers: tuple[PeerOffer, ...], **options: object) -> PlanRequest:
    return PlanRequest(graph, peers, 4, 4, 2, PlannerOptions(**options))


def test_uniform_gives_every_peer_equally_many_operators_in_the_order_of_joining() -> None:
    graph = chain_graph(16, width=32)
    made = uniform(request(graph, offers(GIB, GIB, GIB, GIB)))
    assert made.plan.validate(len(graph.operators)).peers == ("p0", "p1", "p2", "p3")
    assert [s.stop - s.start for s in made.plan.stages] == [8, 9, 8, 8]
    assert "equal operators: 4 stages of 8 to 9 operators" in made.report.reasons[0]
    assert len(made.plan.routes) == 4
    assert len(made.plan.evaluation_routes) == 2
    assert made.report.predicted.step_s > 0


@pytest.mark.parametrize("planner", [uniform, equal_compute])
def test_one_stage_is_with_a_peer_that_has_the_data_which_stays(planner: Planner) -> None:
    """As of a host that came back to its client, beside peers that have no data and more memory."""
    asked = request(chain_graph(2), offers(2 * GIB, GIB, 2 * GIB), stages=1)
    asked = dataclasses.replace(asked, local=("x",), holders=frozenset({"p1"}))
    assert planner(asked).plan.peers == ("p1",)


def test_uniform_knows_neither_speeds_nor_links() -> None:
    graph = chain_graph(6)
    peers = tuple(
        dataclasses.replace(o, flops_per_s=s)
        for o, s in zip(offers(GIB, GIB), (1e9, 1e12), strict=True)
    )
    made, fair = uniform(request(graph, peers)), equal_compute(request(graph, peers))
    assert [s.stop - s.start for s in made.plan.stages] == [7, 6]
    assert fair.plan.stages[0].stop <= 3


def test_compute_is_shared_in_proportion_to_speed() -> None:
    graph = chain_graph(40, width=32)
    peers = tuple(
        dataclasses.replace(o, flops_per_s=s)
        for o, s in zip(offers(GIB, GIB, GIB), (1e9, 3e9, 6e9), strict=True)
    )
    made = equal_compute(request(graph, peers))
    shares = [flops(graph, s.start, s.stop) / flops(graph, 0, 81) for s in made.plan.stages]
    assert shares == pytest.approx([0.1, 0.3, 0.6], abs=0.05)


@pytest.mark.parametrize("planner", [uniform, equal_compute])
def test_options_are_kept(planner: Planner) -> None:
    graph = chain_graph(8)
    peers = offers(*[GIB] * 4)
    made = planner(request(graph, peers, stages=4, schedule="interleaved"))
    assert made.plan.schedule == "interleaved"
    assert [s.holders for s in made.plan.stages] == [("p0",), ("p1",), ("p0",), ("p1",)]
    made = planner(request(graph, peers, pipelines=2, schedule="gpipe", recompute=True))
    assert made.plan.schedule == "gpipe"
    assert [s.recompute for s in made.plan.stages] == [True, True]
    assert len({route for route in made.plan.routes}) == 2


@pytest.mark.parametrize("planner", [uniform, equal_compute])
def test_forwards_are_computed_again_only_where_nothing_fits_without(planner: Planner) -> None:
    graph = chain_graph(8, width=64)
    judge = CostModel(request(graph, offers(GIB)))
    with_everything, least = (judge.stage_bytes(0, 17, 4, recompute=r) for r in (False, True))
    one = request(graph, offers(with_everything), schedule="gpipe")
    assert not planner(one).plan.stages[0].recompute
    one = request(graph, offers((with_everything + least) // 2), schedule="gpipe")
    assert planner(one).plan.stages[0].recompute
    with pytest.raises(NoPlan):
        planner(
            request(
                graph, offers((with_everything + least) // 2), recompute=False, schedule="gpipe"
            )
        )


def test_every_peer_gets_about_the_same_flops_in_the_order_of_joining() -> None:
    graph = chain_graph(16, width=32)
    made = equal_compute(request(graph, offers(GIB, GIB, GIB, GIB)))
    assert made.plan.validate(len(graph.operators)).peers == ("p0", "p1", "p2", "p3")
    shares = [flops(graph, s.start, s.stop) / flops(graph, 0, 33) for s in made.plan.stages]
    assert max(shares) < 0.25 * (1 + SLACK) + 0.02
    assert len(made.plan.routes) == 4
    assert len(made.plan.evaluation_routes) == 2
    assert "equal compute: 4 stages" in made.report.reasons[0]


def test_one_peer_holds_everything() -> None:
    made = equal_compute(request(chain_graph(2), offers(GIB)))
    assert [(s.start, s.stop, s.holders) for s in made.plan.stages] == [(0, 5, ("p0",))]


def test_pipelines_share_the_microbatches() -> None:
    made = equal_compute(request(chain_graph(4), offers(*[GIB] * 5), pipelines=2))
    assert [s.holders for s in made.plan.stages] == [("p0", "p2"), ("p1", "p3")]
    assert [route[0].peer for route in made.plan.routes] == ["p0", "p2", "p0", "p2"]
    assert [s.peer for s in made.report.spares] == ["p4"]


def test_predictions_come_from_the_judge() -> None:
    asked = request(chain_graph(4), offers(GIB, GIB, speed=1e6))
    made = equal_compute(asked)
    slowest = max(p.compute_s for p in made.report.predicted.peers)
    assert slowest < made.report.predicted.step_s < 5 * slowest
    assert all(0 < p.device_bytes <= GIB and 0 < p.bubble < 1 for p in made.report.predicted.peers)
    assert {(link.source, link.destination) for link in made.report.predicted.links} == {
        ("p0", "p1"),
        ("p1", "p0"),
    }
    assert made.report.predicted.bottlenecks


def test_memory_moves_the_cut_away_from_equal_compute() -> None:
    graph = chain_graph(8, width=64)
    small = CostModel(request(graph, offers(GIB))).stage_bytes(0, 4, 2)
    made = equal_compute(request(graph, offers(small, GIB)))
    assert made.plan.stages[0].stop <= 5
    assert made.report.predicted.peers[0].device_bytes <= small


def test_a_peer_that_is_too_small_becomes_a_spare_with_its_reason() -> None:
    made = equal_compute(request(chain_graph(4), offers(GIB, 10, GIB)))
    assert made.plan.peers == ("p0", "p2")
    assert [s.peer for s in made.report.spares] == ["p1"]
    assert "its memory (10 B)" in made.report.spares[0].reason


def test_more_peers_than_operators_leaves_spares() -> None:
    made = equal_compute(request(chain_graph(1), offers(*[GIB] * 5)))
    assert made.plan.peers == ("p0", "p1", "p2")
    assert made.report.spares[0].reason == "more peers (5) than operators (3)"


def test_more_stages_than_operators_is_an_error_of_the_job() -> None:
    with pytest.raises(NoPlan, match=r"^6 stages for a graph of 5 operators") as caught:
        equal_compute(request(chain_graph(2), offers(*[GIB] * 6), stages=6))
    assert caught.value.code == "model"


def test_too_few_peers_for_the_stages() -> None:
    with pytest.raises(NoPlan, match="3 peers are needed, 2 are on offer") as caught:
        equal_compute(request(chain_graph(2), offers(GIB, GIB), stages=3))
    assert caught.value.code == "peers"


def test_fixed_stages_take_the_first_peers_or_the_ones_with_most_memory() -> None:
    made = equal_compute(request(chain_graph(4), offers(GIB, GIB, GIB), stages=2))
    assert made.plan.peers == ("p0", "p1")
    made = equal_compute(request(chain_graph(4), offers(10, GIB, GIB), stages=2))
    assert made.plan.peers == ("p1", "p2")
    assert made.report.spares[0].reason == "the job asks for 2 stages"


def test_an_operator_that_fits_nowhere_is_named_with_what_is_short() -> None:
    graph = chain_graph(3, width=64, wide_at=1)
    with pytest.raises(NoPlan, match=r"operator linear1.*short by") as caught:
        equal_compute(request(graph, offers(200_000, 200_000)))
    assert caught.value.code == "memory"


def test_a_model_that_is_too_large_for_all_together_says_by_how_much() -> None:
    graph = chain_graph(12, width=64)
    with pytest.raises(NoPlan, match=r"needs .* more: the model needs .* offer"):
        equal_compute(request(graph, offers(100_000, 100_000)))


def test_a_frozen_parameter_costs_its_weight_only() -> None:
    graph = chain_graph(2, width=64)
    frozen = tuple(dataclasses.replace(p, trainable=False) for p in graph.parameters[:1])
    cold = dataclasses.replace(graph, parameters=frozen + graph.parameters[1:])
    warm, less = (CostModel(request(g, offers(GIB))).stage_bytes(0, 1, 1) for g in (graph, cold))
    less = warm - less
    assert less >= 3 * 64 * 64 * 4
