"""Which k numbers are kept: against torch.topk and a plain stable sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.interface import CodecError
from shoal.compression.sparse.select import HOW, largest, magnitude

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
estimates = pytest.mark.parametrize("how", [how for how in HOW if how != "exact"])
LONG = 34_000  # above 32,768 a sample is drawn


def by_sorting(x, k):
    """Largest magnitudes, of equal ones the first; NaN before infinity."""
    size = x.double().abs()
    size = torch.where(size.isinf(), 1.7e308, size)
    size = torch.where(size.isnan(), math.inf, size)
    return size.sort(descending=True, stable=True).indices[:k].sort().values


def heaps(n, seed):
    """Tensors that selection may meet, by what is special about them."""
    rng = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, generator=rng)
    uniform = torch.rand(n, generator=rng)
    sparse = normal * (uniform < 0.003)
    spiked = normal.clone()
    spiked[:: max(1, n // 7)] = math.inf
    spiked[1 :: max(1, n // 5)] = math.nan
    return {
        "normal": normal,
        "shifted": normal + 5.0,
        "tiny": normal * 1e-30,
        "tails": normal / (uniform + 1e-9),
        "laplace": uniform.log() * normal.sign(),
        "zeros": torch.zeros(n),
        "constant": torch.full((n,), -3.0),
        "few values": (normal * 2).round(),
        "sparse": sparse,
        "not finite": spiked,
        "periodic": normal * (torch.arange(n) % 64 == 0),
        "sorted": normal.sort().values,
        "one side": torch.cat([torch.zeros(n - n // 20), normal[: n // 20]]),
    }


HEAPS = list(heaps(8, 0))
KINDS = pytest.mark.parametrize("kind", HEAPS)


@KINDS
@dtypes
def test_exactly_the_k_largest_are_selected_and_of_equal_ones_the_first(kind, dtype):
    for n in (100, LONG):
        x = heaps(n, 1)[kind].to(dtype)
        for ratio in (1, 1.3, 10, 100, 5000):
            k = max(1, round(n / ratio))
            assert torch.equal(largest(x, k), by_sorting(x, k)), (n, k)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.data(),
)
def test_any_numbers_are_selected_as_by_sorting(numbers, data):
    x = torch.tensor(numbers, dtype=torch.float32)
    k = data.draw(st.integers(1, len(numbers)))
    assert torch.equal(largest(x, k), by_sorting(x, k))


@given(n=st.integers(LONG, 3 * LONG), share=st.floats(1e-5, 1), seed=st.integers(0, 2**31))
def test_magnitudes_are_those_of_topk(n, share, seed):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    k = max(1, int(share * n))
    found = largest(x, k)
    assert found.unique().numel() == k
    assert torch.equal(x[found].abs().sort().values, torch.topk(x.abs(), k).values.flip(0))


@estimates
@KINDS
@dtypes
def test_an_estimate_selects_k_within_a_hundredth_and_none_smaller_than_one_left_out(
    how, kind, dtype
):
    x = heaps(2 * LONG, 2)[kind].to(dtype)
    for k in (170, 1360, 22_000):
        found = largest(x, k, how)
        assert abs(found.numel() - k) <= k // 100
        assert torch.equal(found, by_sorting(x, found.numel())), k


@pytest.mark.parametrize("how", HOW)
@given(rows=st.integers(1, 5), m=st.integers(1, 50), seed=st.integers(0, 2**31), data=st.data())
def test_rows_are_selected_one_by_one(how, rows, m, seed, data):
    x = torch.randint(-4, 5, (rows, m), generator=torch.Generator().manual_seed(seed)).float()
    k = data.draw(st.integers(1, m))
    found = largest(x.view(-1), k, how, rows)
    assert torch.equal(found, torch.cat([by_sorting(x[i], k) + i * m for i in range(rows)]))


@pytest.mark.parametrize("how", HOW)
def test_long_rows_are_selected_one_by_one(how):
    x = torch.randn(3, LONG, generator=torch.Generator().manual_seed(3)) * torch.tensor(
        [[1.0], [1e-6], [1e6]]
    )
    found = largest(x.view(-1), 600, how, 3)
    assert bool((found[1:] > found[:-1]).all())
    for i in range(3):
        row = found[(found >= i * LONG) & (found < (i + 1) * LONG)] - i * LONG
        assert abs(row.numel() - 600) <= (0 if how == "exact" else 6)
        assert torch.equal(row, by_sorting(x[i], row.numel()))


@dtypes
def test_magnitudes_grow_with_the_numbers(dtype):
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    numbers = [0.0, least / 4, least, 1.0, 1.5, most, math.inf, math.nan]
    keys = magnitude(torch.tensor(numbers, dtype=dtype))
    assert bool((keys[1:] > keys[:-1]).all())
    assert torch.equal(keys, magnitude(-torch.tensor(numbers, dtype=dtype)))


def test_all_nan_are_equal():
    patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32)
    assert magnitude(patterns.view(torch.float32)).unique().numel() == 1


def test_whole_numbers_have_no_magnitude():
    with pytest.raises(CodecError, match="floating point"):
        largest(torch.arange(5), 2)


def test_a_threshold_that_misses_is_corrected_or_given_up(monkeypatch):
    x = torch.randn(LONG, generator=torch.Generator().manual_seed(4))
    calls = []
    for floor in (0x7F000000, 1, 0x3F800000):  # above all, below all, at 1.0

        def bad(sample, floor=floor):
            return lambda share: calls.append(share) or floor

        monkeypatch.setitem(HOW, "bad", bad)
        calls.clear()
        assert torch.equal(largest(x, 500, "bad"), by_sorting(x, 500))
        assert len(calls) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("how", HOW)
@dtypes
def test_a_device_selects_the_same(how, dtype):
    for kind, x in heaps(4 * LONG, 5).items():
        x = x.to(dtype)
        found = largest(x.cuda(), 2000, how)
        assert found.is_cuda
        assert torch.equal(found.cpu(), by_sorting(x, found.numel())), kind
        assert abs(found.numel() - 2000) <= (0 if how == "exact" else 20)
