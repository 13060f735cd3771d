"""The strategies between replicas, by the names that jobs have."""

from __future__ import annotations

from collections.abc import Mapping

from ...job.rounds import RoundSettings, options_of
from .diloco import DilocoRounds
from .sparse_loco import SparseLocoRounds
from .strategy import RoundStrategy
from .streaming import StreamingRounds

__all__ = ["STRATEGIES", "standing_bytes", "strategy_of"]

STRATEGIES: Mapping[str, type[RoundStrategy]] = {
    "average": RoundStrategy,
    "diloco": DilocoRounds,
    "sparse-loco": SparseLocoRounds,
    "streaming-diloco": StreamingRounds,
}


def strategy_of(settings: RoundSettings) -> RoundStrategy:
    return STRATEGIES[settings.method](options_of(settings.method, settings.options))


def standing_bytes(settings: RoundSettings, elements: int) -> int:
    """What a holder keeps of so many elements from round to round: the version that its replica
    began with, and state."""
    strategy = STRATEGIES[settings.method]
    return 4 * elements * (1 + len(strategy.slots) + len(strategy.own_slots))
