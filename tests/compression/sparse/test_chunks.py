"""chunks and nonzero: what SparseLoCo sends, against the plain formulas of the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import CodecError, fitting, parse
from shoal.compression.sparse import indices
from shoal.dag.ir.graph import TensorSpec
from shoal.sim.plain.round_methods import top_of_chunks, two_bits


def spec_of(tensor):
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def there_and_back(codec, tensor):
    encoded = codec.encode(tensor)
    data = memoryview(bytearray(b"".join(encoded.buffers)))
    return codec.decode(spec_of(tensor), encoded.header, data)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 700),
    chunk=st.integers(1, 200),
    density=st.sampled_from([1 / 64, 0.1, 0.5, 1.0]),
    bits=st.sampled_from([2, 32]),
    seed=st.integers(0, 999),
)
def test_it_is_the_top_of_each_chunk(n, chunk, density, bits, seed):
    """Of numbers that are all different; with two bits, to the digits of a level."""
    x = normal(n, seed=seed)
    back = there_and_back(parse(f"chunks:density={density!r},chunk={chunk},bits={bits}"), x)
    if bits == 32:
        assert torch.equal(back, top_of_chunks(density, chunk)(x))
        return
    wanted = top_of_chunks(density, chunk, two_bits)(x)
    torch.testing.assert_close(back, wanted, rtol=2.0**-8, atol=0.0)


def test_64_of_4096_cost_a_sixth_of_a_bit_per_number():
    """As calculated, and less than 12 bits for an index and 2 for a number, 0.219."""
    n, chunks, kept = 1 << 20, 256, 256 * 64
    codec = parse("chunks")
    size = codec.size_bytes(TensorSpec((n,), "float32"))
    assert size == 2 * 2 * chunks + kept * 2 // 8 + indices.size_bytes(n, kept)
    assert 8 * size / n == pytest.approx(0.164, abs=5e-4)
    assert codec.encode(normal(n)).size_bytes == size


@pytest.mark.parametrize("bad", ["density=0.0", "density=1.5", "chunk=0", "bits=3"])
def test_parameters_without_sense_are_refused(bad):
    with pytest.raises(CodecError, match=f"expected {bad.partition('=')[0]} ="):
        parse(f"chunks:{bad}")


def test_indices_that_are_not_of_so_many_of_each_chunk_are_refused():
    codec = parse("chunks:density=0.25,chunk=8,bits=32")
    x = torch.arange(1.0, 17.0)
    encoded = codec.encode(x)
    other = indices.encode(torch.tensor([0, 13, 14, 15]), 16)
    data = bytearray(b"".join(encoded.buffers))
    data[-other.numel() :] = bytes(other.numpy())
    with pytest.raises(CodecError, match="not of so many of each chunk"):
        codec.decode(spec_of(x), b"", memoryview(data))


@pytest.mark.parametrize("share", [0.0, 1 / 64, 0.3, 0.95, 1.0])
def test_nonzero_loses_nothing_and_is_never_larger_than_all(share):
    codec, x = parse("nonzero"), normal(3, 4000)
    x = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < share, x, 0)
    x[0, 0] = -0.0
    back = there_and_back(codec, x)
    assert torch.equal(back.view(torch.int32), x.view(torch.int32))
    bits = x.view(torch.int32)
    sparse = 4 * int(bits.count_nonzero()) + indices.size_bytes(12000, int(bits.count_nonzero()))
    assert codec.encode(x).size_bytes == min(sparse, 48000)
    assert fitting(codec, spec_of(x)) is codec


def test_nonzero_refuses_more_elements_than_there_are():
    with pytest.raises(CodecError, match="expected at most 4 elements, got 5"):
        parse("nonzero").decode(
            TensorSpec((4,), "float32"), (5).to_bytes(8, "little"), memoryview(bytearray(4))
        )
