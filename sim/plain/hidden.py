"""Clients that are hidden by noise, the boring way: each one's move is shortened, they are added
up, noise is added to that, and it is divided by how many a round asks (McMahan et al. 2018,
1710.06963, algorithm 1). A move that is no finite number is none. Noise is added once, or by each
who gives (Kairouz, Liu, Steinke 2021, 2102.06387). Words of noise are those of simulations
(`dag/rounds/noise.py`), made once more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .client_methods import Named

__all__ = ["hidden_mean", "noise_of", "share_of"]

_STREAM = 1 << 12
"""Elements of a tensor that have one stream of noise."""
_BITS = 24
"""Of the deviation of a giver's share, in steps of the grid."""


def hidden_mean(
    moved: Sequence[Named],
    *,
    clip: float,
    noise: float,
    asked: int,
    seed: int,
    at: tuple[int, int],
    givers: Sequence[int] = (),
    fewest: int = 0,
) -> Named:
    """Return the noisy mean, by name, in float64. `moved`: of each client that came, by name.
    `noise`: its standard deviation in the sum, by `clip`. `at`: round and attempt. `givers`:
    replicas that add shares of noise, of which `fewest` but one have all that; nobody: it is added
    once."""
    total = {name: torch.zeros_like(t) for name, t in moved[0].items()}
    step = noise * clip / math.sqrt(fewest - 1) / 2**_BITS if givers else 0.0
    deviation = noise * clip
    clip -= step * math.sqrt(sum(t.numel() for t in moved[0].values()))
    for client in moved:
        norm = math.sqrt(sum(float(t.square().sum()) for t in client.values()))
        if not math.isfinite(norm):
            continue  # as one that moved by nothing
        for name, t in client.items():
            total[name] += t * min(1.0, clip / norm if norm else 1.0)
    for name, t in total.items():
        # Peers give what clients moved the other way, towards the version.
        for giver in givers:
            t -= step * share_of(name, t.numel(), seed, at, giver).view(t.shape)
        if noise and not givers:
            t -= deviation * noise_of(name, t.numel(), seed, at).view(t.shape)
    return {name: t / asked for name, t in total.items()}


def noise_of(name: str, elements: int, seed: int, at: tuple[int, int]) -> Tensor:
    """Return the noise of a parameter, (elements,), float64, of variance 1."""
    key = hashlib.sha256(f"{seed} {at[0]} {at[1]}".encode()).digest()
    found: list[float] = []
    for start in range(0, elements, _STREAM):
        count = min(_STREAM, elements - start)
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


def share_of(name: str, elements: int, seed: int, at: tuple[int, int], giver: int) -> Tensor:
    """Return what a replica adds to a parameter, in steps of the grid: (elements,), float64."""
    key = hashlib.sha256(f"{seed} {at[0]} {at[1]}".encode()).digest()
    found: list[int] = []
    for start in range(0, elements, _STREAM):
        label = f"{giver} param:{name} {start}"
        found += _whole_normal(key, label, min(_STREAM, elements - start))
    return torch.tensor(found, dtype=torch.float64)


def _whole_normal(key: bytes, label: str, count: int) -> list[int]:
    """Return so many discrete Gaussians (Canonne, Kamath, Steinke 2020, 2004.00010)."""
    times = 0

    def words(n: int) -> list[int]:
        nonlocal times
        times += 1
        stream = hashlib.shake_256(key + f"{label} {times}".encode()).digest(8 * n)
        return [int.from_bytes(stream[i : i + 8], "little") for i in range(0, 8 * n, 8)]

    found, scale = dict[int, int](), 1 << _BITS
    while len(found) < count:
        missing = [i for i in range(count) if i not in found]
        drawn = dict(zip(missing, words(len(missing)), strict=True))
        low = {i: w >> (64 - _BITS) for i, w in drawn.items()}
        size = {i: low[i] for i in _by_exp(words, low, _BITS)}
        going = list(size)
        while going:
            going = _by_exp(words, dict.fromkeys(going, 1), 0)
            size |= {i: size[i] + scale for i in going}
        size = {i: s for i, s in size.items() if s or not drawn[i] & 1}
        far = {i: (s - scale) ** 2 for i, s in size.items()}
        one = 1 << (2 * _BITS + 1)
        kept = _by_exp(words, {i: f % one for i, f in far.items()}, 2 * _BITS + 1)
        left = {i: far[i] // one for i in kept if far[i] >= one}
        while left:
            again = {*_by_exp(words, dict.fromkeys(left, 1), 0)}
            kept = [i for i in kept if i not in left or i in again]
            left = {i: left[i] - 1 for i in sorted(again) if left[i] > 1}
        found |= {i: -size[i] if drawn[i] & 1 else size[i] for i in kept}
    return [found[i] for i in range(count)]


def _by_exp(words: Callable[[int], list[int]], of: dict[int, int], bits: int) -> list[int]:
    """Return those that stay with a chance of exp(-number / 2^bits)."""
    kept, going, k = list[int](), list(of), 1
    while going:
        bits_of = max(bits, 1)  # of words; a number of 1 or more is above all that there are
        drawn = zip(going, words(len(going)), strict=True)
        more = [i for i, w in drawn if w >> (64 - bits_of) < of[i] << (bits_of - bits)]
        if k > 1 and more:
            more = [i for i, w in zip(more, words(len(more)), strict=True) if w % k == 0]
        kept += {*going} - {*more} if k % 2 else ()
        going, k = more, k + 1
    return sorted(kept)
