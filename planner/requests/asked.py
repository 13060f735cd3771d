"""What planning is asked, and what it answers.

asked                           answered
------------------------------  ---------------------------
MakePlan                        PlanReady or PlanFailed
FormReplicas                    ReplicasFormed or PlanFailed
ConsiderPlan                    PlanConsidered
PreviewWanted                   PreviewAnswer (`proto/broker.proto`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import NO_REPORT, PlanReport
from ...proto.broker_pb2 import Formation, PeerState, RunSpec
from ..base.interface import PeerOffer

__all__ = [
    "LAST_S",
    "PLANNER",
    "ConsiderPlan",
    "FormReplicas",
    "MakePlan",
    "OfPlanning",
    "PlanConsidered",
    "PlanFailed",
    "PlanReady",
    "PreviewWanted",
    "ReplicaId",
    "ReplicasFormed",
]

ReplicaId = NewType("ReplicaId", str)
"""Under which peers and planners know a replica, as their run; the run's id and a number."""
PLANNER = "planner"
"""The code of a run whose planning crashed its process, or passed a limit."""
LAST_S = 3600.0
"""How long others' runs come first when planning one of an owner's had to be ended: with all that
planning may take, each of theirs costs everybody minutes."""


@dataclass(frozen=True, slots=True)
class OfPlanning:
    """A record of one request to plan for a replica: `version` counts them."""

    replica: ReplicaId
    version: int


# ---------------------------------------------------------------- asked


@dataclass(frozen=True, slots=True)
class MakePlan(OfPlanning):
    """Plan the run over these peers; the answer is PlanReady or PlanFailed with this version."""

    spec: RunSpec
    peers: tuple[PeerOffer, ...]
    network: Network | None = None
    """Between these peers, in their order; None: nothing is known of their links."""
    before: Plan | None = None
    """The run's plan so far: the next one keeps its microbatches and its form of the graph."""


@dataclass(frozen=True, slots=True)
class FormReplicas(OfPlanning):
    """Form the replicas of a run of which none has begun; the answer is ReplicasFormed or
    PlanFailed with this version. `replica`: the run's first."""

    spec: RunSpec
    peers: tuple[PeerOffer, ...]
    network: Network | None = None


@dataclass(frozen=True, slots=True)
class ConsiderPlan(OfPlanning):
    """Compare the running plan with the best over these peers; the answer is PlanConsidered."""

    spec: RunSpec
    plan: Plan
    peers: tuple[PeerOffer, ...]
    network: Network | None = None


@dataclass(frozen=True, slots=True)
class PreviewWanted:
    """Preview this spec over these peers; `notes`: what of them was clamped, for people."""

    spec: RunSpec
    peers: tuple[PeerState, ...]
    offers: tuple[PeerOffer, ...]
    network: Network | None = None
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------- answered


@dataclass(frozen=True, slots=True)
class PlanReady(OfPlanning):
    """`pairs`: who exchanges frames with whom; empty: every pair of the plan's peers. `local`:
    inputs of the model that only peers with the data read."""

    plan: Plan
    pairs: tuple[tuple[PeerId, PeerId], ...] = ()
    local: tuple[str, ...] = ()
    report: PlanReport = NO_REPORT


@dataclass(frozen=True, slots=True)
class ReplicasFormed(OfPlanning):
    """`formation`: who is in which replica, and which kind of training it is. `plans`: by replica;
    empty where the run shall not train in replicas that meet: it is planned by itself."""

    formation: Formation
    plans: tuple[PlanReady, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanFailed(OfPlanning):
    """`code` "peers" or "memory" may heal when others are in the pool; others never do. PLANNER:
    planning itself had to be ended.
    `short_bytes`: of device memory; 0: not known, or another thing is short."""

    reason: str
    code: str = "plan"
    short_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlanConsidered(OfPlanning):
    """Seconds per step of the running plan and of the best one (`plan`; None: there is none), and
    of moving from one to the other; pairs that exchange frames under the best one."""

    running_s: float = 0.0
    candidate_s: float = 0.0
    migration_s: float = 0.0
    plan: Plan | None = None
    pairs: tuple[tuple[PeerId, PeerId], ...] = ()
    given_up: str = ""
    """Why comparing them was ended, as it would be again; empty: it was not."""
    report: PlanReport = NO_REPORT
