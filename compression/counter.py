"""Counter-based random bits: 32 bits as a function of (key, position), the same on every device.

    bits[i] = mix(premix(i mod 2^15) xor word(key, i div 2^15))

Everything is arithmetic on integers that wraps in the same way on the CPU and on CUDA. `premix` is
one table of 32,768 words per device, and `word` is splitmix64 (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators", figure 16) of key and chunk, cut to 32 bits. `mix` is
two rounds of multiply and shift. Shifts of signed integers copy the sign; between two
multiplications that costs nothing that can be measured, but after the last one it would bias the
upper bits, so the last operation is a multiplication.

Cost: about six passes over int32 per 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHUNK", "bits", "halves"]

CHUNK = 1 << 15
"""Positions that share one word; who works in pieces starts them at multiples of it."""

_M1, _M2, _M3 = 0x7FEB352D, 0x846CA68B - 2**32, 0x2C1B3C6D  # odd, spread the bits well

_tables: dict[torch.device, Tensor] = {}
"""Per device premix(0) to premix(2^15 - 1)."""


def _table(device: torch.device) -> Tensor:
    table = _tables.get(device)
    if table is None:
        x = torch.arange(CHUNK, dtype=torch.int32, device=device)
        x = x * _M1
        x = (x ^ ((x >> 15) & 0x1FFFF)) * _M2
        table = _tables[device] = x ^ ((x >> 16) & 0xFFFF)
    return table


def _word(key: int, chunk: int) -> int:
    """A signed 32-bit integer."""
    x = (key + (chunk + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return ((x ^ x >> 31) & 0xFFFFFFFF) - 2**31


def bits(key: int, count: int, device: str | torch.device = "cpu", start: int = 0) -> Tensor:
    """int32 (count,): 32 random bits for each of the positions `start`, `start` + 1, …; `start` is
    a multiple of CHUNK. `key`: any integer, its low 64 bits count."""
    if start % CHUNK:
        raise ValueError(f"positions start at {start}: expected a multiple of {CHUNK}")
    device = torch.device(device)
    chunks = range(start // CHUNK, (start + count + CHUNK - 1) // CHUNK)
    key = _spread(key)
    words = torch.tensor([_word(key, c) for c in chunks], dtype=torch.int32).to(device)
    width = CHUNK if len(chunks) > 1 else count
    x = _table(device)[:width] ^ words.view(-1, 1)
    x *= _M1
    shifted = x >> 16
    x ^= shifted
    x *= _M2
    x ^= torch.bitwise_right_shift(x, 15, out=shifted)
    x *= _M3
    return x.view(-1)[:count]


def _spread(key: int) -> int:
    """Neighbouring keys are unrelated afterwards: in `_word` a key and a chunk only add up."""
    x = key & (2**64 - 1)
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & (2**64 - 1)
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & (2**64 - 1)
    return x ^ x >> 32


def halves(key: int, count: int, device: str | torch.device = "cpu", start: int = 0) -> Tensor:
    """int16 (count,): as `bits` with 16 bits each, two from one word, at half the cost. `start` is
    a multiple of 2 · CHUNK."""
    if start % (2 * CHUNK):
        raise ValueError(f"positions start at {start}: expected a multiple of {2 * CHUNK}")
    return bits(key, (count + 1) // 2, device, start // 2).view(torch.int16)[:count]
