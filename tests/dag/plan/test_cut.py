"""Cutting a graph into stages: ports, owners of buffers, ties, gradients, refusals."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.ir.graph import Buffer, BufferUpdate, GraphError, Operator, Output, Ref, TensorSpec
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PlanError

SPEC = TensorSpec((3,), "float32")


def extended(graph, *operators, **changes):
    return replace(graph, operators=graph.operators + operators, **changes)


def add(name, *reads, grad=False, module=""):
    out = (Output(SPEC, grad),)
    return Operator(name, "aten.add.Tensor", tuple(map(Ref, reads)), (), out, False, module)


@given(st.data())
def test_ports_are_exactly_the_values_that_cross(worlds, data):
    world = data.draw(worlds)
    graph, stages = world.bound, world.stages
    stage_at = {i: s.index for s in stages for i in range(s.start, s.stop)}
    loss_stage = stage_at[graph.producer[graph.loss]]
    crossing = set()
    for i, op in enumerate(graph.operators):
        for value in op.reads:
            if value in graph.producer and stage_at[graph.producer[value]] != stage_at[i]:
                crossing.add((value, stage_at[graph.producer[value]], stage_at[i]))
    for value in (graph.loss, graph.weight, *(v for _, v in graph.metrics)):
        if value in graph.producer and stage_at[graph.producer[value]] != loss_stage:
            crossing.add((value, stage_at[graph.producer[value]], loss_stage))

    sent = [(p.value, p.source, t) for s in stages for p in s.sends for t in p.targets]
    received = [(p.value, p.source, s.index) for s in stages for p in (*s.receives, *s.late)]
    assert len(sent) == len(set(sent))
    assert set(sent) == crossing
    assert sorted(received) == sorted(sent)
    assert all(p.spec == graph.spec[p.value] and p.spec.sizes for s in stages for p in s.sends)


@given(st.data())
def test_a_stage_has_all_that_its_operators_read(worlds, data):
    world = data.draw(worlds)
    for stage in world.stages:
        known = {f"in:{name}" for name in stage.inputs}
        known |= {f"param:{name}" for name in stage.parameters}
        known |= {f"buffer:{name}" for name in stage.buffers} | {p.value for p in stage.receives}
        for op in world.bound.operators[stage.start : stage.stop]:
            assert known >= set(op.reads)
            known |= set(op.values)
        assert known >= set(stage.results) | set(stage.statistics)
        assert known >= {p.value for p in stage.sends}
    results = sorted(v for s in world.stages for v in s.results)
    wanted = {world.bound.loss, world.bound.weight, *(v for _, v in world.bound.metrics)} - {""}
    assert results == sorted(wanted)
    updated = sorted(name for s in world.stages for name in s.updates)
    assert updated == sorted(b.name for b in world.bound.buffers if b.update)


@given(st.data())
def test_gradients_come_back_only_where_something_trains_above(worlds, data):
    world = data.draw(worlds)
    graph = world.bound
    trains = set()  # values with a trainable parameter above them
    for op in graph.operators:
        parameters = [p.name for p in graph.parameters if p.trainable]
        if trains & set(op.reads) or any(f"param:{p}" in op.reads for p in parameters):
            trains |= {v for v in op.values if v in graph.spec and graph.spec[v].is_floating}
    for stage in world.stages:
        for port in stage.sends:
            assert port.grad == bool(port.grad_targets)
            assert not port.grad or port.value in trains
            assert set(port.grad_targets) <= set(port.targets)
            assert all(world.stages[t].has_backward for t in port.grad_targets)
        assert stage.has_backward or not any(p.grad for p in stage.sends)


def test_nothing_crosses_back_below_a_frozen_beginning(chain):
    stages = chain(4, 1, trainable=(False, False, True, False)).stages
    assert [s.has_backward for s in stages] == [False, False, True, True]
    assert [p.grad for s in stages for p in s.sends] == [False, False, True]
    assert [s.trainable for s in stages] == [(), (), ("p2",), ()]


def test_a_value_for_several_stages_is_one_port(chain):
    graph = chain(3, 1).graph
    graph = extended(graph, add("sum", "v0", "v2", grad=True), loss="sum")
    port = cut(graph, [(0, 1), (1, 2), (2, 4)])[0].sends[0]
    assert (port.value, port.targets, port.grad_targets) == ("v0", (1, 2), (1, 2))


def test_a_target_that_only_counts_sends_no_gradient(chain):
    graph = chain(2, 1).graph
    graph = extended(graph, add("count", "v0"), metrics=(("count", "count"),))
    port = cut(graph, [(0, 1), (1, 2), (2, 3)])[0].sends[0]
    assert (port.targets, port.grad_targets) == ((1, 2), (1,))


def test_results_reach_the_stage_of_the_loss(chain):
    graph = chain(3, 1).graph
    graph = extended(graph, add("after", "v2"), weight="v0", metrics=(("late", "after"),))
    stages = cut(graph, [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert [s.makes_loss for s in stages] == [False, False, True, False]
    assert [s.results for s in stages] == [("v0",), (), ("v2",), ("after",)]
    assert [p.value for p in stages[2].receives] == ["v0", "v1"]
    assert [p.value for p in stages[2].late] == ["after"]
    assert stages[3].sends[0].targets == (2,)


def test_a_result_that_is_data_is_read_by_the_stage_of_the_loss(chain):
    stages = cut(replace(chain(2, 1).graph, weight="in:x"), [(0, 1), (1, 2)])
    assert [s.inputs for s in stages] == [("x",), ("x",)]
    assert stages[1].results == ("v1", "in:x")


def test_a_constant_is_copied_and_an_updated_buffer_has_one_owner(chain):
    graph = chain(2, 1).graph
    count = TensorSpec((), "int64")
    graph = extended(
        graph,
        add("norm", "v1", "buffer:bn.mean", "buffer:c", grad=True, module="bn"),
        add("end", "norm", "buffer:c", grad=True, module="other"),
        loss="end",
        buffers=(
            Buffer("c", SPEC),
            Buffer("bn.count", count, update=BufferUpdate("add", "", 1)),
            Buffer("bn.mean", SPEC, update=BufferUpdate("ema", "norm", 0.1)),
            Buffer("other.count", count, update=BufferUpdate("add", "", 1)),
            Buffer("nobody.count", count, update=BufferUpdate("add", "", 1)),
        ),
    )
    stages = cut(graph, [(0, 1), (1, 3), (3, 4)])
    assert [s.updates for s in stages] == [
        ("nobody.count",),
        ("bn.count", "bn.mean"),
        ("other.count",),
    ]
    assert stages[1].statistics == ("norm",)
    assert "c" in stages[1].buffers
    assert "c" in stages[2].buffers
    with pytest.raises(GraphError, match=r"'bn.mean' is updated in stage 1 and read in stage 2"):
        cut(extended(graph, add("again", "buffer:bn.mean")), [(0, 1), (1, 3), (3, 5)])


def test_a_trainable_parameter_of_several_stages_is_a_tied_group(chain):
    graph = chain(3, 1, trainable=(True, False, True)).graph
    graph = extended(graph, add("head", "v2", "param:p0", "param:p1", grad=True), loss="head")
    groups = tied_groups(graph, cut(graph, [(0, 1), (1, 2), (2, 4)]))
    assert [(g.index, g.parameter, g.stages) for g in groups] == [(0, "p0", (0, 2))]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([], "no stage"),
        ([(0, 1), (1, 1), (1, 2)], "3 stages for a graph of 2 operators"),
        ([(0, 0), (0, 2)], r"stage 0 is operators \[0, 0\)"),
        ([(0, 1)], "cover 1 operators, the graph has 2"),
        ([(0, 2), (1, 2)], "starts at 2"),
    ],
)
def test_intervals_that_are_no_cut_are_refused(chain, bounds, message):
    with pytest.raises(PlanError, match=message):
        cut(chain(2, 1).graph, bounds)


def test_a_graph_for_any_microbatch_and_one_without_a_loss_are_refused(chain):
    graph = chain(2, 1).graph
    with pytest.raises(GraphError, match="bind"):
        cut(replace(graph, batch=None), [(0, 2)])
    with pytest.raises(GraphError, match="the loss is 'nothing'"):
        cut(replace(graph, loss="nothing"), [(0, 2)])
    with pytest.raises(GraphError, match="'nothing' is no value"):
        cut(replace(graph, weight="nothing"), [(0, 2)])
    with pytest.raises(GraphError, match="operator bad reads 'nothing'"):
        cut(extended(graph, add("bad", "nothing")), [(0, 3)])
