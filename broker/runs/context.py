"""What the parts of one replica share, and the present term, as far as no journal has it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import NO_REPORT, PeerPrediction, PlanReport, PlanWithReport
from ...dag.schedule.slices import PlanSlices
from ...proto.broker_pb2 import (
    WAITING,
    BrokerMessage,
    Exported,
    Leave,
    Ready,
    ReplicaState,
    RoundWork,
    RunEvent,
    SnapshotTransfer,
)
from ...proto.common_pb2 import Reason
from ..events import Instruction, Log, Publish, Tell
from ..membership.member import Member
from ..membership.membership import Membership
from ..records.replica import ReplicaRecord
from ..records.rounds import RoundRecord
from ..records.run import RunRecord
from ..records.work_ledger import shortened
from ..recovery.returning import ReattachWindow
from ..recovery.suspects import SuspectTracker
from ..recovery.view import Pair
from ..snapshots.sets import SnapshotSet

__all__ = ["Reached", "ReplicaContext", "Term"]


Reached = tuple[float, ...]
"""A place in a peer's work, as numbers that are compared in order: a step, or a round and what of
it."""


@dataclass
class Term:
    """The present term, which begins with a plan.

    plan: as it began, but for the keepers, which may be others by now. pairs: of holders that
    exchange frames. begun_from: the set that it goes on from; None: the
    starting weights. transfers: who gives what of it to whom. speed_of: FLOP/s of the holders, as
    they were when it began. leaving: holders that shall not be counted on, and why, in words.
    finished: who has reported the last step, be it in a replay. down: to whom links are broken, and
    who says so. reached: by holder and kind of work, how far it says to be.
    """

    plan: Plan | None = None
    report: PlanReport = NO_REPORT
    pairs: tuple[Pair, ...] = ()
    begun_from: SnapshotSet | None = None
    transfers: tuple[SnapshotTransfer, ...] = ()
    speed_of: dict[PeerId, float] = field(default_factory=dict)
    leaving: dict[PeerId, str] = field(default_factory=dict)
    ready: dict[PeerId, Ready] = field(default_factory=dict)
    exports: dict[PeerId, Exported] = field(default_factory=dict)
    finished: dict[PeerId, None] = field(default_factory=dict)
    down: dict[PeerId, dict[PeerId, None]] = field(default_factory=dict)
    reached: dict[tuple[PeerId, str], Reached] = field(default_factory=dict)

    @cached_property
    def holders(self) -> frozenset[PeerId]:
        """Peers that hold a stage."""
        return frozenset(self.plan.peers if self.plan else ())

    def expects(self, peer: PeerId, step: int) -> PeerPrediction | None:
        """What the plan expects of a peer in a step; None of a full one, as predictions are of the
        others."""
        full = self.plan.full if self.plan else None
        return None if full is not None and full.has(step) else self.expected.get(peer)

    @cached_property
    def expected(self) -> dict[PeerId, PeerPrediction]:
        """By holder, what the plan predicts of it."""
        return {p.peer: p for p in self.report.predicted.peers}

    @cached_property
    def most_compute_s(self) -> float:
        """The busiest holder computes so long, as predicted."""
        return max((p.compute_s for p in self.expected.values()), default=0.0)


class ReplicaContext:
    """record: what outlives the broker. suspects: peers that did not do their part. away: holders
    that are awaited, since the broker was started again or their stream broke."""

    def __init__(self, run: RunRecord, record: ReplicaRecord, members: Membership) -> None:
        self.record = record
        self.run = record.run
        self.members = members
        self.suspects = SuspectTracker()
        self.away = ReattachWindow()
        self.term = Term(record.plan, record.report)
        self._events = run
        self.rounds = run.rounds
        self.stop = run.stop
        self.waits_until = 0.0
        """It may wait for other replicas until then."""
        self.promised: frozenset[PeerId] = frozenset()
        """Peers of the replicas that begin together with it, while they do."""
        self.built_s = 0.0
        """The least that building a term after a loss has taken; 0: it was not measured."""

    def publish(
        self, event: RunEvent, now: float, planned: PlanWithReport | None = None
    ) -> Publish:
        return self._events.publish(event, self.record.number, now, planned)

    def changes(self, state: ReplicaState, now: float) -> Publish:
        return self._events.changes(state, now)

    def note(self, text: str, now: float) -> list[Instruction]:
        return [self.publish(RunEvent(note=text), now)]

    @property
    def has_others(self) -> bool:
        """Whether its run has other replicas, which go on without this one."""
        return len(self._events.replicas) > 1

    @property
    def forms(self) -> bool:
        """Whether it is to be planned together with the others of its run."""
        return self._events.forms

    def spares(self, own: Collection[PeerId]) -> list[Member]:
        """Peers of the pool that may keep copies for its `own` ones: none where these leave fewer
        than as many to each of its run's replicas that wait; where the replicas begin together,
        all that none of them has."""
        taken = {*own, *self.promised}
        free = [m for m in self.members.pool if self.run.suits(m) and m.id not in taken]
        others = (r for r in self._events.replicas if r is not self.record)
        waiting = sum(r.phase == WAITING and not r.paused for r in others)
        return free if self.promised or len(free) > waiting * len(own) else []

    def rank(self, member: Member, now: float) -> tuple[bool, float]:
        """How late it is asked to keep copies: whether it is lost again and again, and how long
        before the end of the run it means to leave, seconds."""
        return self.suspects.shaky(member.id, now), self.record.lacks_s(member, now)

    @property
    def work(self) -> RoundWork | None:
        """The replica's work in the round under way; None: it is in none."""
        rounds, record = self.rounds, self.record
        return rounds.work.member(record.number, record.term) if rounds is not None else None

    @property
    def round(self) -> int:
        """The round whose version its work began with; without work the one under way, and 0 of a
        run without rounds."""
        work, rounds = self.work, self.rounds
        number = rounds.versions.round if rounds is not None else 0
        return number - (work.behind if work is not None else 0)

    @property
    def gate(self) -> int | None:
        """The step in front of which it waits for the other replicas; None: it is in no round."""
        work = self.work
        return None if work is None else work.first_step + work.steps

    def work_from(self, step: int, now: float) -> RoundWork | None:
        """The rest of the replica's work in the round that it is in, from a step of its own on."""
        rounds, record, work = self.rounds, self.record, self.work
        if rounds is None or work is None:
            return None
        others = [
            r
            for r in self._events.replicas
            if r is not record and r.running and rounds.work.member(r.number, r.term)
        ]
        end = max((_ends_at(r, rounds, now) for r in others), default=math.inf)
        step_s = record.round_step_s
        mine = now + self.built_s + (work.first_step + work.steps - step) * step_s
        done = record.committed - work.first_step
        return shortened(work, done, mine - end, step_s, len(others))

    @property
    def plan(self) -> Plan | None:
        """The plan of the present term, with those that keep snapshots now."""
        return self.term.plan

    @property
    def parts(self) -> tuple[PeerId, ...]:
        """Everybody with a part in the present plan, holders first."""
        return () if self.plan is None else (*self.plan.peers, *self.plan.warm)

    def mine(self, peer: PeerId) -> Member | None:
        """A peer that has a part in it now; None for any other."""
        return self.members.mine(peer, self.record.id)

    def holders(self) -> list[Member]:
        """The holders that are still members and assigned to it, in the plan's order."""
        return [m for p in self.record.peers if (m := self.mine(p))]

    def labels(self, peers: Iterable[PeerId]) -> str:
        found = ((p, self.members.members.get(p)) for p in peers)
        return ", ".join(m.label if m else p for p, m in found) or "nobody"

    def ignored(self, what: str, member: Member, text: str) -> Log:
        fields = (("message", what), ("peer", member.id), ("run", self.record.id), ("why", text))
        return Log("message_ignored", fields)

    # ------------------------------------------------------------ peers that leave it

    def release(
        self, peers: Iterable[PeerId], reason: Reason, now: float, goes_on: bool = True
    ) -> list[Instruction]:
        """Have peers leave the replica, whether or not it goes on."""
        out: list[Instruction] = []
        for member in (m for p in peers if (m := self.mine(p))):
            leave = Leave(run=self.record.id, term=self.record.term, goes_on=goes_on, reason=reason)
            out.append(Tell(member.stream, BrokerMessage(leave=leave)))
            out += self.members.drain(member, now)
        return out

    @property
    def welcome(self) -> tuple[PeerId, ...]:
        """Peers that may come back with their part: holders that are waited for, and those that
        only keep copies, for which nobody waits."""
        plan = self.plan if self.record.active else None
        return (*self.away.peers, *(plan.warm if plan else ()))

    def welcomes_nobody(self) -> None:
        """A new term begins, or none."""
        self.unwelcome(self.welcome)

    def unwelcome(self, peers: Iterable[PeerId]) -> None:
        """Forget the parts that these could have come back with."""
        for peer in peers:
            holding = self.members.expected.get(peer)
            if holding is not None and holding.run == self.record.id:
                del self.members.expected[peer]

    def waits_no_longer(self) -> tuple[PeerId, ...]:
        """For those that may come back; returns them."""
        away = self.away.peers
        self.welcomes_nobody()
        self.away = ReattachWindow()
        return away

    def taken_up(self, now: float) -> None:
        """An earlier start of the broker began the term: its holders are awaited for a lease."""
        plan = self.record.plan
        pairs = PlanSlices(plan).pairs if plan else ()
        self.term = Term(plan, self.record.report, pairs)
        self.away = ReattachWindow(self.record.peers, now + self.run.lease_s)


def _ends_at(replica: ReplicaRecord, rounds: RoundRecord, now: float) -> float:
    """When a replica has made its steps of the round, as far as that can be told."""
    work, ledger = rounds.work.given[replica.number], replica.ledger
    since = max(rounds.versions.done_at_s, ledger.committed_at if ledger else 0.0)
    left = work.first_step + work.steps - replica.committed
    return max(now, since + left * replica.round_step_s) if left > 0 else now
