"""How an optimizer's moments lie in 8 bits, which planners and peers have to agree on: one byte a
number, and a float32 scale for each block of neighbours; parameters with few elements have their
moments in float32, as bitsandbytes does it."""

from __future__ import annotations

from ..ir.random import ROUNDED

__all__ = ["BLOCK", "LEAST", "blocks", "counted_in_8_bits", "is_in_8_bits", "update_in_8_bits"]

BLOCK = 256
"""Elements, in the order of memory, that share a scale; the last block may have fewer."""
LEAST = 4096
"""Elements of the smallest parameter whose moments are in 8 bits."""
_TEMPORARIES = 32
"""Bytes for each element of a slice, of at most ROUNDED elements, that is updated: float32 copies
of weights, gradients and moments, two numbers of AdamW's own, and in encoding as much."""


def is_in_8_bits(elements: int) -> bool:
    """Return whether the moments of a parameter with so many are."""
    return elements >= LEAST


def blocks(elements: int) -> int:
    """Return how many scales there are of a moment of so many elements."""
    return -(-elements // BLOCK)


def counted_in_8_bits(elements: int, plain_bytes: int) -> int:
    """Return the bytes of one moment of a parameter: elements + 4 · blocks, or `plain_bytes` of one
    that is too small."""
    return elements + 4 * blocks(elements) if is_in_8_bits(elements) else plain_bytes


def update_in_8_bits(elements: int, plain_bytes: int) -> int:
    """Return the bytes that an update of a parameter takes beside what stays; `plain_bytes` where
    its moments are in 32 bits."""
    taken = _TEMPORARIES * min(elements, ROUNDED) if is_in_8_bits(elements) else 0
    return max(taken, plain_bytes)
