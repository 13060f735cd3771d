"""SAPS-PSGD (Tang et al. 2020, 2002.09692): two replicas take the mean of some coordinates, which
are the same for all pairs of a round; the others stay where they are.

    x_i ← (x_i + x'_i) / 2    for i in the mask of (seed, round), a share `keep` of each tensor

Only the values at these positions go over a link. Of the sum of a pair nothing is lost but what
float32 rounds off.
"""

from __future__ import annotations

from torch import Tensor

from ....compression.codec import RAW, Codec
from ....compression.sparse.masks import MaskCodec, SharedMask
from ....dag.rounds.vector import PIECE, RunVector, VectorPiece
from ....job.gossip import SapsOptions
from ..coding import PartCoding
from .gossip_rounds import GossipRounds
from .round_strategy import State

__all__ = ["MaskedCoding", "SapsRounds"]


class MaskedCoding(PartCoding):
    """Writes buffers, and of parameters the values at the positions of a mask, whose number both
    ends know; reads zeros elsewhere."""

    framed = False
    name = MaskCodec.name

    def __init__(self, vector: RunVector, mask: SharedMask) -> None:
        super().__init__(vector, "none")
        self._mask = mask

    def of(self, piece: VectorPiece) -> Codec:
        if piece.entry.is_buffer:
            return RAW
        return MaskCodec(self._mask, f"{piece.entry.value}:{piece.start}")


class SapsRounds(GossipRounds):
    """The mean of the coordinates that a mask has."""

    options: SapsOptions

    @property
    def mask(self) -> SharedMask:
        """The coordinates of the round."""
        return SharedMask(self.seed, self.round, self.options.keep)

    def coding(self, vector: RunVector) -> PartCoding | None:
        return None if self.gathers else MaskedCoding(vector, self.mask)

    def meet(
        self, value: str, base: Tensor, given: Tensor, mean: Tensor, state: State
    ) -> tuple[Tensor, State]:
        if self.gathers:
            return mean, {}
        found = given.clone()
        for start in range(0, len(found), PIECE):
            elements = min(PIECE, len(found) - start)
            at = start + self.mask.positions(f"{value}:{start}", elements)
            found[at] = mean[at]
        return found, {}
