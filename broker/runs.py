"""One run: its phases, steps and events.

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
- A lost holder is an event (`recovery.py`): a peer of the pool takes its part and everyone goes on
  from the newest snapshots (`terms.py`), or all are planned anew. So too for a holder that reports
  a fault, or makes no progress; it is left out for a while. What would fail on any peer ends the
  run, as does a fault at every peer that was tried. A lost peer that only keeps snapshots ends
  nothing.
- Where nothing of a lost holder is left, and the run's ladder allows it, another peer makes its
  stages anew from those around them (`dag/neighbour.py`): nobody goes back, and the run is not
  exact from there on, which its state says (`inexact_from`).
- A holder that says that it leaves hands its part over first (`handing.py`): no step is done again.
- Every phase but WAITING has a deadline: building and exporting a fixed one; running the larger of
  `step_floor_s` and `step_factor` medians of the measured steps since the last report, with one
  more median for each batch of an evaluation, and `first_step_s` before a step was measured.
- A run that is paused goes back to WAITING between two steps, and nothing is planned for it until
  somebody resumes it; one for which there is a better plan moves to it there. Checkpoints
  (`checkpoints.py`) lie with the broker; one that is on its way at the end is waited for.
- What must outlive the broker changes by events only (`durable.py`). After a restart a run that was
  RUNNING or EXPORTING goes on with its holders, which come back (`returning.py`); one that was
  BUILDING goes back to WAITING.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..dag.plan import PeerId, Plan
from ..proto.broker_pb2 import (
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
    Fault,
    Heard,
    Leave,
    Phase,
    Ready,
    RunEvent,
    RunSpec,
    Saved,
    Start,
    StepReport,
    WeightFile,
    Weights,
)
from ..proto.common_pb2 import Reason
from ..proto.journal_pb2 import Decision
from .events import Instruction, Log, RunId, SetTimer, Tell
from .handing import Errand
from .membership import Lost, Member, Membership, clean
from .options import BrokerOptions
from .recovery import replacements, suited_left, unreached
from .replica import rerouted, rerouted_pairs
from .resume import substituted
from .returning import Returning
from .steps import WrongStepError
from .terms import Terms
from .wish import Wish

__all__ = ["Run"]

FAULTS_OF_ONE = frozenset(
    {"blob", "busy", "compute", "draining", "frame", "link", "memory", "snapshot", "stalled"}
)
"""Codes of faults that another peer need not have. Others would come again wherever it runs."""
NOT_LIVE = "live"
"""A holder has applied the step that is to be begun anew from what is in the stages."""
NOT_REBUILT = "neighbour"
"""A lost stage cannot be made anew from the blocks around it."""
FAULTS_OF_NETWORKS = frozenset({"deadline", "link", "stalled"})
"""Those that pass: a run waits, where it would end for others."""
COMMITTED_EVERY = 32
"""Steps after which holders are told what is committed: so many of their reports are kept twice."""


class Run(Terms):
    """A run and its history. All methods return instructions; all but `watched` may change it.

    asked: version of the MakePlan whose answer it waits for, only while WAITING. offered: the
    incarnations that were offered for it. returning: holders that are awaited after a restart.
    """

    def __init__(
        self,
        run: RunId,
        number: int,
        spec: RunSpec,
        wish: Wish,
        options: BrokerOptions,
        decisions: list[Decision],
        owner: str = "",
    ) -> None:
        super().__init__(run, number, spec, wish, options, decisions, owner)
        self.asked: int | None = None
        self.offered: dict[PeerId, tuple[str, int]] = {}
        self.returning = Returning((), 0.0)
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
        plan: Plan,
        pairs: Sequence[tuple[PeerId, PeerId]],
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        """The plan's peers are all in the pool. Uses a dial generation for each pair."""
        assert self.phase == WAITING, self
        text = f"{len(plan.peers)} peers fetch and build {len(plan.stages)} stages"
        return self._build(plan, pairs, members, generation, "building", text, now)

    def _build(
        self,
        plan: Plan,
        pairs: Sequence[tuple[PeerId, PeerId]],
        members: Membership,
        generation: Callable[[], int],
        code: str,
        text: str,
        now: float,
        live: bool = False,
        rebuilt: Sequence[PeerId] = (),
    ) -> list[Instruction]:
        self.asked, self.offered = None, {}
        self._ready, self._exports, self._finished, self._down = {}, {}, {}, {}
        out = self.begin_term(plan, pairs, members, generation, now, live, rebuilt)
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
        for expected in self.plan.predicted.peers:
            if expected.peer == member.id:
                member.correction.report(report, expected.compute_s, member.planned_with)
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

    def _finish_export(self, members: Membership, now: float) -> list[Instruction]:
        if self.phase != EXPORTING or len(self._exports) < len(self._exporters):
            return []
        if self.checkpoints.coming is not None:
            return []
        files = [WeightFile(blob=self._exports[p].weights) for p in self._exporters]
        weights = Weights(step=self.spec.steps, files=files)
        out: list[Instruction] = [self._publish(RunEvent(weights=weights), now)]
        text = f"{self.committed} steps are done"
        if self.inexact_from:
            text += f"; not exact from step {self.inexact_from} on: a lost stage was made anew"
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
        self.handing.stop_for(Errand("it is put aside"))
        return []

    def _put_aside(self, members: Membership, now: float) -> list[Instruction]:
        self.handing.stop_for(None)
        self.asked, self.offered = None, {}
        found = self.goes_on_from(members)
        at = f"with {found.step} steps" if found else "before its first step"
        text = f"paused {at}: `shoal resume {self.id}` goes on"
        return self._release(self.parts, text, members, now) + self._enter(
            WAITING, now, "paused", text
        )

    def unpause(self, now: float) -> list[Instruction]:
        """Raises ValueError when it is not paused."""
        errand = self.handing.errand
        if errand is not None and errand.plan is None:
            self.handing.stop_for(None)
            return []
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

    def owner_says(self, member: Member) -> None:
        """The owner of a peer with a part in it takes it out of runs, or no longer does."""
        if member.closed is None:
            self.handing.remains(member.id)
        elif member.id in self.peers:
            self.handing.leaves(member.id, member.closed.text)

    def hand_over(
        self, members: Membership, generation: Callable[[], int], now: float
    ) -> list[Instruction]:
        """Goes on with handing over the parts of those that leave (`handing.py`)."""
        if self.returning:
            return []
        held = self.on_hold
        out, over = self.handing.look(self, members, now)
        if held and not self.on_hold:
            self._since = now
        if over is None:
            return out
        if over.errand is None:
            gone, text = over.leavers, over.text
            return out + self._go_on(gone, "left", text, members, generation, now, live=False)
        if over.errand.plan is None:
            return out + self._put_aside(members, now)
        return out + self._move(over.text, over.errand, members, generation, now)

    def _move(
        self,
        text: str,
        errand: Errand,
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        """To a better plan, where the run stands between two steps."""
        plan, pool = errand.plan, [m.id for m in members.pool if not self.blamed.out(m.id, now)]
        assert plan is not None
        gone = [p for p in plan.peers if members.mine(p, self.id) is None and p not in pool]
        if gone:
            why = f"the better plan is out of date: {', '.join(gone)} is not free any more"
            return [*self.release(members), *self.note(why, now)]
        return self._build(plan, errand.pairs, members, generation, "moved", text, now)

    def lost(
        self, lost: Lost, members: Membership, generation: Callable[[], int], now: float
    ) -> list[Instruction]:
        """A peer with a part in it is no member any more."""
        peer = lost.member.id
        text = f"peer {lost.member.label} was lost {self._where}: {lost.cause}"
        if lost.code == "away":
            self.returning.wait_for(peer, lost.member.heard_at + self.lease_s)
            self._left[peer] = text
            return []
        self.handing.remains(peer)
        self._refuse.pop(peer, None)
        self.blamed.lost(peer, now)
        if not self.needs(peer):
            out = self.note(text, now)
            if self.checkpoints.awaits(peer):
                out += self._no_checkpoint(text, now)
            return [*out, *self.order_snapshots(members, now), *self._finish_export(members, now)]
        return self._go_on((peer,), lost.code, text, members, generation, now)

    def may_return(self, peer: PeerId) -> bool:
        """Whether a holder whose stream broke is waited for: all who have links with it still hear
        it. If its process had died, these would have broken as well."""
        return self.phase in (RUNNING, EXPORTING) and self.needs(peer) and not self._down.get(peer)

    def heard(
        self,
        member: Member,
        heard: Heard,
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        """A link of a peer with a part in it broke, or is up again."""
        if heard.term != self.term or members.mine(member.id, self.id) is None:
            return []
        peer = PeerId(heard.peer)
        if heard.up or peer not in self.parts:
            self._down.get(peer, {}).pop(member.id, None)
            return []
        self._down.setdefault(peer, {})[member.id] = None
        if peer not in self._left:
            return []
        text = f"{self._left[peer]}, as did its link with {member.label}"
        self.blamed.lost(peer, now)
        return self._go_on((peer,), "lost", text, members, generation, now)

    def needs(self, peer: PeerId) -> bool:
        """Whether it cannot go on without a peer: a holder, until all have finished the last step
        and it has sent the weights that it answers for; and who gives a holder a snapshot."""
        if self.phase == BUILDING:
            giving = [g.source for g in self.gifts if g.destination not in self._ready]
            return peer in self.peers or peer in giving
        if peer not in self.peers:
            return False
        over = self.phase == EXPORTING and all(p in self._finished for p in self.peers)
        return not over or (peer in self._exporters and peer not in self._exports)

    def fault(
        self,
        member: Member,
        fault: Fault,
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        stale = self._stale("fault", member, fault.term, BUILDING, RUNNING, EXPORTING)
        if stale:
            return stale
        about = ""
        other = members.mine(PeerId(fault.about), self.id)
        if fault.about:
            about = f" about peer {other.label if other else clean(fault.about, 128)}"
        what = clean(fault.reason.text, 2000) or clean(fault.reason.code, 60) or "no reason given"
        where = f"at step {fault.step}" if self.phase == RUNNING else self._where
        text = f"peer {member.label} reports a fault {where}{about}: {what}"
        code = clean(fault.reason.code, 60) or "fault"
        if code == "snapshot":
            self.sets.spoilt(self.begun_from)
        if code in (NOT_LIVE, NOT_REBUILT):
            return self._go_on((), code, text, members, generation, now, live=False)
        if code not in FAULTS_OF_ONE:
            return self.fail(code, text, members, now)
        out_of = other or member
        return self._without((out_of.id,), code, text, members, generation, now)

    def _without(
        self,
        peers: Sequence[PeerId],
        code: str,
        text: str,
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        """These peers are here and do not do their part: others shall."""
        everybody = set(peers) >= set(self.peers)
        if everybody:  # they wait for each other: once more, from the start of the term
            peers = ()
        if not self.blamed.again(peers, self.committed, now):
            text += f". That was tried {self.blamed.tries} times at this step"
            if code not in FAULTS_OF_NETWORKS:
                return self.fail(code, text, members, now)
            return self._collect(code, text, members, now)
        out = self._release(peers, text, members, now)
        return out + self._go_on(peers, code, text, members, generation, now)

    def _go_on(
        self,
        gone: Sequence[PeerId],
        code: str,
        text: str,
        members: Membership,
        generation: Callable[[], int],
        now: float,
        live: bool = True,
    ) -> list[Instruction]:
        """Without these holders. `live`: by their replicas, if they have some, from what is in the
        stages now."""
        assert self.plan is not None, self
        away = self._waits_no_longer(members, now)
        gone = (*gone, *(p for p in away if p not in gone))
        if live and (rest := self._replicas(gone, members)) is not None:
            text += "; replicas do its microbatches"
            pairs = rerouted_pairs(self.plan, self.pairs, gone)
            return self._build(rest, pairs, members, generation, code, text, now, live=True)
        found = self.goes_on_from(members)
        lost = found is None or found.checkpoint is not None
        rebuilds, why_not = self._rebuilds(gone, live and lost)
        if rebuilds and (taken := replacements(self, gone, members, now)) is not None:
            why_not = unreached(self.plan, taken, members, self.options.relays)
            if not why_not:
                return self._in_place(
                    taken, code, text, members, generation, now, rebuilt=tuple(taken.values())
                )
        elif rebuilds:
            why_not = "nobody in the pool can take its part"
        if why_not:
            text += f". It is not made anew from its neighbours: {why_not}"
        if not self.wish.recovery.ladder or (self.committed and lost and not self.begins_anew):
            text += ". No snapshot of it is left, and its ladder has no checkpoint"
            return self.fail(code, text, members, now)
        taken_by = replacements(self, gone, members, now)
        if taken_by is None:
            return self._collect(code, text, members, now)
        return self._in_place(taken_by, code, text, members, generation, now)

    def _rebuilds(self, gone: Sequence[PeerId], lost: bool) -> tuple[bool, str]:
        """Whether stages of these are to be made anew, with everybody else where it is; and why
        not, where that was asked for. `lost`: nothing of this run is left but a checkpoint."""
        ladder = "neighbour" in self.wish.recovery.ladder
        if not (ladder and lost and self.committed and any(p in self.peers for p in gone)):
            return False, ""
        if self.phase not in (BUILDING, RUNNING):
            return False, "the training is over"
        if all(p in gone for p in self.peers):
            return False, "nobody is left"
        return True, ""

    def _in_place(
        self,
        taken_by: Mapping[PeerId, PeerId],
        code: str,
        text: str,
        members: Membership,
        generation: Callable[[], int],
        now: float,
        rebuilt: Sequence[PeerId] = (),
    ) -> list[Instruction]:
        """Others take the parts of lost holders, in the same plan."""
        assert self.plan is not None, self
        plan, pairs, names = self.plan, self.pairs, []
        for old, new in taken_by.items():
            stages = ", ".join(str(k) for k in plan.stages_of(old))
            kind = "warm" if new in self.plan.warm else "from the pool"
            names.append(f"stage {stages} -> {members.members[new].label} ({kind})")
            plan = substituted(plan, old, new)
            pairs = tuple((new if a == old else a, new if b == old else b) for a, b in pairs)
            self.took_over(old, new)
        if rebuilt:
            names.append(
                "made anew from the blocks around it: the run is not exact from step "
                f"{self.inexact_from or self.committed} on"
            )
        text = "; ".join((text, *names))
        if names:
            plan = replace(plan, reasons=(*names, "the rest is as before"))
        live = bool(rebuilt)
        return self._build(plan, pairs, members, generation, code, text, now, live, rebuilt)

    def _waits_no_longer(self, members: Membership, now: float) -> tuple[PeerId, ...]:
        """For those that may come back; returns them."""
        away = self.returning.away
        for peer in away:
            members.expected.pop(peer, None)
        self.returning, self._left = Returning((), now), {}
        return away

    def _replicas(self, gone: Sequence[PeerId], members: Membership) -> Plan | None:
        """The plan without these, if their replicas can go on at once."""
        assert self.plan is not None, self
        if "replica" not in self.wish.recovery.ladder or self.phase not in (BUILDING, RUNNING):
            return None
        plan = rerouted(self.plan, gone) if any(p in self.peers for p in gone) else None
        if plan is None or any(members.mine(p, self.id) is None for p in plan.peers):
            return None
        return plan

    def _collect(self, code: str, text: str, members: Membership, now: float) -> list[Instruction]:
        """Everybody goes back to the pool, and all are planned anew."""
        if self.wish.recovery.when_short == "fail" and not suited_left(self, members, now):
            return self.fail(code, f"{text}, and too few peers are left", members, now)
        self._waits_no_longer(members, now)
        out = self._release(self.parts, text, members, now)
        return out + self._enter(WAITING, now, code, text)

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

    # ------------------------------------------------------------ after a restart

    def resume(self, now: float) -> list[Instruction]:
        """The broker was started again; nobody is here yet."""
        self._since = now
        if self.phase == BUILDING:
            text = "the broker was started again while it was built: it is planned anew"
            return self._enter(WAITING, now, "restart", text)
        if self.active:
            self.taken_up()
            self.returning = Returning(self.peers, now + self.lease_s)
        return []

    def back(self, member: Member, members: Membership, now: float) -> list[Instruction]:
        """A holder attached again, still with its part. It may not have heard the Start, nor which
        step is on hold, or no longer."""
        self.returning.back(member.id)
        self._left.pop(member.id, None)
        self._since = now
        self.cadence.given_up()  # it may not have heard the order
        self.handing.holds(member)
        out: list[Instruction] = [Tell(member.stream, self._start())]
        return out if self.returning else [*out, *self.tell_order(members)]

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
            return self._since + self.options.build_s
        if self.phase == RUNNING:
            return self._since + self._allowance
        if self.phase == EXPORTING:
            return self._since + self.options.export_s
        return None

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

    def timer(
        self, members: Membership, generation: Callable[[], int], now: float
    ) -> list[Instruction]:
        self._armed = None
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        if self.returning:
            away = self.returning.away
            who = _labels(away, members)
            text = f"{who} did not come back within a lease of {self.lease_s:g} s"
            text = "; ".join((*self._left.values(), f"{text}, {self._where}"))
            for peer in self._left:
                self.blamed.lost(peer, now)
            return self._go_on(away, "lost", text, members, generation, now)
        if self.phase == RUNNING:
            over = self.handing.timed(self, members, now)
            if over is not None:
                return self._go_on(over.leavers, "left", over.text, members, generation, now)
            phase = self._phase_deadline
            if self.on_hold or phase is None or now < phase:
                return []
        waited = now - self._since
        if self.phase == BUILDING:
            missing = [p for p in self.peers if p not in self._ready]
            text = f"not built within {waited:.0f} s: no Ready came from {{}}"
        elif self.phase == EXPORTING:
            missing = [p for p in self._exporters if p not in self._exports]
            if not missing:
                out = self._no_checkpoint(f"nothing of it came for {waited:.0f} s", now)
                return out + self._finish_export(members, now)
            text = f"no weights came for {waited:.0f} s: they are missing from {{}}"
        else:
            assert self.ledger is not None, self
            missing = list(self.ledger.missing)
            measured = self.ledger.median_s
            known = "none measured" if measured is None else f"median {measured:.2f} s"
            text = (
                f"step {self.committed} made no progress for {waited:.0f} s (steps so far: "
                f"{known}): no report came from {{}}"
            )
        text = text.format(_labels(missing, members))
        return self._without(missing, "deadline", text, members, generation, now)

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
        elif what != "fault" and member.id not in self.peers:
            text = "the peer holds no stage"
        elif self.phase not in phases:
            text = f"the run is {Phase.Name(self.phase)}"
        else:
            return []
        return [self._ignored(what, member, text)]

    def _ignored(self, what: str, member: Member, text: str) -> Log:
        fields = (("message", what), ("peer", member.id), ("run", self.id), ("why", text))
        return Log("message_ignored", fields)


def _labels(peers: Iterable[PeerId], members: Membership) -> str:
    found = ((p, members.members.get(p)) for p in peers)
    return ", ".join(m.label if m else p for p, m in found) or "nobody"
