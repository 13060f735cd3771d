"""The snapshots of a replica: when they are taken, where they lie, and what could be gone on from.

They are ordered by `broker/snapshots/cadence.py`; a set is whole when each holder and its keeper
have theirs. Older ones go then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...dag.plan.plan import PeerId, Plan
from ...proto.broker_pb2 import (
    EXPORTING,
    RUNNING,
    BrokerMessage,
    DialOrder,
    RoundPosition,
    Snapshot,
    SnapshotOrder,
    SnapshotReport,
)
from ..events import Instruction, Log, Tell
from ..membership.member import Member, clean
from ..recovery.view import View
from ..snapshots.cadence import SnapshotSchedule
from ..snapshots.checkpoints import as_set
from ..snapshots.keepers import instead
from ..snapshots.sets import SnapshotCatalog, SnapshotSet
from .context import ReplicaContext

__all__ = ["NEVER", "ReplicaSnapshots"]

NEVER = 2**64 - 1
"""As the step that is needed: nothing is."""


class ReplicaSnapshots:
    """sets: which lie where. on_hold: the step that nobody begins, since parts are handed over
    there; 0: none."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context, self._record = context, context.record
        self.sets = SnapshotCatalog()
        self.cadence = SnapshotSchedule(0, 0)
        self.on_hold = 0
        self._of_round = 0
        """Whose version is in the set that was ordered last, of a run with rounds."""
        self._needed = 0
        """Snapshots of fewer steps may go, as peers were told."""
        self._keepers: dict[PeerId, PeerId] | None = None
        """By holder, as peers were told; None: nothing but the plan."""
        self._dials: dict[PeerId, DialOrder] = {}
        """By holder, how it reaches a keeper that came after the term began, where it dials."""
        self._instead: tuple[object, dict[PeerId, PeerId]] = (None, {})
        """By holder, as it was found, and what that was found by."""
        self._refuse: dict[PeerId, None] = {}
        """Keepers that did not take a copy."""

    @property
    def unreliable(self) -> tuple[PeerId, ...]:
        """Peers with a part in it that nothing is to be left with."""
        return (*self._context.term.leaving, *self._refuse)

    # ------------------------------------------------------------ what to go on from

    def view(self, now: float) -> View:
        """The replica as it stands, for whoever decides about it."""
        context = self._context
        return View(
            replica=self._record,
            members=context.members,
            suspects=context.suspects,
            pairs=context.term.pairs,
            speed_of=context.term.speed_of,
            found=self.found(),
            now=now,
            present=context.plan,
        )

    def found(self) -> SnapshotSet | None:
        """The newest set, of what lies at its peers or in the pool, or of checkpoints; of a replica
        with rounds, of the one that it is in."""
        if self._context.rounds is not None:
            work, newest = self._context.work, self._newest()
            if work is None or newest is None or newest.step < work.first_step + work.late:
                return self._first_version()
            return newest
        record, run = self._record, self._record.run
        saved = record.checkpoints.newest(record.committed) if run.begins_anew else None
        if saved is None and run.spec.HasField("resumed"):
            saved = run.spec.resumed
        found = self._newest()
        if saved is None or (found is not None and found.step >= saved.step):
            return found
        return as_set(saved)

    def _first_version(self) -> SnapshotSet | None:
        """That of the checkpoint which the run goes on from, while all begin with it."""
        spec, rounds = self._record.run.spec, self._context.rounds
        if rounds is None or not spec.HasField("resumed"):
            return None
        if self._context.round > rounds.versions.first:
            return None
        return replace(as_set(spec.resumed), step=0)  # each replica counts its own steps

    def _newest(self) -> SnapshotSet | None:
        record, context = self._record, self._context
        if record.plan is None or not record.run.takes_snapshots:
            return None

        def gives(peer: PeerId) -> bool:
            member = context.members.members.get(peer)
            return (member is not None and member.state == "pool") or bool(context.mine(peer))

        found = self.sets.newest(self._operators, record.committed, gives, context.round)
        leaving = context.term.leaving
        return (found.without(leaving) or found) if found and leaving else found

    @property
    def _operators(self) -> int:
        assert self._record.plan is not None, self._record
        return self._record.plan.stages[-1].stop

    # ------------------------------------------------------------ what happens

    def begin_term(self, first: int) -> None:
        """`first`: steps that are in the stages then."""
        every = self._record.run.requirements.recovery.snapshot_every
        self.cadence = SnapshotSchedule(0 if every == "auto" else every, first, self.cadence.took)
        self._keepers, self._dials, self.on_hold = None, {}, 0

    def begin_round(self, now: float) -> list[Instruction]:
        """Order a set, as a round begins with a new version that is in none so far, unless
        somebody waits for another one, or the version lands later."""
        work, record = self._context.work, self._record
        if work is None or work.late or self.on_hold or record.checkpoints.untaken:
            return []
        self.cadence.begin_round(work.first_step)
        return self.order(now)

    def _round_at(self, step: int, *, held: bool = False) -> int:
        """The round whose version is in the stages when a step is in front of them; `held`: and
        nobody begins it, so that the round ends there."""
        work, number = self._context.work, self._context.round
        if work is None:
            return number
        if step < work.first_step + work.late:
            return number - 1
        end = work.first_step + work.steps + work.ahead
        return number + (step >= end if held else step > end)

    def lost(self, peer: PeerId) -> None:
        """Forget a lost peer's refusal: it may come back, and take copies then."""
        self._refuse.pop(peer, None)

    def reported(self, member: Member, report: SnapshotReport, now: float) -> list[Instruction]:
        """What became of one at a peer, now or in an earlier term."""
        snapshot, record = report.snapshot, self._record
        if problem := self._odd(snapshot) or record.places.problem(member.id, snapshot):
            return [self._context.ignored("snapshot", member, problem)]
        asked = (snapshot.term, snapshot.round) == (record.term, self._of_round)
        own = asked and snapshot.holder == member.id
        if report.held:
            self.sets.held(member.id, snapshot)
            if own:
                self.cadence.taken(snapshot.step, now)
                record.checkpoints.taken(member.id, snapshot.step)
            return self.order(now)
        self.sets.not_held(member.id, snapshot)
        why = clean(report.reason.text) or "it does not say why"
        fields = (("run", record.id), ("peer", member.id), ("step", snapshot.step))
        out: list[Instruction] = [Log("snapshot_missed", (*fields, ("why", why)))]
        if not asked:
            return out
        refused = not own and snapshot.step == self.cadence.pending
        self.cadence.missed(snapshot.step)
        if own and snapshot.step == record.checkpoints.coming and record.checkpoints.untaken:
            record.checkpoints.given_up(late=True)
            out += self.order(now)
        if refused and member.id not in self._refuse:
            out += self._refused(member, PeerId(snapshot.holder), why, now)
            out += self.order(now)
        return out

    def _refused(self, keeper: Member, holder: PeerId, why: str, now: float) -> list[Instruction]:
        """Another one keeps this holder's copies from here on, if there is one."""
        members, plan = self._context.members, self._context.plan
        assert plan is not None, self._record
        self._refuse[keeper.id] = None
        other = self.keepers(plan).get(holder)
        text = f"peer {keeper.label} does not keep a copy of the snapshots of {holder}: {why}"
        if other is None or other in self._refuse:
            text += ". Nobody else can: without a copy the loss of that peer costs more steps"
        else:
            text += f"; {members.members[other].label} does instead"
        return self._context.note(text, now)

    def _odd(self, snapshot: Snapshot) -> str:
        """What cannot be of a snapshot that a peer tells of; empty: nothing."""
        record = self._record
        if record.plan is None or not 1 <= snapshot.term <= record.term:
            return f"a snapshot of term {snapshot.term}: the run is in term {record.term}"
        if not 0 < snapshot.step <= record.steps:
            return f"a snapshot after {snapshot.step} of {record.steps} steps"
        return ""

    # ------------------------------------------------------------ orders

    def order(self, now: float) -> list[Instruction]:
        """The next set, if one is due; and that older ones may go, when a newer one is whole."""
        record, cadence = self._record, self.cadence
        plan = self._context.plan
        if record.phase not in (RUNNING, EXPORTING) or plan is None:
            return []
        keepers = self.keepers(plan)
        if cadence.pending is not None:
            asked = cadence.pending, record.term, record.peers, keepers, self._of_round
            if self.sets.copied(*asked):
                # Copies to holders share links with the training: more of them would cost more.
                suspects = self._context.suspects
                cadence.copied(now, suspects.between_s(now) if plan.warm else math.inf)
            elif self._keepers_differ(keepers) or cadence.overdue(now):
                cadence.given_up()
        needed = self._needed
        if cadence.whole is not None and cadence.whole <= record.committed:
            needed = max(needed, cadence.whole)
        due, saves = self._due(plan, now)
        if due is None and needed == self._needed:
            return []
        told = dict.fromkeys((*self._context.parts, *self.sets.peers))
        self.sets.not_needed(needed)
        self._needed, self._keepers = needed, keepers
        if due is not None:
            cadence.ordered(due)
            self._of_round = self._round_at(due)
        return self._tell_order(told, due or 0, upload=saves)

    def _due(self, plan: Plan, now: float) -> tuple[int | None, bool]:
        """The step of the next set, and whether it is a checkpoint's."""
        record, steps = self._record, self._record.steps
        if self.on_hold:
            return None, False
        saves = record.checkpoints.due(record.committed, steps, record.step_s or 0.0)
        if saves is not None:
            its = record.term, saves, record.run.spec, plan, record.inexact_from
            record.checkpoints.begin(record.run.id, *its)
            return saves, True
        if not (record.run.takes_snapshots and record.running) or record.checkpoints.untaken:
            return None, False
        step_s = record.step_s or 0.0
        return self.cadence.due(record.committed, steps, now, step_s / 2), False

    def _keepers_differ(self, keepers: dict[PeerId, PeerId]) -> bool:
        """From those that peers were told of."""
        if keepers is not self._keepers and keepers == self._keepers:
            self._keepers = keepers  # the next report compares no thousand of them
        return keepers is not self._keepers

    def keepers(self, plan: Plan) -> dict[PeerId, PeerId]:
        """By holder, who keeps its copies now. Found anew only when a member came, went or changed
        its part: asked at every report."""
        members = self._context.members
        facts = plan, members.version, self.unreliable
        if self._instead[0] != facts:
            self._instead = facts, instead(plan, self._context.mine, self.unreliable)
        return self._instead[1]

    def kept_by(self, dials: Mapping[PeerId, DialOrder], now: float) -> list[Instruction]:
        """Others keep the copies from here on. `dials`: of the holders that dial their keeper."""
        assert self._context.plan is not None, self._record
        self._dials |= dials
        self.cadence.given_up()  # a set that is on its way goes to those before
        out = self.order(now)
        self._keepers = self.keepers(self._context.plan)
        return out or self.tell_order()

    def hold(self, step: int) -> list[Instruction]:
        """Orders a set of this step, in place of the one that is pending, and that nobody begins
        the step."""
        record, plan = self._record, self._context.plan
        assert plan is not None, record
        self.cadence.ordered(step)
        self._of_round = self._round_at(step, held=True)
        if record.checkpoints.untaken:
            record.checkpoints.given_up(late=True)
        self.on_hold = step
        self._keepers = self.keepers(plan)
        return self._tell_order(self._context.parts, step)

    def save(self, rounds: RoundPosition) -> list[Instruction]:
        """Orders a checkpoint of the version that it has, in place of a set that is pending: taken
        as soon as its round begins."""
        record, plan = self._record, self._context.plan
        assert plan is not None, record
        step, spec = record.committed, record.run.spec
        record.checkpoints.begin(record.run.id, record.term, step, spec, plan, rounds=rounds)
        self.cadence.ordered(step)
        self._of_round = self._round_at(step)
        self._keepers = self.keepers(plan)
        return self._tell_order(self._context.parts, step, upload=True)

    def let_go(self) -> list[Instruction]:
        """No step is on hold any more."""
        if not self.on_hold:
            return []
        self.on_hold = 0
        return self.tell_order()

    def tell_order(self) -> list[Instruction]:
        """What holds, without another snapshot."""
        return self._tell_order(self._context.parts, 0)

    def _tell_order(
        self, peers: Iterable[PeerId], step: int, *, upload: bool = False
    ) -> list[Instruction]:
        order = SnapshotOrder(
            run=self._record.id,
            term=self._record.term,
            step=step,
            needed=self._needed,
            upload=upload,
            hold=self.on_hold,
            round=self._of_round,
        )
        return self._tell(peers, order, self._keepers)

    def _tell(
        self,
        peers: Iterable[PeerId],
        order: SnapshotOrder,
        keepers: Mapping[PeerId, PeerId] | None = None,
    ) -> list[Instruction]:
        """Each is told of its own keeper alone: a thousand peers would hear of a thousand."""
        out: list[Instruction] = []
        for peer in peers:
            if member := self._context.members.members.get(peer):
                message = BrokerMessage(snapshot=order)
                if keepers is not None:
                    keeper, dial = keepers.get(peer, ""), self._dials.get(peer)
                    message.snapshot.keeper = keeper
                    if dial is not None and dial.peer == keeper:
                        message.snapshot.dial.CopyFrom(dial)
                out.append(Tell(member.stream, message))
        return out

    def forget(self) -> list[Instruction]:
        """Forget a replica that has ended. Its parts hear that as they leave; who else keeps
        something, now."""
        others = [p for p in self.sets.peers if self._context.mine(p) is None]
        self.sets = SnapshotCatalog()
        order = SnapshotOrder(run=self._record.id, term=self._record.term, needed=NEVER)
        return self._tell(others, order)
