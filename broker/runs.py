"""One run: its phases, steps and events.

    WAITING --plan--> BUILDING --all ready--> RUNNING --last step committed--> EXPORTING --> DONE
       |                 |                       |                                 |
       +-----------------+-----------+-----------+---------------------------------+
                                     v
                            FAILED or CANCELLED

Rules.

- A plan makes a new term. A message of another term, or of a peer that the plan does not name, has
  no effect: it is counted and logged (I3). A late report of a committed step is history only.
- A step is committed when every holder of the plan has reported it (`steps.py`); commits become
  StepDone events. All events are numbered and kept for watchers (`history.py`).
- The export is complete when every peer that is the first holder of some stage sent its weights
  with all updates in them; they may come before the last report of another peer.
- A lost peer or a fault ends the run: FAILED, with a reason that names peer, step and cause. All
  other holders are told to leave. (Going on without it is a later capability.)
- Every phase but WAITING has a deadline: building and exporting a fixed one; running the larger of
  `step_floor_s` and `step_factor` medians of the measured steps since the last report, with one
  more median for each batch of an evaluation, and `first_step_s` before a step was measured.
- What must outlive the broker changes by events only (`durable.py`). After a restart a run that was
  RUNNING or EXPORTING goes on with its holders, which come back (`returning.py`); one that was
  BUILDING has begun no step and goes back to WAITING.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..dag.convert_plan import plan_to_proto
from ..dag.plan import PeerId, Plan
from ..proto.broker_pb2 import (
    BUILDING,
    CANCELLED,
    DONE,
    EXPORTING,
    FAILED,
    RUNNING,
    WAITING,
    Assign,
    BrokerMessage,
    Committed,
    DialOrder,
    Exported,
    Fault,
    Leave,
    Phase,
    Ready,
    RunEvent,
    RunSpec,
    Start,
    StepReport,
    WeightFile,
    Weights,
)
from ..proto.common_pb2 import Reason
from ..proto.graph_pb2 import CORE
from ..proto.journal_pb2 import Decision
from .durable import DurableRun
from .events import Instruction, Log, RunId, SetTimer, Tell
from .membership import Lost, Member, Membership, clean, dial
from .options import BrokerOptions
from .returning import Returning
from .steps import WrongStepError
from .wish import Wish

__all__ = ["Run"]

COMMITTED_EVERY = 32
"""Steps after which holders are told what is committed: so many of their reports are kept twice."""
_ALONE = (
    "A run cannot go on without its holders yet: let the peer or another one join, then submit the "
    "run again"
)


class Run(DurableRun):
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
        super().__init__(run, number, spec, options, decisions, owner)
        self.wish = wish
        self.asked: int | None = None
        self.offered: dict[PeerId, tuple[str, int]] = {}
        self.returning = Returning((), 0.0)
        self._ready: dict[PeerId, Ready] = {}
        self._exports: dict[PeerId, Exported] = {}
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

    def waiting_to_building(
        self,
        plan: Plan,
        pairs: Sequence[tuple[PeerId, PeerId]],
        members: Membership,
        generation: int,
        now: float,
    ) -> list[Instruction]:
        """The plan's peers are all in the pool. Uses dial generations from `generation` on, one for
        each pair. Of each pair the one that stands first in the plan dials, or the one that can."""
        assert self.phase == WAITING, self
        self.asked, self.offered = None, {}
        wire = plan_to_proto(plan)
        out: list[Instruction] = [self._publish(RunEvent(plan=wire), now, self.term + 1, plan)]
        joined = [members.members[p] for p in self.peers]
        dials: dict[PeerId, list[DialOrder]] = {p: [] for p in self.peers}
        for i, (a, b) in enumerate(pairs):
            way = dial(members.members[a], members.members[b], self.options.relays)
            assert way is not None, f"{a} and {b} were planned and cannot reach each other"
            source, target, address = way
            order = DialOrder(peer=target.id, address=address, generation=generation + i)
            dials[source.id].append(order)
        base = Assign(
            run=self.id,
            term=self.term,
            plan=wire,
            full_graph=self.spec.graph,
            weights=self.spec.weights,
            data=self.spec.data,
            training=self.wish.training,
            submitter=self.owner,
        )
        for member in joined:
            members.assign(member, self.id)
            assign = Assign()
            assign.CopyFrom(base)
            core = member.profile.operator_set == CORE
            assign.graph.CopyFrom(self.spec.core_graph if core else self.spec.graph)
            assign.dials.extend(dials[member.id])
            out.append(Tell(member.stream, BrokerMessage(assign=assign)))
        text = f"{len(joined)} peers fetch and build {len(plan.stages)} stages"
        return out + self._enter(BUILDING, now, "building", text)

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
        return out + self._enter(RUNNING, now)

    def _start(self) -> BrokerMessage:
        return BrokerMessage(start=Start(run=self.id, term=self.term))

    def reported(
        self, member: Member, report: StepReport, members: Membership, now: float
    ) -> list[Instruction]:
        stale = self._stale("step", member, report.term, RUNNING)
        if stale:
            return stale
        assert self.ledger is not None, self
        try:
            if not self.ledger.report(member.id, report):
                text = f"step {report.step} was reported before"
                return [self._ignored("step_again", member, text)]
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
        if self.committed // COMMITTED_EVERY > before // COMMITTED_EVERY:
            kept = Committed(run=self.id, term=self.term, step=self.committed)
            out += [Tell(m.stream, BrokerMessage(committed=kept)) for m in self._holders(members)]
        if self.committed == self.spec.steps:
            files = len(self._exporters)
            out += self._enter(EXPORTING, now, "exporting", f"{files} peers upload their weights")
            out += self._finish_export(members, now)
        return out

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
        files = [WeightFile(blob=self._exports[p].weights) for p in self._exporters]
        weights = Weights(step=self.spec.steps, files=files)
        out: list[Instruction] = [self._publish(RunEvent(weights=weights), now)]
        return out + self._end(DONE, "done", f"{self.committed} steps are done", members, now)

    @property
    def _exporters(self) -> tuple[PeerId, ...]:
        assert self.plan is not None, self
        return tuple(dict.fromkeys(s.holders[0] for s in self.plan.stages))

    # ------------------------------------------------------------ ends

    def lost(self, lost: Lost, members: Membership, now: float) -> list[Instruction]:
        """A holder is no member any more."""
        text = f"peer {lost.member.label} was lost {self._where}: {lost.cause}. {_ALONE}"
        return self.fail("lost", text, members, now)

    def fault(
        self, member: Member, fault: Fault, members: Membership, now: float
    ) -> list[Instruction]:
        stale = self._stale("fault", member, fault.term, BUILDING, RUNNING, EXPORTING)
        if stale:
            return stale
        about = ""
        if fault.about:
            other = members.members.get(PeerId(fault.about))
            about = f" about peer {other.label if other else clean(fault.about, 128)}"
        what = clean(fault.reason.text, 2000) or clean(fault.reason.code, 60) or "no reason given"
        where = f"at step {fault.step}" if self.phase == RUNNING else self._where
        text = f"peer {member.label} reports a fault {where}{about}: {what}"
        return self.fail(clean(fault.reason.code, 60) or "fault", text, members, now)

    def fail(self, code: str, text: str, members: Membership, now: float) -> list[Instruction]:
        return self._end(FAILED, code, text, members, now)

    def cancel(self, members: Membership, now: float) -> list[Instruction]:
        return self._end(CANCELLED, "cancelled", f"cancelled {self._where}", members, now)

    def _end(
        self, phase: Phase, code: str, text: str, members: Membership, now: float
    ) -> list[Instruction]:
        assert not self.ended, self
        out: list[Instruction] = []
        for member in self._holders(members):
            leave = Leave(run=self.id, term=self.term, reason=Reason(code=code, text=text))
            out.append(Tell(member.stream, BrokerMessage(leave=leave)))
            out += members.drain(member, now)
        self.asked, self.offered = None, {}
        self._ready, self._exports = {}, {}
        for peer in self.returning.away:
            members.expected.pop(peer, None)
        self.returning = Returning((), now)
        return out + self._enter(phase, now, code, text)

    # ------------------------------------------------------------ after a restart

    def resume(self, now: float) -> list[Instruction]:
        """The broker was started again; nobody is here yet."""
        self._since = now
        if self.phase == BUILDING:
            text = "the broker was started again while it was built: it is planned anew"
            return self._enter(WAITING, now, "restart", text)
        if self.active:
            self.returning = Returning(self.peers, now + self.options.lease_s)
        return []

    def back(self, member: Member, now: float) -> list[Instruction]:
        """A holder attached again, still with its part. It may not have heard the Start."""
        self.returning.back(member.id)
        self._since = now
        return [Tell(member.stream, self._start())]

    # ------------------------------------------------------------ time

    @property
    def deadline(self) -> float | None:
        """When the current phase has failed, unless something comes before."""
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

    def timer(self, members: Membership, now: float) -> list[Instruction]:
        self._armed = None
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        if self.returning:
            away = _labels(self.returning.away, members)
            text = f"{away} did not come back within a lease of the broker's restart, {self._where}"
            return self.fail("lost", f"{text}. {_ALONE}", members, now)
        waited = now - self._since
        if self.phase == BUILDING:
            missing = [p for p in self.peers if p not in self._ready]
            text = f"not built within {waited:.0f} s: no Ready came from {{}}"
        elif self.phase == EXPORTING:
            missing = [p for p in self._exporters if p not in self._exports]
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
        return self.fail("deadline", text.format(_labels(missing, members)), members, now)

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
        found = (members.members.get(p) for p in self.peers)
        return [m for m in found if m is not None and m.state == "assigned" and m.run == self.id]

    def _stale(self, what: str, member: Member, term: int, *phases: Phase) -> list[Instruction]:
        """A log line when a message may have no effect: another term, phase or peer (I3)."""
        if term != self.term:
            text = f"term {term}: the run is in term {self.term}"
        elif member.run != self.id or member.state != "assigned":
            text = f"the peer is {member.state} for {member.run or 'no run'}"
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
