"""Noise of an untrained network (VHL, 2206.02465, which has an untrained StyleGAN in this place):
latents go through a dense layer into a small image of several channels, which is doubled until it
has the shape of a sample; behind each doubling every channel is a sum of all of them and of their
neighbours, along one axis after the other, and is clipped. Last, channels are added up, and a
sample is divided by its root mean square.

Numbers are integers of the unit 2^-16, in float64, and no sum of theirs reaches 2^53: so they have
the same bits in whichever order they are added up, on every machine. A layer of n addends has

    clip(round(sum / (2^16·sqrt(n))), ±2^16)

Weight e of a layer has the number `normal(key(seed, VIRTUAL_GENERATOR, layer), e)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...dag.permutation import Domain, Words, key

__all__ = ["LATENTS", "UNIT", "generated", "normal"]

LATENTS, CHANNELS = 64, 8
UNIT = 1 << 16
_MOST_LATENT = 1 << 20
Floats = npt.NDArray[np.float64]


def normal(keys: Words, count: int) -> npt.NDArray[np.int64]:
    """Return nearly normal integers, of standard deviation `UNIT`: (*places, count) for keys
    (*places, 1). Each is the sum of the twelve 16-bit parts of key(h, element, 0 to 2), less its
    mean."""
    at = np.arange(count, dtype=np.uint64)
    total = np.zeros(np.broadcast_shapes(keys.shape, at.shape), np.int64)
    for word in range(3):
        words = key(keys, at, word)
        for bits in (0, 16, 32, 48):
            total += ((words >> np.uint64(bits)) & np.uint64(0xFFFF)).astype(np.int64)
    return total - 6 * 0xFFFF


def generated(
    latents: Floats, seed: int, small: Sequence[int], sample: Sequence[int]
) -> npt.NDArray[np.float32]:
    """Return samples of latents, (n, LATENTS), in integers of `UNIT`: (n, *sample). `small`: the
    shape that they begin with, as many dimensions, none larger."""
    bounded = np.clip(latents, -_MOST_LATENT, _MOST_LATENT)
    wide = CHANNELS * math.prod(small)
    found = _layer(bounded @ _weights(seed, 0, LATENTS, wide), LATENTS)
    found, size, layer = found.reshape(len(latents), CHANNELS, *small), tuple(small), 0
    while not layer or size != tuple(sample):
        larger = tuple(map(min, (2 * d for d in size), sample))
        for axis, (few, many) in enumerate(zip(size, larger, strict=True), 2):
            if many != few:
                found = found.take(np.arange(many) * few // many, axis=axis)
        size = larger
        for axis in range(2, found.ndim):
            layer += 1
            found = _mixed(found, axis, _weights(seed, layer, 3, CHANNELS, CHANNELS))
    last = _weights(seed, layer + 1, CHANNELS, 1)[:, 0]
    whole = _layer(np.tensordot(found, last, axes=(1, 0)), CHANNELS).reshape(len(latents), -1)
    squares = np.square(whole.astype(np.int64)).sum(1, keepdims=True)
    root = np.sqrt(np.maximum(squares, 1).astype(np.float64) / whole.shape[1])
    made: npt.NDArray[np.float32] = (whole / root).astype(np.float32)
    return made.reshape(len(latents), *sample)


def _mixed(images: Floats, axis: int, weights: Floats) -> Floats:
    """Return each channel as a sum of all, at a place and at both beside it. `images`: (n,
    CHANNELS, ...); `weights`: (3, CHANNELS, CHANNELS), by place before, same and behind, of which
    channel, and for which."""
    size = images.shape[axis]
    edges = [(1, 1) if d == axis else (0, 0) for d in range(images.ndim)]
    padded, total = np.pad(images, edges), np.zeros(1)
    for shift, by in enumerate(weights):
        there = padded.take(np.arange(shift, shift + size), axis=axis)
        total = total + np.tensordot(by, there, axes=(0, 1))
    return _layer(np.moveaxis(total, 0, 1), 3 * CHANNELS)


def _layer(sums: Floats, addends: int) -> Floats:
    found: Floats = np.clip(np.rint(sums / (UNIT * math.sqrt(addends))), -UNIT, UNIT)
    return found


@lru_cache(maxsize=64)
def _weights(seed: int, layer: int, *shape: int) -> Floats:
    words = key(seed, Domain.VIRTUAL_GENERATOR, layer)[:, None]
    return normal(words, math.prod(shape)).astype(np.float64).reshape(shape)
