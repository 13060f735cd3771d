"""Masks that both ends derive: what travels, and what an exchange keeps."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.checks import DTYPES, FLOATING
from shoal.compression.codec import CodecError
from shoal.compression.sparse.masks import SharedMask
from shoal.dag.ir.graph import TensorSpec

words = st.integers(-(2**63), 2**63 - 1)
shares = st.floats(1e-4, 1.0)


def sent(mask, name, tensor):
    return memoryview(bytearray(b"".join(mask.payload(name, tensor))))


def meet(mask, name, a, b):
    """Both ends: each with a mask of its own, made from the same numbers."""
    other = SharedMask(mask.seed, mask.round, mask.keep)
    to_b, to_a = sent(mask, name, a), sent(other, name, b)
    mask.average(name, a, to_a)
    other.average(name, b, to_b)


def normal(n, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=g, dtype=torch.float64) * scale).to(dtype)


@given(words, words, shares, st.integers(0, 3000), st.sampled_from(FLOATING))
def test_the_payload_is_the_kept_numbers_and_nothing_else(seed, round_, keep, n, dtype):
    mask, x = SharedMask(seed, round_, keep), normal(n, DTYPES[dtype])
    at = mask.positions("w", n)
    expected = min(n, max(1, round(n * keep)))
    assert at.unique().numel() == at.numel() == expected
    assert n == 0 or 0 <= int(at.min()) <= int(at.max()) < n
    data = sent(mask, "w", x)
    assert data.nbytes == mask.size_bytes(TensorSpec((n,), dtype))
    assert bytes(data) == x[at].view(torch.uint8).numpy().tobytes()


@given(words, words, shares, st.integers(1, 400), st.sampled_from(FLOATING), st.integers(0, 9))
def test_both_ends_get_the_same_bits_in_the_middle(seed, round_, keep, n, dtype, data_seed):
    a, b = normal(n, DTYPES[dtype], data_seed), normal(n, DTYPES[dtype], data_seed + 100, 30.0)
    before_a, before_b = a.clone(), b.clone()
    mask = SharedMask(seed, round_, keep)
    meet(mask, "w", a, b)
    at = mask.positions("w", n)
    rest = torch.ones(n, dtype=torch.bool)
    rest[at] = False
    assert torch.equal(a[at].view(torch.uint8), b[at].view(torch.uint8))
    assert torch.equal(a[rest], before_a[rest])
    assert torch.equal(b[rest], before_b[rest])
    eps = Fraction(torch.finfo(DTYPES[dtype]).eps) / 2
    for i in at.tolist():
        exact = Fraction(float(before_a[i])) + Fraction(float(before_b[i]))
        got = Fraction(float(a[i])) + Fraction(float(b[i]))
        assert abs(got - exact) <= eps * abs(exact)


@given(words, shares, st.integers(1, 300), st.integers(0, 9))
def test_the_mean_of_a_pair_is_kept_exactly_where_it_can_be_written(seed, keep, n, data_seed):
    g = torch.Generator().manual_seed(data_seed)
    a, b = (torch.randint(-(2**22), 2**22, (n,), generator=g).float() for _ in range(2))
    total = a + b
    meet(SharedMask(seed, 3, keep), "w", a, b)
    assert torch.equal(a + b, total)


def test_the_mean_of_all_is_kept_in_every_coordinate():
    """Rounds of many pairs; multiples of 2^10 are halved ten times without loss."""
    n, peers = 50, 6
    g = torch.Generator().manual_seed(1)
    xs = [torch.randint(-999, 999, (n,), generator=g).double() * 1024 for _ in range(peers)]
    total = torch.stack(xs).sum(0)
    for t in range(10):
        order = torch.randperm(peers, generator=g).tolist()
        for i in range(0, peers, 2):
            meet(SharedMask(5, t, 0.3), "w", xs[order[i]], xs[order[i + 1]])
        assert torch.equal(torch.stack(xs).sum(0), total)


def test_equal_tensors_stay_what_they_are():
    for dtype in FLOATING:
        x = torch.cat([normal(50, DTYPES[dtype], scale=s) for s in (1.0, 1e-6, 1e4)])
        a, b = x.clone(), x.clone()
        meet(SharedMask(0, 0, 1.0), "w", a, b)
        assert torch.equal(a, x)


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


def test_a_whole_tensor_is_plain_averaging_in_order():
    a, b = normal(10, torch.float32), normal(10, torch.float32, 1)
    middle = (a + b) / 2
    mask = SharedMask(0, 0, 1.0)
    assert bytes(sent(mask, "w", a)) == a.numpy().tobytes()
    meet(mask, "w", a, b)
    assert torch.equal(a, middle)


def test_a_tensor_of_ten_to_the_twelve_has_a_mask_without_a_list_of_it():
    at = SharedMask(1, 2, 1e-9).positions("w", 10**12)
    assert at.unique().numel() == 1000


def test_parameters_are_moved_in_place_and_keep_their_shape():
    a = torch.nn.Parameter(torch.zeros(3, 4))
    mask = SharedMask(0, 0, 1.0)
    mask.average("w", a, sent(mask, "w", torch.ones(3, 4)))
    assert torch.equal(a, torch.full((3, 4), 0.5))


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(keep):
    with pytest.raises(CodecError, match="keep"):
        SharedMask(0, 0, keep)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\0" * 4, "truncated"),
        (b"\0" * 12, "trailing"),
        (b"\0\0\x80\x7f" * 2, "infinite"),
        (b"\0\0\xc0\x7f" * 2, "NaN"),
    ],
)
def test_a_payload_that_cannot_be_changes_nothing(data, says):
    x = normal(4, torch.float32)
    before = x.clone()
    with pytest.raises(CodecError, match=says):
        SharedMask(0, 0, 0.5).average("w", x, memoryview(bytearray(data)))
    assert torch.equal(x, before)


def test_what_is_not_finite_or_no_floating_point_is_not_sent():
    mask = SharedMask(0, 0, 1.0)
    with pytest.raises(CodecError, match="NaN or infinite"):
        mask.payload("w", torch.tensor([1.0, float("inf")]))
    with pytest.raises(CodecError, match="int64"):
        mask.payload("w", torch.tensor([1, 2]))
