"""lossless: every bit comes back, nothing grows, and no bytes make it allocate."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import torch
import zstandard

from shoal.compression.checks import DTYPES
from shoal.compression.codec import fitting, typical_bytes
from shoal.compression.interface import CodecError
from shoal.compression.plain.lossless import LosslessCodec
from shoal.dag.ir.graph import TensorSpec

CODEC = LosslessCodec()


def spec_of(tensor):
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check(tensor):
    """Bytes that a tensor becomes, after it came back bit for bit."""
    encoded = CODEC.encode(tensor)
    data = memoryview(bytearray(b"".join(encoded.buffers)))
    back = CODEC.decode(spec_of(tensor), encoded.header, data)
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert encoded.size_bytes <= tensor.nbytes
    return encoded.size_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int16"])
def test_every_16_bit_pattern_comes_back(dtype):
    check(torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("n", [1, 2, 1000, 300_000])
def test_random_bytes_come_back_and_do_not_grow(dtype, n):
    size = n * DTYPES[dtype].itemsize
    raw = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(n))
    raw = raw.to(torch.uint8) & (1 if dtype == "bool" else 255)
    check(raw.view(DTYPES[dtype]))


@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 0.70), ("float16", 0.87), ("float32", 0.84), ("float64", 0.91)]
)
def test_bell_shaped_numbers_take_what_is_planned(dtype, most):
    rng = torch.Generator().manual_seed(0)
    for size in (1e-4, 1.0, 30.0):
        tensor = (torch.randn(200_000, generator=rng, dtype=torch.float64) * size).to(DTYPES[dtype])
        if dtype != "float16" or size == 1.0:  # where denormals have no exponent to speak of
            assert check(tensor) <= most * tensor.nbytes
        assert typical_bytes(CODEC, spec_of(tensor)) == round(most * tensor.nbytes)


def test_zeros_take_next_to_nothing():
    assert check(torch.zeros(1_000_000)) < 1000


def test_it_is_kept_where_it_may_not_pay_but_should():
    assert fitting(CODEC, TensorSpec((100,), "bfloat16")) is CODEC
    assert fitting(CODEC, TensorSpec((100,), "int64")) is not CODEC


def frame(size, **parameters):
    return zstandard.ZstdCompressor(**parameters).compress(bytes(size))


def decode(data, n=1000, header=None):
    header = struct.pack("<Q", len(data)) if header is None else header
    return CODEC.decode(TensorSpec((n,), "uint8"), header, memoryview(bytearray(data)))


def test_a_bomb_is_refused_before_anything_is_allocated():
    bomb = frame(200_000_000)
    silent = frame(200_000_000, write_content_size=False)
    # A frame that says 1,000 and holds more: the size field (4 bytes behind magic number and
    # descriptor, one segment) is written over.
    liar = bytearray(frame(150_000))
    at = liar.index(struct.pack("<I", 150_000))
    liar[at : at + 4] = struct.pack("<I", 100_000)
    tracemalloc.start()
    for data, n in ((bomb, 100_000), (silent, 100_000), (bytes(liar), 100_000)):
        assert len(data) < n
        with pytest.raises(CodecError, match="frame"):
            decode(data, n)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000


@pytest.mark.parametrize(
    "data",
    [
        frame(1000) + b"x",
        frame(1000)[:-1],
        frame(500) + frame(500),
        frame(999),
        b"no frame at all",
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",  # one that zstd skips
    ],
    ids=["trailing", "truncated", "two frames", "short", "garbage", "skippable"],
)
def test_what_is_no_whole_frame_of_the_plane_is_refused(data):
    with pytest.raises(CodecError, match="lossless/1 data"):
        decode(data)


@pytest.mark.parametrize(
    "header", [b"", bytes(8), struct.pack("<Q", 1001), struct.pack("<Q", 2**64 - 1), bytes(16)]
)
def test_headers_that_no_encoder_writes_are_refused(header):
    with pytest.raises(CodecError, match="header"):
        decode(bytes(1000), header=header)


def test_booleans_that_are_neither_are_refused():
    with pytest.raises(CodecError, match="other than 0 and 1"):
        CODEC.decode(TensorSpec((2,), "bool"), struct.pack("<Q", 2), memoryview(bytearray(b"\1\2")))
