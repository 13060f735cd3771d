"""The report beside a plan: what it is expected to cost, what it was compared with, and why it is
as it is. Nothing of it is executed, and no peer gets it: people read it, and the broker compares
what it measures with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .plan import PeerId, Plan

__all__ = [
    "NO_REPORT",
    "Alternative",
    "CodecUse",
    "LinkPrediction",
    "PeerPrediction",
    "PlanReport",
    "PlanWithReport",
    "Prediction",
    "Spare",
]


@dataclass(frozen=True, slots=True)
class PeerPrediction:
    """What the plan expects of a peer: compute seconds per step, peak bytes on device and host."""

    peer: PeerId
    compute_s: float
    device_bytes: int
    host_bytes: int
    bubble: float = 0.0
    """Share of the step in which it does not compute."""
    learned: float = 0.0
    """In compute_s: how many times longer than its own speeds say it takes, as earlier steps have
    shown; 0: compute_s is of another peer, whose part it took over, or nothing is known."""


@dataclass(frozen=True, slots=True)
class CodecUse:
    """What the codec of one role on a link is expected to do in a step."""

    role: str
    codec: str
    """Its text; `raw/1` where nothing is encoded."""
    bytes: int
    """Encoded, without what frames add."""
    dense_bytes: int
    """Bytes of the same tensors, uncompressed."""
    saved_s: float = 0.0
    """Seconds of transfer that it saves."""
    encode_s: float = 0.0
    """Seconds that both ends take to encode and decode."""
    error: float = 0.0
    """Relative L2 that is typical of it, ‖Δ‖₂ / ‖x‖₂; 0: bit for bit the same."""


@dataclass(frozen=True, slots=True)
class LinkPrediction:
    """What the plan expects of a directed link: encoded bytes per step, and seconds per step in
    which it carries them. `codecs`: by role that uses it; empty where nothing is compressed on any
    link."""

    source: PeerId
    destination: PeerId
    bytes: int
    busy_s: float
    codecs: tuple[CodecUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to train the same model with these peers. `step_s`: seconds for the same samples;
    0: it does not fit."""

    name: str
    step_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the plan expects of a step. step_s 0: not predicted."""

    step_s: float = 0.0
    peers: tuple[PeerPrediction, ...] = ()
    links: tuple[LinkPrediction, ...] = ()
    bottlenecks: tuple[str, ...] = ()
    """What the step time hangs on, the heaviest first, one sentence each."""
    alternatives: tuple[Alternative, ...] = ()
    full_step_s: float = 0.0
    """Of a step in which every microbatch visits all stages, where the plan has such besides."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A peer that holds nothing in this plan, and why."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a planner says of its plan. `reasons`: for people, one sentence each."""

    predicted: Prediction = Prediction()
    reasons: tuple[str, ...] = ()
    spares: tuple[Spare, ...] = ()


NO_REPORT = PlanReport()


class PlanWithReport(NamedTuple):
    """A plan and what its planner says of it: what planners return, and a run keeps."""

    plan: Plan
    report: PlanReport = NO_REPORT

    @property
    def step_s(self) -> float:
        """How long its planner expects a step to take."""
        return self.report.predicted.step_s
