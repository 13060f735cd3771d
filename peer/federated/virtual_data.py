"""Virtual data: labelled noise that all clients train on, made of a seed (VHL, 2206.02465). Of
sample k of class c there is, in the shape `noise`,

    gauss(key(seed, VIRTUAL_MEAN, c)) + spread · gauss(key(seed, VIRTUAL_SAMPLE, c, k))

where `gauss(h)` has the numbers normal(h, element) / 2^16 (`generator.py`): deviation 1, and normal
but for tails beyond six deviations. Of integers all the way, so the set has the same bits on every
machine, and nobody keeps or sends it. In the Gaussian variant this is repeated up to the input's
shape (nearest neighbour); with a generator there are as many such numbers as it has latents. Which
samples a step of a client has are the words of key(seed, VIRTUAL_BATCH, round, client, step, place)
(`dag/permutation.py`), modulo the set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...dag.permutation import Domain, Indices, key
from ...job.clients.local_work import VhlOptions
from .generator import LATENTS, UNIT, generated, normal

__all__ = ["noise_shape", "virtual_batch", "virtual_samples"]

Floats = npt.NDArray[np.float32]


def noise_shape(vhl: VhlOptions, sample: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in which noise is drawn for samples of this shape. Raises ValueError for one
    that cannot be repeated up to it."""
    if not vhl.noise:
        first = sample[: len(sample) > 1]
        return (*first, *(-(-d // 4) for d in sample[len(first) :]))
    if len(vhl.noise) != len(sample) or any(map(int.__gt__, vhl.noise, sample)):
        raise ValueError(
            f"is {list(vhl.noise)}, and samples are {list(sample)}: expected as many dimensions, "
            "none of them larger"
        )
    return vhl.noise


def virtual_samples(
    vhl: VhlOptions, labels: Indices, numbers: Indices, sample: Sequence[int], seed: int
) -> Floats:
    """Return samples by class and number in it, any shape (*places,) each: (*places, *sample)."""
    shape = noise_shape(vhl, sample)
    classes = labels.astype(np.uint64)[..., None]
    count = LATENTS if vhl.source == "generator" else math.prod(shape)
    means = normal(key(seed, Domain.VIRTUAL_MEAN, classes), count)
    words = key(seed, Domain.VIRTUAL_SAMPLE, classes, numbers.astype(np.uint64)[..., None])
    own = normal(words, count)
    if vhl.source == "generator":
        latents = np.rint(means + vhl.spread * own).reshape(-1, LATENTS)
        return generated(latents, seed, shape, sample).reshape(*labels.shape, *sample)
    scaled = np.float32(vhl.spread) * _by_unit(own)
    found = (_by_unit(means) + scaled).reshape(*labels.shape, *shape)
    for axis, (small, large) in enumerate(zip(shape, sample, strict=True), labels.ndim):
        if small != large:
            found = found.take(np.arange(large) * small // large, axis=axis)
    return found


def virtual_batch(
    vhl: VhlOptions,
    classes: int,
    size: int,
    clients: Sequence[int],
    *,
    seed: int,
    round_: int,
    step: int,
) -> tuple[Indices, Indices]:
    """Return what a step of each client has of the set: classes and numbers in them, (clients,
    size) each."""
    of = np.asarray(clients, np.uint64)[:, None]
    words = key(seed, Domain.VIRTUAL_BATCH, round_, of, step, np.arange(size, dtype=np.uint64))
    number, label = np.divmod(words % np.uint64(classes * vhl.per_class), np.uint64(classes))
    return label.astype(np.int64), number.astype(np.int64)


def _by_unit(numbers: npt.NDArray[np.int64]) -> Floats:
    return numbers.astype(np.float32) / np.float32(UNIT)
