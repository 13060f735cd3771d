"""The phases of a replica, and its steps, as long as nobody is lost (`losses.py`).

    WAITING --plan--> BUILDING --all ready--> RUNNING --last step committed--> EXPORTING --> DONE
       ^                 ^                       |                                 |
       |                 +---- another peer takes the part of one that is lost ----+
       +---------------------- there is none: planned anew ------------------------+

    and from each of them FAILED or CANCELLED

Rules.

- A plan makes a new term. A message of another term, or of a peer that the plan does not name, has
  no effect: it is counted and logged (I3). A late report of a committed step is history only.
- A step is committed when every holder of the plan has reported it (`broker/records/steps.py`);
  commits become StepDone events.
- The export is complete when every peer that is the first holder of some stage sent its weights
  with all updates in them; they may come before the last report of another peer.
- A replica that is paused goes back to WAITING between two steps, and nothing is planned for it
  until somebody resumes it. Checkpoints (`broker/snapshots/checkpoints.py`) lie with the broker;
  one that is on its way at the end is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dag.plan.plan import PeerId
from ...dag.plan.report import PlanWithReport
from ...job.words import count_of
from ...proto.broker_pb2 import (
    BUILDING,
    CANCELLED,
    DONE,
    EXPORTING,
    FAILED,
    RUNNING,
    WAITING,
    BrokerMessage,
    Committed,
    Exported,
    Phase,
    Ready,
    RunEvent,
    Saved,
    Start,
    StepReport,
    WeightFile,
    Weights,
)
from ...proto.common_pb2 import Reason
from ..events import Instruction, Log, Tell
from ..membership.member import Member, clean
from ..records.steps import ReplayedLosses
from ..recovery.recover import Recover
from ..recovery.view import Pair
from ..snapshots.sets import SnapshotSet
from .context import ReplicaContext, Term
from .deadline import Deadline
from .handover import PAUSE, Handover
from .snapshots import ReplicaSnapshots
from .term import begin_term

__all__ = ["Lifecycle"]

COMMITTED_EVERY = 32
"""Steps after which holders are told what is committed: so many of their reports are kept twice."""


class Lifecycle:
    """asked: version of the MakePlan whose answer it waits for, only while WAITING. offered: the
    incarnations that were offered for it. All methods return instructions."""

    def __init__(
        self, context: ReplicaContext, snapshots: ReplicaSnapshots, handover: Handover
    ) -> None:
        self.context, self.record = context, context.record
        self.snapshots, self.handover = snapshots, handover
        self.deadline = Deadline(context, snapshots, handover)
        self.asked: int | None = None
        self.offered: dict[PeerId, tuple[str, int]] = {}
        self._losses = ReplayedLosses()

    def _enter(
        self,
        phase: Phase,
        now: float,
        code: str = "",
        text: str = "",
        inexact_from: int | None = None,
    ) -> list[Instruction]:
        """`inexact_from`: None: as before."""
        record, state = self.record, self.record.state
        state.phase = phase
        if inexact_from is not None:
            state.inexact_from = inexact_from
        state.ClearField("reason")
        if phase not in (BUILDING, RUNNING):  # it is paused, or there is nothing to pause any more
            state.pausing = False
            self.handover.stop_for(None)
        if code:
            state.reason.CopyFrom(Reason(code=code, text=text))
        self.deadline.since = now
        self.handover.reset()
        fields: list[tuple[str, str | int | float]] = [("run", record.id)]
        fields += [("phase", Phase.Name(phase)), ("term", record.term)]
        fields += [("step", record.committed), ("why", text)]
        return [
            Log("run_state", tuple(fields), "warning" if phase == FAILED else "info"),
            self.context.changes(state, now),
        ]

    # ------------------------------------------------------------ WAITING

    def waits(self, code: str, text: str, now: float) -> list[Instruction]:
        """Shows why it waits; nothing when that is known already."""
        reason = self.record.reason
        if (reason.code, reason.text) == (code, text):
            return []
        return self._enter(WAITING, now, code, text)

    def planned(
        self, planned: PlanWithReport, pairs: Sequence[Pair], local: tuple[str, ...], now: float
    ) -> list[Instruction]:
        """The plan's peers are all in the pool. `local`: inputs of the model that only peers with
        the data read, under this plan."""
        assert self.record.phase == WAITING, self.record
        plan = planned.plan
        peers, stages = count_of(len(plan.peers), "peer"), count_of(len(plan.stages), "stage")
        text = f"{stages} fetched and built by {peers}"
        return self.builds(
            Recover(planned, tuple(pairs), local=local),
            self.snapshots.found(),
            "building",
            text,
            now,
        )

    def builds(
        self, wanted: Recover, found: SnapshotSet | None, code: str, text: str, now: float
    ) -> list[Instruction]:
        """Everybody with a part builds it, for a new term. `found`: what could be gone on from."""
        self.asked, self.offered = None, {}
        self.context.welcomes_nobody()
        out, inexact_from = begin_term(self.context, self.snapshots, wanted, found, now)
        self.handover.begin_term()
        if self.record.term > 1:
            begun = self.context.term.begun_from
            text += f", going on at step {begun.step}" if begun else ", from the starting weights"
        return out + self._enter(BUILDING, now, code, text, inexact_from)

    def collects(self, code: str, text: str, now: float) -> list[Instruction]:
        """Everybody goes back to the pool, and all are planned anew; not before somebody resumes
        it, if it was to pause."""
        if self.record.pausing:
            return self.put_aside(now, because=text)
        self.context.waits_no_longer()
        out = self.context.release(self.context.parts, Reason(code="released", text=text), now)
        return out + self._enter(WAITING, now, code, text)

    # ------------------------------------------------------------ BUILDING to EXPORTING

    def ready(self, member: Member, message: Ready, now: float) -> list[Instruction]:
        if stale := self.stale("ready", member, message.term, BUILDING):
            return stale
        record, term = self.record, self.context.term
        term.ready[member.id] = message
        if len(term.ready) < len(record.peers):
            return []
        out: list[Instruction] = [Tell(m.stream, self.start()) for m in self.context.holders()]
        if record.term > 1:
            took, context = now - self.deadline.since, self.context
            context.built_s = min(took, context.built_s or took)
        if record.committed > (term.begun_from.step if term.begun_from else 0):
            out += self._say_committed()  # of a replay nobody keeps reports
        out += self._enter(RUNNING, now)
        if record.committed == record.steps:  # only weights are missing, behind a replay
            return out + self.export(now)
        return out + self.snapshots.order(now)

    def start(self) -> BrokerMessage:
        return BrokerMessage(start=Start(run=self.record.id, term=self.record.term))

    def reported(self, member: Member, report: StepReport, now: float) -> list[Instruction]:
        """Enter a holder's report of a step. Raises WrongStepError for one that cannot be."""
        if stale := self.stale("step", member, report.term, RUNNING, EXPORTING):
            return stale
        record, term = self.record, self.context.term
        assert record.ledger is not None, record
        if report.step + 1 == record.steps:
            term.finished[member.id] = None
        new = record.ledger.report(member.id, report)
        self.deadline.further(member.id, "step", (report.step,), now)
        if not new:  # a replay, or told twice
            told = report.HasField("outcome")
            note = self._losses.again(report.step, report.outcome.loss) if told else ""
            return self.context.note(note, now) if note else []
        if (expected := term.expects(member.id, report.step)) is not None:
            about = expected.compute_s, expected.learned, term.most_compute_s
            member.correction.report(report, *about)
        out: list[Instruction] = []
        before = record.committed
        while (done := record.ledger.due(now)) is not None:
            out.append(self.context.publish(RunEvent(step=done), now))
            self._losses.told(done.step, done.outcome.loss)
        if record.committed // COMMITTED_EVERY > before // COMMITTED_EVERY:
            out += self._say_committed()
        out += self.snapshots.order(now)
        return out if record.committed < record.steps else out + self.export(now)

    def _say_committed(self) -> list[Instruction]:
        record = self.record
        kept = Committed(run=record.id, term=record.term, step=record.committed)
        return [Tell(m.stream, BrokerMessage(committed=kept)) for m in self.context.holders()]

    def export(self, now: float) -> list[Instruction]:
        """All of its steps are done."""
        count = len(self.record.exporters)
        text = f"{count} peers upload their weights" if count > 1 else "1 peer uploads its weights"
        return [
            *self._enter(EXPORTING, now, "exporting", text),
            *self.snapshots.order(now),
            *self.finish_export(now),
        ]

    def exported(self, member: Member, message: Exported, now: float) -> list[Instruction]:
        if stale := self.stale("exported", member, message.term, RUNNING, EXPORTING):
            return stale
        exporters, steps = self.record.exporters, self.record.steps
        if member.id not in exporters or message.step != steps:
            text = (
                f"weights of step {message.step}: expected those of step {steps} from "
                f"{', '.join(exporters)}"
            )
            return [self.context.ignored("exported", member, text)]
        self.context.term.exports[member.id] = message
        self.deadline.further(member.id, "export", (message.step,), now)
        return self.finish_export(now)

    def finish_export(self, now: float) -> list[Instruction]:
        """Ends it, if nothing is missing any more."""
        record, exports = self.record, self.context.term.exports
        missing = len(exports) < len(record.exporters) or record.checkpoints.coming is not None
        if record.phase != EXPORTING or missing:
            return []
        spec = record.run.spec
        files = [WeightFile(blob=exports[p].weights) for p in record.exporters]
        weights = Weights(step=record.steps, files=files, graph=spec.graph)
        if any(e.partial for e in exports.values()):
            weights.starting.extend(spec.weights)
            if spec.HasField("recipe"):
                weights.recipe.CopyFrom(spec.recipe)
        out: list[Instruction] = [self.context.publish(RunEvent(weights=weights), now)]
        rounds, steps = self.context.rounds, record.committed
        if rounds is not None:  # what a replica made by itself is not the run's
            steps = rounds.work.step
        what = "round" if record.run.requirements.cohorts is not None else "step"
        text = f"{count_of(steps, what)} {'is' if steps == 1 else 'are'} done"
        if record.inexact_from:
            text += (
                f"; not exact from step {record.inexact_from} on: a lost stage was made anew, or "
                "microbatches take other routes than before"
            )
        return out + self.end(DONE, "done", text, now)

    def saved(self, member: Member, message: Saved, now: float) -> list[Instruction]:
        """A part of a checkpoint lies with the broker, or will not."""
        if stale := self.stale("saved", member, message.term, RUNNING, EXPORTING):
            return stale
        self.deadline.further(member.id, "saved", (self.record.checkpoints.coming or 0,), now)
        out: list[Instruction] = []
        if message.HasField("blob"):
            whole = self.record.checkpoints.saved(member.id, message)
            if whole is not None:
                out.append(self.context.publish(RunEvent(checkpoint=whole), now))
        else:
            why = clean(message.reason.text, 2000) or "it does not say why"
            out += self.no_checkpoint(f"{member.label} could not bring its part here: {why}", now)
        return [*out, *self.snapshots.order(now), *self.finish_export(now)]

    def no_checkpoint(self, why: str, now: float) -> list[Instruction]:
        """The one that is on its way will not be complete."""
        step = self.record.checkpoints.coming
        self.record.checkpoints.given_up()
        own = " of its own" if self.context.rounds is not None else ""
        text = f"no checkpoint after {step} steps{own}: {why}"
        return [] if step is None else self.context.note(text, now)

    # ------------------------------------------------------------ pauses

    def check_pause(self) -> None:
        """Raises ValueError when it cannot be paused."""
        record, run = self.record, self.record.run
        if record.ended or record.phase == EXPORTING:
            phase = Phase.Name(record.phase).lower()
            raise ValueError(f"run {run.id} is {phase}: nothing to pause")
        if record.phase != WAITING and record.committed and not run.takes_snapshots:
            raise ValueError(
                f"run {run.id} takes no snapshots, so that a pause would lose {record.committed} "
                'steps: expected "snapshot" in recovery.ladder'
            )

    def pause(self, now: float) -> list[Instruction]:
        """Have the run stop; call `check_pause` first."""
        record, run = self.record, self.record.run
        waits = self.context.rounds is not None and self.context.work is None
        if record.phase in (WAITING, BUILDING) or not record.committed or waits:
            return self.put_aside(now)
        if record.pausing:
            return []
        self.handover.stop_for(PAUSE)
        text = f"stops between two of its next steps: `shoal resume {run.id}` has it go on"
        return self._say(True, "pausing", text, now)

    def _say(self, pausing: bool, code: str, text: str, now: float) -> list[Instruction]:
        """Say that it goes on for now, and is to stop, or not any more: also after a restart."""
        state = self.record.state
        state.pausing = pausing
        state.reason.CopyFrom(Reason(code=code, text=text))
        return [self.context.changes(state, now)]

    def put_aside(self, now: float, because: str = "", lacks: str = "") -> list[Instruction]:
        """`because`: what made it stop before it could; `lacks`: of what it goes on from."""
        self.context.waits_no_longer()
        self.asked, self.offered = None, {}
        found = self.snapshots.found()
        at = f"with {found.step} steps" if found else "before its first step"
        text = f"paused {at}{lacks}: `shoal resume {self.record.run.id}` goes on"
        text = f"{because}; {text}" if because else text
        out = self.context.release(self.context.parts, Reason(code="released", text=text), now)
        return out + self._enter(WAITING, now, "paused", text)

    def check_unpause(self) -> None:
        """Raises ValueError when it is not paused."""
        record = self.record
        if not record.pausing and not record.paused:
            phase = Phase.Name(record.phase).lower()
            raise ValueError(f"run {record.run.id} is {phase}: expected a paused one")

    def unpause(self, now: float) -> list[Instruction]:
        """Have the run go on; call `check_unpause` first."""
        if self.record.pausing:
            gate = self.context.gate
            if gate is not None and gate == self.snapshots.on_hold:
                self.snapshots.sets.not_needed(gate + 1)  # of the round that goes on to its end now
            self.handover.stop_for(None)
            return self._say(False, "resumed", "goes on without the pause", now)
        return self._enter(WAITING, now, "resumed", "waits for a plan")

    # ------------------------------------------------------------ ends

    def done(self, text: str, now: float) -> list[Instruction]:
        """Another replica of the run has brought the weights."""
        return self.end(DONE, "done", text, now)

    def fail(self, code: str, text: str, now: float) -> list[Instruction]:
        return self.end(FAILED, code, text, now)

    def cancel(self, now: float) -> list[Instruction]:
        return self.end(CANCELLED, "cancelled", f"cancelled {self.record.where}", now)

    def end(self, phase: Phase, code: str, text: str, now: float) -> list[Instruction]:
        record, context = self.record, self.context
        assert not record.ended, record
        out = self.snapshots.forget()
        out += context.release(context.parts, Reason(code=code, text=text), now, goes_on=False)
        self.asked, self.offered = None, {}
        self._losses = ReplayedLosses()
        context.waits_no_longer()
        out += self._enter(phase, now, code, text)
        context.term = Term(record.plan, record.report)
        return out

    # ------------------------------------------------------------ after a restart

    def resume(self, now: float) -> list[Instruction]:
        """The broker was started again; nobody is here yet."""
        record = self.record
        self.deadline.since = now
        if record.phase == BUILDING:
            text = "the broker was started again while it was built"
            if record.pausing:
                text += f"; paused: `shoal resume {record.run.id}` goes on"
                return self._enter(WAITING, now, "paused", text)
            return self._enter(WAITING, now, "restart", f"{text}: it is planned anew")
        if record.active:
            # What the earlier start knew of the term is not kept.
            self.context.taken_up(now)
            self.snapshots.begin_term(record.committed)
            self.handover.stop_for(PAUSE if record.pausing else None)
        return []

    # ------------------------------------------------------------ shared

    def stale(self, what: str, member: Member, term: int, *phases: Phase) -> list[Instruction]:
        """A log line when a message may have no effect: another term, phase or peer (I3)."""
        record = self.record
        if term != record.term:
            text = f"term {term}: the run is in term {record.term}"
        elif member.run != record.id or member.state != "assigned":
            text = f"the peer is {member.state} for {member.run or 'no run'}"
        elif what != "fault" and member.id not in self.context.term.holders:
            text = "the peer holds no stage"
        elif record.phase not in phases:
            text = f"the run is {Phase.Name(record.phase)}"
        else:
            return []
        return [self.context.ignored(what, member, text)]
