"""Whole numbers k with probabilities in proportion to exp(-k^2 / (2 sigma^2)): the discrete
Gaussian (Canonne, Kamath, Steinke 2020, 2004.00010, algorithms 1 to 3), for a sigma that is a power
of two. All is decided by integers of 64 bits, so nothing is rounded and no tail is cut off. They
are drawn many at once.

    candidate   |y| = u + v 2^bits   u uniform below 2^bits, kept with exp(-u / 2^bits)
                                     v: how often exp(-1) comes in a row; a sign, and not minus 0
    kept        with exp(-(|y| - sigma)^2 / (2 sigma^2)); who has none yet draws again
    exp(-g)     g in [0, 1]: for k = 1, 2, …, as long as a draw of g / k comes; kept if it was an
                even number of times

The j-th time that words are wanted, they are SHAKE-256 of key, label and j.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["discrete_gaussian"]

Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Draw = Callable[[int], Words]


def discrete_gaussian(key: bytes, label: str, elements: int, bits: int) -> Tensor:
    """Return numbers of mean 0 and variance 4^bits, (elements,), int64, on the host. bits: 1 to
    24, so that squares of what is drawn are below 2^64."""
    draw, found = _stream(key, label), np.zeros(elements, np.int64)
    missing = np.arange(elements)
    while len(missing):
        size, there = _candidates(draw, len(missing), bits)
        at = missing[there]
        off = np.abs((size[there] >> np.uint64(1)).astype(np.int64) - (1 << bits))
        kept = _exp_minus(draw, (off * off).astype(np.uint64), 2 * bits + 1)
        chosen = size[there][kept]
        magnitude = (chosen >> np.uint64(1)).astype(np.int64)
        found[at[kept]] = np.where(chosen & np.uint64(1), -magnitude, magnitude)
        there[np.flatnonzero(there)[~kept]] = False
        missing = missing[~there]
    return torch.from_numpy(found)


def _stream(key: bytes, label: str) -> Draw:
    times = 0

    def draw(count: int) -> Words:
        nonlocal times
        times += 1
        about = hashlib.shake_256(key + f"{label} {times}".encode())
        return np.frombuffer(about.digest(8 * count), "<u8").astype(np.uint64)

    return draw


def _candidates(draw: Draw, count: int, bits: int) -> tuple[Words, Mask]:
    """Draw from the discrete Laplace distribution of scale 2^bits. Return 2·|y|, 1 more where y is
    negative, (count,), and which are there."""
    words = draw(count)
    low, sign = words >> np.uint64(64 - bits), words & np.uint64(1)
    there = _exp_minus_fraction(draw, low, bits)
    high, going = np.zeros(count, np.uint64), np.flatnonzero(there)
    while len(going):
        going = going[_exp_minus_one(draw, len(going))]
        high[going] += np.uint64(1)
    size = low + (high << np.uint64(bits))
    there &= (size > 0) | (sign == 0)
    return (size << np.uint64(1)) | sign, there


def _exp_minus(draw: Draw, numerators: Words, bits: int) -> Mask:
    """Return True with probability exp(-numerator / 2^bits), each by itself."""
    whole = numerators >> np.uint64(bits)
    kept = _exp_minus_fraction(draw, numerators & np.uint64((1 << bits) - 1), bits)
    going = np.flatnonzero(kept & (whole > 0))
    while len(going):
        more = _exp_minus_one(draw, len(going))
        kept[going[~more]] = False
        whole[going] -= np.uint64(1)
        going = going[more & (whole[going] > 0)]
    return kept


def _exp_minus_one(draw: Draw, count: int) -> Mask:
    return _exp_minus_fraction(draw, np.full(count, 2, np.uint64), 1)


def _exp_minus_fraction(draw: Draw, numerators: Words, bits: int) -> Mask:
    """As `_exp_minus`, of numerators up to 2^bits."""
    kept, going, k = np.zeros(len(numerators), np.bool_), np.arange(len(numerators)), 1
    while len(going):
        more = (draw(len(going)) >> np.uint64(64 - bits)) < numerators[going]
        more[more] = _one_in(draw, k, int(more.sum()))
        kept[going[~more]] = k % 2 == 1
        going, k = going[more], k + 1
    return kept


def _one_in(draw: Draw, k: int, count: int) -> Mask:
    """Return True with probability 1 / k, each by itself: words beyond the largest multiple of k
    are drawn again."""
    if k == 1 or not count:
        return np.ones(count, np.bool_)
    words = draw(count)
    most = np.uint64((1 << 64) // k * k - 1)
    while (beyond := words > most).any():
        words[beyond] = draw(int(beyond.sum()))
    found: Mask = words % np.uint64(k) == 0
    return found
