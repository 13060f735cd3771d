"""What of a run outlives the broker: what was submitted, its replicas, and its numbered events.

`publish` makes an event happen, which is a decision for the journal; `apply` is the same when a
journal is replayed.
"""

from __future__ import annotations

from ...dag.plan.report import PlanWithReport
from ...proto.broker_pb2 import (
    BUILDING,
    CANCELLED,
    DONE,
    EXPORTING,
    FAILED,
    RUNNING,
    WAITING,
    Checkpoint,
    ReplicaState,
    RunEvent,
    RunState,
)
from ...proto.journal_pb2 import Decision, RunAdded, RunHappened, RunKept
from ..events import Publish, Watched
from .client_homes import ClientHomes
from .cohort_ledger import CohortLedger
from .history import EventHistory
from .peer_shares import PeerShares
from .replica import ReplicaRecord
from .rounds import OF_ROUNDS, RoundRecord
from .stop_rule import StopRule
from .submitted import SubmittedRun
from .version_ledger import VersionLedger
from .work_ledger import WorkLedger

__all__ = ["RunRecord"]

_FAR = (WAITING, BUILDING, RUNNING, EXPORTING, CANCELLED, FAILED, DONE)
"""Phases in the order in which a run is said to stand in one of its replicas'."""


class RunRecord:
    """A run as the journal has it. Every decision is added to `decisions`. rounds: of a run whose
    replicas train apart; None: it has one, which steps by itself."""

    def __init__(
        self, run: SubmittedRun, decisions: list[Decision], shares: PeerShares | None = None
    ) -> None:
        """`shares`: of all runs, which its events add to."""
        self.id, self.owner = run.id, run.owner
        self._shares = PeerShares() if shares is None else shares
        self.history = EventHistory(run.options.kept_events)
        self._decisions = decisions
        self.stop = StopRule(run.requirements.stop)
        self._wants(run)

    def _wants(self, run: SubmittedRun) -> None:
        """With as many replicas as its job says; none has begun."""
        self.run, needs = run, run.requirements
        self.replicas = tuple(ReplicaRecord(run, number) for number in range(needs.replicas))
        self.rounds = None
        if needs.has_rounds:
            of = run.spec.steps, run.spec.microbatches, needs.replicas
            work, homes = WorkLedger(*of, round_steps=needs.sync.steps), None
            if needs.cohorts is not None:
                hidden, rounds = needs.cohorts.privacy, run.spec.steps
                work = CohortLedger(rounds, hidden.sums(rounds) if hidden else 0)
                if needs.sync.keeps_state:
                    homes = ClientHomes(needs.cohorts.clients, needs.seed)
            self.rounds = RoundRecord(VersionLedger(needs.sync.remembered), work, homes)
            if run.spec.HasField("resumed"):
                self.rounds.begin_from(run.spec.resumed)
        self._spec_bytes = run.spec.ByteSize()

    def __repr__(self) -> str:
        return f"<Run {self.id}: {', '.join(map(repr, self.replicas))}>"

    @property
    def of_rounds(self) -> RoundRecord:
        """Rounds of a run that has some."""
        assert self.rounds is not None, f"run {self.id} has no rounds"
        return self.rounds

    @property
    def forms(self) -> bool:
        """Whether its replicas are to be planned together: none has begun."""
        return self.run.requirements.forms and not any(r.term for r in self.replicas)

    @property
    def ended(self) -> bool:
        return all(replica.ended for replica in self.replicas)

    @property
    def active(self) -> bool:
        """Whether peers are assigned to it."""
        return any(replica.active for replica in self.replicas)

    @property
    def kept_bytes(self) -> int:
        """What of it is kept: its spec, its plans, and its history, as they would be on disk."""
        plans = sum(replica.plan_bytes for replica in self.replicas)
        return self._spec_bytes + plans + self.history.size_bytes

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest complete one."""
        found = (r.checkpoints.newest() for r in self.replicas)
        return max((c for c in found if c), key=lambda c: c.step, default=None)

    @property
    def saved_step(self) -> int:
        """Steps that are in the newest checkpoint, be it the one that the run began from."""
        return (self.checkpoint or self.run.spec.resumed).step

    @property
    def state(self) -> RunState:
        return self._state([replica.state for replica in self.replicas])

    def left_s(self, now: float) -> float:
        """Seconds until the last step of a run that trains, by its pace or by the rule that ends
        it, whichever is sooner; 0: not known."""
        state, replicas = self.state, self.replicas
        if state.phase != RUNNING:
            return 0.0
        ends = [self.stop.ends_at()]
        if self.run.requirements.cohorts is None:  # of which a step is a round
            paces = [
                pace for r in replicas if (pace := r.round_step_s if self.rounds else r.step_s)
            ]
            pace = sum(paces) / len(paces) if paces else 0.0
            ends.append(now + (state.steps - state.step) * pace if pace else 0.0)
        return max(0.0, min((at for at in ends if at), default=now) - now)

    def _state(self, replicas: list[ReplicaState], now: float = 0.0) -> RunState:
        """A run stands where the one of its replicas does that is farthest; it has ended when all
        have. now: when it comes to stand so, if that is news."""
        open_ = [r for r in replicas if r.phase not in (DONE, FAILED, CANCELLED)]
        first = max(open_ or replicas, key=lambda r: _FAR.index(r.phase))
        rounds, step = self.rounds, first.step
        if rounds is not None:
            step = rounds.work.step
        return RunState(
            run=self.id,
            phase=first.phase,
            reason=first.reason if first.HasField("reason") else None,
            step=step,
            steps=self.replicas[0].last or self.run.spec.steps,
            name=self.run.spec.name,
            term=first.term,
            inexact_from=first.inexact_from,
            pausing=any(r.pausing for r in replicas),
            round=rounds.versions.round if rounds is not None else 0,
            replicas=replicas,
            stop_at_s=self.stop.ends_at(now if first.phase == RUNNING else 0.0),
        )

    def watched(self, start: int) -> Watched:
        """Events for somebody who has those before `start`."""
        first, events = self.history.read(start)
        numbered = self.history.numbered
        over = self.ended and first + len(events) == numbered
        return Watched(self.id, first, events, over, numbered)

    # ------------------------------------------------------------ what happens

    def changes(self, state: ReplicaState, now: float) -> Publish:
        """One of its replicas stands like this from now on."""
        states = [state if r.id == state.replica else r.state for r in self.replicas]
        number = next(r.number for r in self.replicas if r.id == state.replica)
        return self.publish(RunEvent(state=self._state(states, now)), number, now)

    def publish(
        self, event: RunEvent, replica: int, now: float, planned: PlanWithReport | None = None
    ) -> Publish:
        """Something happens in a replica. `planned`: the event's, where it has one: it begins
        the next term."""
        event.at_s, event.replica = now, replica
        event.term = self.replicas[replica].term + event.HasField("plan")
        event.number = self.history.numbered
        self.apply(event, planned)
        decision = Decision(happened=RunHappened(run=self.id))
        decision.happened.event.CopyFrom(event)
        self._decisions.append(decision)
        return Publish(self.id, event)

    def apply(self, event: RunEvent, planned: PlanWithReport | None = None) -> None:
        """Takes an event over; `planned` is the event's, where that is at hand. Raises ValueError,
        PlanError for what cannot have been."""
        if event.number != self.history.numbered:
            raise ValueError(f"event {event.number} of {self.id}: expected {self.history.numbered}")
        if event.replica >= len(self.replicas):
            raise ValueError(f"an event of replica {event.replica} of {self.id}: it has none")
        if event.HasField("formed"):
            if self.run.requirements.undecided:
                apart = event.formed.kind == "local"
                self._wants(self.run.decided(len(event.formed.replicas) if apart else 0))
            for replica, made in zip(self.replicas, event.formed.replicas, strict=False):
                replica.formed_s, replica.client = made.step_s, made.client
        elif event.WhichOneof("kind") in (*OF_ROUNDS, "evaluated") and not event.finishing.step:
            if self.rounds is None:
                raise ValueError(f"an event of a round of {self.id}: it has none")
            self.rounds.apply(event)
            if event.HasField("round_done"):
                gave = (*event.round_done.members, *event.round_done.joined)
                peers = (p for m in gave for p in self.replicas[m.replica].peers)
                self._shares.met(self.id, self.run.spec.name, peers, event.round_done, event.at_s)
        else:
            replica = self.replicas[event.replica]
            replica.apply(event, planned)
            if event.HasField("step"):
                of = self.id, self.run.spec.name, replica.peers, replica.samples
                self._shares.stepped(*of, event.step, event.at_s)
            if event.HasField("checkpoint"):
                self._keep_newest()
        self.stop.apply(event)
        self.history.add(event)
        if self.ended:
            self.history.rest()

    def _keep_newest(self) -> None:
        """The newest of all checkpoints stay, whichever replica brought them."""
        each = [r.checkpoints for r in self.replicas]
        steps = sorted(c.step for found in each for c in found.kept)
        least = steps[-self.run.requirements.output.keep :][0]
        for found in each:
            found.kept = [c for c in found.kept if c.step >= least]

    def broker_started(self) -> None:
        """Another process of the broker has begun."""
        for replica in self.replicas:
            waits = replica.phase == WAITING and replica.reason.code == "planning"
            replica.interrupted += waits

    # ------------------------------------------------------------ the journal's snapshots

    def kept(self) -> RunKept:
        """Everything but its past, for `restore`."""
        run = self.run
        return RunKept(
            added=RunAdded(run=run.id, number=run.number, spec=run.spec, owner=run.owner),
            replicas=[replica.kept() for replica in self.replicas],
            events=self.history.unpacked,
            numbered=self.history.numbered,
            rounds=self.rounds.kept() if self.rounds is not None else None,
            stop=self.stop.kept() if self.stop.wanted else None,
        )

    def restore(self, kept: RunKept) -> None:
        """As an earlier start of the broker left it."""
        self.history.restore(kept.events, kept.numbered)
        for replica, its in zip(self.replicas, kept.replicas, strict=True):
            events = (e for e in self.history.recent if e.replica == replica.number)
            replica.restore(its, ((e.step, e.at_s) for e in events if e.HasField("step")))
        if self.rounds is not None:
            self.rounds.restore(kept.rounds)
        if kept.HasField("stop"):
            self.stop.restore(kept.stop)
        if self.ended:
            self.history.rest()
