"""Which k of n numbers are the largest by magnitude.

NaN counts as larger than infinity, so that it is kept; all NaN are equal. Magnitudes are compared
as integers: without its sign, the bit pattern of an IEEE number grows with it.

    exact       k numbers, of equal ones those of the lowest index
    gaussian    k within 1 %; the first threshold from mean and deviation (1911.08772)
    histogram   k within 1 %; the first threshold from a histogram of a sample

All three go the same way (Floyd and Rivest 1975): a sample gives a threshold a little too low, one
pass over the tensor gives the few numbers above it, and only among these the cut is sought: the
k-th largest, or for the estimates the edge of a histogram's bin. Where the candidates are too few
or too many, the threshold is corrected up to three times. What no estimate fits is selected
exactly: a tensor that is short or flat, k below 100, many equal numbers at the cut.

Cost: n reads, about 12 ms for 10 M fp32 on one core; n bytes for the mask and 4 MiB beside it, or
on CUDA the magnitudes. torch.kthvalue over everything, the way out, takes 20 times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..interface import CodecError

__all__ = ["HOW", "largest", "magnitude"]

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHORT = 1 << 15  # elements; below it everything is a candidate
_SAMPLE = 1 << 16
_CHUNK = 1 << 20  # elements whose magnitudes stay in the cache; fewer would cost threads' starts
_CORRECTIONS = 3


def magnitude(x: Tensor) -> Tensor:
    """Integers of the same width that order floating point numbers x as |x| does, NaN above all."""
    integer, infinite = _bits(x)
    return (x.view(integer) & torch.iinfo(integer).max).clamp_(max=infinite + 1)


def largest(x: Tensor, k: int, how: str = "exact", rows: int = 1) -> Tensor:
    """Sorted indices of the k largest of each row; int64, on x's device.

    x is floating point, (rows · m,), each row m elements, and 1 <= k <= m. Of each row exactly k
    for "exact", k ± k // 100 for the other words of `HOW`.
    """
    m = x.numel() // rows
    if m <= _SHORT or k == m:
        return _of_all(x, k, rows)
    found = [_of_one(part, k, how) for part in x.view(rows, m)]
    return found[0] if rows == 1 else torch.cat([part + i * m for i, part in enumerate(found)])


def _of_all(x: Tensor, k: int, rows: int) -> Tensor:
    return _exactly(magnitude(x).view(rows, -1), k).view(-1).nonzero().view(-1)


def _exactly(keys: Tensor, k: int) -> Tensor:
    """Mask of the k largest of each row of keys (rows, m), of equal ones the first."""
    cut = torch.kthvalue(keys, keys.shape[1] - k + 1, dim=1, keepdim=True).values
    keep = keys >= cut
    if int(keep.sum()) > k * keys.shape[0]:
        above, tied = keys > cut, keys == cut
        free = k - above.sum(1, keepdim=True)
        keep = above | (tied & (tied.cumsum(1) <= free))
    return keep


def _of_one(x: Tensor, k: int, how: str) -> Tensor:
    n = x.numel()
    estimate = HOW[how](x[_positions(n, x.device)])
    # What lies above it in the sample scatters: four deviations more, so that k are found.
    size = min(_SAMPLE, n // 8)
    goal = k / n + 4 * math.sqrt(k / n / size) + 4 / size
    share = goal
    for _ in range(1 + _CORRECTIONS):
        floor = estimate(share)
        # Zeros are all equal: they only fill up what is missing.
        mask = _mask(x, max(floor, 1))
        found = int(torch.count_nonzero(mask))
        if found <= k and floor <= 1:
            return _filled(x, _indices(mask, found), k)
        if k <= found <= max(2 * k, 2 * goal * n):
            indices = _indices(mask, found)
            keys = magnitude(x[indices])
            keep = None if how == "exact" else _about(keys, max(floor, 1), k, x.dtype)
            return indices[_exactly(keys[None], k)[0] if keep is None else keep]
        share = min(1.0, share * goal * n / found if found else 4 * share)
    return _of_all(x, k, 1)


def _about(keys: Tensor, floor: int, k: int, dtype: torch.dtype) -> Tensor | None:
    """Mask of the keys above the edge of a bin, k ± k // 100 of them; None: no edge is so near.
    Bins are 2^-12 octaves wide over the lowest eight octaves."""
    octave = _bits(torch.ones(0, dtype=dtype), 1.0)[1] - _bits(torch.ones(0, dtype=dtype), 0.5)[1]
    shift = max(0, octave.bit_length() - 1 - 12)
    bins = ((keys - floor) >> shift).clamp_(max=8 * (octave >> shift))
    above = torch.bincount(bins).flip(0).cumsum(0)
    off, last = (above - k).abs().min(0)
    if int(off) > k // 100:
        return None
    return keys >= floor + ((above.numel() - 1 - int(last)) << shift)


def _positions(n: int, device: torch.device) -> Tensor:
    """An even sample of [0, n) without the tensor's own periods: steps of the golden section."""
    step = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, n) > 1:
        step += 1
    return torch.arange(min(_SAMPLE, n // 8), device=device) * step % n


def _mask(x: Tensor, floor: int) -> Tensor:
    """Which magnitudes are at least `floor`; bool, with False up to a multiple of 8 elements."""
    n, (integer, _) = x.numel(), _bits(x)
    mask = torch.zeros(-(-n // 8) * 8, dtype=torch.bool, device=x.device)
    bits = x.view(integer)
    chunk = _CHUNK if x.device.type == "cpu" else n
    buffer = torch.empty(min(chunk, n), dtype=integer, device=x.device)
    for start in range(0, n, chunk):
        part = bits[start : start + chunk]
        keys = buffer[: part.numel()]
        torch.bitwise_and(part, torch.iinfo(integer).max, out=keys)
        torch.ge(keys, floor, out=mask[start : start + part.numel()])
    return mask


def _indices(mask: Tensor, found: int) -> Tensor:
    """Where the mask is True. Few are found faster by words of eight."""
    if mask.is_cuda or found > mask.numel() // 16:
        return mask.nonzero().view(-1)
    words = mask.view(torch.int64).nonzero().view(-1)
    at = mask.view(-1, 8)[words].nonzero()
    return words[at[:, 0]].mul_(8).add_(at[:, 1])


def _filled(x: Tensor, indices: Tensor, k: int) -> Tensor:
    """All numbers but zeros, and the first zeros, k together."""
    missing, zeros = k - indices.numel(), []
    for start in range(0, x.numel(), _CHUNK):
        if missing <= 0:
            break
        more = (x[start : start + _CHUNK] == 0).nonzero().view(-1)[:missing] + start
        missing -= more.numel()
        zeros.append(more)
    return torch.cat([indices, *zeros]).sort().values


# What makes of a sample an estimate: the threshold that about this share of all numbers reaches,
# as an integer of their width.

_Estimate = Callable[[float], int]


def _by_rank(sample: Tensor) -> _Estimate:
    keys = magnitude(sample)

    def estimate(share: float) -> int:
        rank = math.ceil(share * keys.numel())
        return int(torch.kthvalue(keys, max(1, keys.numel() - rank + 1)).values)

    return estimate


def _by_histogram(sample: Tensor) -> _Estimate:
    """The estimate from a histogram of the upper 15 bits: 128 bins an octave, for fp16 1024."""
    keys = magnitude(sample)
    shift = torch.iinfo(keys.dtype).bits - 16
    above = torch.bincount(keys >> shift).flip(0).cumsum(0)

    def estimate(share: float) -> int:
        enough = int((above < share * keys.numel()).sum())
        return max(0, above.numel() - 1 - enough) << shift

    return estimate


def _by_gaussian(sample: Tensor) -> _Estimate:
    """Where a bell of the sample's mean and deviation leaves this share outside of ±threshold. A
    sample that is constant or not finite has no bell: then by rank."""
    deviation, mean = (float(v) for v in torch.std_mean(sample.double()))
    if not (0 < deviation < math.inf and math.isfinite(mean)):
        return _by_rank(sample)

    def outside(threshold: float) -> float:
        left, right = (threshold + mean) / deviation, (threshold - mean) / deviation
        return (math.erfc(left / math.sqrt(2)) + math.erfc(right / math.sqrt(2))) / 2

    def estimate(share: float) -> int:
        low, high = 0.0, abs(mean) + 40 * deviation
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if outside(middle) > share else (low, middle)
        return _bits(sample, low)[1]

    return estimate


HOW: dict[str, Callable[[Tensor], _Estimate]] = {
    "exact": _by_rank,
    "gaussian": _by_gaussian,
    "histogram": _by_histogram,
}
"""The ways to select."""


def _bits(x: Tensor, number: float = math.inf) -> tuple[torch.dtype, int]:
    """The integers as wide as x's elements, and which of them a positive number is."""
    if not x.dtype.is_floating_point:
        raise CodecError(f"magnitudes of {x.dtype}: expected a floating point dtype")
    integer = _INTEGER[x.dtype.itemsize]
    return integer, int(torch.tensor(number, dtype=x.dtype).view(integer))
