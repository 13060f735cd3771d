"""Virtual data: labelled noise that all clients train on, made of a seed (VHL, 2206.02465, its
Gaussian variant). Sample k of class c is, in the shape `noise`,

    gauss(key(seed, VIRTUAL_MEAN, c)) + spread · gauss(key(seed, VIRTUAL_SAMPLE, c, k))

where each number of `gauss(h)` is the sum of the twelve 16-bit parts of key(h, element, 0 to 2),
less its mean, by 2^16: deviation 1, and normal but for tails beyond six deviations. Of integers all
the way, so the set has the same bits on every machine, and nobody keeps or sends it. A sample is
repeated up to the input's shape (nearest neighbour). Which samples a step of a client has are the
words of key(seed, VIRTUAL_BATCH, round, client, step, place) (`dag/rounds/permutation.py`), modulo
the set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...dag.rounds.permutation import Domain, Indices, Words, key
from ...job.clients.local_work import VhlOptions

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
    classes, count = labels.astype(np.uint64)[..., None], int(np.prod(shape))
    means = _gauss(key(seed, Domain.VIRTUAL_MEAN, classes), count)
    own = _gauss(
        key(seed, Domain.VIRTUAL_SAMPLE, classes, numbers.astype(np.uint64)[..., None]), count
    )
    found = (means + np.float32(vhl.spread) * own).reshape(*labels.shape, *shape)
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


def _gauss(keys: Words, count: int) -> Floats:
    """(*places, 1) keys: (*places, count)."""
    at = np.arange(count, dtype=np.uint64)
    total = np.zeros(np.broadcast_shapes(keys.shape, at.shape), np.int64)
    for word in range(3):
        words = key(keys, at, word)
        for bits in (0, 16, 32, 48):
            total += ((words >> np.uint64(bits)) & np.uint64(0xFFFF)).astype(np.int64)
    return (total - 6 * 0xFFFF).astype(np.float32) / np.float32(1 << 16)
