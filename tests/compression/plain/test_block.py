"""Blocks of small integers, and the random bits that round them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import counter
from shoal.compression.checks import DTYPES, PIECE
from shoal.compression.interface import CodecError
from shoal.compression.plain.block import BlockCodec, int2, int4, int6, int8
from shoal.dag.ir.graph import TensorSpec

M = {8: 127, 6: 31, 4: 7, 2: 1}


def there_and_back(codec, tensor, key=0):
    spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    encoded = codec.encode(tensor, key)
    data = memoryview(bytearray(b"".join(encoded.buffers)))
    return codec.decode(spec, encoded.header, data)


def slowly(tensor, bits, block):
    """The same, one block after the other: the scale is the next bfloat16 upwards."""
    out = []
    for part in tensor.split(block):
        scale = part.abs().max() / M[bits]
        rounded = scale.bfloat16()
        if rounded.float() < scale:
            rounded = torch.nextafter(rounded, torch.tensor(math.inf, dtype=torch.bfloat16))
        out.append((part / rounded.float()).round() * rounded.float() if scale > 0 else part * 0)
    return torch.cat(out)


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
@pytest.mark.parametrize("n", [1, 7, 64, 65, 191, 1000, PIECE["cpu"] + 3])
def test_it_does_what_one_block_after_the_other_does(bits, n):
    tensor = torch.randn(n, generator=torch.Generator().manual_seed(n))
    found = there_and_back(BlockCodec(bits, 64, "nearest"), tensor)
    # A multiplication by the reciprocal may turn a tie the other way: a step at most.
    off = (found - slowly(tensor, bits, 64)).abs() > 1e-6
    assert off.sum() <= 1 + n // 10_000
    assert (found - tensor).abs().max() <= tensor.abs().max() / M[bits] * 0.51


numbers = st.floats(-3.0, 3.0, width=32)


@given(values=st.lists(numbers, min_size=1, max_size=40), bits=st.sampled_from([8, 6, 4, 2]))
def test_ordinary_float32_numbers_are_off_by_half_a_step(values, bits):
    tensor = torch.tensor(values)
    back = there_and_back(BlockCodec(bits, 8, "nearest"), tensor)
    for part, got in zip(tensor.split(8), back.split(8), strict=True):
        step = part.abs().max() / M[bits] * (1 + 2.0**-7)
        assert ((got - part).abs() <= step / 2 * (1 + 1e-4) + 1e-30).all()


@pytest.mark.parametrize("codec", [int8(), int6(), int4(), int2()], ids=lambda c: c.name)
def test_the_bound_is_near_what_the_worst_block_loses(codec):
    # A scale just above a bfloat16, one large element, and all others just under half a step.
    m = M[codec.bits]
    scale = torch.tensor(1 + 2.0**-7 + 2.0**-20) / 1
    tensor = torch.full((codec.block,), float((1 + 2.0**-6) * 0.4999))
    tensor[0] = scale * m
    back = there_and_back(codec, tensor)
    lost = ((back - tensor).norm() / tensor.norm()).item()
    bound = codec.error_bound(TensorSpec((codec.block,), "float32"))
    assert bound / 2.1 <= lost <= bound


@pytest.mark.parametrize("make", [int8, int6, int4, int2])
def test_stochastic_rounding_is_right_in_the_mean(make):
    codec, keys = make(block=64, rounding="stochastic"), 1000
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(3))
    backs = torch.stack([there_and_back(codec, tensor, key).double() for key in range(keys)])
    error = (backs.mean(0) - tensor).abs()
    # With the probability of the fraction: a standard deviation of half a step at most.
    deviation = backs.std(0) / math.sqrt(keys)
    # What happens less than once in so many keys shows in no deviation: 5 times a step is allowed.
    assert (error <= 4.5 * deviation + 5 / keys * tensor.abs().max() / M[codec.bits]).all()
    assert (error / deviation.clamp(min=1e-9)).square().median() < 1.5
    assert backs.std(0).max() > 0


def test_stochastic_rounding_leaves_multiples_of_the_step():
    tensor = torch.arange(-127.0, 128.0) * 0.5
    for key in range(50):
        back = there_and_back(int8(rounding="stochastic"), tensor, key)
        assert torch.equal(back, tensor)


def test_where_a_tensor_is_cut_into_pieces_does_not_matter_to_a_key():
    codec, n = int8(rounding="stochastic"), PIECE["cpu"] * 2 + 1000
    tensor = torch.rand(n, generator=torch.Generator().manual_seed(4))
    tensor[::256] = 1.0  # one scale for all
    whole = there_and_back(codec, tensor, 9)
    part = there_and_back(codec, tensor[: PIECE["cpu"] + 512], 9)
    assert torch.equal(whole[: len(part)], part)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", [int8, int6, int4, int2])
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_no_other_is(value, make):
    tensor = torch.randn(300)
    tensor[70] = value
    back = there_and_back(make(block=64), tensor)
    clean = there_and_back(make(block=64), tensor.nan_to_num(0.5, 0.5, 0.5))
    assert back[64:128].isnan().all()
    assert torch.equal(back[:64], clean[:64])
    assert torch.equal(back[128:], clean[128:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_ends_of_a_dtype_do_not_overflow_or_vanish(dtype):
    limits = torch.finfo(DTYPES[dtype])
    smallest = torch.zeros((), dtype=DTYPES[dtype]).nextafter(torch.ones((), dtype=DTYPES[dtype]))
    for value in (limits.max, limits.tiny, smallest.item()):
        tensor = torch.full((100,), value, dtype=DTYPES[dtype])
        tensor[3] = -value
        back = there_and_back(int8(), tensor)
        assert back.isfinite().all()
        ratio = back.double() / tensor.double()
        assert (ratio - 1).abs().max() <= 2.0**-7


def test_scales_that_no_encoder_writes_are_refused():
    spec = TensorSpec((8,), "float32")
    for scale in (b"\x80\x7f", b"\x80\xff", b"\x80\xbf"):  # inf, -inf, -1
        with pytest.raises(CodecError, match="scale is negative or infinite"):
            int8(block=8).decode(spec, bytes(2), memoryview(bytearray(scale + bytes(8))))
    with pytest.raises(CodecError, match="exponent"):
        int8(block=8).decode(spec, b"\xff\x7f", memoryview(bytearray(10)))


@settings(max_examples=30)
@given(key=st.integers(0, 2**64 - 1), count=st.integers(0, 300))
def test_bits_of_a_key_begin_alike_whatever_their_number(key, count):
    many = counter.bits(key, counter.CHUNK + 50)
    assert torch.equal(counter.bits(key, count), many[:count])
    assert torch.equal(counter.bits(key, 50, start=counter.CHUNK), many[counter.CHUNK :])


def uniform_of(key: int, count: int) -> torch.Tensor:
    """Uniform in [0, 1), from the upper 24 bits of each word."""
    upper = (counter.bits(key, count) >> 8).double()
    return (upper + 2.0**23) * 2.0**-24


def test_bits_look_random():
    n = 1 << 18
    words = counter.bits(11, n)
    ones = torch.stack([(words >> b) & 1 for b in range(32)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / math.sqrt(n)
    uniform = uniform_of(11, n)
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    counts = torch.histc(uniform, bins=256, min=0, max=1)
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 256 + 6 * math.sqrt(512)
    for other in (uniform_of(12, n), uniform.roll(1), uniform.roll(counter.CHUNK)):
        assert abs(torch.corrcoef(torch.stack([uniform, other]))[0, 1]) < 5 / math.sqrt(n)


def test_positions_start_where_words_do():
    with pytest.raises(ValueError, match="multiple of"):
        counter.bits(0, 5, start=7)
    with pytest.raises(ValueError, match="multiple of"):
        counter.halves(0, 5, start=counter.CHUNK)
