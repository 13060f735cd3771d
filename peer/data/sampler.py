"""Which samples a microbatch has: a pure function of (seed, step, microbatch), on any machine.

The samples of a run are numbered, g = 0, 1, …: with B samples in a step, in microbatches of b,
sample i of microbatch m of step s is number g = s·B + m·b + i. So a step has the same samples in
the same order, however its batch is divided into microbatches. Held-out sample i of microbatch m is
number g = m·b + i. The seed turns a number into a place in the data.

Keys and permutations are those of `dag/permutation.py`.

Windows (text, tokens) are drawn with replacement. Sample g begins at

    key(seed, WINDOW, g) mod (train - length)                     # window: length + 1 items
    train + key(seed, HELD_OUT_WINDOW, g) mod (held_out - length) # held out

Arrays are walked in passes without replacement: sample g is item `permute(g mod train)` under the
key (seed, ITEM, g div train), held out train + permute(g mod held_out) under the key
(seed, HELD_OUT_ITEM, 0).
It needs no table, so that a peer can jump to any step of any pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...dag.permutation import Domain, Indices, key, permute
from .manifest import DataError, Manifest

__all__ = ["Sampler", "steps_for"]

_U64 = np.uint64


@dataclass(frozen=True, slots=True)
class Sampler:
    """First items (windows) or items (arrays) of each sample; see the module. `microbatches` per
    step, those of the run's plan, are fixed within a run, and so is their size."""

    manifest: Manifest
    seed: int
    microbatches: int

    def train(self, step: int, microbatch: int, size: int) -> Indices:
        """Return the samples or windows of a microbatch, (size,), int64."""
        m = self.manifest
        g = (step * self.microbatches + microbatch) * size + np.arange(size)
        if m.kind != "arrays":
            choices = _U64(m.train - m.length)
            return (key(self.seed, Domain.WINDOW, g.astype(_U64)) % choices).astype(np.int64)
        keys = key(self.seed, Domain.ITEM, (g // m.train).astype(_U64))
        return permute(g % m.train, m.train, keys)

    def held_out(self, microbatch: int, size: int) -> Indices:
        """Shape (size,). Raises DataError when nothing is held out."""
        m, g = self.manifest, microbatch * size + np.arange(size)
        if not m.held_out:
            raise DataError("the run evaluates, but nothing is held out: set holdout above 0")
        if m.kind != "arrays":
            choices = _U64(m.held_out - m.length)
            words = key(self.seed, Domain.HELD_OUT_WINDOW, g.astype(_U64))
            return m.train + (words % choices).astype(np.int64)
        order = key(self.seed, Domain.HELD_OUT_ITEM, 0)
        return m.train + permute(g % m.held_out, m.held_out, order)


def steps_for(
    manifest: Manifest,
    batch: int,
    *,
    passes: float | None = None,
    tokens: int | None = None,
    length: int = 0,
) -> int:
    """Steps of `batch` samples that see the training data `passes` times, or `tokens` tokens,
    rounded up. Exactly one of the two; tokens only where the data is text or tokens, or `length`
    says how many positions a sample of arrays has, padding among them."""
    if (passes is None) == (tokens is None):
        raise DataError("exactly one of passes and tokens says how long to train")
    per_step = batch * (manifest.length or 1)
    if passes is not None:
        return max(1, math.ceil(passes * manifest.train / per_step))
    if manifest.kind == "arrays" and not length:
        raise DataError(
            "tokens counts text or tokens, but the data is arrays: give steps or passes"
        )
    assert tokens is not None
    return max(1, math.ceil(tokens / (batch * (manifest.length or length))))
