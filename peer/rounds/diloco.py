"""DiLoCo (Douillard et al. 2023, 2311.08105): what replicas moved on the mean is a gradient D for
an outer SGD with Nesterov momentum.

    m ← μ·m + D        θ ← θ - η·(D + μ·m)
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ...job.rounds import DilocoOptions
from .strategy import RoundStrategy, State

__all__ = ["DilocoRounds"]

_MOMENTUM = "momentum"


class DilocoRounds(RoundStrategy):
    """Outer Nesterov momentum, which all replicas share."""

    options: DilocoOptions
    slots: ClassVar[tuple[str, ...]] = (_MOMENTUM,)

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        kept = state[_MOMENTUM] * self.options.momentum
        kept = kept + mean
        ahead = kept * self.options.momentum
        step = (mean + ahead) * self.options.lr
        return base - step, {_MOMENTUM: kept}
