"""DiLoCo (Douillard et al. 2023, 2311.08105): what replicas moved on the mean is a gradient D for
an outer SGD with Nesterov momentum.

    m ← μ·m + D        θ ← θ - η·(D + μ·m)

Streaming DiLoCo (Douillard et al. 2025, 2501.18512) is that of one fragment a round, in four bits,
beside local steps, with a part of the local weights kept: local ← α·local + (1 - α)·θ. Which
fragment it is, and when the version lands, is the broker's to say.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ....job.rounds import DilocoOptions, StreamingOptions
from .round_strategy import RoundStrategy, State

__all__ = ["DilocoRounds", "StreamingRounds"]

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


class StreamingRounds(DilocoRounds):
    """`mix` is α."""

    options: StreamingOptions

    def __init__(self, options: StreamingOptions, seed: int = 0) -> None:
        super().__init__(options, seed)
        self.mix = options.mix
        self.codecs = (options.codec, "int8:block=128" if options.bits == 4 else "none")
