"""Rounds in which a replica meets one other, or nobody: what is given are weights, and each goes on
with a version of its own.

random-pairs, ring: x ← (x + x') / 2, of which both come to the same bits.

A round that gathers (`RoundStart.gathers`) ends with one version for all: the plain mean of what
every replica would go on with, were it alone. Pairs keep their mean, so that is the mean of what
they would have come to, too.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .round_strategy import RoundStrategy, State

__all__ = ["GossipRounds"]


class GossipRounds(RoundStrategy):
    """Two take the mean of their weights. gathers, round: of the round that is under way."""

    apart: ClassVar[bool] = True
    gathers = False
    round = 0

    def begin(self, number: int, *, gathers: bool) -> None:
        self.round, self.gathers = number, gathers

    def contribution(self, value: str, base: Tensor, now: Tensor, own: State) -> Tensor:
        return now

    def meet(
        self, value: str, base: Tensor, given: Tensor, mean: Tensor, state: State
    ) -> tuple[Tensor, State]:
        return mean, {}
