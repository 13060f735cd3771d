"""Who is here: streams, incarnations, leases and the pool.

Rules.

- A stream says Hello first, within `hello_s`, and once. Whoever breaks that is refused.
- A peer id is persistent; a start of its process is an *incarnation* (boot id, counter). The newest
  counter wins; the older incarnation is *fenced*: told Refused(again=False) and closed. Among equal
  counters the one that came last is the newest.
- An incarnation that attaches again on another stream replaces its own stream. Whoever still holds
  a run when it joins is told to leave that first, unless the run waits for it (`expected`): since
  the broker was started again, or because only its stream broke, which costs no recovery.
- Two live processes that keep claiming one identity (more than `takeovers` changes of hands within
  `takeover_window_s`) are both refused, and the identity stays closed for one window.
- A peer is in one state: `pool` (free), `assigned` (to one run), `draining` (told to leave a run
  and not clean yet; it says Drained, or is closed after `drained_s`), `resting` (free, and kept out
  of runs by its owner for now).
- Every message renews the lease. A peer that was silent for its lease (its run's, or `lease_s`) is
  lost, as is one whose stream ended or that said Goodbye.

Timers are lazy: one per peer, armed for the earliest moment that something could be due, and armed
again when it fires early. So a heartbeat costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import (
    Availability,
    BrokerMessage,
    DialOrder,
    Hello,
    Holding,
    Leave,
    Profile,
    Refused,
    Speeds,
    Welcome,
)
from ...proto.common_pb2 import Reason
from ..events import CloseStream, Instruction, Log, ReplicaId, SetTimer, StreamId, Tell, ignored
from ..options import BrokerOptions
from .bounds import sound
from .member import Member, clean, dial, problem_of
from .speeds import Correction, speeds_of

__all__ = ["Lost", "Membership"]


class Lost(NamedTuple):
    """A peer that is no member any more, and the cause in words ("its stream ended: …"). `code`
    "away": it may come back with its run (`expected`)."""

    member: Member
    cause: str
    code: str


@dataclass
class _Claims:
    """Claims of one identity, kept whether or not it is joined."""

    counter: int = -1
    boot: str = ""
    correction: Correction = field(default_factory=Correction)  # Of this boot.
    takeovers: list[float] = field(default_factory=list)
    closed_until: float = -math.inf


class Membership:
    """Streams and members. Every method returns instructions, and who was lost where one can be.

    members: by id, in order of joining; streams: every open one and its member (None before Hello).
    version grows with every change that a plan could depend on.
    """

    def __init__(self, broker_id: str, options: BrokerOptions) -> None:
        self.broker_id = broker_id
        self.options = options
        self.members: dict[PeerId, Member] = {}
        self.streams: dict[StreamId, PeerId | None] = {}
        self.version = 0
        self.expected: dict[PeerId, Holding] = {}
        """What holders that a run waits for come back with."""
        self.goes_on_with: Callable[[Member], Holding | None] = lambda member: None
        """What a member may come back with whose stream broke; None: it is lost."""
        self.lease_of: Callable[[ReplicaId], float] = lambda run: options.lease_s
        """Seconds of silence after which a peer of a run is lost."""
        self._dials = 0
        self._claims: dict[PeerId, _Claims] = {}
        self._proven: dict[StreamId, PeerId] = {}
        self._joins = 0

    def started(self, starts: int) -> None:
        """The broker was started for so manieth time."""
        self._dials = (starts - 1) << 32

    def next_dial(self) -> int:
        """A new generation of a link: they only grow, over all runs, probes and starts."""
        self._dials += 1
        return self._dials

    def reach(self, a: Member, b: Member) -> bool:
        """Whether two can have a link."""
        return dial(a, b, self.options.relays) is not None

    def dial(self, a: PeerId, b: PeerId) -> tuple[PeerId, DialOrder] | None:
        """Say which of two that shall have a link dials, with its order; the first one, if both
        can. None when neither can be dialled, and nothing is relayed."""
        way = dial(self.members[a], self.members[b], self.options.relays)
        if way is None:
            return None
        source, target, address = way
        order = DialOrder(peer=target.id, address=address, generation=self.next_dial())
        return source.id, order

    # ------------------------------------------------------------ streams

    def opened(self, stream: StreamId, now: float, peer: PeerId | None = None) -> list[Instruction]:
        """`peer`: the one that the stream's other end has proven to be; None: anybody."""
        if stream in self.streams:
            return [Log("stream_twice", (("stream", stream),), "warning")]
        if len(self.streams) >= self.options.most_streams:
            return self.refuse(
                stream,
                "full",
                f"the broker has {len(self.streams)} streams, its limit: try again later",
                again=True,
            )
        self.streams[stream] = None
        if peer is not None:
            self._proven[stream] = peer
        return [SetTimer(f"hello:{stream}", now + self.options.hello_s)]

    def closed(self, stream: StreamId, why: str) -> tuple[list[Instruction], list[Lost]]:
        self._proven.pop(stream, None)
        peer = self.streams.pop(stream, None)
        if peer is None:
            return [], []
        return self._lose(self.members[peer], f"its stream ended ({clean(why)})", "stream")

    def heard(self, stream: StreamId, now: float) -> Member | None:
        """The member that speaks on a stream, its lease renewed; None before its Hello."""
        peer = self.streams.get(stream)
        if peer is None:
            return None
        member = self.members[peer]
        member.heard_at = now
        return member

    def refuse(
        self, stream: StreamId, code: str, text: str, *, again: bool = False
    ) -> list[Instruction]:
        """Ends a stream that has no member (any more)."""
        assert self.streams.get(stream) is None, f"stream {stream} still has a member"
        self.streams.pop(stream, None)
        refused = Refused(reason=Reason(code=code, text=text), again=again)
        return [
            Log("stream_refused", (("stream", stream), ("code", code), ("why", text)), "warning"),
            Tell(stream, BrokerMessage(refused=refused)),
            CloseStream(stream, text),
        ]

    def expel(
        self, member: Member, code: str, text: str, *, again: bool = False
    ) -> tuple[list[Instruction], list[Lost]]:
        """Ends the membership of a peer and tells it why."""
        out, lost = self._lose(member, text, code)
        self.streams[member.stream] = None
        return out + self.refuse(member.stream, code, text, again=again), lost

    # ------------------------------------------------------------ joining and leaving

    def greeted(
        self, stream: StreamId, hello: Hello, now: float
    ) -> tuple[list[Instruction], list[Lost]]:
        """A Hello on a stream that is open and has no member yet."""
        problem = problem_of(hello)
        if problem is not None:
            return self.refuse(stream, *problem), []
        peer = PeerId(hello.peer)
        proven = self._proven.get(stream, peer)
        if peer != proven:
            text = f"the Hello is of {clean(peer, 100)}, the certificate of {proven}"
            return self.refuse(stream, "identity", text), []
        claims = self._claims.pop(peer, _Claims())
        self._claims[peer] = claims  # the most recent claim stands last
        if now < claims.closed_until:
            left = claims.closed_until - now
            text = f"{_shared(peer)}; the identity stays closed for {left:.0f} s more"
            return self.refuse(stream, "identity", text), []
        if hello.counter < claims.counter:
            text = (
                f"peer {peer} with counter {hello.counter} is older than the incarnation with "
                f"counter {claims.counter} that joined since: end this process, the newest start "
                "of a peer is the one that counts"
            )
            return self.refuse(stream, "fenced", text), []
        out: list[Instruction] = []
        lost: list[Lost] = []
        old = self.members.get(peer)
        if old is not None:
            out, lost = self._replace(old, hello, claims, now)
        if hello.boot != claims.boot:
            claims.correction = Correction()
        claims.counter, claims.boot = hello.counter, hello.boot
        if now < claims.closed_until:
            return out + self.refuse(stream, "identity", _shared(peer)), lost
        self._forget_old_claims()
        return out + self._join(stream, hello, now), lost

    def _replace(
        self, old: Member, hello: Hello, claims: _Claims, now: float
    ) -> tuple[list[Instruction], list[Lost]]:
        if (old.boot, old.counter) == (hello.boot, hello.counter):
            out, lost = self._lose(old, "it attached again on another stream", "stream")
            self.streams.pop(old.stream)
            return [*out, CloseStream(old.stream, "the peer attached again")], lost
        window = now - self.options.takeover_window_s
        claims.takeovers = [t for t in claims.takeovers if t > window] + [now]
        if len(claims.takeovers) > self.options.takeovers:
            claims.takeovers.clear()
            claims.closed_until = now + self.options.takeover_window_s
            return self.expel(old, "identity", _shared(old.id))
        text = (
            f"a newer start of peer {old.id} (counter {hello.counter}) has taken over from this "
            f"one (counter {old.counter})"
        )
        return self.expel(old, "fenced", text)

    def _join(self, stream: StreamId, hello: Hello, now: float) -> list[Instruction]:
        peer = PeerId(hello.peer)
        self._joins += 1
        profile = Profile()
        profile.CopyFrom(hello.profile)
        odd = sound(profile)
        member = Member(
            id=peer,
            stream=stream,
            boot=hello.boot,
            counter=hello.counter,
            profile=profile,
            address=hello.address,
            joined=self._joins,
            heard_at=now,
            correction=self._claims[peer].correction,
            stays_until=now + profile.stay_s if profile.stay_s > 0 else math.inf,
            closed=_cleaned(hello.closed) if hello.HasField("closed") else None,
            odd=(*odd, *speeds_of(profile)[1]),
        )
        member.state = member.free
        self.members[peer] = member
        self.streams[stream] = peer
        resumed = self._resumed(member, hello.holding)
        self.version += 1
        welcome = Welcome(
            broker=self.broker_id,
            lease_s=self.options.lease_s,
            heartbeat_s=self.options.heartbeat_s,
            resumed=resumed,
        )
        out: list[Instruction] = [
            Log(
                "peer_joined", (("peer", peer), ("name", profile.name), ("counter", hello.counter))
            ),
            *(
                Log("profile_odd", (("peer", peer), ("why", clean(text))), "warning")
                for text in member.odd
            ),
            Tell(stream, BrokerMessage(welcome=welcome)),
            self.timer_of(member),
        ]
        if not hello.holding.run or resumed is not None:
            return out
        return out + self._free_of(member, hello.holding, now)

    def _resumed(self, member: Member, holding: Holding) -> Holding | None:
        """Return the part that a member goes on with, if it comes back with what it is expected to
        hold."""
        expected = self.expected.pop(member.id, None)
        if expected is None or (expected.run, expected.term) != (holding.run, holding.term):
            return None
        member.state, member.run = "assigned", ReplicaId(holding.run)
        return expected

    def _free_of(self, member: Member, holding: Holding, now: float) -> list[Instruction]:
        """Free a member that joined while it still has a part in a run, which went on without it
        when its stream ended, or which an earlier start of this broker began: it is free once it
        has given that up."""
        member.state, member.run, member.draining_since = "draining", ReplicaId(holding.run), now
        text = "the run went on without this peer when it lost its stream to the broker"
        reason = Reason(code="lost", text=text)
        leave = Leave(run=holding.run, term=holding.term, reason=reason, goes_on=True)
        return [
            Tell(member.stream, BrokerMessage(leave=leave)),
            self.timer_of(member),
        ]

    def _lose(self, member: Member, cause: str, code: str) -> tuple[list[Instruction], list[Lost]]:
        del self.members[member.id]
        self.version += 1
        fields = (("peer", member.id), ("state", member.state), ("why", cause))
        assigned = member.state == "assigned"
        if code == "stream" and assigned and (holding := self.goes_on_with(member)) is not None:
            self.expected[member.id] = holding
            return [Log("peer_away", fields)], [Lost(member, cause, "away")]
        return [Log("peer_lost", fields)], [Lost(member, cause, code)]

    def goodbye(self, member: Member, why: str) -> tuple[list[Instruction], list[Lost]]:
        out, lost = self._lose(
            member, f"it said goodbye ({clean(why) or 'no reason given'})", "goodbye"
        )
        self.streams.pop(member.stream)
        return [*out, CloseStream(member.stream, "goodbye")], lost

    # ------------------------------------------------------------ the pool

    @property
    def pool(self) -> tuple[Member, ...]:
        """Free peers in order of joining."""
        return tuple(m for m in self.members.values() if m.state == "pool")

    def mine(self, peer: PeerId, run: ReplicaId) -> Member | None:
        """A peer that has a part in a run now; None for any other."""
        member = self.members.get(peer)
        if member is None or member.state != "assigned" or member.run != run:
            return None
        return member

    def assign(self, member: Member, run: ReplicaId) -> list[Instruction]:
        assert member.state == "pool", f"{member.id} is {member.state} for {member.run}"
        member.state, member.run = "assigned", run
        self.version += 1
        # Its timer is armed for the broker's own lease, and the run's may be shorter.
        return [self.timer_of(member)]

    def drain(self, member: Member, now: float) -> list[Instruction]:
        """Mark a member as told to leave its run; it is free once it says Drained."""
        assert member.state == "assigned", f"{member.id} is {member.state}"
        member.state, member.draining_since = "draining", now
        self.version += 1
        # Its timer is armed for its lease, which may be over before or after this.
        return [self.timer_of(member)]

    def availability_told(self, member: Member, told: Availability) -> list[Instruction]:
        """Note that a member's owner keeps it out of runs, or no longer does; from a run that it is
        in, it leaves by itself."""
        member.closed = _cleaned(told.closed) if told.HasField("closed") else None
        if member.run is None and member.state != member.free:
            member.state = member.free
            self.version += 1
        why = member.closed.text if member.closed else "it takes part again"
        return [Log("peer_closed" if member.closed else "peer_open", _named(member, why))]

    def measured(self, member: Member, speeds: Speeds) -> list[Instruction]:
        """Take what a member's device was measured to do in the pool in the place of what its Hello
        said, and of what steps have shown of that."""
        if member.run is not None:
            why = f"it works for {member.run}: expected in the pool only"
            return [ignored("measured", member.id, why)]
        member.profile.speeds.CopyFrom(speeds)
        member.profile.flops_per_s = speeds.product_flops_per_s
        member.correction, self.version = Correction(), self.version + 1
        taken = f"{speeds_of(member.profile)[0].product:.3g} FLOP/s"
        return [Log("peer_measured", (("peer", member.id), ("speed", taken)))]

    def drained(self, member: Member, run: str) -> bool:
        """Whether that made it free: a Drained of another run has no effect."""
        if member.state != "draining" or member.run != run:
            return False
        member.state, member.run = member.free, None
        self.version += 1
        return True

    # ------------------------------------------------------------ time

    def timer(self, name: str, now: float) -> tuple[list[Instruction], list[Lost]]:
        """A timer `hello:STREAM` or `peer:PEER` fired; others are not ours."""
        kind, _, who = name.partition(":")
        stream = StreamId(who)
        if kind == "hello" and stream in self.streams and self.streams[stream] is None:
            text = f"no Hello came within {self.options.hello_s:g} s of opening the stream"
            return self.refuse(stream, "hello", text, again=True), []
        member = self.members.get(PeerId(who)) if kind == "peer" else None
        if member is None:
            return [], []
        if now < self._due(member):
            return [self.timer_of(member)], []
        silent = now - member.heard_at
        lease = self._lease_of(member)
        if silent >= lease:
            text = f"it was silent for {silent:.1f} s (its lease is {lease:g} s)"
            return self.expel(member, "lease", text, again=True)
        text = (
            f"it did not give up run {member.run} within {self.options.drained_s:g} s of being "
            "told to leave it"
        )
        return self.expel(member, "drain", text, again=True)

    def begin_anew(self, now: float) -> None:
        """Every lease begins now; timers that fire before are set again."""
        for member in self.members.values():
            member.heard_at = now
            if member.state == "draining":
                member.draining_since = now

    def timer_of(self, member: Member) -> SetTimer:
        """Armed for the moment when it is lost unless it speaks."""
        return SetTimer(f"peer:{member.id}", self._due(member))

    def _due(self, member: Member) -> float:
        lease = member.heard_at + self._lease_of(member)
        if member.state != "draining":
            return lease
        return min(lease, member.draining_since + self.options.drained_s)

    def _lease_of(self, member: Member) -> float:
        return self.options.lease_s if member.run is None else self.lease_of(member.run)

    def _forget_old_claims(self) -> None:
        # Bounded memory: identities that are not joined, the longest unheard first.
        excess = len(self._claims) - 2 * self.options.most_streams
        if excess > 0:
            gone = [p for p in self._claims if p not in self.members][:excess]
            for peer in gone:
                del self._claims[peer]


def _cleaned(reason: Reason) -> Reason:
    return Reason(code=clean(reason.code, 60), text=clean(reason.text) or "no reason given")


def _named(member: Member, why: str) -> tuple[tuple[str, str], ...]:
    return ("peer", member.id), ("state", member.state), ("why", why)


def _shared(peer: PeerId) -> str:
    return (
        f"two live processes keep claiming the identity {peer}: both are refused. Stop one of "
        "them, or give it a state folder of its own"
    )
