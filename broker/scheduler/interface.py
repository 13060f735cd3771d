"""What a planner gets and gives; every scheduler stands behind this page.

A planner is a pure function: the same request gives the same plan, and a search counts iterations,
never seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...dag.graph import Graph, OperatorSet
from ...dag.plan import PeerId, Plan, ScheduleName

__all__ = ["NoPlan", "PeerOffer", "PlanOptions", "PlanRequest", "Planner"]


class NoPlan(ValueError):  # noqa: N818 (an answer, named in the design)
    """These peers cannot run this job. The text names the resource that is short, and by how much.

    `code`: "memory" and "peers" can be healed by more or other peers, "model" and "plan" cannot.
    """

    def __init__(self, reason: str, code: str = "plan") -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """A peer that a plan may use, in the order of joining."""

    peer: PeerId
    name: str = ""
    place: str = ""
    device_memory_bytes: int = 0
    host_memory_bytes: int = 0
    flops_per_s: float = 0.0
    """Measured or stated speed in fp32; 0: unknown."""
    operator_set: OperatorSet = "full"
    reachable: bool = True
    """Whether other peers can dial it."""

    def __str__(self) -> str:
        return self.name or self.peer


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The part of a job's `[plan]` and `[train]` that a planner reads."""

    stages: int | None = None
    """Number of stages; None: one per peer, as far as the operators reach."""
    pipelines: int = 1
    """Holders of each stage."""
    schedule: ScheduleName = "1f1b"
    optimizer_slots: int = 2
    """fp32 numbers of optimizer state per trainable number: AdamW 2, SGD with momentum 1."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`graph` is bound to `microbatch_size`; `evaluation_microbatches` 0: no evaluation."""

    graph: Graph
    offers: tuple[PeerOffer, ...]
    microbatches: int
    microbatch_size: int
    evaluation_microbatches: int = 0
    options: PlanOptions = field(default_factory=PlanOptions)


Planner = Callable[[PlanRequest], Plan]
"""Raises NoPlan."""
