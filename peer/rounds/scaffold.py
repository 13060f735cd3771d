"""SCAFFOLD's server (Karimireddy et al. 2020, 1910.06378, algorithm 1, option II). D is the mean of
what K clients of N moved in so many steps at a learning rate, towards where they came from, and g
what a move is multiplied by to be a mean gradient, 1 / (steps · rate):

    θ <- θ - η·D        c <- c + (K/N)·(g·D - c)

So c stays the mean over all N clients of their own c_i, which `peer/federated/control_variates.py`
has: each of the K goes from c_i to c_i - c + g·D_i.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ...job.clients.client_options import ScaffoldOptions
from .strategy import RoundStrategy, State

__all__ = ["CONTROL", "ScaffoldRounds"]

CONTROL = "control"
"""The slot of c."""


class ScaffoldRounds(RoundStrategy):
    """The mean of all control variates, which all share."""

    options: ScaffoldOptions
    slots: ClassVar[tuple[str, ...]] = (CONTROL,)
    _share = _to_gradient = 0.0

    def planned(self, share: float, to_gradient: float) -> None:
        self._share, self._to_gradient = share, to_gradient

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        step, control = mean * self.options.lr, state[CONTROL]
        if self._to_gradient > 0:
            gradient = mean * self._to_gradient
            change = gradient - control
            change = change * self._share
            control = control + change
        return base - step, {CONTROL: control}
