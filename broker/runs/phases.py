"""One run: its phases, steps and events, as long as nobody is lost (`runs.py`).

    WAITING --plan--> BUILDING --all ready--> RUNNING --last step committed--> EXPORTING --> DONE
       ^                 ^                       |                                 |
       |                 +---- another peer takes the part of one that is lost ----+
       +---------------------- there is none: planned anew ------------------------+

    and from each of them FAILED or CANCELLED

Rules.

- A plan makes a new term. A message of another term, or of a peer that the plan does not name, has
  no effect: it is counted and logged (I3). A late report of a committed step is history only.
- A step is committed when every holder of the plan has reported it (`steps.py`); commits become
  StepDone events. All events are numbered and kept for watchers (`history.py`).
- The export is complete when every peer that is the first holder of some stage sent its weights
  with all updates in them; they may come before the last report of another peer.
- Every phase but WAITING has a deadline: building and exporting a fixed one; running the larger of
  `step_floor_s` and `step_factor` medians of the measured steps since the last report, with one
  more median for each batch of an evaluation, and `first_step_s` before a step was measured.
- A run that is paused goes back to WAITING between two steps, and nothing is planned for it until
  somebody resumes it. Checkpoints (`broker/snapshots/checkpoints.py`) lie with the broker; one that
  is on its way at the end is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    Leave,
    Phase,
    Ready,
    RunEvent,
    RunSpec,
    Saved,
    SnapshotReport,
    Start,
    StepReport,
    WeightFile,
    Weights,
)
from ...proto.common_pb2 import Reason
from ...proto.journal_pb2 import Decision
from ..events import Instruction, Log, RunId, SetTimer, Tell
from ..membership.bounds import sound_report
from ..membership.member import Member, clean
from ..membership.membership import Membership
from ..options import BrokerOptions
from ..recovery.handing import PAUSE
from ..recovery.returning import ReattachWindow
from ..wish import RunRequirements
from .steps import WrongStepError
from .terms import NOBODY, TermBuilder

__all__ = ["Phases"]

_SLOW_BYTES_PER_S = 1.25e6
"""10 Mbit/s: a home uplink. Who is slower still may be too slow."""
_LONGEST_MOVE_S = 86_400.0
COMMITTED_EVERY = 32
"""Steps after which holders are told what is committed: so many of their reports are kept twice."""


class Phases(TermBuilder):
    """A run and its history. All methods return instructions; all but `watched` may change it.

    asked: version of the MakePlan whose answer it waits for, only while WAITING. offered: the
    incarnations that were offered for it. returning: holders that are awaited after a restart.
    """

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
        super().__init__(run, number, spec, wish, options, decisions, owner)
        self.asked: int | None = None
        self.offered: dict[PeerId, tuple[str, int]] = {}
        self.returning = ReattachWindow((), 0.0)
        self._ready: dict[PeerId, Ready] = {}
        self._exports: dict[PeerId, Exported] = {}
        self._left: dict[PeerId, str] = {}
        """Of those that may come back: how their stream broke."""
        self._down: dict[PeerId, dict[PeerId, None]] = {}
        """To whom links are broken in this term, and who says so."""
        self._finished: dict[PeerId, None] = {}
        """Who has reported the last step in this term, be it in a replay."""
        self._since = 0.0  # Begin of what the deadline counts from.
        self._armed: float | None = None

    # ------------------------------------------------------------ events for watchers

    def _enter(self, phase: Phase, now: float, code: str = "", text: str = "") -> list[Instruction]:
        state = self.state
        state.phase = phase
        state.ClearField("reason")
        if phase not in (BUILDING, RUNNING):  # it is paused, or there is nothing to pause any more
            state.pausing = False
            self.handing.stop_for(None)
        if code:
            state.reason.CopyFrom(Reason(code=code, text=text))
        self._since = now
        self.handing.reset()
        fields: list[tuple[str, str | int | float]] = [("run", self.id)]
        fields += [("phase", Phase.Name(phase)), ("term", self.term)]
        fields += [("step", self.committed), ("why", text)]
        return [
            Log("run_state", tuple(fields), "warning" if phase == FAILED else "info"),
            self._publish(RunEvent(state=state), now),
        ]

    def note(self, text: str, now: float) -> list[Instruction]:
        return [self._publish(RunEvent(note=text), now)]

    # ------------------------------------------------------------ WAITING

    def waits(self, code: str, text: str, now: float) -> list[Instruction]:
        """Shows why it waits; nothing when that is known already."""
        if (self.reason.code, self.reason.text) == (code, text):
            return []
        return self._enter(WAITING, now, code, text)

    def planned(
        self,
        planned: PlanWithReport,
        pairs: Sequence[tuple[PeerId, PeerId]],
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        """The plan's peers are all in the pool. Uses a dial generation for each pair."""
        assert self.phase == WAITING, self
        plan = planned.plan
        peers, stages = count_of(len(plan.peers), "peer"), count_of(len(plan.stages), "stage")
        text = f"{stages} fetched and built by {peers}"
        return self._build(planned, pairs, members, generation, "building", text, now)

    def _build(
        self,
        planned: PlanWithReport,
        pairs: Sequence[tuple[PeerId, PeerId]],
        members: Membership,
        generation: Callable[[], int],
        code: str,
        text: str,
        now: float,
        live: bool = False,
        rebuilt: Sequence[PeerId] = (),
        taken_by: Mapping[PeerId, PeerId] = NOBODY,
    ) -> list[Instruction]:
        self.asked, self.offered = None, {}
        self._ready, self._exports, self._finished, self._down = {}, {}, {}, {}
        self._welcomes_nobody(members)
        out = self.begin_term(planned, pairs, members, generation, now, live, rebuilt, taken_by)
        if self.term > 1:
            found = self.begun_from
            text += f", going on at step {found.step}" if found else ", from the starting weights"
        return out + self._enter(BUILDING, now, code, text)

    # ------------------------------------------------------------ BUILDING to EXPORTING

    def ready(
        self, member: Member, message: Ready, members: Membership, now: float
    ) -> list[Instruction]:
        stale = self._stale("ready", member, message.term, BUILDING)
        if stale:
            return stale
        self._ready[member.id] = message
        if len(self._ready) < len(self.peers):
            return []
        start = self._start()
        out: list[Instruction] = [Tell(m.stream, start) for m in self._holders(members)]
        if self.committed > (self.begun_from.step if self.begun_from else 0):
            out += self._say_committed(members)  # of a replay nobody keeps reports
        out += self._enter(RUNNING, now)
        if self.committed == self.spec.steps:  # only weights are missing, behind a replay
            return out + self._export(members, now)
        return out + self.order_snapshots(members, now)

    def _start(self) -> BrokerMessage:
        return BrokerMessage(start=Start(run=self.id, term=self.term))

    def reported(
        self, member: Member, report: StepReport, members: Membership, now: float
    ) -> list[Instruction]:
        stale = self._stale("step", member, report.term, RUNNING, EXPORTING)
        if stale:
            return stale
        assert self.ledger is not None, self
        sound_report(report)
        if report.step + 1 == self.spec.steps:
            self._finished[member.id] = None
        try:
            if not self.ledger.report(member.id, report):  # a replay, or told twice
                self._since = now
                if report.HasField("outcome"):
                    return self.replayed_loss(report.step, report.outcome.loss, now)
                return []
        except WrongStepError as error:
            return self.fail("protocol", f"peer {member.label} reported {error}", members, now)
        assert self.plan is not None, self
        if (expected := self._by_peer.expected.get(member.id)) is not None:
            most_s = self._by_peer.most_compute_s
            member.correction.report(report, expected.compute_s, expected.learned, most_s)
        self._since = now
        out: list[Instruction] = []
        before = self.committed
        while (done := self.ledger.due(now)) is not None:
            out.append(self._publish(RunEvent(step=done), now))
            self.told_loss(done.step, done.outcome.loss)
        if self.committed // COMMITTED_EVERY > before // COMMITTED_EVERY:
            out += self._say_committed(members)
        out += self.order_snapshots(members, now)
        return out if self.committed < self.spec.steps else out + self._export(members, now)

    def _say_committed(self, members: Membership) -> list[Instruction]:
        kept = Committed(run=self.id, term=self.term, step=self.committed)
        return [Tell(m.stream, BrokerMessage(committed=kept)) for m in self._holders(members)]

    def _export(self, members: Membership, now: float) -> list[Instruction]:
        text = f"{len(self._exporters)} peers upload their weights"
        return [
            *self._enter(EXPORTING, now, "exporting", text),
            *self.order_snapshots(members, now),
            *self._finish_export(members, now),
        ]

    def exported(
        self, member: Member, message: Exported, members: Membership, now: float
    ) -> list[Instruction]:
        stale = self._stale("exported", member, message.term, RUNNING, EXPORTING)
        if stale:
            return stale
        if member.id not in self._exporters or message.step != self.spec.steps:
            text = (
                f"weights of step {message.step}: expected those of step {self.spec.steps} from "
                f"{', '.join(self._exporters)}"
            )
            return [self._ignored("exported", member, text)]
        self._exports[member.id] = message
        self._since = now
        return self._finish_export(members, now)

    def snapshot_reported(
        self, member: Member, report: SnapshotReport, members: Membership, now: float
    ) -> list[Instruction]:
        """As in TermBuilder; the end of a run may have waited for a checkpoint that will not be."""
        out = super().snapshot_reported(member, report, members, now)
        return out + self._finish_export(members, now)

    def _finish_export(self, members: Membership, now: float) -> list[Instruction]:
        if self.phase != EXPORTING or len(self._exports) < len(self._exporters):
            return []
        if self.checkpoints.coming is not None:
            return []
        files = [WeightFile(blob=self._exports[p].weights) for p in self._exporters]
        weights = Weights(step=self.spec.steps, files=files)
        if any(e.partial for e in self._exports.values()):
            weights.starting.extend(self.spec.weights)
            weights.graph.CopyFrom(self.spec.graph)
            if self.spec.HasField("recipe"):
                weights.recipe.CopyFrom(self.spec.recipe)
        out: list[Instruction] = [self._publish(RunEvent(weights=weights), now)]
        text = f"{self.committed} steps are done"
        if self.inexact_from:
            text += (
                f"; not exact from step {self.inexact_from} on: a lost stage was made anew, or "
                "others change places"
            )
        return out + self._end(DONE, "done", text, members, now)

    def saved(
        self, member: Member, message: Saved, members: Membership, now: float
    ) -> list[Instruction]:
        """A part of a checkpoint lies with the broker, or will not."""
        stale = self._stale("saved", member, message.term, RUNNING, EXPORTING)
        if stale:
            return stale
        self._since = now
        out: list[Instruction] = []
        if message.HasField("blob"):
            whole = self.checkpoints.saved(member.id, message)
            if whole is not None:
                out.append(self._publish(RunEvent(checkpoint=whole), now))
        else:
            why = clean(message.reason.text, 2000) or "it does not say why"
            out += self._no_checkpoint(f"{member.label} could not bring its part here: {why}", now)
        out += self.order_snapshots(members, now)
        return out + self._finish_export(members, now)

    def _no_checkpoint(self, why: str, now: float) -> list[Instruction]:
        step = self.checkpoints.coming
        self.checkpoints.given_up()
        text = f"no checkpoint after {step} steps: {why}"
        return [] if step is None else self.note(text, now)

    # ------------------------------------------------------------ pauses

    @property
    def paused(self) -> bool:
        return self.phase == WAITING and self.reason.code == "paused"

    def pause(self, members: Membership, now: float) -> list[Instruction]:
        """Raises ValueError when it cannot be paused."""
        if self.ended or self.phase == EXPORTING:
            raise ValueError(f"run {self.id} is {Phase.Name(self.phase).lower()}: nothing to pause")
        if self.phase == WAITING or not self.committed:
            return self._put_aside(members, now)
        if not self.snapshots:
            raise ValueError(
                f"run {self.id} takes no snapshots, so that a pause would lose {self.committed} "
                'steps: expected "snapshot" in recovery.ladder'
            )
        if self.phase == BUILDING:
            return self._put_aside(members, now)
        if self.pausing:
            return []
        self.handing.stop_for(PAUSE)
        text = f"stops between two of its next steps: `shoal resume {self.id}` has it go on"
        return self._say(True, "pausing", text, now)

    def _say(self, pausing: bool, code: str, text: str, now: float) -> list[Instruction]:
        """It goes on for now, and is to stop, or not any more: also after a restart."""
        state = self.state
        state.pausing = pausing
        state.reason.CopyFrom(Reason(code=code, text=text))
        return [self._publish(RunEvent(state=state), now)]

    def _put_aside(
        self, members: Membership, now: float, because: str = "", lacks: str = ""
    ) -> list[Instruction]:
        """`because`: what made it stop before it could; `lacks`: of what it goes on from."""
        self._waits_no_longer(members, now)
        self.asked, self.offered = None, {}
        found = self.goes_on_from(members)
        at = f"with {found.step} steps" if found else "before its first step"
        text = f"paused {at}{lacks}: `shoal resume {self.id}` goes on"
        text = f"{because}; {text}" if because else text
        return self._release(self.parts, text, members, now) + self._enter(
            WAITING, now, "paused", text
        )

    def unpause(self, now: float) -> list[Instruction]:
        """Raises ValueError when it is not paused."""
        if self.pausing:
            self.handing.stop_for(None)
            return self._say(False, "resumed", "goes on without the pause", now)
        if not self.paused:
            raise ValueError(
                f"run {self.id} is {Phase.Name(self.phase).lower()}: expected a paused one"
            )
        return self._enter(WAITING, now, "resumed", "waits for a plan")

    @property
    def _exporters(self) -> tuple[PeerId, ...]:
        assert self.plan is not None, self
        return tuple(dict.fromkeys(s.holders[0] for s in self.plan.stages))

    # ------------------------------------------------------------ ends

    def fail(self, code: str, text: str, members: Membership, now: float) -> list[Instruction]:
        return self._end(FAILED, code, text, members, now)

    def cancel(self, members: Membership, now: float) -> list[Instruction]:
        return self._end(CANCELLED, "cancelled", f"cancelled {self._where}", members, now)

    def _end(
        self, phase: Phase, code: str, text: str, members: Membership, now: float
    ) -> list[Instruction]:
        assert not self.ended, self
        out = self.forget_snapshots(members)
        for member in (m for p in self.parts if (m := members.mine(p, self.id))):
            leave = Leave(run=self.id, term=self.term, reason=Reason(code=code, text=text))
            out.append(Tell(member.stream, BrokerMessage(leave=leave)))
            out += members.drain(member, now)
        self.asked, self.offered = None, {}
        self._ready, self._exports, self._finished = {}, {}, {}
        self._waits_no_longer(members, now)
        return out + self._enter(phase, now, code, text)

    @property
    def welcome(self) -> tuple[PeerId, ...]:
        """Who may come back with its part: holders that are waited for, and those that only keep
        copies, for which nobody waits."""
        warm = self.plan.warm if self.plan is not None and self.active else ()
        return (*self.returning.away, *warm)

    def _welcomes_nobody(self, members: Membership) -> None:
        for peer in self.welcome:
            holding = members.expected.get(peer)
            if holding is not None and holding.run == self.id:
                del members.expected[peer]

    def _waits_no_longer(self, members: Membership, now: float) -> tuple[PeerId, ...]:
        """For those that may come back; returns them."""
        away = self.returning.away
        self._welcomes_nobody(members)
        self.returning, self._left = ReattachWindow((), now), {}
        return away

    # ------------------------------------------------------------ time

    @property
    def deadline(self) -> float | None:
        """When something is to be done, unless something comes before."""
        phase = self._phase_deadline
        if self.returning or self.phase != RUNNING or phase is None:
            return phase
        hand_over = self.handing.due(self)
        return hand_over if self.on_hold else min(hand_over, phase)

    @property
    def _phase_deadline(self) -> float | None:
        """When the current phase has failed."""
        if self.returning:
            return self.returning.until
        if self.phase == BUILDING:
            return self._since + self._within_s(self.options.build_s)
        if self.phase == RUNNING:
            return self._since + self._allowance
        if self.phase == EXPORTING:
            return self._since + self._within_s(self.options.export_s)
        return None

    def _within_s(self, least_s: float) -> float:
        """`least_s`, or what the weights of the largest part take over a slow link, if that is
        more (a day at most): they are no more than what its holder's device holds."""
        assert self.plan is not None, self
        most = max((p.device_bytes for p in self.report.predicted.peers), default=0)
        return max(least_s, min(_LONGEST_MOVE_S, most / _SLOW_BYTES_PER_S))

    @property
    def _allowance(self) -> float:
        measured = self.ledger.median_s if self.ledger else None
        if measured is None:
            return self.options.first_step_s
        # The median hides a rare evaluation, each batch of which takes at most as long as a step.
        assert self.plan is not None, self
        batches = len(self.plan.evaluation_routes) / len(self.plan.routes)
        return max(self.options.step_floor_s, (self.options.step_factor + batches) * measured)

    def arm(self) -> list[Instruction]:
        """Sets the timer when nothing is armed, or the deadline has come nearer than the timer."""
        deadline = self.deadline
        if deadline is None or (self._armed is not None and self._armed <= deadline):
            return []
        self._armed = deadline
        return [SetTimer(f"run:{self.id}", deadline)]

    def allow(self, seconds: float, now: float) -> None:
        """The broker itself stood still for so long: what is waited for has as much more time."""
        self._since = min(now, self._since + seconds)
        if self.returning:
            self.returning.until += seconds

    # ------------------------------------------------------------ shared

    @property
    def _where(self) -> str:
        if self.phase == RUNNING:
            return f"at step {self.committed}"
        return {WAITING: "before it began", BUILDING: "while it was built"}.get(
            self.phase, "while its weights were exported"
        )

    def _holders(self, members: Membership) -> list[Member]:
        """The holders that are still members and assigned to this run, in the plan's order."""
        return [m for p in self.peers if (m := members.mine(p, self.id))]

    def _stale(self, what: str, member: Member, term: int, *phases: Phase) -> list[Instruction]:
        """A log line when a message may have no effect: another term, phase or peer (I3)."""
        if term != self.term:
            text = f"term {term}: the run is in term {self.term}"
        elif member.run != self.id or member.state != "assigned":
            text = f"the peer is {member.state} for {member.run or 'no run'}"
        elif what != "fault" and member.id not in self._by_peer.slots:
            text = "the peer holds no stage"
        elif self.phase not in phases:
            text = f"the run is {Phase.Name(self.phase)}"
        else:
            return []
        return [self._ignored(what, member, text)]

    def _ignored(self, what: str, member: Member, text: str) -> Log:
        fields = (("message", what), ("peer", member.id), ("run", self.id), ("why", text))
        return Log("message_ignored", fields)
