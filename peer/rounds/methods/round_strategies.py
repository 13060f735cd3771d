"""The strategies between replicas, by the names that jobs have."""

from __future__ import annotations

from collections.abc import Mapping

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
from .round_strategy import RoundStrategy
from .saps import SapsRounds
from .sparse_loco import SparseLocoRounds

__all__ = ["STRATEGIES"]

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
