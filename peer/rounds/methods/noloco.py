"""NoLoCo (Kolehmainen et al. 2025, 2506.10911): slow weights s and momentum m of each replica, and
an outer step of a pair. Over local weights p of both,

    m ← μ·m + η·(mean p - s)        s ← s + m        p ← s

which is the paper's with equal factors of mean(p - s) and of the pull mean(s) - s. Who is alone
makes the same step by itself. saps-outer is this step over pairs with fast links.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ....job.gossip import NoLocoOptions
from .gossip_rounds import GossipRounds
from .round_strategy import State

__all__ = ["NoLocoRounds"]

_MOMENTUM = "momentum"


class NoLocoRounds(GossipRounds):
    """Outer momentum of each replica; a version goes with that of whom it is taken from."""

    options: NoLocoOptions
    slots: ClassVar[tuple[str, ...]] = (_MOMENTUM,)

    def _step(self, base: Tensor, to: Tensor, state: State) -> Tensor:
        return state[_MOMENTUM] * self.options.momentum + (to - base) * self.options.lr

    def contribution(self, value: str, base: Tensor, now: Tensor, own: State) -> Tensor:
        return base + self._step(base, now, own) if self.gathers else now

    def meet(
        self, value: str, base: Tensor, given: Tensor, mean: Tensor, state: State
    ) -> tuple[Tensor, State]:
        if self.gathers:
            return mean, {_MOMENTUM: given - base}
        moved = self._step(base, mean, state)
        return base + moved, {_MOMENTUM: moved}
