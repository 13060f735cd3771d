"""The server's rules of federated averaging that are no plain mean (FedBuff: Nguyen et al. 2022,
2106.06639; FedAvgM: Hsu et al. 2019, 1909.06335; FedAdam, FedYogi, FedAdagrad: Reddi et al. 2021,
2003.00295, algorithm 2). D is the mean of what clients moved, towards where they came from:

    FedBuff      θ <- θ - η·D
    FedAvgM      m <- μ·m + D                     θ <- θ - η·m
    the others   m <- β₁·m + (1 - β₁)·D           θ <- θ - η·m / (√v + ε)
    FedAdam      v <- β₂·v + (1 - β₂)·D²
    FedYogi      v <- v - (1 - β₂)·D²·sign(v - D²)
    FedAdagrad   v <- v + D²

SCAFFOLD (Karimireddy et al. 2020, 1910.06378, algorithm 1, option II), of K clients of N that each
made as many steps, with g what a move is multiplied by to be a mean gradient, 1 / (steps · rate):

    θ <- θ - η·D                c <- c + (K/N)·(g·D - c)

So c stays the mean over all N clients of their own c_i, which `peer/federated/control_variates.py`
has: each of the K goes from c_i to c_i - c + g·D_i.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ....job.clients.client_options import (
    AdaptiveOptions,
    FedAvgMOptions,
    FedBuffOptions,
    ScaffoldOptions,
)
from .round_strategy import RoundStrategy, State

__all__ = [
    "CONTROL",
    "FedAdagradRounds",
    "FedAdamRounds",
    "FedAvgMRounds",
    "FedBuffRounds",
    "FedYogiRounds",
    "ScaffoldRounds",
]

CONTROL = "control"
"""The slot of SCAFFOLD's c."""
_MOMENTUM, _SQUARE = "momentum", "square"


class FedBuffRounds(RoundStrategy):
    """A step along the mean. How much older versions count for is in the weights of the mean, and
    in what the round's plan multiplies it by."""

    options: FedBuffOptions

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        step = mean * self.options.lr
        return base - step, {}


class FedAvgMRounds(RoundStrategy):
    """The server's momentum, which all share."""

    options: FedAvgMOptions
    slots: ClassVar[tuple[str, ...]] = (_MOMENTUM,)

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        kept = state[_MOMENTUM] * self.options.momentum
        kept = kept + mean
        step = kept * self.options.lr
        return base - step, {_MOMENTUM: kept}


class _Adaptive(RoundStrategy):
    """The server's two moments, which all share."""

    options: AdaptiveOptions
    slots: ClassVar[tuple[str, ...]] = (_MOMENTUM, _SQUARE)

    def second(self, before: Tensor, squared: Tensor) -> Tensor:
        """Return the next second moment, by D²."""
        raise NotImplementedError

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        beta = self.options.betas[0]
        kept, new = state[_MOMENTUM] * beta, mean * (1 - beta)
        kept = kept + new
        squared = mean * mean
        square = self.second(state[_SQUARE], squared)
        scaled = kept * self.options.lr
        root = square.sqrt()
        step = scaled / (root + self.options.eps)
        return base - step, {_MOMENTUM: kept, _SQUARE: square}


class FedAdamRounds(_Adaptive):
    """Decaying mean of squares."""

    def second(self, before: Tensor, squared: Tensor) -> Tensor:
        beta = self.options.betas[1]
        kept, new = before * beta, squared * (1 - beta)
        return kept + new


class FedYogiRounds(_Adaptive):
    """Squares by which the moment moves towards D², never faster than these are."""

    def second(self, before: Tensor, squared: Tensor) -> Tensor:
        new = squared * (1 - self.options.betas[1])
        signed = new * (before - squared).sign()
        return before - signed


class FedAdagradRounds(_Adaptive):
    """Sum of squares."""

    def second(self, before: Tensor, squared: Tensor) -> Tensor:
        return before + squared


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
