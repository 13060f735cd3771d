"""Gradients on the support of their value."""

from __future__ import annotations

import pytest
import torch

from shoal.compression.codec import CodecError, parse
from shoal.compression.echo import shape_of
from shoal.compression.sparse.support import positions

CODEC = parse("support:ratio=10,values=fp32")


def over(encoded):
    return memoryview(bytearray(b"".join(encoded.buffers)))


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("shape", [(1000,), (7, 30, 11), (64,)])
def test_it_is_the_gradient_masked_by_the_value(shape, values):
    codec, topk = parse(f"support:ratio=10,values={values}"), parse("topk:ratio=10,values=bf16")
    x, gradient = torch.randn(shape), torch.randn(shape)
    sent = topk.encode(x)
    value = topk.decode(shape_of(x), sent.header, over(sent))
    state = {"positions": positions(value)}
    encoded, _ = codec.encode(gradient, state)
    back, _ = codec.decode(shape_of(gradient), encoded.header, over(encoded), state)
    masked = torch.where(value != 0, gradient, 0.0)
    close = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 0.02}[values]
    assert (back - masked).abs().max() <= close * gradient.abs().max()
    assert encoded.size_bytes == codec.size_bytes(shape_of(gradient))  # topk kept no zero
    assert not back[value == 0].any()


def test_the_gradient_is_that_of_the_sparse_network():
    """Finite differences through a layer whose input is sparse."""
    torch.manual_seed(0)
    w, x = torch.randn(20, 30, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    topk = parse("topk:ratio=5,values=fp32")

    def loss(x):
        sent = topk.encode(x)
        return (topk.decode(shape_of(x), sent.header, over(sent)) @ w).tanh().sum()

    sent = topk.encode(x)
    value = topk.decode(shape_of(x), sent.header, over(sent)).requires_grad_()
    (value @ w).tanh().sum().backward()
    state = {"positions": positions(value)}
    codec = parse("support:ratio=5,values=fp32")
    encoded, _ = codec.encode(value.grad, state)
    found, _ = codec.decode(shape_of(x), encoded.header, over(encoded), state)
    step = 1e-6
    for i in range(20):
        nudge = torch.zeros(20, dtype=torch.float64)
        nudge[i] = step
        assert abs((loss(x + nudge) - loss(x - nudge)) / (2 * step) - found[i]) < 1e-6


def test_a_value_of_zeros_takes_no_bytes():
    state = {"positions": positions(torch.zeros(100))}
    encoded, _ = CODEC.encode(torch.randn(100), state)
    assert encoded.size_bytes == 0
    back, _ = CODEC.decode(shape_of(torch.zeros(100)), b"", memoryview(bytearray()), state)
    assert torch.equal(back, torch.zeros(100))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "expected the positions of the value, got none"),
        ({"positions": torch.arange(200)}, "expected up to 100 positions"),
        ({"positions": torch.tensor([3, 100])}, "position 100 is of another tensor"),
        ({"positions": torch.tensor([1.0])}, "expected up to 100 positions"),
    ],
)
def test_a_state_of_another_tensor_is_refused(state, words):
    with pytest.raises(CodecError, match=words):
        CODEC.encode(torch.randn(100), state)
    with pytest.raises(CodecError, match=words):
        CODEC.decode(shape_of(torch.zeros(100)), b"", memoryview(bytearray(40)), state)


def test_wrong_bytes_are_refused():
    state = {"positions": torch.arange(10)}
    spec = shape_of(torch.zeros(100))
    for data, header in ((bytearray(39), b""), (bytearray(41), b""), (bytearray(40), b"x")):
        with pytest.raises(CodecError):
            CODEC.decode(spec, header, memoryview(data), state)


def test_what_is_not_finite_outside_the_support_is_not_lost_silently():
    gradient = torch.randn(100)
    gradient[50] = float("nan")
    with pytest.raises(CodecError, match="NaN or infinite where its value was not sent"):
        CODEC.encode(gradient, {"positions": torch.arange(10)})
    encoded, _ = CODEC.encode(gradient, {"positions": torch.tensor([50])})
    back, _ = CODEC.decode(
        shape_of(gradient), b"", over(encoded), {"positions": torch.tensor([50])}
    )
    assert back[50].isnan()
