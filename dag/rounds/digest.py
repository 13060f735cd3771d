"""The hash of a version, which says whether replicas have made the same.

    Σ over pieces of XXH3-64(value, first element, bytes in float32)    modulo 2^64

Pieces follow from the graph alone (`vector.py`), and sums have no order: so the sums of
a replica's holders are equal to those of another one's, however each is cut.
"""

from __future__ import annotations

from torch import Tensor
from xxhash import xxh3_64

from .vector import PIECE

__all__ = ["digest"]


def digest(value: str, version: Tensor) -> int:
    """The digest of one entry; `version`: (elements,), float32, on the host."""
    total, data = 0, version.contiguous().numpy()
    for start in range(0, len(data), PIECE):
        piece = xxh3_64(f"{value}\0{start}\0".encode())
        piece.update(data[start : start + PIECE].data)
        total += piece.intdigest()
    return total % 2**64
