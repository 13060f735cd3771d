"""What of a replica outlives the broker: its phase, its plan, its steps and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import NO_REPORT, PlanWithReport
from ...dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from ...dag.schedule.convert_report import report_from_proto, report_to_proto
from ...dag.schedule.filled import filled
from ...planner.requests.client_data import spec_of_client
from ...proto.broker_pb2 import (
    CANCELLED,
    DONE,
    EXPORTING,
    FAILED,
    RUNNING,
    WAITING,
    Phase,
    Renamed,
    ReplicaState,
    RunEvent,
    RunSpec,
    StepDone,
)
from ...proto.broker_pb2 import Plan as PlanMessage
from ...proto.broker_pb2 import PlanReport as ReportMessage
from ...proto.common_pb2 import BlobRef, Reason
from ...proto.journal_pb2 import RenamedSince, ReplicaKept
from ..membership.member import Member
from ..snapshots.checkpoints import Checkpoints
from ..snapshots.places import SnapshotPlaces
from .steps import StepLedger
from .submitted import SubmittedRun, replica_id

__all__ = ["ReplicaRecord"]

_ENDED = (DONE, FAILED, CANCELLED)
ENDLESS = 2**53
"""More steps than any replica makes."""


class ReplicaRecord:
    """A replica as the journal has it: `apply` takes an event over, now or when it is replayed.

    plan, report, peers: of the present term, from BUILDING on. pausing: whether it is to stop
    between two steps and be put aside until somebody resumes it. interrupted: starts of the broker
    that found it being planned, since it last got a plan.
    """

    def __init__(self, run: SubmittedRun, number: int = 0) -> None:
        self.run, self.number = run, number
        self.id = replica_id(run.id, number)
        self.phase: Phase = WAITING
        self.reason = Reason()
        self.term = 0
        self.plan: Plan | None = None
        self.report = NO_REPORT
        self.plan_bytes = 0
        self.peers: tuple[PeerId, ...] = ()
        self.local = run.requirements.local
        """Inputs of the model that only peers with the data read, under the present plan."""
        self.inexact_from = run.spec.resumed.inexact_from
        """The first step after a lost stage was made anew from its neighbours, or from which on
        microbatches take other routes than before; 0: neither."""
        self.pausing = False
        self.last = 0
        """So many steps it makes, as it ends before its length; 0: it does not."""
        self.interrupted = 0
        self.formed_s = 0.0
        """Seconds of a local step, as its formation says; 0: it says none."""
        self.client = 0
        """Of federated training on data of peers, whose data it trains on."""
        self.ledger: StepLedger | None = None  # Of the newest term that was RUNNING.
        output = run.requirements.output
        apart = run.requirements.has_rounds
        self.checkpoints = Checkpoints(
            0 if apart else output.every, output.keep, 0 if apart else run.spec.resumed.step
        )
        self._begins_at = 0 if apart else run.spec.resumed.step
        self.places = SnapshotPlaces()
        self.names: dict[int, dict[PeerId, PeerId]] = {}
        """By term, who took whose place since then."""

    def __repr__(self) -> str:
        phase, steps = Phase.Name(self.phase), self.run.spec.steps
        return f"<Replica {self.id} {phase} term {self.term}, {self.committed}/{steps} steps>"

    # ------------------------------------------------------------ what holds

    @property
    def samples(self) -> int:
        """Samples of one of its steps, as its plan has them; 0 without one."""
        return 0 if self.plan is None else len(self.plan.routes) * self.plan.microbatch_size

    @property
    def ended(self) -> bool:
        return self.phase in _ENDED

    @property
    def running(self) -> bool:
        return self.phase == RUNNING

    @property
    def active(self) -> bool:
        """Whether peers are assigned to it."""
        return not self.ended and self.phase != WAITING

    @property
    def paused(self) -> bool:
        return self.phase == WAITING and self.reason.code == "paused"

    @property
    def committed(self) -> int:
        """Number of committed steps."""
        return self.ledger.committed if self.ledger else self._begins_at

    @property
    def steps(self) -> int:
        """How many it makes; of one with rounds that is known at the end."""
        if not self.run.requirements.has_rounds:
            return self.last or self.run.spec.steps
        return self.committed if self.phase in (EXPORTING, *_ENDED) else ENDLESS

    @property
    def has_own_steps(self) -> bool:
        """Whether it has committed steps since it was submitted, be it from a checkpoint."""
        return self.committed > self._begins_at

    @property
    def exporters(self) -> tuple[PeerId, ...]:
        """Return the peers that upload weights at the end: the first holder of each stage."""
        stages = self.plan.stages if self.plan else ()
        return tuple(dict.fromkeys(s.holders[0] for s in stages))

    @property
    def spec(self) -> RunSpec:
        """The spec of its run, with the data that it trains on itself."""
        return spec_of_client(self.run.spec, self.client)

    @property
    def data(self) -> BlobRef:
        """Manifest of the data that it trains on."""
        found = self.run.spec.client_data
        return found[self.client] if found else self.run.spec.data

    @property
    def where(self) -> str:
        """How far it is, behind "was lost", say."""
        if self.phase == RUNNING:
            return f"at step {self.committed}"
        return {WAITING: "before it began", EXPORTING: "while its weights were exported"}.get(
            self.phase, "while it was built"
        )

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, measured or predicted; None: not known."""
        measured = self.ledger.median_s if self.ledger else None
        return measured or self.report.predicted.step_s or None

    @property
    def round_step_s(self) -> float:
        """Seconds of a step by which work is divided and waited for; 0: not known. The mean of the
        middle half of the newest: copies of snapshots slow some of them, and so not the median;
        waits at the gate and losses make a few very long."""
        newest = sorted(self.ledger.newest) if self.ledger else []
        middle = newest[len(newest) // 4 : len(newest) - len(newest) // 4]
        return sum(middle) / len(middle) if middle else self.formed_s or self.step_s or 0.0

    def ends_at(self, now: float) -> float:
        """When its last step is done, as far as that can be told."""
        # Of one with rounds, whose batches are smaller, about as many.
        steps = self.last or self.run.spec.steps
        return now + max(0, steps - self.committed) * (self.step_s or 0.0)

    def lacks_s(self, member: Member, now: float) -> float:
        """How long before the end of its steps a peer means to leave, seconds."""
        return max(0.0, self.ends_at(now) - member.stays_until)

    # ------------------------------------------------------------ what happened

    @property
    def state(self) -> ReplicaState:
        reason = self.reason if self.reason.code else None
        return filled(ReplicaState, self, replica=self.id, reason=reason, step=self.committed)

    def apply(self, event: RunEvent, planned: PlanWithReport | None = None) -> None:
        """`planned` is the event's, where that is at hand. Raises ValueError, PlanError for what
        cannot have been."""
        match event.WhichOneof("kind"):
            case "plan":
                for renamed in event.renamed:
                    self._took_over(PeerId(renamed.old), PeerId(renamed.to))
                self.term, self.interrupted = event.term, 0
                self.local = tuple(event.local)
                self._plan(event.plan, event.report, planned)
                assert self.plan is not None
                self.places.begin(self.term, self.plan)
            case "note":
                self.places.keep(event.term, event.keepers)
            case "state":
                state = event.state.replicas[self.number]
                begins = state.phase == RUNNING != self.phase
                self._stands(state)
                if begins:
                    self.ledger = self._ledger(self.committed, event.at_s)
            case "step":
                if self.ledger is None or event.step.step != self.committed:
                    raise ValueError(
                        f"step {event.step.step} of {self.id}: expected step {self.committed} of a "
                        "replica that has begun"
                    )
                self.ledger.commit(event.step, event.at_s)
            case "finishing":
                if event.finishing.step != self.committed:
                    text = f"{self.id} is to end with step {event.finishing.step}"
                    raise ValueError(f"{text}: expected {self.committed}, which is committed")
                self.last = event.finishing.step
            case "checkpoint":
                self.checkpoints.add((event.checkpoint,))

    def _plan(
        self, plan: PlanMessage, report: ReportMessage, known: PlanWithReport | None = None
    ) -> None:
        read = known or PlanWithReport(plan_from_proto(plan), report_from_proto(report))
        self.plan, self.report = read
        self.peers = read.plan.peers
        self.plan_bytes = plan.ByteSize() + report.ByteSize()

    def _stands(self, state: ReplicaState) -> None:
        self.phase, self.reason = state.phase, deepcopy(state.reason)
        self.inexact_from, self.pausing = state.inexact_from, state.pausing

    def _took_over(self, old: PeerId, new: PeerId) -> None:
        """States of codecs name both ends: who has the part of whom since a snapshot was taken."""
        self.names.setdefault(self.term, {})
        for names in self.names.values():
            before = [k for k, v in names.items() if v == old] or [old]
            names.update(dict.fromkeys(before, new))

    def _ledger(self, committed: int, at_s: float) -> StepLedger:
        run = self.run
        steps = ENDLESS if run.requirements.has_rounds else self.last or run.spec.steps
        earlier = self.ledger.newest if self.ledger else ()
        return StepLedger(self.peers, steps, run.options.most_lead, at_s, committed, earlier)

    # ------------------------------------------------------------ the journal's snapshots

    def kept(self) -> ReplicaKept:
        """Everything, for `restore`."""
        names = [
            RenamedSince(term=term, holders=[Renamed(old=a, to=b) for a, b in names.items()])
            for term, names in self.names.items()
        ]
        return ReplicaKept(
            state=self.state,
            plan=plan_to_proto(self.plan) if self.plan is not None else None,
            report=report_to_proto(self.report) if self.plan is not None else None,
            peaks=self.ledger.peaks if self.ledger is not None else (),
            checkpoints=self.checkpoints.kept,
            interrupted=self.interrupted,
            renamed=names,
            local=self.local,
            holders=self.places.kept(),
            client=self.client,
            steps=self.last,
        )

    def restore(self, kept: ReplicaKept, steps: Iterable[tuple[StepDone, float]]) -> None:
        """`steps`: the newest, each with when it was committed, in seconds."""
        self.checkpoints.add(kept.checkpoints)
        self.interrupted, self.client = kept.interrupted, kept.client
        self.last = kept.steps
        for since in kept.renamed:
            self.names[since.term] = {PeerId(r.old): PeerId(r.to) for r in since.holders}
        self.term = kept.state.term
        self._stands(kept.state)
        if not kept.HasField("plan"):
            return
        self.local = tuple(kept.local)
        self._plan(kept.plan, kept.report)
        assert self.plan is not None
        self.places.begin(self.term, self.plan)  # of a journal that does not say it
        self.places.restore(kept.holders)
        if self.phase in (RUNNING, EXPORTING) or kept.state.step:
            self.ledger = self._ledger(kept.state.step, 0.0)
            self.ledger.held(kept.peaks)
            for step, at_s in steps:
                self.ledger.seen(step.seconds, at_s)
