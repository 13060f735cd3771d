"""The strategies between replicas, by the names that jobs have."""

from __future__ import annotations

from collections.abc import Mapping

from ...dag.rounds.vector import RunVector
from ...dag.rounds.wiring import GIVE, RESULT, VERSION
from ...job.rounds import RoundSettings, options_of
from .coding import CountedCoding, PartCoding
from .diloco import DilocoRounds, StreamingRounds
from .fed_opt import (
    FedAdagradRounds,
    FedAdamRounds,
    FedAvgMRounds,
    FedBuffRounds,
    FedYogiRounds,
    ScaffoldRounds,
)
from .gossip import GossipRounds
from .noloco import NoLocoRounds
from .saps import SapsRounds
from .side_by_side import SideBySide
from .sparse_loco import SparseLocoRounds
from .strategy import RoundStrategy

__all__ = ["STRATEGIES", "codings_of", "strategy_of"]

STRATEGIES: Mapping[str, type[RoundStrategy]] = {
    "average": RoundStrategy,
    "diloco": DilocoRounds,
    "sparse-loco": SparseLocoRounds,
    "streaming-diloco": StreamingRounds,
    "saps": SapsRounds,
    "random-pairs": GossipRounds,
    "ring": GossipRounds,
    "noloco": NoLocoRounds,
    "saps-outer": NoLocoRounds,
    "fedavg": RoundStrategy,
    "fedprox": RoundStrategy,
    "fednova": RoundStrategy,
    "scaffold": ScaffoldRounds,
    "fedavgm": FedAvgMRounds,
    "fedadam": FedAdamRounds,
    "fedyogi": FedYogiRounds,
    "fedadagrad": FedAdagradRounds,
    "fedbuff": FedBuffRounds,
    "fedimpro": RoundStrategy,
}


def strategy_of(settings: RoundSettings) -> RoundStrategy:
    options = options_of(settings.method, settings.options)
    return STRATEGIES[settings.method](options, settings.seed)


def codings_of(
    strategy: RoundStrategy, settings: RoundSettings, vector: RunVector
) -> dict[int, PartCoding]:
    """How contributions, results and versions are written, by hop, before a plan says more. Raises
    CodecError for a codec that rounds cannot have."""
    if strategy.codecs is None:
        given = result = PartCoding(vector, settings.codec)
    else:
        given, result = (PartCoding(vector, text, least=0) for text in strategy.codecs)
    whole = PartCoding(vector, "none", rows=1 + len(strategy.slots))
    if settings.secure:
        given = result = PartCoding(vector, "none", rows=2)  # the bits of integers
    if settings.overlap:
        given = CountedCoding(vector, settings.codec)
    found = {GIVE: given, RESULT: result, VERSION: whole}
    return found | ({RESULT: SideBySide(given)} if strategy.side_by_side else {})
