"""SparseLoCo (Sarfi et al. 2025, 2508.15706): a replica gives the largest numbers of each chunk of
what it moved (D) and has not given yet (e), and that remainder stands in for outer momentum.

    e ← b·e + D        q = two bits of the largest of e        e ← e - q        θ ← θ - η·mean q

All q go to everybody side by side. With `result_density`, only the largest numbers of their mean
come back, in two bits again, and what of a q is not among them goes back into the e that it came
from, as in gTop-k (1901.04359): what a peer gets does not grow with the replicas, and who adds up
remembers nothing.

What of e is sent counts when the round is committed with this replica in it. A replica that is left
out, whose samples are handed out again, goes on with the e of before.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ....job.rounds import SparseLocoOptions
from .round_strategy import RoundStrategy, State

__all__ = ["SparseLocoRounds"]

_RESIDUAL = "residual"


class SparseLocoRounds(RoundStrategy):
    """Sparse contributions with decayed error feedback of each replica."""

    own_slots: ClassVar[tuple[str, ...]] = (_RESIDUAL,)

    options: SparseLocoOptions

    def __init__(self, options: SparseLocoOptions, seed: int = 0) -> None:
        super().__init__(options, seed)
        self.side_by_side = not options.result_density
        self.codecs = (options.codec, options.codec if self.side_by_side else options.result_codec)

    def contribution(self, value: str, base: Tensor, now: Tensor, own: State) -> Tensor:
        return own[_RESIDUAL] * self.options.decay + (base - now)

    def left(self, value: str, given: Tensor, heard: Tensor, mean: Tensor) -> State:
        if not self.side_by_side:
            heard = torch.where(mean == 0, 0.0, heard)
        return {_RESIDUAL: given - heard}

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        return base - mean * self.options.lr, {}
