"""Gaussian noise of a round's sums, from streams of random words.

A stream is SHAKE-256 of a key of 32 bytes and a label: nobody who does not have the key can tell
its words from random ones. `StreamKey` gives the key of each stream. In daemons that is drawn anew
whenever it is asked for, told to nobody and kept nowhere (`secret_key`), so that no two sums have
one noise, and nobody can take it off again. Simulations want the same bits again: there it follows
from (seed, round, attempt) (`known_key`), which hides nothing.

Two words u, v of 53 bits make two numbers (Box and Muller 1958), none beyond 8.6:

    r = sqrt(-2 ln((u + 1) / 2^53))      r cos(2 pi v / 2^53)      r sin(2 pi v / 2^53)
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .discrete_gaussian import discrete_gaussian
from .vector import RunVector, Span

__all__ = ["StreamKey", "VectorNoise", "gaussian", "known_key", "secret_key"]

_STREAM = 1 << 12
"""Elements of an entry that have one stream of noise, as many as the smallest part has."""
StreamKey = Callable[[int, int, int], bytes]
"""By the run's seed, a round and an attempt, the key of the noise in a sum: 32 bytes."""


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


class _Stream(NamedTuple):
    """at: what is wanted of its elements."""

    label: str
    elements: int
    at: slice


class VectorNoise:
    """Noise in the sums of a run, by parts of its vector: the same however that is divided, as each
    _STREAM elements of an entry have a stream of their own."""

    def __init__(self, vector: RunVector, seed: int, key: StreamKey) -> None:
        self._vector, self._seed, self._key = vector, seed, key

    def of_sum(self, part: Span, round_: int, attempt: int) -> Tensor:
        """Return what who adds up adds, by its deviation: (elements,), float64."""
        key = self._key(self._seed, round_, attempt)
        return torch.cat([gaussian(key, s.label, s.elements)[s.at] for s in self._streams(part)])

    def of_giver(self, giver: str, part: Span, round_: int, attempt: int, bits: int) -> Tensor:
        """Return the share of one that gives, with a deviation of 2^bits: (elements,), int64. The
        sum of several such shares hides as one does (Kairouz, Liu, Steinke 2021, 2102.06387,
        theorem 1: what it lacks of that is below exp(-4^bits))."""
        key = self._key(self._seed, round_, attempt)
        each = [
            discrete_gaussian(key, f"{giver} {s.label}", s.elements, bits)[s.at]
            for s in self._streams(part)
        ]
        return torch.cat(each)

    def _streams(self, part: Span) -> Iterator[_Stream]:
        for piece in self._vector.pieces(part):
            entry = piece.entry
            for start in range(piece.start - piece.start % _STREAM, piece.stop, _STREAM):
                elements = min(_STREAM, entry.spec.elements - start)
                at = slice(max(0, piece.start - start), min(piece.stop - start, elements))
                yield _Stream(f"{entry.value} {start}", elements, at)
