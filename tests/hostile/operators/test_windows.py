"""What the whole sweep of the fuzzer found (benchmarks/operators/fuzz.py): each call is refused
before it runs, and its honest neighbour gives what it should."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.dag.ir.graph import GraphError, Operator, TensorSpec
from shoal.dag.ir.infer import results_of
from shoal.dag.ir.rules.rules import check

from .test_operators import call, floats

X1, X2, X3 = floats(2, 3, 9), floats(2, 3, 5, 6), floats(2, 2, 4, 5, 6)
W1, W2 = floats(5, 3, 2), floats(4, 3, 3, 3)
Q, K = floats(2, 4, 5, 4), floats(2, 2, 6, 4)
Call = tuple[Operator, dict[str, TensorSpec]]


def attention(
    query: TensorSpec, key: TensorSpec, dropout: float = 0.0, shared: bool = True
) -> Call:
    op, specs = call("scaled_dot_product_attention.default", query, key, key, None, dropout, False)
    kwargs = (("scale", None), ("enable_gqa", shared))
    return Operator(op.name, op.target, op.args, kwargs, op.outputs), specs


HARMFUL: dict[str, tuple[Call, str]] = {
    "a window of padding only": (
        call("max_pool1d.default", floats(2, 3, 1), (3,), (3,), (1,), (2,), True),
        r"dilation is \[2\]: expected at most the sizes \[1\]",
    ),
    "the same where nothing is rounded up": (
        call("max_pool1d.default", floats(1, 1, 1), (2,), (2,), (1,), (2,), False),
        "dilation is",
    ),
    "in one of two dimensions": (
        call("max_pool2d.default", floats(2, 3, 3, 8), (3, 2), (7, 1), (1, 0), (4, 2), True),
        "dilation is",
    ),
    "one number for both": (
        call("max_pool2d.default", floats(2, 3, 1, 8), (3, 2), (16, 16), (1, 0), (2,), True),
        r"dilation is \[2, 2\]",
    ),
    "in one of three": (
        call("max_pool3d.default", X3, (2, 2, 3), (1, 2, 1), (1, 0, 1), (5, 1, 1), True),
        "dilation is",
    ),
    "a stride without end": (
        call("conv1d.default", X1, W1, None, (2147483647,), (0,), (1,), 1),
        "stride is",
    ),
    "the same by its other name": (
        call("convolution.default", X1, W1, None, (2147483647,), (0,), (1,), False, (0,), 1),
        "stride is",
    ),
    "a padding that wraps around": (
        call("conv2d.default", X2, W2, None, (1, 1), (1 << 40, 0), (1, 1), 1),
        "padding is",
    ),
    "a dilation that wraps around": (
        call("conv1d.padding", X1, W1, None, (1,), "same", (2147483647,), 1),
        "dilation is",
    ),
    "a weight of nothing, of another dtype": (
        call("conv2d.default", TensorSpec((2, 0, 5, 6), "float16"), floats(4, 0, 0, 0), None, (1,)),
        "weight is",
    ),
    "heads that nobody has": (attention(Q, floats(2, 0, 6, 4)), "samples and heads"),
    "samples that nobody has": (attention(Q, floats(0, 2, 6, 4)), "samples and heads"),
    "a rank less": (attention(Q, floats(0, 3, 4)), "key has 3 dimensions"),
    "torch's own dropout": (attention(Q, K, 0.5), "expected shoal.dropout"),
    "more of a triangle than there is": (
        call("tril_indices.default", 5, 4, 2**63 - 1),
        "offset",
    ),
    "sizes that are a flag": (
        call("upsample_bicubic2d.vec", floats(2, 3, 4, 5), None, True, True),
        "expected a list of numbers",
    ),
    "a bias that is wider": (
        call("linear.default", floats(3, 4), floats(1, 4), floats(8)),
        r"bias is float32\[8\]: expected \[1\]",
    ),
    "integers times floating numbers": (
        call("linear.default", TensorSpec((3, 4), "int8"), TensorSpec((5, 4), "float16"), None),
        "weight is",
    ),
    "a number in place of a tensor": (call("to.dtype_layout", -1), "expected a tensor"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_the_call_is_refused_and_says_why(name: str) -> None:
    (op, specs), why = HARMFUL[name]
    with pytest.raises(GraphError, match=why):
        check(op, specs)
    with pytest.raises(GraphError, match=why):
        results_of(op, {value: (spec, False) for value, spec in specs.items()})


def test_more_bytes_than_can_be_counted_are_refused() -> None:
    op, specs = call("sigmoid.default", floats(2**33, 2**31))
    with pytest.raises(GraphError, match="reads t0 of 73786976294838206464 bytes: "):
        results_of(op, {value: (spec, False) for value, spec in specs.items()})


HONEST: dict[str, tuple[Call, tuple[int, ...]]] = {
    "a pool": (call("max_pool2d.default", X2, (3, 3), (2, 2), (1, 1), (1, 1), True), (2, 3, 3, 4)),
    "a dilated pool": (call("max_pool1d.default", X1, (3,), (1,), (1,), (3,), False), (2, 3, 5)),
    "a pool by one number": (call("max_pool2d.default", X2, (2,)), (2, 3, 2, 3)),
    "a convolution": (call("conv1d.default", X1, W1, floats(5), (2,), (1,), (3,), 1), (2, 5, 4)),
    "one that keeps its size": (
        call("conv1d.padding", X1, W1, None, (1,), "same", (2,), 1),
        (2, 5, 9),
    ),
    "heads that are shared": (attention(Q, K), (2, 4, 5, 4)),
    "samples that are not": (attention(Q, floats(1, 4, 6, 4), shared=False), (2, 4, 5, 4)),
    "a linear of one row": (call("linear.default", floats(3, 4), floats(1, 4), floats(1)), (3, 1)),
    "a triangle": (call("tril_indices.default", 5, 4, -1), (2, 10)),
}


@pytest.mark.parametrize("name", HONEST)
def test_the_honest_neighbour_passes(name: str) -> None:
    (op, specs), shape = HONEST[name]
    check(op, specs)
    (found,) = results_of(op, {value: (spec, False) for value, spec in specs.items()})
    assert found is not None
    made: Any = found[0].sizes
    assert made == shape
