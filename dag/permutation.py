"""Random words and permutations without a table, the same on any machine: pure functions of
unsigned 64-bit integers, which wrap around.

`mix` is the splitmix64 finaliser:

    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9
            z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    key(seed, a, b, …) = fold h = mix((h ^ word) + 0x9E3779B97F4A7C15) over the words, from h = 0

`permute` over [0, n): four Feistel rounds on 2·w bits, the smallest w with 4^w ≥ n, round r maps
(left, right) to (right, left ^ (key(round key, r, right) mod 2^w)); repeated until it is < n.
It needs no table, so that a peer can jump to any step of any pass.

The second word of a key says what it is for (`Domain`), so that no two uses of a seed share words.
"""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np
import numpy.typing as npt

__all__ = ["Domain", "Indices", "Words", "key", "permute"]

_U64 = np.uint64
Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@unique
class Domain(IntEnum):
    """What a key is for: its second word. Numbers are never given again."""

    WINDOW = 1
    """Where a window to train on begins."""
    HELD_OUT_WINDOW = 2
    """Where a held-out window begins."""
    ITEM = 3
    """The order of items in a pass over arrays."""
    HELD_OUT_ITEM = 4
    """The order of held-out items of arrays."""
    PARTITION = 5
    """Which client has which samples."""
    COHORT = 6
    """Which clients are in a round."""
    BATCH = 7
    """The order of a client's samples in a pass of a round."""
    EVALUATED = 8
    """Which clients' own samples are evaluated, where there are too many."""
    CLIENT_LINK = 9
    """What links clients stand for."""
    VIRTUAL_MEAN = 10
    """Around what the virtual samples of a class lie."""
    VIRTUAL_SAMPLE = 11
    """How far one virtual sample is from its class's mean."""
    VIRTUAL_BATCH = 12
    """Which virtual samples a client trains on in a step."""
    VIRTUAL_GENERATOR = 13
    """Weights of the untrained network that makes virtual samples."""
    FEATURE_CLASS = 14
    """Of which class the first of a step's drawn features is."""
    FEATURE_SAMPLE = 15
    """How far drawn features are from their class's mean."""


def _mix(z: Words) -> Words:
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))


def _folded(h: Words, word: Words) -> Words:
    return _mix((h ^ word) + _U64(0x9E3779B97F4A7C15))


def key(*words: int | Words) -> Words:
    """One hash per element of the broadcast words (module docstring); at least one dimension."""
    h = np.zeros(1, _U64)
    for word in words:
        w = np.asarray([word % 2**64], _U64) if isinstance(word, int) else word
        h = _folded(h, w)
    return h


def permute(index: Indices, count: int | Indices, round_key: Words) -> Indices:
    """The place of each index, (n,), under a pseudo-random permutation of [0, count); counts and
    keys may be those of each index."""
    counts = np.broadcast_to(np.asarray(count, _U64), index.shape)
    bits = np.frexp((counts - _U64(1)).astype(np.float64))[1]
    half = np.maximum(1, (bits + 1) // 2).astype(_U64)
    mask = (_U64(1) << half) - _U64(1)
    found, todo = index.astype(_U64), np.ones(index.shape, bool)
    # Keys of the four rounds before their last word, which is all that changes.
    keys = np.broadcast_to(key(round_key, np.arange(4, dtype=_U64)[:, None]), (4, *index.shape))
    while todo.any():  # about 4 rounds at worst in expectation: 4^half < 4·count
        shift, low = half[todo], mask[todo]
        left, right = found[todo] >> shift, found[todo] & low
        for begun in keys[:, todo]:
            left, right = right, left ^ (_folded(begun, right) & low)
        found[todo] = (left << shift) | right
        todo = found >= counts
    return found.astype(np.int64)
