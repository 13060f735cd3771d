"""The strategies between replicas, by the names that jobs have."""

from __future__ import annotations

from collections.abc import Mapping

from ...dag.rounds.vector import RunVector
from ...job.rounds import RoundSettings, options_of
from .coding import PartCoding
from .diloco import DilocoRounds
from .gossip import GossipRounds
from .noloco import NoLocoRounds
from .saps import SapsRounds
from .sparse_loco import SparseLocoRounds
from .strategy import RoundStrategy

__all__ = ["STRATEGIES", "coding_of", "standing_bytes", "strategy_of"]

STRATEGIES: Mapping[str, type[RoundStrategy]] = {
    "average": RoundStrategy,
    "diloco": DilocoRounds,
    "sparse-loco": SparseLocoRounds,
    "saps": SapsRounds,
    "random-pairs": GossipRounds,
    "ring": GossipRounds,
    "noloco": NoLocoRounds,
    "saps-outer": NoLocoRounds,
}


def strategy_of(settings: RoundSettings) -> RoundStrategy:
    options = options_of(settings.method, settings.options)
    return STRATEGIES[settings.method](options, settings.seed)


def coding_of(strategy: RoundStrategy, settings: RoundSettings, vector: RunVector) -> PartCoding:
    """How contributions are written, and means. Raises CodecError for a codec that rounds cannot
    have."""
    if strategy.codec is None:
        return PartCoding(vector, settings.codec)
    return PartCoding(vector, strategy.codec, least=0)


def standing_bytes(settings: RoundSettings, elements: int) -> int:
    """What a holder keeps of so many elements from round to round: the version that its replica
    began with, and state."""
    strategy = STRATEGIES[settings.method]
    return 4 * elements * (1 + len(strategy.slots) + len(strategy.own_slots))
