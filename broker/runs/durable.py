"""What of a run outlives the broker: what was submitted, and what followed from its events.

All of it changes by events only: `_publish` makes one happen, which is a decision for the journal,
and `happened` is the same when a journal is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import NO_REPORT, PlanWithReport
from ...dag.schedule.convert_plan import plan_from_proto
from ...dag.schedule.convert_report import report_from_proto
from ...proto.broker_pb2 import (
    CANCELLED,
    DONE,
    EXPORTING,
    FAILED,
    RUNNING,
    WAITING,
    Checkpoint,
    PeerPeak,
    Phase,
    RunEvent,
    RunSpec,
    RunState,
)
from ...proto.common_pb2 import Reason
from ...proto.journal_pb2 import Decision, RunHappened
from ..events import Publish, RunId, Watched
from ..options import BrokerOptions
from ..snapshots.checkpoints import Checkpoints
from ..wish import RunRequirements
from .history import History
from .steps import StepLedger

__all__ = ["DurableRun"]

_ENDED = (DONE, FAILED, CANCELLED)


class DurableRun:
    """plan, report, peers: of the current term, from BUILDING on. Every decision is added to
    `decisions`."""

    def __init__(
        self,
        run: RunId,
        number: int,
        spec: RunSpec,
        wish: RunRequirements,
        options: BrokerOptions,
        decisions: list[Decision],
        owner: str = "",
    ) -> None:
        self.id = run
        self.number = number
        self.owner = owner  # Who submitted it; empty where nobody has an identity.
        self.spec = spec
        self._spec_bytes, self.plan_bytes = spec.ByteSize(), 0
        self.wish = wish
        self.options = options
        self.phase: Phase = WAITING
        self.reason = Reason()
        self.term = 0
        self.plan: Plan | None = None
        self.report = NO_REPORT
        self.peers: tuple[PeerId, ...] = ()
        self.inexact_from = spec.resumed.inexact_from
        """The first step after a lost stage was made anew from its neighbours, or other ones than
        before began to change places; 0: neither."""
        self.pausing = False
        """Whether it is to stop between two steps and be put aside until somebody resumes it."""
        self.interrupted = 0
        """Starts of the broker that found it being planned, since it last got a plan."""
        self.history = History(options.kept_events)
        self.ledger: StepLedger | None = None  # Of the newest term that was RUNNING.
        self.checkpoints = Checkpoints(wish.output.every, wish.output.keep)
        self.names: dict[int, dict[PeerId, PeerId]] = {}
        """By term, who took whose place since then."""
        self._decisions = decisions

    def __repr__(self) -> str:
        phase = Phase.Name(self.phase)
        return f"<Run {self.id} {phase} term {self.term}, {self.committed}/{self.spec.steps} steps>"

    @property
    def ended(self) -> bool:
        return self.phase in _ENDED

    @property
    def kept_bytes(self) -> int:
        """What of it is kept: its spec, its plan, and its history, as they would be on disk."""
        return self._spec_bytes + self.plan_bytes + self.history.size_bytes

    @property
    def committed(self) -> int:
        """Number of committed steps."""
        return self.ledger.committed if self.ledger else self.spec.resumed.step

    @property
    def lease_s(self) -> float:
        """Silence after which one of its peers is lost."""
        asked = self.wish.recovery.lease
        return self.options.lease_s if asked is None else float(asked)

    @property
    def running(self) -> bool:
        return self.phase == RUNNING

    @property
    def active(self) -> bool:
        """Whether peers are assigned to it."""
        return not self.ended and self.phase != WAITING

    @property
    def state(self) -> RunState:
        return RunState(
            run=self.id,
            phase=self.phase,
            reason=self.reason if self.reason.code else None,
            step=self.committed,
            steps=self.spec.steps,
            name=self.spec.name,
            term=self.term,
            inexact_from=self.inexact_from,
            pausing=self.pausing,
        )

    def broker_started(self) -> None:
        """Another process of the broker has begun."""
        self.interrupted += self.phase == WAITING and self.reason.code == "planning"

    # ------------------------------------------------------------ events for watchers

    def watched(self, start: int) -> Watched:
        first, events = self.history.read(start)
        numbered = self.history.numbered
        over = self.ended and first + len(events) == numbered
        return Watched(self.id, first, events, over, numbered)

    def _publish(
        self,
        event: RunEvent,
        now: float,
        term: int | None = None,
        plan: PlanWithReport | None = None,
    ) -> Publish:
        event.at_s, event.term = now, self.term if term is None else term
        event.number = self.history.numbered
        self.happened(event, plan)
        decision = Decision(happened=RunHappened(run=self.id))
        decision.happened.event.CopyFrom(event)
        self._decisions.append(decision)
        return Publish(self.id, event)

    def happened(self, event: RunEvent, plan: PlanWithReport | None = None) -> None:
        """Takes an event over into the state, now or when a journal is replayed; `plan` is the
        event's, where that is at hand. Raises ValueError, PlanError for what cannot have been."""
        if event.number != self.history.numbered:
            raise ValueError(f"event {event.number} of {self.id}: expected {self.history.numbered}")
        kind = event.WhichOneof("kind")
        if kind == "plan":
            for renamed in event.renamed:
                self._took_over(PeerId(renamed.old), PeerId(renamed.to))
            if plan is None:
                plan = PlanWithReport(plan_from_proto(event.plan), report_from_proto(event.report))
            self.term, (self.plan, self.report) = event.term, plan
            self.interrupted = 0
            self.peers = self.plan.peers
            self.plan_bytes = event.plan.ByteSize() + event.report.ByteSize()
        elif kind == "state":
            begins = event.state.phase == RUNNING != self.phase
            self.phase, self.reason = event.state.phase, Reason()
            self.inexact_from, self.pausing = event.state.inexact_from, event.state.pausing
            self.reason.CopyFrom(event.state.reason)
            if begins:
                self.ledger = self._ledger(self.committed, event.at_s)
        elif kind == "step":
            if self.ledger is None or event.step.step != self.committed:
                raise ValueError(
                    f"step {event.step.step} of {self.id}: expected step {self.committed} of a run "
                    "that has begun"
                )
            self.ledger.commit(event.step, event.at_s)
        elif kind == "checkpoint":
            self.checkpoints.add((event.checkpoint,))
        self.history.add(event)
        if self.ended:
            self.history.rest()

    def _took_over(self, old: PeerId, new: PeerId) -> None:
        """States of codecs name both ends: who has the part of whom since a snapshot was taken."""
        self.names.setdefault(self.term, {})
        for names in self.names.values():
            before = [k for k, v in names.items() if v == old] or [old]
            names.update(dict.fromkeys(before, new))

    def _ledger(self, committed: int, at_s: float) -> StepLedger:
        return StepLedger(self.peers, self.spec.steps, self.options.most_lead, at_s, committed)

    def restored(
        self,
        state: RunState,
        plan: PlanWithReport | None,
        peaks: Iterable[PeerPeak],
        checkpoints: Iterable[Checkpoint],
        names: Mapping[int, dict[PeerId, PeerId]],
    ) -> None:
        """As an earlier start of the broker left it; the history is restored already."""
        self.checkpoints.add(checkpoints)
        self.names.update(names)
        self.phase, self.term = state.phase, state.term
        self.inexact_from, self.pausing = state.inexact_from, state.pausing
        self.reason.CopyFrom(state.reason)
        if self.ended:
            self.history.rest()
        if plan is None:
            return
        self.plan, self.report = plan
        self.peers = self.plan.peers
        if self.phase in (RUNNING, EXPORTING) or state.step:
            self.ledger = self._ledger(state.step, 0.0)
            self.ledger.held(peaks)
            for event in self.history.recent:
                if event.HasField("step"):
                    self.ledger.seen(event.step.seconds, event.at_s)
