"""Changes against what both ends hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import CodecError, Stream, fitting, parse, typical_bytes
from shoal.compression.echo import shape_of

INNER = ["raw", "lossless", "bf16", "int8", "int4", "topk:ratio=20", "randomk:ratio=5"]


def data_of(encoded):
    return memoryview(bytearray(b"".join(encoded.buffers)))


def step(sender, receiver, x, key=0):
    encoded = sender.encode(x, key)
    return receiver.decode(shape_of(x), encoded.header, data_of(encoded))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("inner", INNER)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(), (1,), (0, 3), (9,), (3, 40), (2, 3, 50)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    strided=st.booleans(),
)
def test_both_ends_hold_the_same_bits_after_every_tensor(inner, seed, shape, dtype, strided):
    codec = parse(f"delta+{inner}")
    sender, receiver = Stream(codec), Stream(codec)
    rng = torch.Generator().manual_seed(seed)
    for key in range(5):
        x = torch.randn(shape, generator=rng).to(dtype)
        if strided and x.dim() > 1:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        heard = step(sender, receiver, x, key)
        assert sender.state.keys() == receiver.state.keys() == {"held", "count"}
        assert torch.equal(bits(sender.state["held"]), bits(receiver.state["held"]))
        assert torch.equal(bits(heard), bits(receiver.state["held"]))
        assert int(sender.state["count"]) == int(receiver.state["count"]) == key + 1
        assert heard.shape == x.shape
        assert heard.dtype == x.dtype


@pytest.mark.parametrize("inner", INNER)
def test_a_constant_is_approached(inner):
    codec = parse(f"delta+{inner}")
    sender, receiver = Stream(codec), Stream(codec)
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    bound = parse(inner).error_bound(shape_of(x))
    apart = float((step(sender, receiver, x) - x).norm())
    first = apart
    for key in range(1, 100):
        now = float((step(sender, receiver, x, key) - x).norm())
        assert now <= bound * apart + 1e-6 * float(x.norm())
        apart = now
    assert apart <= 1e-6 * float(x.norm()) or apart < 0.05 * first


def test_the_start_is_close_for_a_sparse_codec():
    codec, x = parse("delta+topk:ratio=100"), torch.randn(64, 64)
    sender, receiver = Stream(codec), Stream(codec)
    assert float((step(sender, receiver, x) - x).norm() / x.norm()) < 0.01
    assert Stream(codec).encode(x).size_bytes == codec.size_bytes(shape_of(x))
    assert sender.encode(x).size_bytes == typical_bytes(codec, shape_of(x))
    assert fitting(codec, shape_of(x)) is codec
    assert fitting(codec, shape_of(x.bfloat16())) is codec


def test_what_is_not_finite_does_not_stay():
    codec = parse("delta+bf16")
    sender, receiver = Stream(codec), Stream(codec)
    x = torch.ones(10)
    step(sender, receiver, x)
    bad = x.clone()
    bad[0], bad[1] = math.nan, math.inf
    heard = step(sender, receiver, bad)
    assert not heard[:2].isfinite().any()
    for _ in range(2):
        heard = step(sender, receiver, x)
    assert torch.equal(heard, x)
    assert torch.equal(bits(sender.state["held"]), bits(receiver.state["held"]))


def test_a_change_beyond_the_dtype_takes_two_tensors():
    codec = parse("delta+raw")
    sender, receiver = Stream(codec), Stream(codec)
    x = torch.full((300,), 60000.0, dtype=torch.float16)
    step(sender, receiver, -x)
    assert step(sender, receiver, x).tolist() == [-60000.0 + 65504.0] * 300
    assert torch.equal(step(sender, receiver, x), x)


def test_a_payload_twice_or_out_of_order_is_refused_and_changes_nothing():
    codec, x = parse("delta+int8"), torch.randn(300)
    sender, receiver = Stream(codec), Stream(codec)
    payloads = [sender.encode(x + i) for i in range(3)]
    spec = shape_of(x)
    receiver.decode(spec, payloads[0].header, data_of(payloads[0]))
    before = receiver.state
    for wrong in (payloads[0], payloads[2]):
        with pytest.raises(CodecError, match=r"expected tensor 1 of the stream, got [02]"):
            receiver.decode(spec, wrong.header, data_of(wrong))
        assert receiver.state is before
    receiver.decode(spec, payloads[1].header, data_of(payloads[1]))
    with pytest.raises(CodecError, match="truncated"):
        receiver.decode(spec, b"\0\0\0", data_of(payloads[2]))
    with pytest.raises(CodecError):
        receiver.decode(spec, payloads[2].header, data_of(payloads[2])[:-1])
    receiver.decode(spec, payloads[2].header, data_of(payloads[2]))
    assert torch.equal(bits(sender.state["held"]), bits(receiver.state["held"]))


@pytest.mark.parametrize(
    "state",
    [
        {"held": torch.zeros(3), "count": torch.tensor(1)},
        {"held": torch.zeros(4).bfloat16(), "count": torch.tensor(1)},
        {"held": torch.zeros(4)},
        {"residual": torch.zeros(4)},
    ],
)
def test_a_state_of_another_tensor_is_refused_at_both_ends(state):
    codec = parse("delta+int8")
    with pytest.raises(CodecError, match="expected"):
        Stream(codec, state).encode(torch.ones(4))
    good = Stream(codec).encode(torch.ones(4))
    with pytest.raises(CodecError, match="expected"):
        Stream(codec, state).decode(shape_of(torch.ones(4)), good.header, data_of(good))


def test_a_stream_goes_on_from_kept_states():
    codec, xs = parse("delta+int4"), [torch.randn(200) for _ in range(6)]
    sender, receiver = Stream(codec), Stream(codec)
    for x in xs[:3]:
        step(sender, receiver, x)
    copies = [{k: v.clone() for k, v in s.state.items()} for s in (sender, receiver)]
    heard = [step(sender, receiver, x) for x in xs[3:]]
    again = [Stream(codec, state) for state in copies]
    for x, one in zip(xs[3:], heard, strict=True):
        assert torch.equal(step(*again, x), one)
