"""SAPS-PSGD (Tang et al. 2020, 2002.09692): two replicas take the mean of some coordinates, which
are the same for all pairs of a round; the others stay where they are.

    x_i ← (x_i + x'_i) / 2    for i in the mask of (seed, round), a share `keep` of each tensor

Only the values at these positions go over a link. Of the sum of a pair nothing is lost but what
float32 rounds off.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...compression.codec import RAW, CodecError, Encoded
from ...compression.sparse.masks import SharedMask
from ...dag.rounds.vector import PIECE, RunVector, Span, VectorPiece
from ...job.gossip import SapsOptions
from ...job.settings import Settings
from .coding import PartCoding, flat_spec
from .gossip import GossipRounds
from .strategy import State

__all__ = ["MaskedCoding", "SapsRounds", "masked"]


def masked(mask: SharedMask, value: str, start: int, elements: int) -> Tensor:
    """int64: positions in the piece of an entry that begins at `start`."""
    return mask.positions(f"{value}:{start}", elements)


class MaskedCoding(PartCoding):
    """Writes buffers, and of parameters the values at the positions of a mask; reads zeros
    elsewhere."""

    def __init__(self, vector: RunVector, mask: SharedMask) -> None:
        super().__init__(vector, "none")
        self._mask = mask

    @property
    def name(self) -> str:
        return "mask"

    def encode(self, piece: VectorPiece, values: Tensor, round_: int, whose: str) -> Encoded:
        return RAW.encode(values[self._at(piece)])

    def echo(self, piece: VectorPiece, values: Tensor, encoded: Encoded) -> Tensor:
        return torch.zeros_like(values).index_copy_(0, at := self._at(piece), values[at])

    def written(self, pieces: Iterable[tuple[VectorPiece, Encoded]]) -> tuple[memoryview, ...]:
        return tuple(buffer for _, encoded in pieces for buffer in encoded.buffers)

    def most_bytes(self, part: Span) -> int:
        return sum(self._size(piece) for piece in self.vector.pieces(part))

    typical_bytes = most_bytes

    def decode(self, part: Span, data: memoryview) -> Tensor:
        if len(data) != self.most_bytes(part):
            raise CodecError(
                f"{len(data)} bytes of a part: expected {self.most_bytes(part)}, of the values "
                "that the mask has"
            )
        found, at = torch.zeros(part[1] - part[0]), 0
        for piece in self.vector.pieces(part):
            size = self._size(piece)
            values = RAW.decode(flat_spec(size // 4), b"", data[at : at + size])
            found[piece.entry.start + piece.start - part[0] + self._at(piece)] = values
            at += size
        return found

    def _at(self, piece: VectorPiece) -> Tensor:
        if piece.entry.is_buffer:
            return torch.arange(piece.elements)
        return masked(self._mask, piece.entry.value, piece.start, piece.elements)

    def _size(self, piece: VectorPiece) -> int:
        if piece.entry.is_buffer:
            return 4 * piece.elements
        return self._mask.size_bytes(flat_spec(piece.elements))


class SapsRounds(GossipRounds):
    """The mean of the coordinates that a mask has."""

    def __init__(self, options: Settings, seed: int = 0) -> None:
        super().__init__(options, seed)
        assert isinstance(options, SapsOptions), f"options of saps, not {options!r}"
        self.keep = options.keep

    @property
    def mask(self) -> SharedMask:
        """The coordinates of the round."""
        return SharedMask(self.seed, self.round, self.keep)

    def coding(self, vector: RunVector) -> PartCoding | None:
        return None if self.gathers else MaskedCoding(vector, self.mask)

    def meet(
        self, value: str, base: Tensor, given: Tensor, mean: Tensor, state: State
    ) -> tuple[Tensor, State]:
        if self.gathers:
            return mean, {}
        found = given.clone()
        for start in range(0, len(found), PIECE):
            at = start + masked(self.mask, value, start, len(found[start : start + PIECE]))
            found[at] = mean[at]
        return found, {}
