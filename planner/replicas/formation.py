"""Which peers are which replica, and what a round of them is expected to take."""

from __future__ import annotations

from dataclasses import dataclass

from ...dag.plan.plan import PeerId
from ...dag.plan.report import Alternative, PlanWithReport, Spare

__all__ = ["Formation", "FormedReplica", "RoundPrediction"]


@dataclass(frozen=True, slots=True)
class FormedReplica:
    """Peers that hold the model once. Every one of them has a share in the plan."""

    peers: tuple[PeerId, ...]
    made: PlanWithReport
    """Of a local step, with the local step's microbatches."""
    step_s: float
    """Of a local step."""
    steps: int
    """Local steps in a round, so that all replicas end together."""
    samples: int
    """Of a local step: the same for all replicas."""
    slowest_link: float
    """bytes/s of the slowest link inside, in its slower direction; inf: there is none."""


@dataclass(frozen=True, slots=True)
class RoundPrediction:
    """What a round takes: local work, and an exchange of contributions. One replica exchanges
    nothing, and its round is `every` steps."""

    every: int
    """Global steps of a round, each of `batch` samples."""
    batch: int
    local_s: float
    """Of the slowest replica's local work."""
    exchange_s: float
    exposed_s: float
    """Of the exchange, in which nobody trains."""
    contribution_bytes: float
    """Of each replica."""
    peer_bytes: tuple[tuple[PeerId, float], ...]
    """What a peer sends in a round, and as much what it receives."""
    slowest_link: float
    """bytes/s of the slowest link between replicas that is used; inf: there is none."""
    hangs_on: str
    """One sentence."""

    @property
    def seconds(self) -> float:
        return self.local_s + self.exposed_s

    @property
    def samples(self) -> int:
        return self.every * self.batch

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


@dataclass(frozen=True, slots=True)
class Formation:
    """The replicas of a run. Steps times samples, over all of them, are the round's samples."""

    replicas: tuple[FormedReplica, ...]
    left_out: tuple[Spare, ...]
    round: RoundPrediction
    microbatch_size: int
    head_parts: int
    """The form of the request that it was made for: the same for all replicas."""
    alternatives: tuple[Alternative, ...]
    """With the seconds for `batch` samples."""
    reasons: tuple[str, ...]
    """The first says what is recommended."""

    @property
    def samples_per_s(self) -> float:
        return self.round.samples_per_s
