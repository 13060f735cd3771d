"""Clients that are hidden by noise, the boring way: each one's move is shortened, they are added
up, noise is added to that, and it is divided by how many a round asks (McMahan et al. 2018,
1710.06963, algorithm 1). A move that is no finite number is none. Words of noise are those of
simulations (`dag/rounds/noise.py`), made once more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .client_methods import Named

__all__ = ["hidden_mean", "noise_of"]

_PIECE = 1 << 20
"""Elements of a tensor that have one stream of noise."""


def hidden_mean(
    moved: Sequence[Named], *, clip: float, noise: float, asked: int, seed: int, at: tuple[int, int]
) -> Named:
    """Return the noisy mean, by name, in float64. `moved`: of each client that came, by name.
    `noise`: its standard deviation in the sum, by `clip`. `at`: round and attempt."""
    total = {name: torch.zeros_like(t) for name, t in moved[0].items()}
    for client in moved:
        norm = math.sqrt(sum(float(t.square().sum()) for t in client.values()))
        if not math.isfinite(norm):
            continue  # as one that moved by nothing
        for name, t in client.items():
            total[name] += t * min(1.0, clip / norm if norm else 1.0)
    for name, t in total.items():
        if noise:
            # Peers give what clients moved the other way, towards the version.
            t -= noise * clip * noise_of(name, t.numel(), seed, at).view(t.shape)
    return {name: t / asked for name, t in total.items()}


def noise_of(name: str, elements: int, seed: int, at: tuple[int, int]) -> Tensor:
    """Return the noise of a parameter, (elements,), float64, of variance 1."""
    key = hashlib.sha256(f"{seed} {at[0]} {at[1]}".encode()).digest()
    found: list[float] = []
    for start in range(0, elements, _PIECE):
        count = min(_PIECE, elements - start)
        pairs = (count + 1) // 2
        stream = hashlib.shake_256(key + f"param:{name} {start}".encode()).digest(16 * pairs)
        words = [int.from_bytes(stream[i : i + 8], "little") >> 11 for i in range(0, 16 * pairs, 8)]
        both = list(zip(words[:pairs], words[pairs:], strict=True))
        radii = [math.sqrt(-2 * math.log((u + 1) / 2**53)) for u, _ in both]
        angles = [2 * math.pi * v / 2**53 for _, v in both]
        piece = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
        piece += [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
        found += piece[:count]
    return torch.tensor(found, dtype=torch.float64)
