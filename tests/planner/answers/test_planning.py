"""From a MakePlan and the bytes of a graph to the event that answers it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.events import ConsiderPlan, MakePlan, PlanFailed, PlanReady, RunId
from shoal.dag.cost.network import Network, uniform
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, Size, TensorSpec
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.planner.answers.planning import answer, consider, frame_pairs
from shoal.planner.base.interface import PeerOffer
from shoal.planner.schedulers.coded import UNCOMPRESSED

SHAPE = TensorSpec((Size(1), 3), "float32")


def op(name: str, target: str, *reads: str, spec: TensorSpec = SHAPE) -> Operator:
    return Operator(name, target, tuple(Ref(r) for r in reads), (), (Output(spec, True),))


def make_graph() -> Graph:
    """in:x -> a -> b -> c -> d = c + a -> loss; a skips from the first operator to the fourth."""
    return Graph(
        inputs=(Input("x", SHAPE),),
        parameters=(Parameter("w", TensorSpec((3, 3), "float32")),),
        buffers=(),
        operators=(
            op("a", "aten.linear.default", "in:x", "param:w"),
            op("b", "aten.relu.default", "a"),
            op("c", "aten.relu.default", "b"),
            op("d", "aten.add.Tensor", "c", "a"),
            op("loss", "aten.sum.default", "d", spec=TensorSpec((), "float32")),
        ),
        loss="loss",
    )


def offers(*names: str) -> tuple[PeerOffer, ...]:
    return tuple(PeerOffer(PeerId(f"id-{n}"), n, device_memory_bytes=2**30) for n in names)


def by_hand(world, *stages: tuple[int, int, str]):
    spec = world.spec()
    spec.plan.microbatch_size, spec.plan.schedule = 2, "gpipe"
    for start, stop, peer in stages:
        spec.plan.stages.add(start=start, stop=stop, holders=[peer])
    for _ in range(2):
        route = spec.plan.routes.add()
        for i, (_, _, peer) in enumerate(stages):
            route.visits.add(stage=i, peer=peer)
    return spec


def test_a_plan_is_made_with_the_pairs_that_exchange_frames(world) -> None:
    spec = world.spec(plan={"scheduler": "uniform"})
    ask = MakePlan(RunId("r"), 7, spec, offers("one", "two"))
    ready = answer(ask, graph_to_bytes(make_graph()))
    assert isinstance(ready, PlanReady)
    assert (ready.replica, ready.version) == ("r", 7)
    assert ready.plan.peers == ("id-one", "id-two")
    assert ready.pairs == (("id-one", "id-two"),)
    assert ready.plan.evaluation_routes == ()


def test_pairs_leave_out_peers_that_have_nothing_to_say_to_each_other() -> None:
    peers = [PeerId(p) for p in "pqrs"]
    slots = tuple(StageSlot(i, i + 1, (p,)) for i, p in enumerate(peers[:3]))
    slots = (*slots, StageSlot(3, 5, (peers[3],)))
    route = tuple(Visit(i, p) for i, p in enumerate(peers))
    pairs = frame_pairs(make_graph().bind(2), Plan(slots, (route,) * 3, 2))
    # The hub is s; a goes from p to s; q and r are neighbours; p and r never meet.
    assert pairs == (("p", "q"), ("p", "s"), ("q", "r"), ("q", "s"), ("r", "s"))


def test_a_hand_written_plan_is_used_as_it_is_with_names_as_ids(world) -> None:
    spec = by_hand(world, (0, 2, "two"), (2, 5, "id-one"))
    ready = answer(
        MakePlan(RunId("r"), 1, spec, offers("one", "two")), graph_to_bytes(make_graph())
    )
    assert isinstance(ready, PlanReady)
    assert [(s.start, s.stop, s.holders) for s in ready.plan.stages] == [
        (0, 2, ("id-two",)),
        (2, 5, ("id-one",)),
    ]
    assert [v.peer for v in ready.plan.routes[0]] == ["id-two", "id-one"]
    assert ready.plan.schedule == "gpipe"


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (((0, 4, "one"),), "the stages cover 4 operators, the graph has 5"),
        (((0, 6, "one"),), "the stages cover 6 operators, the graph has 5"),
        (((1, 5, "one"),), "expected a non-empty interval that starts at 0"),
        (((0, 5, "ghost"),), "peer ghost is not among"),
    ],
)
def test_a_hand_written_plan_that_breaks_a_rule_says_which(world, stages, text) -> None:
    failed = answer(
        MakePlan(RunId("r"), 1, by_hand(world, *stages), offers("one")),
        graph_to_bytes(make_graph()),
    )
    assert isinstance(failed, PlanFailed)
    assert failed.code == "plan"
    assert text in failed.reason


def test_a_planner_s_refusal_becomes_its_code_and_reason(world) -> None:
    small = (PeerOffer(PeerId("p"), "p", device_memory_bytes=5),)
    failed = answer(MakePlan(RunId("r"), 1, world.spec(), small), graph_to_bytes(make_graph()))
    assert isinstance(failed, PlanFailed)
    assert failed.code == "memory"
    assert "short by" in failed.reason


@settings(max_examples=60)
@given(data=st.data())
def test_bytes_that_are_no_graph_are_a_failed_plan(data) -> None:
    valid = bytearray(graph_to_bytes(make_graph()))
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(valid) - 1), st.integers(0, 255)), max_size=5)
    ):
        valid[at] = value
    content = data.draw(st.sampled_from([bytes(valid), data.draw(st.binary(max_size=100))]))
    from shoal.proto.broker_pb2 import RunSpec

    spec = RunSpec(microbatch_size=2, microbatches=1)
    spec.plan.microbatch_size, spec.plan.schedule = 2, "1f1b"
    spec.plan.stages.add(start=0, stop=5, holders=["id-one"])
    spec.plan.routes.add().visits.add(stage=0, peer="id-one")
    found = answer(MakePlan(RunId("r"), 1, spec, offers("one")), content)
    assert isinstance(found, PlanReady | PlanFailed)


# ---------------------------------------------------------------- codecs


def wide_graph() -> Graph:
    """A chain of values that are large against their work."""
    wide = TensorSpec((Size(1), 4096), "float32")
    return Graph(
        inputs=(Input("x", wide),),
        parameters=(Parameter("w", TensorSpec((4096,), "float32")),),
        buffers=(),
        operators=(
            op("a", "aten.mul.Tensor", "in:x", "param:w", spec=wide),
            op("b", "aten.relu.default", "a", spec=wide),
            op("c", "aten.relu.default", "b", spec=wide),
            op("loss", "aten.sum.default", "c", spec=TensorSpec((), "float32")),
        ),
        loss="loss",
    )


def slow_links(*names: str) -> Network:
    return uniform([PeerId(f"id-{n}") for n in names], 0.001, 1e5)


def test_a_job_with_codecs_gets_a_plan_with_codecs(world) -> None:
    spec = world.spec(codec={"default": "int8"}, plan={"scheduler": "uniform"})
    ask = MakePlan(RunId("r"), 1, spec, offers("one", "two"), slow_links("one", "two"))
    plain = replace(ask, spec=world.spec(plan={"scheduler": "uniform"}))
    found, dense = (answer(a, graph_to_bytes(wide_graph())) for a in (ask, plain))
    assert isinstance(found, PlanReady)
    assert isinstance(dense, PlanReady)
    assert {(c.role, c.codec.partition(":")[0]) for c in found.plan.codecs} == {
        ("activation", "int8/1"),
        ("activation_grad", "int8/1"),
    }
    assert found.report.predicted.step_s < 0.5 * dense.report.predicted.step_s
    first = found.report.predicted.alternatives[0]
    assert (first.name, first.step_s) == (UNCOMPRESSED, dense.report.predicted.step_s)
    assert dense.plan.codecs == ()
    assert all(link.codecs == () for link in dense.report.predicted.links)


def test_a_hand_written_plan_gets_the_job_s_codecs_unless_it_has_its_own(world) -> None:
    spec = by_hand(world, (0, 2, "one"), (2, 4, "two"))
    spec.job = world.spec(codec={"activation": "bf16"}).job
    ask = MakePlan(RunId("r"), 1, spec, offers("one", "two"), slow_links("one", "two"))
    ready = answer(ask, graph_to_bytes(wide_graph()))
    assert isinstance(ready, PlanReady)
    assert [(c.source, c.role, c.codec) for c in ready.plan.codecs] == [
        ("id-one", "activation", "bf16/1")
    ]
    spec.plan.codecs.add(source="one", destination="two", role=1, codec="raw/1")
    ready = answer(ask, graph_to_bytes(wide_graph()))
    assert isinstance(ready, PlanReady)
    assert [c.codec for c in ready.plan.codecs] == ["raw/1"]


def test_codecs_are_chosen_again_when_links_change(world) -> None:
    """The running plan counts with the codecs that it has, the candidate gets those for the links
    of now."""
    spec = world.spec(codec={"default": "auto", "error_budget": 0.2}, plan={"scheduler": "uniform"})
    graph, names = graph_to_bytes(wide_graph()), ("one", "two")
    fast = uniform([PeerId(f"id-{n}") for n in names], 1e-6, 1e12)
    ready = answer(MakePlan(RunId("r"), 1, spec, offers(*names), fast), graph)
    assert isinstance(ready, PlanReady)
    assert ready.plan.codecs == ()
    slow = slow_links(*names)
    found = consider(ConsiderPlan(RunId("r"), 2, spec, ready.plan, offers(*names), slow), graph)
    assert found.plan is not None
    assert found.plan.stages == ready.plan.stages
    assert found.plan.codecs
    assert found.candidate_s < 0.5 * found.running_s
    again = consider(ConsiderPlan(RunId("r"), 3, spec, found.plan, offers(*names), slow), graph)
    assert again.running_s == again.candidate_s == found.candidate_s
