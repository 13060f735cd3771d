"""Gaussian noise of a round's sums, from streams of random words.

A stream is SHAKE-256 of a key of 32 bytes and a label: nobody who does not have the key can tell
its words from random ones. `StreamKey` gives the key of each stream. In daemons that is drawn anew
whenever it is asked for, told to nobody and kept nowhere (`secret_key`), so that no two sums have
one noise, and nobody can take it off again. Simulations want the same bits again: there it follows
from (seed, round, attempt) (`known_key`), which hides nothing.

Two words u, v of 53 bits make two numbers (Box and Muller 1958), none beyond 8.6:

    r = sqrt(-2 ln((u + 1) / 2^53))      r cos(2 pi v / 2^53)      r sin(2 pi v / 2^53)

Where each that gives adds a share of its own, that is whole numbers k, multiples of the sum's grid,
with probabilities in proportion to exp(-k^2 / (2 sigma^2)): the discrete Gaussian (Canonne, Kamath,
Steinke 2020, 2004.00010, algorithms 1 to 3), for a sigma that is a power of two. All is decided by
integers of 64 bits, so nothing is rounded and no tail is cut off. They are drawn many at once.

    candidate   |y| = u + v 2^bits   u uniform below 2^bits, kept with exp(-u / 2^bits)
                                     v: how often exp(-1) comes in a row; a sign, and not minus 0
    kept        with exp(-(|y| - sigma)^2 / (2 sigma^2)); who has none yet draws again
    exp(-g)     g in [0, 1]: for k = 1, 2, …, as long as a draw of g / k comes; kept if it was an
                even number of times

The j-th time that words are wanted, they are SHAKE-256 of key, label and j.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .vector import RunVector, Span

__all__ = ["StreamKey", "VectorNoise", "discrete_gaussian", "gaussian", "known_key", "secret_key"]

_STREAM = 1 << 12
"""Elements of an entry that have one stream of noise, as many as the smallest part has."""
StreamKey = Callable[[int, int, int], bytes]
"""By the run's seed, a round and an attempt, the key of the noise in a sum: 32 bytes."""
_Words = npt.NDArray[np.uint64]
_Mask = npt.NDArray[np.bool_]
_Draw = Callable[[int], _Words]


def secret_key(seed: int, round_: int, attempt: int) -> bytes:
    """Return 32 bytes that nobody else has, whatever is asked for."""
    return secrets.token_bytes(32)


def known_key(seed: int, round_: int, attempt: int) -> bytes:
    """Return 32 bytes that whoever knows the seed has as well."""
    return hashlib.sha256(f"{seed} {round_} {attempt}".encode()).digest()


def gaussian(key: bytes, label: str, elements: int) -> Tensor:
    """Return numbers of mean 0 and variance 1, (elements,), float64, on the host."""
    pairs = -(-elements // 2)
    words = hashlib.shake_256(key + label.encode()).digest(16 * pairs)
    u, v = (np.frombuffer(words, "<u8").reshape(2, pairs) >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2.0 * np.log((u + 1.0) / 2.0**53))
    angle = 2.0 * np.pi * (v / 2.0**53)
    found = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(found[:elements])


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


def _stream(key: bytes, label: str) -> _Draw:
    times = 0

    def draw(count: int) -> _Words:
        nonlocal times
        times += 1
        about = hashlib.shake_256(key + f"{label} {times}".encode())
        return np.frombuffer(about.digest(8 * count), "<u8").astype(np.uint64)

    return draw


def _candidates(draw: _Draw, count: int, bits: int) -> tuple[_Words, _Mask]:
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


def _exp_minus(draw: _Draw, numerators: _Words, bits: int) -> _Mask:
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


def _exp_minus_one(draw: _Draw, count: int) -> _Mask:
    return _exp_minus_fraction(draw, np.full(count, 2, np.uint64), 1)


def _exp_minus_fraction(draw: _Draw, numerators: _Words, bits: int) -> _Mask:
    """As `_exp_minus`, of numerators up to 2^bits."""
    kept, going, k = np.zeros(len(numerators), np.bool_), np.arange(len(numerators)), 1
    while len(going):
        more = (draw(len(going)) >> np.uint64(64 - bits)) < numerators[going]
        more[more] = _one_in(draw, k, int(more.sum()))
        kept[going[~more]] = k % 2 == 1
        going, k = going[more], k + 1
    return kept


def _one_in(draw: _Draw, k: int, count: int) -> _Mask:
    """Return True with probability 1 / k, each by itself: words beyond the largest multiple of k
    are drawn again."""
    if k == 1 or not count:
        return np.ones(count, np.bool_)
    words = draw(count)
    most = np.uint64((1 << 64) // k * k - 1)
    while (beyond := words > most).any():
        words[beyond] = draw(int(beyond.sum()))
    found: _Mask = words % np.uint64(k) == 0
    return found


class VectorNoise:
    """Noise in the sums of a run, by parts of its vector: the same however that is divided, as each
    _STREAM elements of an entry have a stream of their own."""

    def __init__(self, vector: RunVector, seed: int, key: StreamKey) -> None:
        self._vector, self._seed, self._key = vector, seed, key

    def of_sum(self, part: Span, round_: int, attempt: int) -> Tensor:
        """Return what who adds up adds, by its deviation: (elements,), float64."""
        key = self._key(self._seed, round_, attempt)
        return torch.cat([gaussian(key, of, length)[at] for of, length, at in self._streams(part)])

    def of_giver(self, giver: str, part: Span, round_: int, attempt: int, bits: int) -> Tensor:
        """Return the share of one that gives, with a deviation of 2^bits: (elements,), int64. The
        sum of several such shares hides as one does (Kairouz, Liu, Steinke 2021, 2102.06387,
        theorem 1: what it lacks of that is below exp(-4^bits))."""
        key = self._key(self._seed, round_, attempt)
        each = [
            discrete_gaussian(key, f"{giver} {label}", elements, bits)[at]
            for label, elements, at in self._streams(part)
        ]
        return torch.cat(each)

    def _streams(self, part: Span) -> Iterator[tuple[str, int, slice]]:
        """Yield label and length of each stream, and which of its elements are wanted."""
        for piece in self._vector.pieces(part):
            entry = piece.entry
            for start in range(piece.start - piece.start % _STREAM, piece.stop, _STREAM):
                elements = min(_STREAM, entry.spec.elements - start)
                at = slice(max(0, piece.start - start), min(piece.stop - start, elements))
                yield f"{entry.value} {start}", elements, at
