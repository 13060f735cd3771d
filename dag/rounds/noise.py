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
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = ["StreamKey", "gaussian", "known_key", "secret_key"]

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
