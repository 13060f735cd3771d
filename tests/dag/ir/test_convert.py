"""Graph, plan and specs on the wire: they come back equal, and nothing bad comes in."""

import contextlib
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.ir.convert import (
    graph_from_bytes,
    graph_from_proto,
    graph_to_bytes,
    graph_to_proto,
    spec_from_proto,
    spec_to_proto,
)
from shoal.dag.ir.graph import (
    ITEM_BYTES,
    Buffer,
    BufferUpdate,
    Device,
    Dtype,
    GraphError,
    MemoryFormat,
    Operator,
    Output,
    Ref,
    Size,
    TensorSpec,
)
from shoal.dag.plan.plan import (
    CodecChoice,
    PeerId,
    PlanError,
    SnapshotKeeper,
)
from shoal.dag.plan.report import (
    Alternative,
    CodecUse,
    LinkPrediction,
    PeerPrediction,
    PlanReport,
    Prediction,
    Spare,
)
from shoal.dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from shoal.dag.schedule.convert_report import report_from_proto, report_to_proto
from shoal.proto import broker_pb2, common_pb2, graph_pb2

dims = st.integers(0, 64) | st.builds(Size, st.integers(1, 9), st.integers(-9, 9))
specs = st.builds(
    TensorSpec, st.lists(dims, max_size=5).map(tuple), st.sampled_from(list(ITEM_BYTES))
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.builds(Size, st.integers(0, 9), st.integers(-9, 9))
    | st.sampled_from([Ref("in:x"), Ref("param:p0"), Dtype("bfloat16"), Device()])
    | st.just(MemoryFormat("channels_last"))
)
arguments = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@given(specs)
def test_a_spec_comes_back_equal(spec):
    assert spec_from_proto(spec_to_proto(spec)) == spec


@given(st.data())
def test_a_graph_comes_back_equal_and_has_one_form(worlds, data):
    graph = data.draw(worlds).graph
    state = [(f"its.{p.name}", p.name, p.spec.dtype) for p in graph.parameters]
    graph = replace(graph, state=tuple(state))
    written = graph_to_bytes(graph)
    assert graph_from_bytes(written) == graph
    assert graph_to_bytes(graph_from_bytes(written)) == written


@given(st.data(), st.lists(arguments, max_size=4), arguments)
def test_every_kind_of_argument_comes_back_equal(chain, data, args, named):
    graph = replace(chain(1, 1).graph, batch=None)
    op = replace(graph.operators[0], args=(Ref("in:x"), *args), kwargs=(("named", named),))
    graph = replace(graph, operators=(op,))
    back = graph_from_bytes(graph_to_bytes(graph))
    assert back == graph
    # True == 1 == 1.0 in Python, and operators tell them apart.
    assert repr(back) == repr(graph)
    assert repr(back.operators) == repr(graph.operators)


def test_infinities_and_nan_are_arguments(chain):
    graph = replace(chain(1, 1).graph, batch=None)
    op = replace(graph.operators[0], args=(math.inf, -math.inf, math.nan, -0.0))
    args = graph_from_bytes(graph_to_bytes(replace(graph, operators=(op,)))).operators[0].args
    assert repr(args) == "(inf, -inf, nan, -0.0)"


@given(st.data())
def test_a_plan_comes_back_equal(worlds, data):
    plan = data.draw(worlds).plan
    first = plan.peers[0]
    anybody = st.sampled_from([*plan.peers, PeerId("x"), PeerId("y")])
    pairs = st.tuples(st.sampled_from(plan.peers), anybody).filter(lambda pair: pair[0] != pair[1])
    plan = replace(
        plan,
        codecs=(CodecChoice(first, PeerId("x"), "activation_grad", "raw/1"),),
        keepers=tuple(
            SnapshotKeeper(h, p) for h, p in data.draw(st.lists(pairs, unique=True, max_size=4))
        ),
    )
    assert plan_from_proto(plan_to_proto(plan)) == plan


def test_a_report_comes_back_equal():
    a, x = PeerId("a"), PeerId("x")
    use = CodecUse("activation", "int8/1", 10, 40, 0.25, 0.125, 0.0078125)
    report = PlanReport(
        predicted=Prediction(
            1.5,
            (PeerPrediction(a, 0.25, 1 << 40, 7, 0.5, 1.5),),
            (LinkPrediction(a, x, 10, 0.5, (use,)),),
            ("a computes",),
            (Alternative("alone", 2.0, "on a"),),
        ),
        reasons=("equal FLOPs",),
        spares=(Spare(x, "too small"),),
    )
    assert report_from_proto(report_to_proto(report)) == report


# ---------------------------------------------------------------- nothing bad comes in


@given(st.binary(max_size=200))
def test_random_bytes_are_a_graph_or_a_graph_error(data):
    with contextlib.suppress(GraphError):
        graph_from_bytes(data)


def mutated(data, rng):
    """The bytes with a few of them changed, cut out, doubled or moved."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        i, n = rng.randrange(len(found) + 1), rng.randint(1, 8)
        match rng.randrange(4):
            case 0:
                found[i : i + n] = rng.randbytes(n)
            case 1:
                del found[i : i + n]
            case 2:
                found[i:i] = found[i : i + n]
            case _:
                if i < len(found):
                    found[i] = rng.choice([0, 1, 127, 128, 255, found[i] ^ 1 << rng.randrange(8)])
    return bytes(found)


@given(st.data(), st.integers(0, 1 << 32))
def test_a_mutated_graph_is_a_graph_or_a_graph_error(worlds, data, seed):
    rng, graph = random.Random(seed), data.draw(worlds).graph
    for _ in range(8):
        with contextlib.suppress(GraphError):
            found = graph_from_bytes(mutated(graph_to_bytes(graph), rng))
            # What is let in can be used: it has specs, and goes out again.
            assert set(found.results) <= set(found.spec)
            assert graph_from_bytes(graph_to_bytes(found)) is not None
            found.bind(2)


@given(st.data(), st.integers(0, 1 << 32))
def test_a_mutated_plan_is_a_plan_or_a_plan_error(worlds, data, seed):
    rng, plan = random.Random(seed), data.draw(worlds).plan
    written = plan_to_proto(plan).SerializeToString()
    for _ in range(8):
        message = broker_pb2.Plan()
        try:
            message.ParseFromString(mutated(written, rng))
        except Exception:  # protobuf's own errors are the caller's to translate
            continue
        with contextlib.suppress(PlanError):
            found = plan_from_proto(message)
            assert plan_from_proto(plan_to_proto(found)) == found


@given(st.binary(max_size=60))
def test_random_bytes_are_a_spec_or_a_graph_error(data):
    message = common_pb2.TensorSpec()
    try:
        message.ParseFromString(data)
    except Exception:  # protobuf's own errors are the caller's to translate
        return
    with contextlib.suppress(GraphError):
        assert spec_to_proto(spec_from_proto(message)).dtype == message.dtype


def test_deep_nesting_ends_in_a_graph_error(chain):
    message = graph_to_proto(replace(chain(1, 1).graph, batch=None))
    arg = message.operators[0].args.add()
    for _ in range(9):
        arg = arg.list.items.add()
    arg.none = True
    with pytest.raises(GraphError, match="more than 8 lists in lists"):
        graph_from_proto(message)
    nested: tuple = ()
    for _ in range(5000):
        nested = (nested,)
    op = replace(chain(1, 1).graph.operators[0], args=(nested,))
    with pytest.raises(GraphError, match="more than 8 lists in lists"):
        graph_to_proto(replace(chain(1, 1).graph, batch=None, operators=(op,)))
    deep = b""
    for _ in range(300):  # field 11 (list) of an argument in field 1 (items) of a list
        for tag in (0x0A, 0x5A):
            length = len(deep)
            deep = bytes([tag, length & 0x7F | 0x80, length >> 7]) + deep
    with pytest.raises(GraphError):
        graph_from_bytes(b"\x2a" + bytes([len(deep) & 0x7F | 0x80, len(deep) >> 7]) + deep)


SPEC = TensorSpec((3,), "float32")


READS, MADE = (Ref("v0"),), (Output(SPEC),)


def op(name="v1", target="aten.add.Tensor", args=READS, kwargs=(), outputs=MADE):
    return Operator(name, target, args, kwargs, outputs)


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (op(args=(Ref("later"),)), "v1 reads 'later', which nothing before it makes"),
        (op(args=(Ref("v1"),)), "v1 reads 'v1', which nothing before it makes"),
        (op(args=((Ref("in:z"),),)), "v1 reads 'in:z'"),
        (op("v0"), "value 'v0' occurs twice"),
        (op("in:x"), "an operator's name is 'in:x'"),
        (op("a\nb"), "an operator's name is"),
        (op("n" * 600), "1 to 512 printable"),
        (op(target="os.system"), "expected namespace.name.overload"),
        (op(target="aten.add.Tensor; import os"), "expected namespace.name.overload"),
        (op(outputs=()), "v1 returns one tensor and has 0 outputs"),
        (op(outputs=(Output(None),)), "without a spec"),
        (op(outputs=(Output(TensorSpec((), "int64"), True),)), "a gradient for an output of spec"),
        (op(kwargs=(("a b", 1),)), "keyword 'a b'"),
        (op(kwargs=(("a", 1), ("a", 2))), "keyword arguments: 'a' occurs twice"),
        (op(args=(MemoryFormat("load"),)), "memory format 'load' is unknown"),
        (op(args=("x" * 5000,)), "a text argument has 5000 characters"),
        (op(args=(Size(-1, 0),)), "a size is -1b"),
        (op(outputs=(Output(TensorSpec((-1,), "float32")),)), "a tensor has the size -1"),
        (op(outputs=(Output(TensorSpec((1 << 30, 1 << 30), "int8")),)), "more than"),
        (op(outputs=(Output(TensorSpec((1,) * 40, "int8")),)), "40 dimensions"),
    ],
)
def test_operators_that_break_a_rule_are_refused(chain, operator, message):
    graph = replace(chain(1, 1).graph, batch=None)
    message_in = graph_to_proto(replace(graph, operators=(*graph.operators, operator)))
    with pytest.raises(GraphError, match=message):
        graph_from_proto(message_in)


def refuse(graph, message):
    with pytest.raises(GraphError, match=message):
        graph_from_bytes(graph_to_bytes(graph))


def test_graphs_that_break_a_rule_are_refused(chain):
    graph = replace(chain(1, 1).graph, batch=None)
    refuse(replace(graph, loss=""), "the loss is ''")
    refuse(replace(graph, loss="in:x"), "the loss is 'in:x'")
    refuse(replace(graph, weight="w"), "result 'w' is no value")
    refuse(replace(graph, metrics=(("a", "v0"), ("a", "v0"))), "metric 'a' occurs twice")
    refuse(replace(graph, inputs=graph.inputs * 2), "input 'x' occurs twice")
    tied = (replace(graph.parameters[0], tied=("p0",)),)
    refuse(replace(graph, parameters=tied), "parameter 'p0' occurs twice")

    def with_update(rule, value, factor, spec=SPEC):
        return replace(graph, buffers=(Buffer("b", spec, True, BufferUpdate(rule, value, factor)),))

    refuse(with_update("ema", "v9", 0.1), "result 'v9' is no value")
    refuse(with_update("ema", "in:x", 0.1), "updated from 'in:x', which nothing makes")
    refuse(with_update("ema", "v0", 0.1), "buffer b is float32")
    refuse(with_update("ema", "v0", math.nan), "has factor nan")
    refuse(with_update("add", "v0", 1), "adds a number and names value 'v0'")


def test_messages_of_another_kind_are_refused(chain):
    graph = replace(chain(1, 1).graph, batch=None)
    with pytest.raises(GraphError, match="version 0: expected 1"):
        graph_from_bytes(b"")
    message = graph_to_proto(graph)
    message.operator_set = 7  # type: ignore[assignment]  # an open enum
    with pytest.raises(GraphError, match="operator set 7 is unknown"):
        graph_from_proto(message)
    message = graph_to_proto(graph)
    message.operators[0].args.add()
    with pytest.raises(GraphError, match="an argument is empty"):
        graph_from_proto(message)
    message = graph_to_proto(graph)
    message.inputs[0].spec.dtype = 0
    with pytest.raises(GraphError, match="dtype 0 is unknown"):
        graph_from_proto(message)
    message = graph_to_proto(graph)
    message.buffers.add(name="b", spec=message.inputs[0].spec).update.rule = 5
    with pytest.raises(GraphError, match="rule 5, which is unknown"):
        graph_from_proto(message)


def test_what_has_no_place_on_the_wire_is_refused_when_written(chain):
    graph = chain(1, 1).graph
    with pytest.raises(GraphError, match="complex64"):
        spec_to_proto(TensorSpec((), "complex64"))
    big = replace(graph, batch=None, operators=(replace(graph.operators[0], args=(1 << 70,)),))
    with pytest.raises(GraphError, match="64 bits"):
        graph_to_bytes(big)
    plan = replace(
        chain(1, 1).plan(), codecs=(CodecChoice(PeerId("a"), PeerId("b"), "x", "raw/1"),)
    )
    with pytest.raises(PlanError, match="role 'x'"):
        plan_to_proto(plan)


def test_plans_that_break_a_rule_are_refused(chain):
    def refuse_plan(message, change, listed=False):
        found = chain(2, 2).plan()
        plan = plan_to_proto(found if listed else replace(found, visits=(), evaluations=()))
        change(plan)
        with pytest.raises(PlanError, match=message):
            plan_from_proto(plan)

    refuse_plan("schedule '' is unknown", lambda p: p.ClearField("schedule"))
    refuse_plan("no stage", lambda p: p.ClearField("stages"))
    refuse_plan("takes route 0 of 0", lambda p: p.ClearField("routes"))
    refuse_plan("no route", lambda p: (p.ClearField("routes"), p.ClearField("route_of")))
    refuse_plan("takes route 7 of 1", lambda p: p.route_of.append(7))
    refuse_plan("microbatches of 0", lambda p: p.ClearField("microbatch_size"))
    refuse_plan("a peer id is ''", lambda p: p.stages[0].holders.append(""))
    refuse_plan("role 9", lambda p: p.codecs.add(source="a", destination="b", role=9, codec="r"))
    refuse_plan("a codec is ''", lambda p: p.codecs.add(source="a", destination="b", role=1))
    refuse_plan("visits stages", lambda p: p.routes[0].visits.add(stage=7, peer="a"))
    refuse_plan("of 3 peers are listed, not of 2", lambda p: p.visits.list_of.append(0), True)
    refuse_plan("a has list 9 of 2", lambda p: p.visits.list_of.__setitem__(0, 9), True)
    refuse_plan("16 is no visit of a", lambda p: p.visits.lists[0].numbers.append(16), True)
    refuse_plan("7 is no visit of a", lambda p: p.visits.lists[0].numbers.append(7), True)


def test_a_graph_of_absurd_length_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr("shoal.dag.ir.convert.MAX_GRAPH_BYTES", 10)
    with pytest.raises(GraphError, match="11 bytes: expected at most 10"):
        graph_from_bytes(b"x" * 11)


def test_what_comes_later_in_the_format_is_passed_over(chain):
    graph = replace(chain(1, 1).graph, batch=None)
    future = graph_to_bytes(graph) + b"\xfa\x07\x01x"  # field 127
    assert graph_from_bytes(future) == graph
    assert graph_pb2.Graph.FromString(future).version == 1


def test_reports_that_break_a_rule_are_refused():
    def refuse(message, change):
        report = broker_pb2.PlanReport()
        change(report)
        with pytest.raises(PlanError, match=message):
            report_from_proto(report)

    def use(report, **fields):
        link = report.predicted.links.add(source="a", destination="b")
        link.codecs.add(**fields)

    refuse("time is nan", lambda p: setattr(p.predicted, "step_s", math.nan))
    refuse("5000 characters", lambda p: p.reasons.append("x" * 5000))
    refuse("role 'x'", lambda p: use(p, role="x", codec="raw/1"))
    refuse("a codec is ''", lambda p: use(p, role="sync", codec=""))
    refuse("time is -1.0", lambda p: use(p, role="sync", codec="raw/1", saved_s=-1.0))
    refuse("error is inf", lambda p: use(p, role="sync", codec="raw/1", error=math.inf))
