"""A replica as decisions about its losses see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import PlanWithReport
from ..events import ReplicaId
from ..membership.member import Member
from ..membership.membership import Membership
from ..records.replica import ReplicaRecord
from ..records.submitted import SubmittedRun
from ..snapshots.sets import SnapshotSet
from .suspects import SuspectTracker

__all__ = ["Pair", "View"]

Pair = tuple[PeerId, PeerId]


@dataclass(frozen=True, slots=True)
class View:
    """Knowledge of a replica at one moment; nobody changes anything through it.

    pairs: of the term's holders that exchange frames. speed_of: FLOP/s of the holders, as they were
    when the term began. found: the set that could be gone on from; None: the starting weights.
    present: the `plan`, where there is one.
    """

    replica: ReplicaRecord
    members: Membership
    suspects: SuspectTracker
    pairs: tuple[Pair, ...]
    speed_of: Mapping[PeerId, float]
    found: SnapshotSet | None
    now: float
    present: Plan | None = None

    @property
    def id(self) -> ReplicaId:
        return self.replica.id

    @property
    def run(self) -> SubmittedRun:
        return self.replica.run

    @property
    def plan(self) -> Plan:
        """The plan of the present term, with those that keep snapshots now; only asked where there
        is one."""
        assert self.present is not None, self.replica
        return self.present

    @property
    def planned(self) -> PlanWithReport:
        return PlanWithReport(self.plan, self.replica.report)

    def mine(self, peer: PeerId) -> Member | None:
        """A peer that has a part in it now; None for any other."""
        return self.members.mine(peer, self.id)
