"""A replica: peers that hold the model once and step as one. It has one plan, in one term; one
ledger of steps; its own snapshots and recovery."""

from __future__ import annotations

from ...dag.plan.plan import PeerId
from ...planner.requests.run_spec import HASH
from ...proto.broker_pb2 import RUNNING, WAITING, PeerMessage, SnapshotReport
from ...proto.common_pb2 import Reason
from ..events import Instruction, ReplicaId
from ..membership.bounds import sound_report, sound_round
from ..membership.member import Member
from ..membership.membership import Membership
from ..records.replica import ReplicaRecord
from ..records.run import RunRecord
from ..records.steps import WrongStepError
from .context import ReplicaContext
from .enlisting import KeeperSearch
from .handover import Handover
from .lifecycle import Lifecycle
from .losses import Losses
from .snapshots import ReplicaSnapshots

__all__ = ["Replica"]

LEAST_STAY_S = 300.0
"""Who means to leave sooner than that is asked after all others: handing its part over takes some
seconds of everybody's time (docs/recovery.md), which is one percent then."""


class Replica:
    """Replica with its parts, each with one job. record: what outlives the broker."""

    def __init__(self, run: RunRecord, record: ReplicaRecord, members: Membership) -> None:
        self.record, self.run = record, record.run
        self.context = ReplicaContext(run, record, members)
        self.snapshots = ReplicaSnapshots(self.context)
        self.keeping = KeeperSearch(self.context, self.snapshots)
        self.handover = Handover(self.context, self.snapshots)
        self.lifecycle = Lifecycle(self.context, self.snapshots, self.handover)
        self.losses = Losses(self.lifecycle)

    def __repr__(self) -> str:
        return repr(self.record)

    @property
    def id(self) -> ReplicaId:
        return self.record.id

    @property
    def needs_a_plan(self) -> bool:
        """Whether it waits, and nothing is asked for it yet."""
        record = self.record
        return record.phase == WAITING and self.lifecycle.asked is None and not record.paused

    def sound(self, member: Member, message: PeerMessage) -> None:
        """Make what a member says of a step or a round such that all behind this can reckon with
        it, in place: numbers are bounded, names are printable, and results count from the plan's
        hub alone, of evaluations those that are due."""
        plan = self.record.plan
        is_hub = plan is not None and member.id == plan.hub
        match message.WhichOneof("kind"):
            case "step":
                sound_report(report := message.step)
                run, steps = self.context.run, self.record.steps
                wanted = not run.requirements.has_rounds
                if not is_hub:
                    report.ClearField("outcome")
                if not (is_hub and wanted and run.requirements.evaluates_after(report.step, steps)):
                    report.ClearField("evaluation")
            case "round":
                sound_round(message.round)
                if not (is_hub and self.context.run.requirements.eval_every):
                    message.round.ClearField("evaluation")

    def said(
        self, kind: str, member: Member, message: PeerMessage, now: float
    ) -> list[Instruction]:
        """A peer told it something."""
        match kind:
            case "ready":
                return self.lifecycle.ready(member, message.ready, now)
            case "step":
                try:
                    return self.lifecycle.reported(member, message.step, now)
                except WrongStepError as error:
                    return self.losses.wrong_report(member, message.step, str(error), now)
            case "saved":
                return self.lifecycle.saved(member, message.saved, now)
            case "exported":
                if not HASH.fullmatch(message.exported.weights.hash):
                    return [self.context.ignored(kind, member, "weights that are no blob")]
                return self.lifecycle.exported(member, message.exported, now)
            case "link_status":
                return self.losses.link_told(member, message.link_status, now)
            case "fault":
                return self.losses.fault(member, message.fault, now)
        raise AssertionError(f"{kind} is no message to a replica")

    def snapshot_reported(
        self, member: Member, report: SnapshotReport, now: float
    ) -> list[Instruction]:
        """The end may have waited for a checkpoint that will not be."""
        out = self.snapshots.reported(member, report, now)
        return out + self.lifecycle.finish_export(now)

    @property
    def only_keep(self) -> tuple[PeerId, ...]:
        """Peers that have no part in it but to keep copies, and can be given up."""
        plan = self.context.plan if self.record.phase == RUNNING else None
        return () if plan is None else tuple(p for p in plan.warm if self.context.mine(p))

    def give_up_warm(self, now: float) -> list[Instruction]:
        """Another run has work for its keepers. Holders keep each other's snapshots from here
        on."""
        reason = Reason(code="released", text="another run has work for it")
        out = self.context.release(self.only_keep, reason, now)
        return out + self.snapshots.order(now) if out else out

    def steady(self, member: Member, now: float) -> bool:
        """Whether it is asked first: not lost again and again of late, and not about to leave."""
        stays = member.stays_until - now >= LEAST_STAY_S
        known = self.record.step_s is not None
        ends = known and self.record.ends_at(now) <= member.stays_until
        return (stays or ends) and not self.context.suspects.shaky(member.id, now)
