"""The broker's decisions: `handle(event, now) -> instructions`, without sockets, clock or threads.

Rules.

- Nothing happens outside of an event. The same events at the same times give the same instructions,
  byte for byte (I6); only dictionaries and lists are iterated over, in order of insertion.
- Membership knows peers (`broker/membership/membership.py`), a Run knows itself and its replicas
  (`broker/runs/`), and they meet only here: a replica goes on without a lost member; an ended run
  gives its members back; the pool is offered to the replicas that wait
  (`broker/placement/placing.py`); links are measured beside all that (`broker/links/probing.py`).
- An event is followed up for the replicas that it changed; for all only when a member came, went,
  or changed its part.
- Whoever speaks nonsense on a stream loses that stream, and nobody else notices.
- Every client request is answered once, in the same call (`broker/clients.py`); one about data of
  peers, once these have looked at it (`broker/placement/datasets.py`).
- What it must not forget changes by decisions only (`broker/journal/decided.py`). Those of one
  event are one Persist in front of all that tells anybody, so that a journal ends between two
  events.
- After DrainAsked nothing new starts; StopServing comes when nothing is active.
  StopAsked ends everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from ..dag.plan.plan import PeerId
from ..net.identity.statements import CheckStatement
from ..net.knocks import RateLimiter
from ..planner.requests.asked import PLANNER
from ..proto.broker_pb2 import (
    BrokerMessage,
    Hello,
    Holding,
    PeerMessage,
    Refused,
    SnapshotOrder,
    SnapshotReport,
)
from ..proto.common_pb2 import Reason
from .clients import ClientRequests
from .events import (
    CloseStream,
    CohortAsked,
    DataAsked,
    DescribeAsked,
    DrainAsked,
    Event,
    Instruction,
    Log,
    PeerKicked,
    PeerSaid,
    Persist,
    PlanConsidered,
    PlanFailed,
    PlanReady,
    PreviewAsked,
    ReplicaId,
    ReplicasFormed,
    RunAsked,
    RunId,
    RunSubmitted,
    Started,
    StopAsked,
    StopServing,
    StreamClosed,
    StreamOpened,
    Tell,
    TimerFired,
    WasAway,
    WatchAsked,
    ignored,
)
from .journal.decided import DurableState
from .links.probing import Probing
from .membership.member import Member, clean
from .membership.membership import Lost, Membership
from .options import BrokerOptions
from .placement.datasets import DataSets
from .placement.placing import PoolScheduler
from .placement.reconsider import Replanner
from .records.submitted import run_of
from .registry import RunRegistry
from .runs.replica import Replica
from .runs.snapshots import NEVER
from .snapshots.sets import MOST_SNAPSHOTS

__all__ = ["MOST_MESSAGE_BYTES", "BrokerMachine"]

MOST_MESSAGE_BYTES = 64 * 1024
"""Longest message of a peer: none carries more than names, numbers and one reason."""
_IGNORED = 256, 1.0
"""Lines of the log that one peer may fill in a row with what is ignored, and then per second."""
_NOT_HERE = frozenset({"heartbeat", "confirmed", "way"})
"""Messages that change no run: the lease is renewed by any message, and the door reads the others
(`broker/service/door/public.py`, `broker/service/door/swarm.py`)."""
MOST_INTERRUPTED = 2
"""Ends of the broker's process in which one run was being planned: once is a power cut."""


class BrokerMachine:
    """members: who is here. runs: by id, in order of submission, the newest ended ones included.
    ignored: number of messages without effect, by kind. boot: differs between two starts of one
    broker without a journal, and so do its runs' ids. decided: what a journal holds. check: of what
    peers sign; None: they have no certificates. secret: another one at each start, by which it
    draws what no peer may know beforehand.
    """

    def __init__(
        self,
        broker_id: str,
        options: BrokerOptions | None = None,
        *,
        boot: str = "",
        decided: DurableState | None = None,
        check: CheckStatement | None = None,
        secret: bytes = b"",
    ) -> None:
        self.options = options or BrokerOptions()
        self.members = Membership(broker_id, self.options)
        self.members.goes_on_with = self._goes_on_with
        self.members.lease_of = self._lease_of
        self.decided = decided or DurableState(self.options)
        self.probing = Probing(self.options)
        self.registry = RunRegistry(
            self.decided, self.members, self.probing.network, f"{broker_id}/{boot}", check, secret
        )
        self.runs, self.replica = self.registry.runs, self.registry.replica
        self._seen = -1  # The members' version, as of the last event.
        self.data = DataSets(self.members, self.options)
        self.placing = PoolScheduler(self.members, self.probing)
        self.reconsidering = Replanner(self.members, self.probing)
        self.clients = ClientRequests(self.registry, self.members, self.placing, self.probing)
        self.ignored: Counter[str] = Counter()
        self._often = RateLimiter(*_IGNORED, self.options.most_streams)

    def __repr__(self) -> str:
        peers, pool = len(self.members.members), len(self.members.pool)
        runs = sum(not run.ended for run in self.runs.values())
        return (
            f"<Broker {peers} peer{'' if peers == 1 else 's'} ({pool} in pool), "
            f"{runs} run{'' if runs == 1 else 's'}>"
        )

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What to do about an event. Never raises for anything that came from outside."""
        registry = self.registry
        registry.changed = {}
        out = self._decide(event, now)
        if self.members.version != self._seen:
            registry.all_changing(registry.replicas())
            self._seen = self.members.version
        for replica in registry.changed.values():
            out += replica.keeping.look(lambda: self.placing.hopeful(registry.replicas(), now), now)
            out += replica.losses.hand_over(now)
        out += self.data.advance(registry.changed.values(), now)
        out += self.probing.advance(self.members, now)
        if any(r.needs_a_plan for r in registry.changed.values()):
            self.placing.changed()
        out += self.placing.place(registry.replicas, now)
        out += self.reconsidering.look(registry.changed.values(), now)
        for happened in self.decided.happened:  # also those that `place` planned for
            registry.told_of(happened)
        for run, replicas in registry.changed_by_run().items():
            if (rounds := registry.rounds.get(run)) is not None:
                out += rounds.run.stops(now)
                out += rounds.changed(replicas, now)
                if any(r.record.ended and r.id == self.placing.planning for r in replicas):
                    self.placing.closed(replicas)
        if ended := {r.id for r in registry.changed.values() if r.record.ended}:
            out = [i for i in out if not _assigns(i, ended)]
        for replica in registry.changed.values():
            out += replica.lifecycle.deadline.arm()
        out = [i for i in out if not (isinstance(i, Log) and self._is_one_too_many(i, now))]
        if self.placing.draining and not any(r.active for r in self.decided.runs.values()):
            out.append(StopServing("no run is active"))
        record = self.decided.taken()
        return out if record is None else [Persist(record), *out]

    def _is_one_too_many(self, log: Log, now: float) -> bool:
        """Whether a peer has sent so much that was ignored that no line is written for it."""
        if log.name != "message_ignored":
            return False
        fields = dict(log.fields)
        self.ignored[str(fields["message"])] += 1
        peer = fields.get("peer")
        return peer is not None and not self._often.allowed(str(peer), now)

    def _decide(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case Started():
                return self._started(now)
            case StreamOpened(stream, peer):
                return self.members.opened(stream, now, peer)
            case PeerSaid(stream, message):
                return self._said(event, message, now) if stream in self.members.streams else []
            case StreamClosed(stream, why):
                return self._losing(*self.members.closed(stream, why), now)
            case PeerKicked(peer):
                return self._kick(peer, now)
            case RunSubmitted():
                return self.clients.submit(event, now)
            case RunAsked():
                return self.clients.asked(event, now)
            case CohortAsked():
                return self.clients.choose(event, now)
            case DescribeAsked():
                return self.clients.describe(event, now)
            case PreviewAsked():
                return self.clients.preview(event, now)
            case DataAsked():
                return self.data.asked(event, now)
            case WatchAsked():
                return self.clients.watch(event)
            case PlanReady() | ReplicasFormed() | PlanFailed():
                replica = self.registry.changing(event.replica)
                return self.placing.answered(replica, event, self.registry.formed, now)
            case PlanConsidered():
                return self.reconsidering.answered(
                    self.registry.changing(event.replica), event, now
                )
            case TimerFired(name):
                return self._timer(name, now)
            case WasAway(seconds):
                return self._was_away(seconds, now)
            case DrainAsked():
                self.placing.draining = True
                self.placing.changed()
                return [Log("broker_draining", (("runs", len(self.runs)),))]
            case StopAsked():
                return self._stop(now)

    def _started(self, now: float) -> list[Instruction]:
        """The first event of all. After a restart, runs wait for their holders, and those that are
        to be planned for peers that attach again."""
        self.decided.start(now)
        starts = self.decided.starts
        self.placing.started(starts, now)
        for part in (self.members, self.probing, self.data):
            part.started(starts)
        out: list[Instruction] = []
        for replica in self.registry.all_changing(self.registry.replicas()):
            record = replica.record
            if record.interrupted >= MOST_INTERRUPTED and not record.ended:
                text = (
                    f"the broker ended {record.interrupted} times while it planned this run, and "
                    "does not plan it again: submit it again, in parts that need less memory"
                )
                out += replica.lifecycle.fail(PLANNER, text, now)
            out += replica.lifecycle.resume(now)
            for peer in replica.context.away.peers:
                self.members.expected[peer] = self._holding(replica)
        for replica in self.registry.replicas():
            # A plan may name a keeper that has another part by now.
            for peer in replica.context.welcome:
                self.members.expected.setdefault(peer, self._holding(replica))
        fields = (("start", starts), ("runs", len(self.runs)))
        return [Log("broker_started", fields), *out]

    # ------------------------------------------------------------ peers

    def _said(self, event: PeerSaid, message: PeerMessage, now: float) -> list[Instruction]:
        members, stream = self.members, event.stream
        kind = message.WhichOneof("kind")
        size = event.size_bytes or message.ByteSize()
        member = members.heard(stream, now)
        nonsense = ""
        if size > MOST_MESSAGE_BYTES:
            nonsense = (
                f"a {kind or 'message'} of {size} bytes: expected at most {MOST_MESSAGE_BYTES}; is "
                "the peer of another version of shoal?"
            )
        elif kind is None:
            nonsense = "a message of no known kind: is the peer of another version of shoal?"
        elif member is None and kind != "hello":
            nonsense = f"a {kind} before the Hello"
        elif member is not None and kind == "hello":
            nonsense = "a second Hello on one stream"
        if nonsense:
            if member is None:
                return members.refuse(stream, "protocol", nonsense)
            return self._losing(*members.expel(member, "protocol", f"it sent {nonsense}"), now)
        if member is None:
            out = self._losing(*members.greeted(stream, message.hello, now), now)
            return out + self._back(members.heard(stream, now), message.hello, now)
        return self._member_said(member, message, now)

    def _back(self, member: Member | None, hello: Hello, now: float) -> list[Instruction]:
        """Somebody joined: perhaps a holder that a run waits for since the broker's restart, or one
        that keeps snapshots."""
        if member is None:
            return []
        out: list[Instruction] = []
        for snapshot in hello.snapshots[:MOST_SNAPSHOTS]:
            report = SnapshotReport(snapshot=snapshot, held=True)
            out += self._snapshot_said(member, report, now)
        return out + self._returned(member, now)

    def _snapshot_said(
        self, member: Member, report: SnapshotReport, now: float
    ) -> list[Instruction]:
        replica = self.registry.changing(report.snapshot.run)
        if replica is not None and not replica.record.ended:
            return replica.snapshot_reported(member, report, now)
        if not report.held:
            return []
        # Nobody goes on from it any more.
        order = SnapshotOrder(run=report.snapshot.run, needed=NEVER)
        return [Tell(member.stream, BrokerMessage(snapshot=order))]

    def _goes_on_with(self, member: Member) -> Holding | None:
        """What a member may come back with, when its stream broke."""
        replica = self.registry.changing(member.run)
        if replica is None or not replica.losses.may_return(member.id):
            return None
        return self._holding(replica)

    def _holding(self, replica: Replica) -> Holding:
        record = replica.record
        return Holding(run=replica.id, term=record.term, step=record.committed)

    def _lease_of(self, name: ReplicaId) -> float:
        run = self.runs.get(run_of(name)[0])
        return self.options.lease_s if run is None else run.submitted.lease_s

    def _returned(self, member: Member, now: float) -> list[Instruction]:
        """A member joined, perhaps with the part that it had."""
        for replica in self.registry.replicas():
            mine = member.run == replica.id and member.state == "assigned"
            awaited = member.id in replica.context.away
            if not (mine or awaited):
                continue
            self.registry.changing(replica.id)
            if mine:
                losses, rounds = replica.losses, self.registry.rounds.get(replica.record.run.id)
                out = (losses.back if awaited else losses.keeper_back)(member, now)
                return out + (rounds.again(replica.record.number, member) if rounds else [])
            lost = Lost(member, "it came back without the run", "lost")
            return replica.losses.lost(lost, now)
        return []

    def _member_said(self, member: Member, message: PeerMessage, now: float) -> list[Instruction]:
        kind = message.WhichOneof("kind")
        if kind in _NOT_HERE:
            return []
        its = self.registry.changing(member.run)
        if kind == "goodbye":
            why = message.goodbye.reason.text
            return self._losing(*self.members.goodbye(member, why), now)
        if kind == "resolved":
            return self.data.resolved(member, message.resolved)
        if kind == "measured":
            return self.members.measured(member, message.measured)
        if kind == "availability":
            out = self.members.availability_told(member, message.availability)
            if its is not None and member.state == "assigned":
                its.losses.owner_says(member)
            return out
        if kind == "link":
            return self.probing.reported(member.id, message.link, now)
        if kind == "snapshot":
            return self._snapshot_said(member, message.snapshot, now)
        about = getattr(message, str(kind)).run
        if kind == "drained":  # also of a run that only an earlier start of this broker knew
            if self.members.drained(member, about):
                free = Log("peer_free", (("peer", member.id), ("run", about)))
                return [free, self.members.timer_of(member)]  # the run's lease may have been longer
            why = f"the peer is {member.state} for {member.run or 'no run'}"
            return [ignored(kind, member.id, why)]
        replica = self.registry.changing(about)
        if replica is None:
            return [ignored(str(kind), member.id, f"the run {clean(about, 60)!r} is not known")]
        replica.sound(member, message)
        if kind in ("round", "round_answer"):
            rounds, number = self.registry.rounds.get(replica.record.run.id), replica.record.number
            if rounds is None:
                return []
            if kind == "round_answer":
                self.registry.all_changing(rounds.run.replicas)
                return rounds.answered(member, message.round_answer, now)
            return rounds.reported(member, number, message.round, now)
        return replica.said(str(kind), member, message, now)

    def _losing(
        self, out: list[Instruction], lost: Sequence[Lost], now: float
    ) -> list[Instruction]:
        """Instructions about members that are gone, and what that means for their runs."""
        out = list(out)
        for gone in lost:
            for other in self.registry.replicas():
                other.snapshots.sets.gone(gone.member.id)
            replica = self.registry.changing(gone.member.run)
            if replica is not None and gone.member.state == "assigned":
                out += replica.losses.lost(gone, now)
        return out

    def _kick(self, peer: PeerId, now: float) -> list[Instruction]:
        member = self.members.members.get(peer)
        if member is None:
            return []
        text = "an operator of this network has kicked the peer out"
        return self._losing(*self.members.expel(member, "kicked", text), now)

    def _timer(self, name: str, now: float) -> list[Instruction]:
        kind, _, who = name.partition(":")
        if kind == "run" and (replica := self.registry.changing(who)) is not None:
            return replica.losses.timer(now)
        if kind == "round" and (rounds := self.registry.rounds.get(RunId(who))) is not None:
            self.registry.all_changing(rounds.run.replicas)
            return rounds.timer(now)
        if kind == "data":
            return self.data.timer(who)
        return self._losing(*self.members.timer(name, now), now)

    # ------------------------------------------------------------ all at once

    def _was_away(self, seconds: float, now: float) -> list[Instruction]:
        """What peers said meanwhile is still to be read: nobody is lost for our own silence."""
        self.members.begin_anew(now)
        for replica in self.registry.all_changing(self.registry.replicas()):
            if not replica.record.ended:
                replica.lifecycle.deadline.allow(seconds, now)
        return [Log("broker_was_away", (("seconds", round(seconds, 1)),), "warning")]

    def _stop(self, now: float) -> list[Instruction]:
        self.placing.draining = True
        text = "the broker is leaving"
        out: list[Instruction] = []
        for run in self.runs.values():
            if not run.ended:
                out += run.fail("broker", f"{text}: submit the run again when it is back", now)
                self.placing.closed(run.replicas)
        refused = Refused(reason=Reason(code="leaving", text=text), again=True)
        for stream in list(self.members.streams):
            out += [Tell(stream, BrokerMessage(refused=refused)), CloseStream(stream, text)]
        return out


def _assigns(instruction: Instruction, ended: Collection[str]) -> bool:
    """Whether a peer would be told to build a replica that has ended in the meantime."""
    if not isinstance(instruction, Tell) or not instruction.message.HasField("assign"):
        return False
    return instruction.message.assign.run in ended
