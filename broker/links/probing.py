"""When the broker has two members measure their link.

Rules.

- O(n) probes, against landmarks (`probed.py`). The rest of the matrix is completed
  (`planner/network/completion.py`), and pairs that a plan would use are measured exactly (`wanted`)
  before it counts.
- A peer takes part in one probe at a time, and sends for probes in an hour at most 20 s of its
  uplink or 64 MiB, whichever is more, and never more than `probe_bytes`.
- A peer in a run is measured only for a wanted pair, with the smallest probe, and within 1 % of its
  uplink (`Allowance`); peers end every other probe when they are assigned.
- A wanted pair of which one may send no more in this hour is given up: nobody waits for it.
- A probe ends when both sides reported, or when its patience is over. A pair that could not be
  measured is tried again after ten minutes, one that was after an hour.
- What a link sustains counts, not what it lets through at first: a report of a burst alone leaves
  the rate unknown.
- All of it is soft state: nothing is journaled, and nothing here can end a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import BrokerMessage, LinkReport, Probe
from ..events import Instruction, Log, SetTimer, Tell, ignored
from ..membership.member import Member, clean, dial
from ..membership.membership import Membership
from ..options import BrokerOptions
from .links import MAX_AGE_S, LinkBurst, Links, Origin
from .probed import PROBE_BYTES, SMALLEST_BYTES, Landmarks, Probed

__all__ = ["Probing"]

_PATIENCE_S = 30.0
"""For both directions: most take one or two, one over a satellite that never becomes even 20."""
_GRACE_S = 5.0
_RETRY_S = 600.0
_ASSIGNED_S = 30.0
_HOURLY_S, _HOURLY_BYTES = 20.0, 2 * PROBE_BYTES
_REFRESH_S = 600.0

Pair = tuple[PeerId, PeerId]


@dataclass(eq=False)
class _Active:
    """A probe under way. `owing`: who has not reported yet."""

    pair: Pair
    until: float
    owing: list[PeerId]
    failed: bool = False  # for good: another try now would bring the same


class Probing:
    """Decides which two members measure their link next, and with how many bytes. version grows
    whenever `settled` could change."""

    def __init__(self, options: BrokerOptions) -> None:
        self.options = options
        self.on = options.probe_s > 0
        self.links = Links()
        self.version = 0
        self._peers: dict[PeerId, Probed] = {}  # in order of joining
        self.landmarks = Landmarks(self._peers, self.links)
        self._wanted: dict[Pair, float] = {}  # until when it is worth the wait
        self._active: dict[int, _Active] = {}
        self._busy: dict[PeerId, int] = {}  # the probe that it takes part in
        self._spent = set[PeerId]()  # those short of links that may send no more for now
        self._number = 0
        self._seen = -1  # version of the members that were looked at last
        self._stale = False  # something may be startable now
        self._timer_at = math.inf
        self._refresh_at = math.inf
        self._boots: dict[PeerId, tuple[str, int]] = {}  # last seen, of those that left too

    def started(self, starts: int) -> None:
        """The broker was started for so manieth time: reports of older probes are none of ours."""
        self._number = (starts - 1) << 32

    # ------------------------------------------------------------ what others ask

    def settled(self, peers: Iterable[PeerId]) -> bool:
        """Whether nothing is about to be learned of links of these peers."""
        some = set(peers)  # never iterated
        short = (p for p in self.landmarks.short if p not in self._spent)
        waits = any(p in some for p in short) or any(p in some for p in self._busy)
        return not waits and not any(a in some and b in some for a, b in self._wanted)

    def last_join(self, peers: Iterable[PeerId]) -> float:
        return max((self._peers[p].joined_at for p in peers if p in self._peers), default=-math.inf)

    def unmeasured(self, pairs: Sequence[Pair], now: float) -> tuple[Pair, ...]:
        """Return the pairs that a probe could still tell something about."""
        if not self.on:
            return ()
        return tuple(
            (a, b)
            for a, b in pairs
            if a in self._peers and b in self._peers and not self.links.is_measured(a, b, now)
            and self._peers[a].tried.get(b, -math.inf) <= now and self._reach(a, b)
        )  # fmt: skip

    def wanted(self, pairs: Sequence[Pair], now: float, turns: int = 1) -> None:
        """A candidate plan would use these: they are measured next, in this order, and exactly.
        `turns`: probes that one peer is in; each is worth a wait of `probe_s`."""
        for pair in self.unmeasured(pairs, now):
            self._wanted[pair] = now + turns * self.options.probe_s
            self._stale = True

    def network(self, peers: Sequence[PeerId], now: float) -> Network | None:
        """Links among these peers for a planner; None when nothing is probed here."""
        if not self.on:
            return None
        return self.links.network(peers, {p: k.caps for p, k in self._peers.items()}, now)

    # ------------------------------------------------------------ reports

    def reported(self, peer: PeerId, report: LinkReport, now: float) -> list[Instruction]:
        """A member says what its link to another carries, or why it could not be measured."""
        other = PeerId(report.peer)
        active = self._active.get(report.probe)
        asked = active is not None and peer in active.owing and other in active.pair
        if asked and active is not None:
            active.owing.remove(peer)
            if peer in self._peers:
                self._peers[peer].settle(report.size_bytes)
        if report.HasField("problem"):
            code = report.problem.code
            if asked and active is not None and code != "assigned":
                active.failed = True
            out: list[Instruction] = [_unmeasured(peer, other, report.problem.text)]
        elif report.probe and not asked:
            out = [_ignored(peer, other, f"nobody waits for probe {report.probe} of it")]
        elif other not in self._peers or other == peer:
            out = [_ignored(peer, other, "the other end is no other member")]
        else:
            origin: Origin = "probe" if report.probe else "traffic"
            burst = (
                LinkBurst(report.burst_bytes_per_s, report.burst_bytes) if report.probe else None
            )
            why = self.links.report(
                peer,
                other,
                report.latency_s,
                report.bytes_per_s,
                now,
                origin,
                burst,
                report.shared and not report.probe,
            )
            out = [_ignored(peer, other, why)] if why else []
            if asked and active is not None and (why or not report.bytes_per_s):
                active.failed = True
            if report.probe and not why:
                out = [_measured(peer, other, report)]
        if active is not None and not active.owing:
            self._end(report.probe, now)
        return out

    def _end(self, number: int, now: float) -> None:
        active = self._active.pop(number)
        a, b = active.pair
        measured = self.links.is_measured(a, b, now)
        if measured or active.failed:
            self._set_tried(a, b, now + (MAX_AGE_S if measured else _RETRY_S))
            self._wanted.pop((a, b), None)
            self._wanted.pop((b, a), None)
        else:  # an assignment came first
            self._set_tried(a, b, now + _ASSIGNED_S)
            self._refresh_at = min(self._refresh_at, now + _ASSIGNED_S)
        for peer in active.pair:
            self._busy.pop(peer, None)
            self.landmarks.measured(peer)
        self._stale = True
        self.version += 1

    def _set_tried(self, a: PeerId, b: PeerId, until: float) -> None:
        for one, other in ((a, b), (b, a)):
            if one in self._peers:
                self._peers[one].tried[other] = until

    # ------------------------------------------------------------ what to do next

    def advance(self, members: Membership, now: float) -> list[Instruction]:
        """Starts what can be started, ends what took too long. After every event."""
        if not self.on:
            return []
        if members.version != self._seen:
            self._seen = members.version
            self._look(members, now)
        out: list[Instruction] = []
        if now >= self._timer_at:
            self._timer_at = math.inf
            out += self._overdue(now)
        if self._stale:
            self._stale = False
            out += self._start_wanted(members, now)
            out += self._start_short(members, now)
        due = min((a.until for a in self._active.values()), default=math.inf)
        due = min(due, *self._wanted.values(), self._refresh_at) if self._peers else math.inf
        if due < self._timer_at:
            self._timer_at = due
            out.append(SetTimer("probe", due))
        return out

    def _look(self, members: Membership, now: float) -> None:
        """Members came, went, or changed their state."""
        here = members.members
        for gone in [p for p in self._peers if p not in here]:
            del self._peers[gone]
        for member in here.values():
            known = self._peers.get(member.id)
            if known is None or known.boot != (member.boot, member.counter):
                self._peers.pop(member.id, None)
                self._join(member, now)
            else:
                known.address = member.address  # it attached again, and another one is reached
        self.landmarks.changed()
        for number, active in list(self._active.items()):
            active.owing = [p for p in active.owing if p in self._peers]
            if not active.owing:
                self._end(number, now)
        self._wanted = {
            (a, b): until
            for (a, b), until in self._wanted.items()
            if a in self._peers and b in self._peers
        }
        self._stale = True
        self.version += 1

    def _join(self, member: Member, now: float) -> None:
        self._peers[member.id] = Probed.of(member, now)
        boot = (member.boot, member.counter)
        if self._boots.get(member.id) == boot:  # it only attached again
            others = ((p, k.tried.get(member.id)) for p, k in self._peers.items())
            self._peers[member.id].tried = {p: until for p, until in others if until is not None}
        else:  # another start may be another place
            self.links.forget(member.id)
            for known in self._peers.values():
                known.tried.pop(member.id, None)
        self._boots[member.id] = boot
        self._refresh_at = min(self._refresh_at, now + _REFRESH_S)

    def _overdue(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for number, active in list(self._active.items()):
            if now >= active.until:
                active.failed = True
                self._end(number, now)
                out.append(_unmeasured(*active.pair, "no report came in time"))
        late = [pair for pair, until in self._wanted.items() if now >= until]
        for pair in late:
            del self._wanted[pair]
        self.version += bool(late)
        if now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_S
            self.links.prune(now)
            self._boots = {p: boot for p, boot in self._boots.items() if p in self._peers}
            for known in self._peers.values():
                known.tried = {p: until for p, until in known.tried.items() if until > now}
            self._seen = -1  # looks at them anew at the next event
            self.landmarks.changed()
        return out

    def _start_wanted(self, members: Membership, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for a, b in list(self._wanted):
            one, other = members.members[a], members.members[b]
            states = (one.state, other.state)
            if a in self._busy or b in self._busy or "draining" in states or "resting" in states:
                continue
            together = one.state == "assigned" and one.run == other.run
            trains = "assigned" in (one.state, other.state)
            most = SMALLEST_BYTES if trains else PROBE_BYTES
            if not all(self._affords(m.id, most, now) for m in (one, other)):
                del self._wanted[a, b]  # not within any patience
                self.version += 1
                continue
            if together or not all(self._may_send(m, most, now) for m in (one, other)):
                continue
            out += self._start(one, other, most, members, now)
        return out

    def _may_send(self, member: Member, size_bytes: int, now: float) -> bool:
        known = self._peers[member.id]
        uplink = known.caps.up or self.links.uplink(member.id, now)
        return member.state != "assigned" or known.takes(size_bytes, uplink, now)

    def _affords(self, peer: PeerId, size_bytes: int, now: float) -> bool:
        hourly = max(_HOURLY_BYTES, _HOURLY_S * self.links.uplink(peer, now))
        most = min(self.options.probe_bytes, int(hourly))
        return self._peers[peer].affords(size_bytes, most, now)

    def _start_short(self, members: Membership, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        pool = [m.id for m in members.pool]
        self.landmarks.count(pool, self._reach)
        idle = [p for p in self.landmarks.short if p not in self._busy]
        self._spent = {p for p in idle if not self._affords(p, PROBE_BYTES, now)}
        idle = [p for p in idle if p not in self._spent]
        for peer in idle:
            if peer in self._busy:
                continue

            def open_to(other: PeerId, peer: PeerId = peer) -> bool:
                return (
                    other != peer
                    and other not in self._peers[peer].tried
                    and members.members[other].state == "pool"
                    and self._affords(other, PROBE_BYTES, now)
                    and self._reach(peer, other)
                )

            other = self.landmarks.partner(peer, chain(idle, pool), self._busy, open_to, now)
            if other is not None:
                one, two = members.members[peer], members.members[other]
                out += self._start(one, two, PROBE_BYTES, members, now)
        return out

    def _reach(self, a: PeerId, b: PeerId) -> bool:
        return self.options.relays or bool(self._peers[a].address or self._peers[b].address)

    def _start(
        self,
        one: Member,
        other: Member,
        most_bytes: int,
        members: Membership,
        now: float,
    ) -> list[Instruction]:
        way = dial(one, other, self.options.relays)
        assert way is not None, f"{one.id} and {other.id} cannot reach each other"
        dialler, target, where = way
        self._number += 1
        number = self._number
        pair = (one.id, other.id)
        until = now + _PATIENCE_S + _GRACE_S
        self._active[number] = _Active(pair, until, [one.id, other.id])
        for peer in pair:
            self._busy[peer] = number
            self._peers[peer].reserve(most_bytes, now)
        attempt = members.next_dial()

        def order(peer: PeerId, address: str) -> BrokerMessage:
            probe = Probe(
                number=number,
                peer=peer,
                address=address,
                generation=attempt,
                most_bytes=most_bytes,
                patience_s=_PATIENCE_S,
            )
            return BrokerMessage(probe=probe)

        return [  # who is dialled hears of it first
            Tell(target.stream, order(dialler.id, "")),
            Tell(dialler.stream, order(target.id, where)),
        ]

    # ------------------------------------------------------------ for people and tests

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts the rules of this module."""
        for number, active in self._active.items():
            assert active.owing, f"probe {number} waits for nobody"
            for peer in active.pair:
                assert self._busy.get(peer) == number, f"{peer} is in two probes"
        assert all(n in self._active for n in self._busy.values())
        self.landmarks.validate()

    def __repr__(self) -> str:
        short = len(self.landmarks.short)
        return f"<Probing {len(self._active)} under way, {short} peers short of links>"


def _measured(peer: PeerId, other: PeerId, report: LinkReport) -> Log:
    fields = (
        ("peer", peer),
        ("other", other),
        ("latency_ms", round(report.latency_s * 1e3, 3)),
        ("bytes_per_s", round(report.bytes_per_s)),
        ("size_bytes", report.size_bytes),
        ("burst_bytes_per_s", round(report.burst_bytes_per_s)),
        ("burst_bytes", report.burst_bytes),
    )
    return Log("link_measured", fields)


def _unmeasured(peer: PeerId, other: PeerId, why: str) -> Log:
    fields = (("peer", peer), ("other", clean(other, 128)), ("why", clean(why)))
    return Log("link_unmeasured", fields)


def _ignored(peer: PeerId, other: PeerId, why: str) -> Log:
    return ignored("link", peer, f"link to {clean(other, 60)!r}: {why}")
