"""bf16 and fp16: rounding, the power of two in the header, and both ends of every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.checks import DTYPES, FLOATING, PIECE, unpack_exponent
from shoal.compression.interface import CodecError
from shoal.compression.plain.cast import bf16, fp16
from shoal.dag.ir.graph import TensorSpec

CODECS = {"bf16": bf16(), "fp16": fp16()}
each = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
WIDTHS = {"float16": 16, "bfloat16": 32, "float32": 32, "float64": 64}


def there_and_back(codec, tensor):
    spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    encoded = codec.encode(tensor)
    data = memoryview(bytearray(b"".join(encoded.buffers)))
    return codec.decode(spec, encoded.header, data)


@each
@given(data=st.data(), dtype=st.sampled_from(FLOATING))
def test_any_finite_numbers_come_back_within_the_bound(codec, data, dtype):
    floats = st.floats(width=WIDTHS[dtype], allow_nan=False, allow_infinity=False)
    values = torch.tensor(data.draw(st.lists(floats, max_size=20)), dtype=torch.float64)
    limit = torch.finfo(DTYPES[dtype]).max
    tensor = values.clamp(-limit, limit).to(DTYPES[dtype])
    back = there_and_back(codec, tensor)
    assert back.isfinite().all()
    if tensor.numel() == 0 or not tensor.any():
        assert torch.equal(back, tensor)
        return
    exponent = math.frexp(tensor.double().abs().max().item())[1]
    half = exponent // 2
    x, y = (t.double() * 2.0**-half * 2.0 ** -(exponent - half) for t in (tensor, back))
    bound = codec.error_bound(TensorSpec(tuple(tensor.shape), dtype))
    assert (y - x).norm() <= bound * x.norm()


def test_bf16_of_usual_numbers_is_the_plain_cast():
    tensor = torch.randn(PIECE["cpu"] + 10)
    encoded = CODECS["bf16"].encode(tensor)
    assert encoded.header == bytes(2)
    assert b"".join(encoded.buffers) == tensor.bfloat16().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9, 1e30])
def test_fp16_rounds_as_well_at_any_size(size):
    tensor = torch.randn(PIECE["cpu"] + 10, generator=torch.Generator().manual_seed(0)) * size
    back = there_and_back(CODECS["fp16"], tensor)
    usual = tensor.abs() > 1e-4 * tensor.abs().max()
    off = ((back - tensor).abs() / tensor.abs())[usual]
    assert off.max() <= 2.0**-11
    exponent = unpack_exponent("fp16", CODECS["fp16"].encode(tensor).header)
    assert 2.0**14 <= tensor.abs().max() * 2.0**-exponent < 2.0**15


@each
@pytest.mark.parametrize("dtype", FLOATING)
def test_what_is_not_finite_stays_what_it_is(codec, dtype):
    limit = torch.finfo(DTYPES[dtype]).max
    for other in (0.0, 1.0, limit):
        tensor = torch.tensor([math.nan, math.inf, -math.inf, other, -other], dtype=DTYPES[dtype])
        back = there_and_back(codec, tensor)
        assert back[0].isnan()
        assert back[1:3].tolist() == [math.inf, -math.inf]
        assert torch.allclose(back[3:], tensor[3:], rtol=2.0**-8, atol=0.0)


@each
def test_a_scale_beyond_any_float_is_refused(codec):
    for header in (b"\xff\x7f", b"\x00\x80"):
        with pytest.raises(CodecError, match="exponent"):
            codec.decode(TensorSpec((1,), "float32"), header, memoryview(bytearray(2)))


@each
def test_what_was_announced_is_said(codec):
    message = r"data of float32\[3\]: expected 6 bytes, got 5 \(truncated\)"
    with pytest.raises(CodecError, match=message):
        codec.decode(TensorSpec((3,), "float32"), bytes(2), memoryview(bytearray(5)))
