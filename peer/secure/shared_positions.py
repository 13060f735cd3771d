"""Positions of the numbers that clients give to a sum with masks, where they give a part of what
they moved: the same ones for all, so that the sum is over numbers that all have, and masks cancel.

Of each piece of a parameter, n numbers, these are k = max(1, round(keep · n)): those that the last
version moved farthest, and others drawn by (seed, round), for else a number that was left out once
would be so for good. A last version and a seed are what all members have, and no client's data
decides beside them.

    fresh = max(1, round(explore · k))
    the k - fresh largest of |last move| that are not 0, of equal ones the first
    and as many of the others as lack of k: the first of all n, shuffled

So where two magnitudes differ by rounding, which of them is among the largest changes one position.

Buffers are given whole. Shared masks that follow the last update are GlueFL's (He et al. 2022,
2212.01523), where clients add numbers of their own to them; here nobody may.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...compression.sparse.masks import SharedMask
from ...dag.rounds.vector import Entry, RunVector, Span, VectorPiece

__all__ = ["SharedPositions"]


class SharedPositions:
    """Positions of the round in which they were found last. `keep`: the share of numbers that is
    given; `explore`: of these, the share that is drawn."""

    def __init__(self, vector: RunVector, seed: int, keep: float, explore: float) -> None:
        self._vector, self._seed, self._explore = vector, seed, explore
        self._mask = SharedMask(seed, 0, keep)
        self._found: dict[tuple[str, int], Tensor] = {}
        """By value and beginning, positions in a piece."""

    def _kept(self, piece: VectorPiece) -> int:
        return piece.elements if piece.entry.is_buffer else self._mask.kept(piece.elements)

    def kept(self, part: Span) -> int:
        """Return how many numbers of a part are given, in any round."""
        return sum(map(self._kept, self._vector.pieces(part)))

    def find(self, round_: int, entry: Entry, moved: Tensor) -> None:
        """Find the positions of an entry in a round. `moved`: (elements,), how far the last version
        moved each, either way."""
        mask = SharedMask(self._seed, round_, self._mask.keep)
        for piece in self._vector.pieces((entry.start, entry.stop)):
            name = f"{entry.value}:{piece.start}"
            last = moved[piece.start : piece.stop]
            self._found[entry.value, piece.start] = mask.following(name, last, self._explore)

    def of(self, part: Span) -> Tensor:
        """Return the positions of a part in it, ascending: (kept,), int64."""
        return torch.cat([*self._positions(part)])

    def _positions(self, part: Span) -> Iterator[Tensor]:
        for piece in self._vector.pieces(part):
            at = piece.entry.start + piece.start - part[0]
            if piece.entry.is_buffer:
                yield torch.arange(at, at + piece.elements)
            else:
                yield self._found[piece.entry.value, piece.start] + at

    def whole(self, part: Span, numbers: Tensor) -> Tensor:
        """Return a part that has these numbers, (kept,), at their positions: (elements,), zeros
        elsewhere."""
        found = torch.zeros(part[1] - part[0], dtype=numbers.dtype)
        found[self.of(part)] = numbers
        return found
