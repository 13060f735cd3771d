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
- Every client request is answered once, in the same call; one about data of peers, once these have
  looked at it (`broker/placement/datasets.py`).
- What it must not forget changes by decisions only (`broker/journal/decided.py`). Those of one
  event are one Persist in front of all that tells anybody, so that a journal ends between two
  events.
- After DrainAsked nothing new starts; StopServing comes when nothing is active.
  StopAsked ends everything.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ..dag.plan.plan import PeerId
from ..net.identity.names import OWNER
from ..proto.broker_pb2 import (
    BrokerMessage,
    Description,
    Hello,
    Holding,
    PeerMessage,
    PeerState,
    Recalled,
    Refused,
    RunSpec,
    RunState,
    SnapshotOrder,
    SnapshotReport,
    Submitted,
)
from ..proto.common_pb2 import Reason
from .access.knocks import RateLimiter
from .events import (
    PLANNER,
    Answer,
    CloseStream,
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
    PreviewWanted,
    Reject,
    ReplicaId,
    RequestId,
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
)
from .journal.decided import DurableState
from .links.probing import Probing
from .membership.member import Member, clean
from .membership.membership import Lost, Membership
from .options import BrokerOptions
from .placement.datasets import DataSets
from .placement.placing import PoolScheduler
from .placement.reconsider import Replanner
from .records.space import make_room, outnumbered
from .records.submitted import run_of
from .runs.replica import Replica
from .runs.run import Run
from .runs.snapshots import NEVER
from .snapshots.sets import MOST_SNAPSHOTS
from .wish import RunSpecError, read_spec

__all__ = ["MOST_MESSAGE_BYTES", "BrokerMachine"]

MOST_MESSAGE_BYTES = 64 * 1024
"""Longest message of a peer: none carries more than names, numbers and one reason."""
_IGNORED = 256, 1.0
"""Lines of the log that one peer may fill in a row with what is ignored, and then per second."""
_WITHOUT_SHARE = ("", OWNER)
"""Submitters who may have all runs: where nobody has an identity, and the broker's own user."""


MOST_INTERRUPTED = 2
"""Ends of the broker's process in which one run was being planned: once is a power cut."""


class BrokerMachine:
    """members: who is here. runs: by id, in order of submission, the newest ended ones included.
    changed: replicas that the present event may have changed.
    ignored: number of messages without effect, by kind. boot: differs between two starts of one
    broker without a journal, and so do its runs' ids. decided: what a journal holds.
    """

    def __init__(
        self,
        broker_id: str,
        options: BrokerOptions | None = None,
        *,
        boot: str = "",
        decided: DurableState | None = None,
    ) -> None:
        self.broker_id = broker_id
        self._boot = boot
        self.options = options or BrokerOptions()
        self.members = Membership(broker_id, self.options)
        self.members.goes_on_with = self._goes_on_with
        self.members.lease_of = self._lease_of
        self.decided = decided or DurableState(self.options)
        self.runs = {name: Run(kept, self.members) for name, kept in self.decided.runs.items()}
        self.changed: dict[ReplicaId, Replica] = {}
        self._seen = -1  # The members' version, as of the last event.
        self.probing = Probing(self.options)
        self.data = DataSets(self.members, self.options)
        self.placing = PoolScheduler(self.members, self.probing)
        self.reconsidering = Replanner(self.members, self.probing)
        self.ignored: Counter[str] = Counter()
        self._often = RateLimiter(*_IGNORED, self.options.most_streams)

    def __repr__(self) -> str:
        peers, pool = len(self.members.members), len(self.members.pool)
        runs = sum(not run.ended for run in self.runs.values())
        return (
            f"<Broker {peers} peer{'' if peers == 1 else 's'} ({pool} in pool), "
            f"{runs} run{'' if runs == 1 else 's'}>"
        )

    def replica(self, name: str | None) -> Replica | None:
        """The one that peers know by this id; None: there is none."""
        run, number = run_of(name or "")
        found = self.runs.get(run)
        known = found is not None and 0 <= number < len(found.replicas)
        return found.replicas[number] if found is not None and known else None

    def _changing(self, name: str | None) -> Replica | None:
        """The same, as something is about to happen to it."""
        found = self.replica(name)
        if found is not None:
            self.changed[found.id] = found
        return found

    def replicas(self) -> list[Replica]:
        """All of them, those of ended runs too."""
        return [replica for run in self.runs.values() for replica in run.replicas]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What to do about an event. Never raises for anything that came from outside."""
        self.changed = {}
        out = self._decide(event, now)
        if self.members.version != self._seen:
            self.changed |= {replica.id: replica for replica in self.replicas()}
            self._seen = self.members.version
        for replica in self.changed.values():
            out += replica.losses.hand_over(now)
        out += self.data.advance(self.changed.values(), now)
        out += self.probing.advance(self.members, now)
        out += self.placing.place(self.replicas, now)
        out += self.reconsidering.look(self.changed.values(), now)
        for name in self.decided.happened:  # also those that `place` planned for
            self._changed(self.runs[RunId(name)].replicas)
        for replica in self.changed.values():
            out += replica.lifecycle.deadline.arm()
        out = [i for i in out if not (isinstance(i, Log) and self._is_one_too_many(i, now))]
        if self.placing.draining and not any(run.active for run in self.runs.values()):
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
                return self._submit(event, now)
            case RunAsked():
                return self._asked(event, now)
            case DescribeAsked(request):
                return [Answer(request, self._describe(now))]
            case PreviewAsked(request, spec, by):
                return [self._preview(request, spec, by, now)]
            case DataAsked():
                return self.data.asked(event, now)
            case WatchAsked(request, run, start, by):
                if refused := self._refused(request, run, by, "watch"):
                    return [refused]
                return [Answer(request, self.runs[run].watched(start))]
            case PlanReady():
                return self.placing.planned(self._changing(event.replica), event, now)
            case PlanFailed():
                return self.placing.unplanned(self._changing(event.replica), event, now)
            case PlanConsidered():
                return self.reconsidering.answered(self._changing(event.replica), event, now)
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
        self.members.started(starts)
        self.placing.started(starts, now)
        self.probing.started(starts)
        self.data.started(starts)
        out: list[Instruction] = []
        for replica in self._changed(self.replicas()):
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
        for replica in self.replicas():  # a plan may name a keeper that has another part by now
            for peer in replica.context.welcome:
                self.members.expected.setdefault(peer, self._holding(replica))
        fields = (("start", starts), ("runs", len(self.runs)))
        return [Log("broker_started", fields), *out]

    def _changed(self, replicas: Iterable[Replica]) -> list[Replica]:
        """The same, as something is about to happen to all of them."""
        found = list(replicas)
        self.changed |= {replica.id: replica for replica in found}
        return found

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
        replica = self._changing(report.snapshot.run)
        if replica is not None and not replica.record.ended:
            return replica.snapshot_reported(member, report, now)
        if not report.held:
            return []
        # Nobody goes on from it any more.
        order = SnapshotOrder(run=report.snapshot.run, needed=NEVER)
        return [Tell(member.stream, BrokerMessage(snapshot=order))]

    def _goes_on_with(self, member: Member) -> Holding | None:
        """What a member may come back with, when its stream broke."""
        replica = self._changing(member.run)
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
        for replica in self.replicas():
            mine = member.run == replica.id and member.state == "assigned"
            awaited = member.id in replica.context.away
            if not (mine or awaited):
                continue
            self.changed[replica.id] = replica
            if mine:
                return (replica.losses.back if awaited else replica.losses.keeper_back)(member, now)
            lost = Lost(member, "it came back without the run", "lost")
            return replica.losses.lost(lost, now)
        return []

    def _member_said(self, member: Member, message: PeerMessage, now: float) -> list[Instruction]:
        kind = message.WhichOneof("kind")
        its = self._changing(member.run)
        if kind == "heartbeat":
            return []
        if kind == "goodbye":
            why = message.goodbye.reason.text
            return self._losing(*self.members.goodbye(member, why), now)
        if kind == "resolved":
            return self.data.resolved(member, message.resolved)
        if kind == "opening":
            out = self.members.opening(member, message.opening)
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
            text = f"the peer is {member.state} for {member.run or 'no run'}"
            return [Log("message_ignored", (("message", kind), ("peer", member.id), ("why", text)))]
        replica = self._changing(about)
        if replica is None:
            text = f"the run {clean(about, 60)!r} is not known"
            fields = (("message", str(kind)), ("peer", member.id), ("why", text))
            return [Log("message_ignored", fields)]
        return replica.said(str(kind), member, message, now)

    def _losing(
        self, out: list[Instruction], lost: Sequence[Lost], now: float
    ) -> list[Instruction]:
        """Instructions about members that are gone, and what that means for their runs."""
        out = list(out)
        for gone in lost:
            for other in self.replicas():
                other.snapshots.sets.gone(gone.member.id)
            replica = self._changing(gone.member.run)
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
        if kind == "run" and (replica := self._changing(who)) is not None:
            return replica.losses.timer(now)
        if kind == "data":
            return self.data.timer(who)
        return self._losing(*self.members.timer(name, now), now)

    # ------------------------------------------------------------ clients

    def _submit(self, event: RunSubmitted, now: float) -> list[Instruction]:
        if self.placing.draining:
            text = "the broker is leaving and starts nothing new: submit to it when it is back"
            return [Reject(event.request, "UNAVAILABLE", text)]
        owners = [run.owner for run in self.runs.values() if not run.ended]
        own, most = owners.count(event.by), self.options.most_waiting_of_one
        if len(owners) >= self.options.most_waiting:
            text = f"{len(owners)} runs have not ended, the limit: try again when some have"
            return [Reject(event.request, "RESOURCE_EXHAUSTED", text)]
        if own >= most and event.by not in _WITHOUT_SHARE:
            text = f"{own} runs of {event.by} have not ended, the limit for one submitter: try "
            text += "again when some have, or cancel some"
            return [Reject(event.request, "RESOURCE_EXHAUSTED", text)]
        try:
            lease = read_spec(event.spec).recovery.lease
        except RunSpecError as error:
            return [Reject(event.request, "INVALID_ARGUMENT", str(error))]
        if lease is not None and lease < (least := 2 * self.options.heartbeat_s):
            text = (
                f"recovery.lease of the run is {lease:g} s: expected at least {least:g} s, for the "
                f"peers of this broker speak every {self.options.heartbeat_s:g} s"
            )
            return [Reject(event.request, "INVALID_ARGUMENT", text)]
        size = event.spec.ByteSize()
        full, why = make_room(self.decided.runs.values(), event.by, size, event.free, self.options)
        if why:
            return [Reject(event.request, "RESOURCE_EXHAUSTED", why)]
        self._forget(full)
        run_id = self._new_id()
        added = self.decided.add(run_id, event.spec, event.by)
        self.runs[run_id] = Run(added, self.members)
        self._changed(self.runs[run_id].replicas)
        self.placing.changed()
        self._forget_old_runs()
        fields = (("run", run_id), ("name", event.spec.name), ("steps", event.spec.steps))
        return [Log("run_submitted", fields), Answer(event.request, Submitted(run=run_id))]

    def _new_id(self) -> RunId:
        # Differs between brokers and between starts of one, so that output folders do not collide,
        # and peers do not take a new run's terms for those of one that they have left.
        seed = f"{self.broker_id}/{self._boot}/{self.decided.submitted}"
        digest = hashlib.sha256(seed.encode()).hexdigest()
        length = next(n for n in range(4, 65) if f"r-{digest[:n]}" not in self.runs)
        return RunId(f"r-{digest[:length]}")

    def _forget_old_runs(self) -> None:
        ended = [run for run in self.decided.runs.values() if run.ended]
        self._forget(outnumbered(ended, self.options.kept_runs))

    def _forget(self, runs: Iterable[RunId]) -> None:
        for run in runs:
            self.decided.forget(run)
            del self.runs[run]

    def _asked(self, event: RunAsked, now: float) -> list[Instruction]:
        request, wanted = event.request, event.wanted
        if refused := self._refused(request, event.run, event.by, wanted):
            return [refused]
        run = self.runs[event.run]
        if wanted == "recall":
            found = Recalled(spec=run.submitted.spec, checkpoint=run.checkpoint)
            return [Answer(request, found)]
        out: list[Instruction] = []
        self._changed(run.replicas)
        try:
            if wanted == "pause":
                out += run.pause(now)
            elif wanted == "resume":
                out += run.unpause(now)
            elif not run.ended:
                out += run.cancel(now)
        except ValueError as error:
            return [Reject(request, "FAILED_PRECONDITION", str(error))]
        if not run.active:
            self.placing.closed(run.replicas)
        return [*out, Answer(request, run.state)]

    def _refused(self, request: RequestId, run_id: RunId, by: str, wanted: str) -> Reject | None:
        """Why somebody may not have this of a run: what is in it is its submitter's."""
        run = self.runs.get(run_id)
        if run is None:
            return self._unknown(request, run_id)
        if not by or run.owner == by:
            return None
        text = f"run {run.id} is {run.owner}'s: only they or an operator may {wanted} it"
        return Reject(request, "PERMISSION_DENIED", text)

    def _unknown(self, request: RequestId, run: str) -> Reject:
        known = ", ".join(list(self.runs)[-5:]) or "none"
        text = f"no run {clean(run, 60)!r} here; the newest runs: {known}"
        return Reject(request, "NOT_FOUND", text)

    def _preview(self, request: RequestId, spec: RunSpec, by: str, now: float) -> Answer | Reject:
        try:
            read_spec(spec)
        except RunSpecError as error:
            return Reject(request, "INVALID_ARGUMENT", str(error))
        # A draft brings no core graph: whether one exists is found when it is submitted.
        pool = self.members.pool
        offers = tuple(m.offer_to(by) for m in pool)
        network = self.probing.network([m.id for m in pool], now)
        states = tuple(_state(m, now) for m in pool)
        notes = tuple(clean(text) for m in pool for text in m.odd)
        return Answer(request, PreviewWanted(spec, states, offers, network, notes))

    def _describe(self, now: float) -> Description:
        return Description(
            broker=self.broker_id,
            peers=[_state(m, now) for m in self.members.members.values()],
            runs=[_told(run.state) for run in self.runs.values()],
            links=self.probing.links.states(self.members.members, now),
        )

    def _was_away(self, seconds: float, now: float) -> list[Instruction]:
        """What peers said meanwhile is still to be read: nobody is lost for our own silence."""
        self.members.begin_anew(now)
        for replica in self._changed(self.replicas()):
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


def _told(state: RunState) -> RunState:
    """How a run stands, for everybody: whoever knows a blob's whole name may fetch it."""
    for reason in (state.reason, *(r.reason for r in state.replicas)):
        if reason.text:
            reason.text = _BLOB.sub(lambda name: f"{name[0][:12]}…", reason.text)
    return state


_BLOB = re.compile(r"[0-9a-f]{64}")


def _state(member: Member, now: float) -> PeerState:
    state = PeerState(
        peer=member.id,
        profile=member.profile,
        address=member.address,
        run=member.run or "",
        silent_s=max(0.0, now - member.heard_at),
        membership=member.state,
        closed=member.closed,
    )
    for data in state.profile.data:
        data.ClearField("users")  # whom an owner trusts is not everybody's business
    state.profile.ClearField("host")  # who knows it could say that it is there
    state.profile.ClearField("web")  # names of its owner's network may be there
    return state
