"""The rules of a graph, its binding and its text."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.ir.graph import (
    Buffer,
    BufferUpdate,
    Device,
    Dtype,
    Graph,
    GraphError,
    Input,
    Operator,
    Output,
    Parameter,
    Ref,
    Size,
    TensorSpec,
)
from shoal.dag.ir.validate import validate

X = TensorSpec((Size(1), 4), "float32")
ROW = TensorSpec((4,), "float32")
SCALAR = TensorSpec((), "float32")


def op(name: str, target: str, *args, out: TensorSpec = X, **kwargs) -> Operator:
    return Operator(name, target, args, tuple(kwargs.items()), (Output(out),))


def graph() -> Graph:
    split = Operator(
        "var_mean",
        "aten.var_mean.correction",
        (Ref("drop"), (0,)),
        (),
        (Output(ROW, True), Output(ROW, True)),
        returns_tuple=True,
        module="norm",
    )
    return Graph(
        inputs=(Input("x", X),),
        parameters=(Parameter("w", ROW, tied=("again",)), Parameter("cold", ROW, trainable=False)),
        buffers=(
            Buffer("mean", ROW, update=BufferUpdate("ema", "var_mean.1", 0.1)),
            Buffer("count", TensorSpec((), "int64"), update=BufferUpdate("add", "", 1.0)),
        ),
        operators=(
            op("mul", "aten.mul.Tensor", Ref("in:x"), Ref("param:w")),
            op("drop", "shoal.dropout.default", Ref("mul"), 0.1, 0),
            split,
            op("sum", "aten.sum.default", Ref("var_mean.0"), out=SCALAR),
            op(
                "full",
                "aten.full.default",
                (),
                1.0,
                dtype=Dtype("float32"),
                device=Device(),
                out=SCALAR,
            ),
        ),
        loss="sum",
        weight="full",
        metrics=(("total", "sum"),),
    )


def with_op(index: int, **changes) -> Graph:
    ops = list(graph().operators)
    ops[index] = replace(ops[index], **changes)
    return replace(graph(), operators=tuple(ops))


def test_a_right_graph_is_returned_itself() -> None:
    right = graph()
    assert validate(right) is right
    assert validate(right.bind(3)).batch == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (with_op(1, name="mul"), "operator name 'mul' appears 2 times"),
        (with_op(1, name=""), "operator name '' appears"),
        (with_op(3, name="var_mean.0"), "value name 'var_mean.0' appears 2 times"),
        (with_op(0, args=(Ref("drop"), 1.0)), "mul .*reads drop, which is not made before it"),
        (with_op(0, args=(Ref("in:y"), 1.0)), "reads in:y"),
        (with_op(0, kwargs=(("alpha", (Ref("nowhere"),)),)), "reads nowhere"),
        (with_op(0, target="aten.from_file.default"), "mul: operator aten.from_file.*allow-list"),
        (
            with_op(
                0, target="aten.embedding.default", args=(Ref("param:w"), Ref("in:x"), -1, 0, 1)
            ),
            "embedding mul has a sparse gradient",
        ),
        (replace(graph(), operator_set="core"), "var_mean: .*'core' allow-list"),
        (with_op(0, outputs=(Output(TensorSpec((3,), "complex64")),)), "mul has dtype 'complex64'"),
        (with_op(0, outputs=(Output(TensorSpec((-3,), "float32")),)), "size is negative"),
        (
            with_op(0, outputs=(Output(X), Output(X))),
            "2 results and returns_tuple=False: expected one",
        ),
        (with_op(1, args=(Ref("mul"), 0.1)), "number 0.1 as its last argument"),
        (replace(graph().bind(2), inputs=graph().inputs), "graph bound to batch 2"),
        (replace(graph(), loss="mul"), "the loss mul is .*expected a floating scalar"),
        (replace(graph(), loss="param:w"), "'param:w', which no operator makes"),
        (replace(graph(), weight="var_mean.0"), "the weight var_mean.0"),
        (replace(graph(), metrics=(("a", "nowhere"),)), "metric a is 'nowhere'"),
        (replace(graph(), metrics=(("a", "sum"), ("a", "sum"))), "metric name 'a' appears"),
        (replace(graph(), inputs=graph().inputs * 2), "input name 'x' appears 2 times"),
        (
            replace(graph(), parameters=(*graph().parameters, Parameter("again", ROW))),
            "parameter name 'again' appears 2 times",
        ),
        (
            replace(graph(), buffers=(Buffer("b", ROW, update=BufferUpdate("ema", "sum", 0.1)),)),
            "buffer b .*updated from 'sum'",
        ),
        (
            replace(graph(), buffers=(Buffer("b", ROW, update=BufferUpdate("ema", "in:x", 0.1)),)),
            "buffer b .*made by an operator",
        ),
        (
            replace(graph(), buffers=(Buffer("b", ROW, update=BufferUpdate("add", "sum", 1)),)),
            "counter b .*expected no value",
        ),
    ],
)
def test_a_broken_rule_is_named(wrong: Graph, says: str) -> None:
    with pytest.raises(GraphError, match=f"(?s){says}"):
        validate(wrong)


@given(st.integers(1, 64), st.integers(0, 7), st.integers(-7, 7))
def test_binding_leaves_no_size(batch: int, times: int, plus: int) -> None:
    size = Size(times, plus)
    made = op(
        "view",
        "aten.reshape.default",
        Ref("in:x"),
        (size, (size, 1)),
        out=TensorSpec((size,), "float32"),
    )
    bound = replace(graph(), operators=(made,)).bind(batch)
    value = times * batch + plus
    assert bound.operators[0].args[1] == (value, (value, 1))
    assert bound.operators[0].outputs[0].spec.shape == (value,)
    assert "Size" not in repr(bound.operators)


def test_the_text_tells_everything_that_counts() -> None:
    texts = [repr(operator) for operator in graph().operators]
    for text in (
        "%drop = shoal.dropout.default(%mul, 0.1, 0) -> float32[b, 4]",
        "%full = aten.full.default((), 1.0, dtype=float32, device=device) -> float32[]",
    ):
        assert text in texts
    assert repr(graph()).startswith("<Graph 5 operators (full), 2 parameters (1 trainable)")
