"""randomk: positions from a key, nothing but numbers on the wire."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import CodecError, parse
from shoal.compression.sparse.randomk import positions
from shoal.compression.sparse.values import VALUES
from shoal.dag.ir.graph import TensorSpec

keys = st.integers(0, 2**64 - 1)


def spec_of(tensor):
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def content(encoded):
    return bytearray(b"".join(encoded.buffers))


def there_and_back(codec, tensor, key=0, device="cpu"):
    encoded = codec.encode(tensor, key)
    return codec.decode(spec_of(tensor), encoded.header, memoryview(content(encoded)), device)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(n=st.integers(1, 3000), key=keys, data=st.data())
def test_positions_are_different_and_below_n(n, key, data):
    k = data.draw(st.integers(0, n))
    found = positions(n, k, key).tolist()
    assert len(set(found)) == len(found) == k
    assert all(0 <= position < n for position in found)
    assert sorted(positions(n, n, key).tolist()) == list(range(n))
    assert positions(n, n, key)[:k].tolist() == found


def test_positions_of_a_large_tensor_take_no_list_of_it():
    found = positions(2**40 + 1, 1000, 7)
    assert found.unique().numel() == 1000
    assert int(found.max()) <= 2**40


@pytest.mark.parametrize("n", [3, 10, 101])
def test_every_position_is_as_likely_in_every_place(n):
    draws = 1000
    places = torch.stack([positions(n, n, key * 977 + 5) for key in range(draws)])
    for place in (0, 1, n - 1):
        counts = torch.bincount(places[:, place], minlength=n).double()
        chi2 = float(((counts - draws / n) ** 2 / (draws / n)).sum())
        assert chi2 < n - 1 + 5 * math.sqrt(2 * (n - 1)) + 5  # five deviations


def test_pairs_are_as_likely_as_others():
    n, draws = 6, 1500
    pairs = torch.stack([positions(n, 2, key) for key in range(draws)])
    counts = torch.bincount(pairs[:, 0] * n + pairs[:, 1], minlength=n * n).double()
    expected = draws / (n * (n - 1))
    apart = counts[counts > 0]
    assert apart.numel() == n * (n - 1)
    assert float(((apart - expected) ** 2 / expected).sum()) < 29 + 5 * math.sqrt(58)


@given(
    shape=st.lists(st.integers(0, 12), max_size=3),
    ratio=st.floats(1, 1e3),
    key=keys,
)
def test_what_was_sent_comes_back_and_the_rest_is_zero(shape, ratio, key):
    x = normal(*shape) + 9.0
    codec = parse(f"randomk:values=fp32,ratio={ratio}")
    back, n = there_and_back(codec, x, key), x.numel()
    k = max(1, round(n / ratio)) if n else 0
    kept = positions(n, k, key)
    expected = torch.zeros(n)
    expected[kept] = x.reshape(-1)[kept]
    assert torch.equal(back, expected.view(x.shape))
    assert codec.encode(x, key).size_bytes == codec.size_bytes(spec_of(x)) == 4 * k


@pytest.mark.parametrize("values", VALUES)
def test_the_error_is_within_the_bound(values):
    for ratio in (1.0, 4.0, 100.0):
        codec = parse(f"randomk:ratio={ratio},values={values}")
        for x in (normal(70, 50), normal(1), torch.zeros(1000).index_fill_(0, torch.tensor(3), 5)):
            difference = there_and_back(codec, x, 11) - x
            assert difference.norm() <= codec.error_bound(spec_of(x)) * x.norm()
            assert codec.encode(x).size_bytes == codec.size_bytes(spec_of(x))


def test_over_many_keys_the_kept_share_is_k_of_n():
    x = normal(500)
    codec = parse("randomk:ratio=5,values=fp32")
    shares = [
        float((there_and_back(codec, x, key) ** 2).sum() / (x**2).sum()) for key in range(150)
    ]
    assert sum(shares) / 150 == pytest.approx(0.2, abs=0.01)


@settings(max_examples=20)
@given(st.integers(2, 5), keys)
def test_payloads_of_one_key_add_up(peers, key):
    codec = parse("randomk:ratio=7,values=fp32")
    assert codec.reducible
    tensors = [normal(20, 30, seed=i).round(decimals=2) * 64 for i in range(peers)]
    encoded = [codec.encode(x, key) for x in tensors]
    assert len({e.header for e in encoded}) == 1
    numbers = [torch.frombuffer(content(e), dtype=torch.float32) for e in encoded]
    summed = memoryview(bytearray(sum(numbers).numpy().tobytes()))
    back = codec.decode(spec_of(tensors[0]), encoded[0].header, summed)
    assert torch.equal(back, sum(there_and_back(codec, x, key) for x in tensors))


def test_payloads_with_other_values_do_not():
    assert not parse("randomk:values=int8").reducible
    assert not parse("randomk").reducible


def test_numbers_that_are_not_finite_are_refused():
    for bad in (math.nan, math.inf):
        x = normal(1000)
        x[500] = bad
        with pytest.raises(CodecError, match="1 of 1000 NaN or infinite"):
            parse("randomk").encode(x)


@pytest.mark.parametrize("text", ["randomk:ratio=0.5", "randomk:ratio=nan", "randomk:values=fp8"])
def test_parameters_that_make_no_sense_are_refused(text):
    with pytest.raises(CodecError):
        parse(text)


def test_headers_and_data_of_another_tensor_are_refused():
    codec, x = parse("randomk:ratio=10"), normal(100)
    encoded = codec.encode(x, 3)
    data = memoryview(content(encoded))
    key_and_k = struct.pack("<QQ", 3, 10)
    assert encoded.header == key_and_k
    for header in (b"", key_and_k[:8], key_and_k + b"\0", struct.pack("<QQ", 3, 11)):
        with pytest.raises(CodecError, match="header"):
            codec.decode(spec_of(x), header, data)
    for other in (data[:-1], memoryview(bytearray(data) + b"\0"), data[:0]):
        with pytest.raises(CodecError, match="values"):
            codec.decode(spec_of(x), encoded.header, other)
    for spec in (TensorSpec((100,), "int32"), TensorSpec((200,), "float32")):
        with pytest.raises(CodecError):
            codec.decode(spec, encoded.header, data)


def test_whole_numbers_are_refused():
    with pytest.raises(CodecError, match="cannot write int64"):
        parse("randomk").encode(torch.arange(9))


def test_keys_are_64_bits():
    codec, x = parse("randomk:ratio=10"), normal(1000)
    assert codec.encode(x, -1).header == codec.encode(x, 2**64 - 1).header
    assert not torch.equal(there_and_back(codec, x, 1), there_and_back(codec, x, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("values", VALUES)
def test_a_device_sends_the_same_positions(values):
    codec, x = parse(f"randomk:values={values}"), normal(300, 500)
    assert content(codec.encode(x.cuda(), 5)) == content(codec.encode(x, 5))
    back = there_and_back(codec, x.cuda(), 5, "cuda")
    assert back.device.type == "cuda"
    assert torch.equal(back.cpu(), there_and_back(codec, x, 5))
