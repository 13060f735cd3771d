"""Which samples a microbatch has: a pure function of (seed, step, microbatch), on any machine.

The samples of a run are numbered, g = 0, 1, …: with B samples in a step, in microbatches of b,
sample i of microbatch m of step s is number g = s·B + m·b + i. So a step has the same samples in
the same order, however its batch is divided into microbatches. Held-out sample i of microbatch m is
number g = m·b + i. The seed turns a number into a place in the data.

Keys are unsigned 64-bit integers that wrap around. `mix` is the splitmix64 finaliser:

    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9
            z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    key(seed, a, b, …) = fold h = mix((h ^ word) + 0x9E3779B97F4A7C15) over the words, from h = 0

Windows (text, tokens) are drawn with replacement. Sample g begins at

    key(seed, 1, g) mod (train - length)            # window: length + 1 items
    train + key(seed, 2, g) mod (held_out - length) # held out

Arrays are walked in passes without replacement: sample g is item `permute(g mod train)` under the
key (seed, 3, g div train), held out train + permute(g mod held_out) under the key (seed, 4, 0).
`permute` over [0, n): four Feistel rounds on 2·w bits, the smallest w with 4^w ≥ n, round r maps
(left, right) to (right, left ^ (key(round key, r, right) mod 2^w)); repeated until it is < n.
It needs no table, so that a peer can jump to any step of any pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .manifest import DataError, Manifest

__all__ = ["Sampler", "key", "permute", "steps_for"]

_U64 = np.uint64
Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def _mix(z: _Words) -> _Words:
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))


def key(*words: int | _Words) -> _Words:
    """One hash per element of the broadcast words (module docstring); at least one dimension."""
    h = np.zeros(1, _U64)
    for word in words:
        w = np.asarray([word % 2**64], _U64) if isinstance(word, int) else word
        h = _mix((h ^ w) + _U64(0x9E3779B97F4A7C15))
    return h


def permute(index: Indices, count: int, round_key: _Words) -> Indices:
    """The place of each index under a pseudo-random permutation of [0, count)."""
    half = max(1, math.ceil((count - 1).bit_length() / 2))
    mask, shift = _U64(2**half - 1), _U64(half)
    found, todo = index.astype(_U64), np.ones(index.shape, bool)
    keys = np.broadcast_to(round_key, index.shape)
    while todo.any():  # about 4 rounds at worst in expectation: 4^half < 4·count
        left, right = found[todo] >> shift, found[todo] & mask
        for r in range(4):
            left, right = right, left ^ (key(keys[todo], r, right) & mask)
        found[todo] = (left << shift) | right
        todo = found >= _U64(count)
    return found.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Sampler:
    """First items (windows) or items (arrays) of each sample; see the module. `microbatches` per
    step, those of the run's plan, are fixed within a run, and so is their size."""

    manifest: Manifest
    seed: int
    microbatches: int

    def train(self, step: int, microbatch: int, size: int) -> Indices:
        """Shape (size,)."""
        m = self.manifest
        g = (step * self.microbatches + microbatch) * size + np.arange(size)
        if m.kind != "arrays":
            choices = _U64(m.train - m.length)
            return (key(self.seed, 1, g.astype(_U64)) % choices).astype(np.int64)
        keys = key(self.seed, 3, (g // m.train).astype(_U64))
        return permute(g % m.train, m.train, keys)

    def held_out(self, microbatch: int, size: int) -> Indices:
        """Shape (size,). Raises DataError when nothing is held out."""
        m, g = self.manifest, microbatch * size + np.arange(size)
        if not m.held_out:
            raise DataError("the run evaluates, but nothing is held out: set holdout above 0")
        if m.kind != "arrays":
            choices = _U64(m.held_out - m.length)
            return m.train + (key(self.seed, 2, g.astype(_U64)) % choices).astype(np.int64)
        return m.train + permute(g % m.held_out, m.held_out, key(self.seed, 4, 0))


def steps_for(
    manifest: Manifest, batch: int, *, passes: float | None = None, tokens: int | None = None
) -> int:
    """Steps of `batch` samples that see the training data `passes` times, or `tokens` tokens,
    rounded up. Exactly one of the two; tokens only where the data is text or tokens."""
    if (passes is None) == (tokens is None):
        raise DataError("exactly one of passes and tokens says how long to train")
    per_step = batch * (manifest.length or 1)
    if passes is not None:
        return max(1, math.ceil(passes * manifest.train / per_step))
    if manifest.kind == "arrays":
        raise DataError(
            "tokens counts text or tokens, but the data is arrays: give steps or passes"
        )
    assert tokens is not None
    return max(1, math.ceil(tokens / per_step))
