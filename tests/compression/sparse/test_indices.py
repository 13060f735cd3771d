"""Indices as bytes: against Python's sets."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.interface import CodecError
from shoal.compression.sparse import indices


@st.composite
def sets(draw):
    """(n, sorted indices): few of many, many of few, and all; spread out or side by side."""
    n = draw(st.sampled_from([1, 2, 7, 8, 9, 255, 256, 257, 1000, 70_000, 2**33]))
    k = draw(st.integers(0, min(n, 300)))
    start = draw(st.integers(0, n - k))
    dense = set(range(start, start + k))
    spread = draw(st.sets(st.integers(0, n - 1), max_size=min(n, 40)))
    return n, sorted(draw(st.sampled_from([dense, spread, dense | spread])))


def encoded(n, chosen):
    return indices.encode(torch.tensor(chosen, dtype=torch.int64), n)


@given(sets())
def test_what_is_decoded_is_what_was_encoded(case):
    n, chosen = case
    data = encoded(n, chosen)
    assert data.dtype is torch.uint8
    assert data.numel() == indices.size_bytes(n, len(chosen))
    assert indices.decode(data, n, len(chosen)).tolist() == chosen


@given(sets(), st.data())
def test_any_bytes_are_such_a_set_and_no_other_bytes_are_the_same_set_or_refused(case, data):
    n, chosen = case
    k = len(chosen)
    content = bytearray(encoded(n, chosen).tolist())
    for _ in range(data.draw(st.integers(1, 3))):
        if content:
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] ^= 1 << data.draw(st.integers(0, 7))
    changed = torch.tensor(list(content), dtype=torch.uint8)
    with suppress(CodecError):
        found = indices.decode(changed, n, k).tolist()
        assert found == sorted(set(found))
        assert len(found) == k
        assert not found or 0 <= found[0] <= found[-1] < n
        assert torch.equal(encoded(n, found), changed)


@given(sets(), st.integers(-3, 3).filter(bool))
def test_bytes_cut_off_or_added_are_refused(case, change):
    n, chosen = case
    data = encoded(n, chosen)
    other = torch.cat([data, data.new_zeros(change)]) if change > 0 else data[:change]
    if other.numel() != data.numel():
        with pytest.raises(CodecError, match=f"are {data.numel()} bytes, got {other.numel()}"):
            indices.decode(other, n, len(chosen))


@given(sets(), st.integers(-3, 3).filter(bool))
def test_another_count_is_refused(case, change):
    n, chosen = case
    k = len(chosen) + change
    with pytest.raises(CodecError):
        indices.decode(encoded(n, chosen), n, k)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([0, 3, 3, 9], "increasing"),
        ([3, 0, 9, 12], "increasing"),
        ([0, 3, 9, 301], "the largest is 301"),
    ],
    ids=["repeated", "unsorted", "out of range"],
)
def test_indices_that_are_no_sorted_set_are_refused(wrong, why):
    n, k = 300, 4  # 6 low bits
    assert indices.size_bytes(n, k) == math.ceil(4 * 4 / 8) + math.ceil(2 * 4 / 8) + 1
    with pytest.raises(CodecError, match=why):
        indices.decode(encoded(n, wrong), n, k)


def test_bits_behind_the_last_number_or_mark_are_refused():
    n, k = 300, 5  # 4 low bits, 5 + 18 marks
    good = encoded(n, [0, 1, 2, 3, 4])
    assert good.numel() == 3 + 3
    for at, bit, why in ((2, 4, "4 bits, got bits set"), (5, 7, "has 6 of 23 bits")):
        bad = good.clone()
        bad[at] |= 1 << bit
        with pytest.raises(CodecError, match=why):
            indices.decode(bad, n, k)


@pytest.mark.parametrize(("n", "k"), [(0, 1), (5, 6), (5, -1), (-1, 0)])
def test_more_indices_than_elements_or_fewer_than_none_are_refused(n, k):
    with pytest.raises(CodecError):
        indices.size_bytes(n, k)


@given(st.integers(1, 2**40), st.data())
def test_the_size_is_near_the_entropy_and_never_above_a_bitmap_or_plain_integers(n, data):
    k = data.draw(st.integers(1, n))
    size = indices.size_bytes(n, k)
    entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert size <= -(-n // 8)
    if n <= 2**31:
        assert size <= 4 * k + 1
    share = k / n
    if share <= 0.25 and n < 2**30:  # beyond, the logarithms are too coarse
        assert 8 * size <= entropy + 0.76 * k + 60


@given(st.integers(1, 10_000), st.data())
def test_more_indices_are_not_fewer_bytes(n, data):
    k = data.draw(st.integers(0, n - 1))
    assert indices.size_bytes(n, k) <= indices.size_bytes(n, k + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@given(sets())
def test_a_device_writes_the_same_bytes(case):
    n, chosen = case
    data = indices.encode(torch.tensor(chosen, dtype=torch.int64, device="cuda"), n)
    assert torch.equal(data.cpu(), encoded(n, chosen))
    assert indices.decode(data, n, len(chosen)).tolist() == chosen
