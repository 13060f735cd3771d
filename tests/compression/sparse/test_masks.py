"""Masks that both ends derive: what travels, and what is read of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.checks import DTYPES, FLOATING
from shoal.compression.codec import CodecError
from shoal.compression.sparse.masks import MaskCodec, SharedMask
from shoal.dag.ir.graph import TensorSpec

words = st.integers(-(2**63), 2**63 - 1)
shares = st.floats(1e-4, 1.0)


def sent(codec, tensor):
    return memoryview(bytearray(b"".join(codec.encode(tensor).buffers)))


def normal(n, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=g, dtype=torch.float64) * scale).to(dtype)


@given(words, words, shares, st.integers(0, 3000), st.sampled_from(FLOATING))
def test_the_kept_numbers_travel_and_nothing_else(seed, round_, keep, n, dtype):
    """The other end has a codec of its own, made from the same numbers."""
    mask, x, spec = (
        SharedMask(seed, round_, keep),
        normal(n, DTYPES[dtype]),
        TensorSpec((n,), dtype),
    )
    at = mask.positions("w", n)
    expected = min(n, max(1, round(n * keep)))
    assert at.unique().numel() == at.numel() == expected
    assert n == 0 or 0 <= int(at.min()) <= int(at.max()) < n
    data, other = sent(MaskCodec(mask, "w"), x), MaskCodec(SharedMask(seed, round_, keep), "w")
    assert data.nbytes == other.size_bytes(spec)
    assert bytes(data) == x[at].view(torch.uint8).numpy().tobytes()
    wanted = torch.zeros_like(x)
    wanted[at] = x[at]
    assert torch.equal(other.decode(spec, b"", data), wanted)
    error = float((wanted - x).double().norm()) / (float(x.double().norm()) or 1.0)
    assert error <= other.error_bound(spec)


def test_seeds_rounds_and_names_have_masks_of_their_own():
    found = {
        tuple(SharedMask(seed, t, 0.1).positions(name, 1000).tolist())
        for seed in (0, 1, -1)
        for t in (0, 1, 2)
        for name in ("a", "b", "")
    }
    assert len(found) == 27


def test_every_coordinate_is_exchanged_as_often_as_any_other():
    n, rounds = 200, 3000
    counts = torch.zeros(n, dtype=torch.float64)
    for t in range(rounds):
        counts[SharedMask(11, t, 0.1).positions("w", n)] += 1
    expected = rounds * 0.1
    chi2 = float(((counts - expected) ** 2 / (expected * 0.9)).sum())
    assert abs(chi2 - n) < 5 * (2 * n) ** 0.5


def test_of_a_whole_tensor_all_goes_in_order():
    x, codec = normal(10, torch.float32), MaskCodec(SharedMask(0, 0, 1.0), "w")
    assert bytes(sent(codec, x)) == x.numpy().tobytes()
    assert codec.error_bound(TensorSpec((10,), "float32")) == 0


def test_a_tensor_of_ten_to_the_twelve_has_a_mask_without_a_list_of_it():
    at = SharedMask(1, 2, 1e-9).positions("w", 10**12)
    assert at.unique().numel() == 1000


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(keep):
    with pytest.raises(CodecError, match="keep"):
        SharedMask(0, 0, keep)


@pytest.mark.parametrize(
    ("header", "size", "says"), [(b"", 4, "truncated"), (b"", 12, "trailing"), (b"1", 8, "header")]
)
def test_bytes_of_another_length_are_refused(header, size, says):
    codec, spec = MaskCodec(SharedMask(0, 0, 0.5), "w"), TensorSpec((4,), "float32")
    with pytest.raises(CodecError, match=says):
        codec.decode(spec, header, memoryview(bytearray(size)))


def test_what_is_no_floating_point_is_not_sent():
    with pytest.raises(CodecError, match="int64"):
        MaskCodec(SharedMask(0, 0, 1.0), "w").encode(torch.tensor([1, 2]))
