"""The strategies between replicas, by the names that jobs have."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ....dag.rounds.vector import RunVector, Span
from ....dag.rounds.wiring import AUDIT, GATHER, GIVE, RESULT, VERSION
from ....job.rounds import RoundSettings, options_of
from ...secure.shared_positions import SharedPositions
from ..coding import CountedCoding, MultiplesCoding, PartCoding, SideBySide
from .diloco import DilocoRounds, StreamingRounds
from .fed_opt import (
    FedAdagradRounds,
    FedAdamRounds,
    FedAvgMRounds,
    FedBuffRounds,
    FedYogiRounds,
    ScaffoldRounds,
)
from .gossip_rounds import GossipRounds
from .noloco import NoLocoRounds
from .round_strategy import RoundStrategy, State
from .saps import SapsRounds
from .sparse_loco import SparseLocoRounds

__all__ = [
    "STRATEGIES",
    "MeanOfBuffers",
    "WholeOfBuffers",
    "codings_of",
    "positions_of",
    "strategy_of",
]


class MeanOfBuffers(RoundStrategy):
    """Shared state, of which there is none, stays as it began."""

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        return base - mean, state


class WholeOfBuffers(MeanOfBuffers):
    """The exchange finds what all go on with: of integers the largest, and of statistics the mean
    where replicas do not begin a round with the same ones."""

    gives_values = True

    def contribution(self, value: str, base: Tensor, now: Tensor, own: State) -> Tensor:
        return now

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        return mean, state


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


def _length(part: Span) -> int:
    """Return how many numbers a part has."""
    return part[1] - part[0]


def strategy_of(settings: RoundSettings) -> RoundStrategy:
    options = options_of(settings.method, settings.options)
    return STRATEGIES[settings.method](options, settings.seed)


def codings_of(
    strategy: RoundStrategy,
    settings: RoundSettings,
    vector: RunVector,
    positions: SharedPositions | None = None,
) -> dict[int, PartCoding]:
    """How contributions, results and versions are written, by hop, before a plan says more.
    `positions`: of the numbers that are given; None: all. Raises CodecError for a codec that rounds
    cannot have."""
    if strategy.codecs is None:
        given = result = PartCoding(vector, settings.codec)
        if settings.results:
            result = PartCoding(vector, settings.results)
    else:
        given, result = (PartCoding(vector, text, least=0) for text in strategy.codecs)
    whole = PartCoding(vector, "none", rows=1 + len(strategy.slots) + (positions is not None))
    if settings.secure:
        given = result = MultiplesCoding(vector, positions.kept if positions else _length)
    if settings.overlap:
        given = CountedCoding(vector, settings.codec)
    sums = given if settings.secure else MultiplesCoding(vector, _length)
    found = {GIVE: given, RESULT: result, VERSION: whole, AUDIT: given, GATHER: sums}
    return found | ({RESULT: SideBySide(given)} if strategy.side_by_side else {})


def positions_of(settings: RoundSettings, vector: RunVector) -> SharedPositions | None:
    """Return the positions of what is given; None: all is."""
    if settings.cohorts is None or not settings.cohorts.shares_positions:
        return None
    options = settings.cohorts.sends.compression_options
    return SharedPositions(vector, settings.seed, options.least_ratio, options.explore)
