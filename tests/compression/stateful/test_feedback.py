"""Error feedback: nothing is lost, only late."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import CodecError, Stream, parse, typical_bytes
from shoal.compression.echo import shape_of

INNER = ["raw", "bf16", "fp16", "int8", "int4:rounding=stochastic", "topk:ratio=10", "randomk"]


def sent(codec, stream, tensor, key=0):
    """What the other end decodes."""
    encoded = stream.encode(tensor, key)
    data = memoryview(bytearray(b"".join(encoded.buffers)))
    return Stream(codec).decode(shape_of(tensor), encoded.header, data)


@pytest.mark.parametrize("inner", INNER)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(), (1,), (0,), (7,), (33, 5), (2, 3, 100)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1e-4, 1.0, 1e3]),
)
def test_all_that_was_sent_and_the_residual_are_all_that_came(inner, seed, shape, dtype, scale):
    codec = parse(f"ef+{inner}")
    stream, rng = Stream(codec), torch.Generator().manual_seed(seed)
    came = told = torch.zeros(shape, dtype=torch.float64)
    for step in range(6):
        x = (torch.randn(shape, generator=rng) * scale).to(dtype)
        came = came + x.double()
        told = told + sent(codec, stream, x, step).double()
        residual = stream.state["residual"]
        assert residual.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        apart = (told + residual.double() - came).abs().max() if x.numel() else 0.0
        assert apart <= 1e-5 * 6 * scale * 10


def test_without_feedback_small_elements_never_arrive():
    """The test above would not hold for the inner codec: the residual is what makes it."""
    x = torch.tensor([10.0] + [0.1] * 9)
    for text, arrives in (("topk:ratio=10", False), ("ef+topk:ratio=10", True)):
        codec = parse(text)
        stream = Stream(codec)
        total = sum(sent(codec, stream, x * (10.0 if i == 0 else 1.0)) for i in range(40))
        assert bool(total[0] > 0)
        x = torch.tensor([0.5] + [0.4] * 9)
        stream = Stream(codec)
        total = sum(sent(codec, stream, x) for _ in range(40))
        assert bool((total[1:] > 0).all()) is arrives


def test_a_decayed_residual_is_nine_tenths_of_the_plain_one():
    codec = parse("efd+topk:ratio=10,values=fp32")
    stream, x = Stream(codec), torch.arange(1.0, 11.0)
    sent(codec, stream, x)
    first = x.clone()
    first[9] = 0
    assert torch.equal(stream.state["residual"], first)
    sent(codec, stream, x)
    whole = x + 0.9 * first
    whole[int(whole.argmax())] = 0
    assert torch.allclose(stream.state["residual"], whole)


@pytest.mark.parametrize("inner", ["raw", "bf16", "fp16", "int8", "lossless"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_so_and_poisons_no_residual(inner, bad):
    codec = parse(f"ef+{inner}")
    stream = Stream(codec)
    sent(codec, stream, torch.full((600,), 0.3))
    x = torch.full((600,), 0.3)
    x[5] = bad
    try:
        heard = sent(codec, stream, x)
    except CodecError:
        pass  # refused: nothing is silent about that
    else:
        assert not heard[5].isfinite()
    assert stream.state["residual"].isfinite().all()
    after = sent(codec, stream, torch.full((600,), 0.3))
    assert after.isfinite().all()
    assert torch.allclose(after[300:], torch.full((300,), 0.3), rtol=0.02)


def test_a_sum_beyond_the_dtype_is_sent_in_two():
    codec = parse("ef+raw")
    stream = Stream(codec)
    stream.state = {"residual": torch.tensor([60000.0])}
    x = torch.tensor([60000.0], dtype=torch.float16)
    assert sent(codec, stream, x).item() == 65504.0
    assert stream.state["residual"].item() == 120000.0 - 65504.0


@pytest.mark.parametrize(
    "state",
    [
        {"residual": torch.zeros(3)},
        {"residual": torch.zeros(4, dtype=torch.float64)},
        {"held": torch.zeros(4)},
        {"residual": torch.zeros(4), "count": torch.tensor(1)},
    ],
)
def test_a_state_of_another_tensor_is_refused_and_kept(state):
    stream = Stream(parse("ef+int8"), state)
    with pytest.raises(CodecError, match="expected a"):
        stream.encode(torch.ones(4))
    assert stream.state is state


def test_the_receiver_has_no_state():
    codec = parse("ef+int8")
    encoded = Stream(codec).encode(torch.ones(4))
    receiver = Stream(codec, {"residual": torch.zeros(4)})
    with pytest.raises(CodecError, match="without a state"):
        receiver.decode(shape_of(torch.ones(4)), encoded.header, memoryview(bytearray(9)))


def test_the_state_before_is_not_written_to():
    stream = Stream(parse("ef+topk:ratio=4"))
    stream.encode(torch.randn(100))
    before = stream.state
    copy = before["residual"].clone()
    stream.encode(torch.randn(100))
    assert torch.equal(before["residual"], copy)
    assert not torch.equal(stream.state["residual"], copy)


def test_bytes_are_those_of_the_inner_codec():
    x = torch.randn(50, 40)
    for inner in INNER:
        plain, wrapped = parse(inner), parse(f"ef+{inner}")
        assert wrapped.size_bytes(shape_of(x)) == plain.size_bytes(shape_of(x))
        assert typical_bytes(wrapped, shape_of(x)) == typical_bytes(plain, shape_of(x))
        assert Stream(wrapped).encode(x).size_bytes == Stream(plain).encode(x).size_bytes
        assert wrapped.error_bound(shape_of(x)) == plain.error_bound(shape_of(x))


def test_one_state_at_a_time():
    for text in ("ef+lowrank", "ef+delta+int8", "delta+ef+int8", "efd+ef+int8"):
        with pytest.raises(CodecError, match="without state"):
            parse(text)


def test_a_name_parses_to_the_same_codec():
    for text in ("ef+topk:ratio=50,values=fp32", "efd+int8", "ef+raw"):
        codec = parse(text)
        assert parse(codec.name).name == codec.name
