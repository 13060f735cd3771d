"""The tables of a job together, as refusals look at them; `spec.py` makes jobs of them."""

from __future__ import annotations

from dataclasses import dataclass

from .log_options import Log
from .plan_options import PlanOptions
from .settings import Settings
from .sync import Sync
from .tables import Codec, Data, Model, Output, Recovery
from .training import Train

__all__ = ["JobTables"]


@dataclass(frozen=True, kw_only=True)
class JobTables(Settings):
    """What a job says, table by table, and among how many replicas its batch is divided."""

    version: int
    """Of the format; 1."""
    name: str
    """For people."""
    seed: int
    """Of everything random."""
    priority: int
    """Higher goes first when runs compete for peers."""
    model: Model
    """What is trained."""
    data: Data
    """On what."""
    train: Train
    """How."""
    plan: PlanOptions
    """Where."""
    codec: Codec
    """Compressed how."""
    sync: Sync
    """Synchronised how."""
    recovery: Recovery
    """And when a peer is lost."""
    output: Output
    """What is left."""
    log: Log
    """Who else is told."""

    @property
    def replicas(self) -> int:
        """Among so many the batch is divided; 1 while that is undecided."""
        return 1 if self.plan.replicas == "auto" else self.plan.replicas

    @property
    def divided(self) -> int:
        """Among so many replicas a batch is divided; 1 in federated training, where it is a
        client's."""
        return 1 if self.sync.kind == "federated" else self.replicas
