"""Frames of the exchange of one round at one holder: which are to come, and which are on their way.
Pure.

    planned -> joins (the device knows it) -> begins (frames come and go) -> complete

Frames of an attempt are taken once it has begun here; an earlier one keeps its place until then,
those of any other have no effect. Parts are added up as they come, and the result of a part goes
out when all have given theirs; so does the sum of a place, whose other peers get the result as it
comes. Where each client's contribution comes by itself, those of all parts go out together, since
one may hang on the others. So they do where contributions end together (`RoundPlan.together`), once
this peer's own has left too, or the plan's patience is over: results would hold up contributions
that others wait for, and acknowledgements, by which uploads are measured.

The broker ends an attempt when nothing has come to anybody for a while. So it is told that
something came, which may be a part of a frame on a slow line, every `SAYS_S` at most: of exchanges
that take less it hears nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from ....dag.plan.plan import PeerId
from ....dag.rounds.vector import RunVector, Span
from ....dag.rounds.wiring import (
    ALL,
    AUDIT,
    GATHER,
    GIVE,
    RESULT,
    VERSION,
    At,
    RoundFrame,
    RoundWiring,
    kind_of,
    port_of,
    segments_of,
    span_of,
    wiring,
)
from ....dag.schedule.flow import Role
from ....net.links.frame import FrameKey
from ....proto import broker_pb2
from .. import events as e
from .repeated_sums import RepeatedSums

__all__ = ["SAYS_S", "RoundExchange", "run_of"]

SAYS_S = 10.0
_SLOTS = 4
"""Parts that may be here or on their way from one peer: 16 MB in fp32."""
_NOT_YET = math.inf, 0.0
"""When a contribution began to leave, and when others had all of it: nothing has left."""


def run_of(replica: str) -> str:
    """The run that a replica is of: frames between replicas have its id."""
    return replica.partition(".")[0]


class RoundExchange:
    """The attempt of the round under way, what came too early, and links, which stay from round to
    round as long as they are wanted. plan: None until there is one. again: what is added up again
    of it; None: nothing yet. late: frames without effect, so far. sent_bytes: of the round.
    upload_bytes: of its own contribution, in this attempt."""

    def __init__(
        self,
        peer: PeerId,
        replica: str,
        term: int,
        vector: RunVector,
        near: Collection[PeerId] = (),
    ) -> None:
        """`near`: peers of its own replica, whose links are there whatever rounds want."""
        self.plan: broker_pb2.RoundPlan | None = None
        self.wiring = RoundWiring()
        self.again: RepeatedSums | None = None
        self.begun = False
        """Whether frames of the attempt are exchanged."""
        self.late = self.sent_bytes = 0
        self._gave, self.upload_bytes = _NOT_YET, 0
        self._encoding: set[FrameKey] = set()
        """Frames that are being encoded: nobody knows their bytes."""
        self._made: e.RoundResult | None = None
        """What the version came to, until that is told."""
        self._leaving: set[FrameKey] = set()
        """Frames of the contribution that are on their way, where results wait for them."""
        self._peer, self._replica, self._term, self._vector = peer, replica, term, vector
        self._run, self._near = run_of(replica), frozenset(near)
        self._awaited: set[RoundFrame] = set()
        """Frames that are to come."""
        self._early: dict[FrameKey, None] = {}
        """Frames that came of an attempt that has not begun here; each keeps its slot."""
        self._linked: dict[PeerId, broker_pb2.DialOrder | None] = {}
        """By counterpart, how it is dialled from here; None: it dials, or is near."""
        self._came, self._moved_at, self._said_at = 0, 0.0, 0.0
        """How often something came in the term, when it did so or left last, and when the broker
        heard of that."""

    # ------------------------------------------------------------ attempts

    def begin_round(self) -> None:
        """Nothing is planned yet."""
        self.plan, self.begun, self.sent_bytes = None, False, 0
        self._awaited, self.wiring, self.again = set(), RoundWiring(), None
        self._encoding, self._made = set(), None

    def planned(self, plan: broker_pb2.RoundPlan) -> None:
        """In place of what there is."""
        self.plan, self.begun, self._gave = plan, False, _NOT_YET
        self.upload_bytes, self._leaving, self.again = 0, set(), None
        self._encoding, self._made = set(), None
        segments, fragment, one = segments_of(plan), plan.fragment, plan.by_client
        self.wiring = wiring(
            self._vector, segments, self._peer, fragment, by_client=one, most=plan.part
        )

    def ordered(self, order: broker_pb2.RoundAudit) -> RepeatedSums:
        """Sums of the attempt are to be added up again, in place of those before."""
        assert self.plan is not None, "nothing is exchanged"
        at = self._peer, self._replica, self._term
        self.again = RepeatedSums(*at, self._vector, self.plan, order)
        return self.again

    def shows(self) -> list[e.Instruction]:
        """Send contributions to who adds up again, and take those that came early."""
        assert self.again is not None, "nothing is added up again"
        return [*self._send(self._key(AUDIT, *s) for s in self.again.gives), *self._take_early()]

    def _take_early(self) -> list[e.Instruction]:
        early, self._early = self._early, {}
        return [i for key in early for i in self.arrived(key, None)]

    def joins(self) -> None:
        """The device hears of it."""
        self._awaited = {*self.wiring.comes}

    def begins(self) -> list[e.Instruction]:
        """Send what is given, and take frames, those too that came early."""
        self.begun = True
        keys = [self._key(*frame) for frame in self.wiring.goes if frame[0] == GIVE]
        self._leaving = {*keys} if self._together else set()
        out, alone = self._send(keys), [at for at in self.wiring.takes if self._is_made(at)]
        return [*out, *self._take_early(), *(i for at in alone for i in self._goes_on(at))]

    def made(self, found: e.RoundResult) -> list[e.Instruction]:
        """The version is made, and goes to those who take it whole."""
        self._made = found
        return self._send(self._key(VERSION, *s) for s in self.wiring.sends)

    def tells(self) -> Iterator[e.RoundResult]:
        """Yield what the version came to, once, when the bytes of all that was sent are known:
        frames are encoded beside the device's actions, and may be later than it."""
        if self._made is not None and not self._encoding:
            found, self._made = self._made, None
            yield found

    def is_at(self, number: int, attempt: int) -> bool:
        """Whether it is at this attempt of this round."""
        plan = self.plan
        return plan is not None and (number, attempt) == (plan.round, plan.attempt)

    @property
    def attempt(self) -> int:
        """Number of the attempt; 0: none is planned."""
        return self.plan.attempt if self.plan is not None else 0

    @property
    def complete(self) -> bool:
        """Whether all is here that the version is made of."""
        return self.begun and not self._awaited

    def lacking(self) -> tuple[list[PeerId], str]:
        """Return the peers that are waited for, and for what (`broker/policies/round_view.py`):
        for contributions, else for sums of places, for what is made of all, or for what is passed
        on. Of all but the first those are not to blame who wait for somebody as well."""
        found = dict[str, list[tuple[Span, PeerId]]]()
        for hop, part, peer, _ in self._awaited:
            what = {GIVE: "late", GATHER: "ungathered"}.get(hop, "unsummed")
            if hop == RESULT and peer != self.wiring.adders[part]:
                what = "unpassed"
            found.setdefault(what, []).append((part, peer))
        code = next((c for c in ("late", "ungathered", "unsummed") if c in found), "unpassed")
        lacks = found.get(code, [])
        return [*dict.fromkeys(peer for _, peer in sorted(lacks))], code if lacks else "unsummed"

    def waits_no_longer(self) -> list[e.Instruction]:
        """Send what waits until the own contribution has left, as far as it is there."""
        if not self._leaving:
            return []
        self._leaving = set()
        return self._all_results() if self._together and self.begun else []

    @property
    def _together(self) -> bool:
        return self.plan is not None and self.plan.together

    @property
    def _all_at_once(self) -> bool:
        """Whether results of all parts go out together."""
        return self.wiring.by_client or self._together

    def _is_made(self, at: At) -> bool:
        """Whether all came that is taken of a part in a phase."""
        part, _, phase = at
        if phase == ALL and self._all_at_once:
            return not self._leaving and not any(hop == GIVE for hop, *_ in self._awaited)
        frames = ((kind_of(h), part, h.source, 0) for h in self.wiring.takes.get(at, ()))
        return self._awaited.isdisjoint(frames)

    def _goes_on(self, at: At) -> list[e.Instruction]:
        """Send what is made of all that is taken of a part in a phase."""
        part, wiring = at[0], self.wiring
        far = [h for h in wiring.gives.get(at, ()) if not wiring.taken_here(part, h)]
        return self._send(self._key(kind_of(h), part, h.destination) for h in far)

    def _all_results(self) -> list[e.Instruction]:
        ready = [at for at in self.wiring.takes if at[2] == ALL and self._is_made(at)]
        return [i for at in ready for i in self._goes_on(at)]

    def _send(self, keys: Iterable[FrameKey]) -> list[e.Instruction]:
        found = [e.SendFrame(key) for key in keys]
        self._encoding |= {send.key for send in found}
        return [*found]

    # ------------------------------------------------------------ frames

    def queued(self, key: FrameKey, size_bytes: int) -> None:
        """A frame is encoded; of no bytes: it could not be sent."""
        self._encoding.discard(key)
        self.sent_bytes += size_bytes
        self.upload_bytes += size_bytes * self._is_given(key)

    def acknowledged(self, key: FrameKey, began_s: float | None, now: float) -> list[e.Instruction]:
        """A frame is with who it is for, and `began_s` to leave; None: over a break, which is no
        time of the line's."""
        self._moved_at = now
        if not self._is_given(key):
            return []
        self._gave = min(self._gave[0], -math.inf if began_s is None else began_s), now
        if key not in self._leaving:
            return []
        self._leaving.discard(key)
        return self._all_results()

    def _is_given(self, key: FrameKey) -> bool:
        """Whether a frame is of the contribution to the present attempt."""
        plan = self.plan
        at = (key.step, key.term, key.hop)
        return plan is not None and at == (plan.round, plan.attempt, GIVE)

    @property
    def upload_s(self) -> float:
        """How long the contribution took to leave; 0: it did not, or a connection broke."""
        began_s, ended_s = self._gave
        return ended_s - began_s if math.isfinite(began_s) else 0.0

    def _key(self, hop: int, part: Span, peer: PeerId, block: int = 0) -> FrameKey:
        assert self.plan is not None
        at = self._run, self.attempt, self.plan.round, Role.ROUND, block
        return FrameKey(*at, hop, port_of(part), self._peer, peer)

    def expects(self, key: FrameKey) -> bool:
        """Whether a frame is one of the present attempt that has not come yet."""
        plan = self.plan
        if plan is None or not self.begun or key.run != self._run:
            return False
        if (key.step, key.term) != (plan.round, plan.attempt) or key.destination != self._peer:
            return False
        frame = self._frame(key)
        return frame in self._awaited or (self.again is not None and frame in self.again.unshown)

    def _frame(self, key: FrameKey) -> RoundFrame:
        return key.hop, span_of(key.port), PeerId(key.source), key.microbatch

    def _is_early(self, key: FrameKey, round_: int | None) -> bool:
        at = (key.step, key.term)
        if self.plan is None:
            return round_ is None or key.step >= round_
        known = (self.plan.round, self.plan.attempt)
        return at > known or (at == known and (not self.begun or key.hop == AUDIT))

    def arrived(self, key: FrameKey, round_: int | None) -> list[e.Instruction]:
        """A part came, and lies in its sum or its place. `round_`: the one under way; None: it has
        no version to work from."""
        if not self.expects(key):
            if self._is_early(key, round_):
                self._early[key] = None
                return []
            self.late += 1
            return [e.Release(key)]
        frame, out = self._frame(key), list[e.Instruction]([e.Release(key, taken=True)])
        self._awaited.discard(frame)
        if self.again is not None:
            self.again.unshown.discard(frame)
        hop, (_, part, *_) = self.wiring.comes.get(frame), frame
        if hop is None:
            return out
        if hop.taken == ALL and self._all_at_once:
            return out + self._all_results()
        at = part, self._peer, hop.taken
        return out + self._goes_on(at) if self._is_made(at) else out

    # ------------------------------------------------------------ waits

    def grows(self, key: FrameKey, now: float) -> list[e.Instruction]:
        """More of a frame came, which takes long."""
        if not self.expects(key):
            return []
        self._came, self._moved_at = self._came + 1, now
        if now < self._said_at + SAYS_S:
            return []
        self._said_at = now
        report = broker_pb2.RoundReport(run=self._replica, term=self._term, came=self._came)
        report.round, report.attempt = key.step, key.term
        return [e.Tell(broker_pb2.PeerMessage(round=report))]

    def waits_anew(self, now: float) -> list[e.Instruction]:
        """Count waits from now on: an attempt begins, or more is asked of it."""
        self._moved_at = self._said_at = now
        return [e.SetTimer("round", self.waits_until)]

    @property
    def waits_until(self) -> float:
        """When the plan's patience is over, if nothing comes or leaves meanwhile."""
        return self._moved_at + (self.plan.patience_s if self.plan is not None else 0.0)

    # ------------------------------------------------------------ links

    def link(self) -> list[e.Instruction]:
        """Have links with those of the attempt, and with no others."""
        orders = [self.plan, self.again.order if self.again is not None else None]
        dials = {PeerId(d.peer): d for order in orders if order is not None for d in order.dials}
        again = self.again.wiring.counterparts if self.again is not None else ()
        there = dict.fromkeys(p for p in (*self.wiring.counterparts, *again) if p != self._peer)
        wanted = {p: None if p in self._near else dials.get(p) for p in there}
        out: list[e.Instruction] = []
        gone = [peer for peer in self._linked if peer not in wanted]
        for peer in gone:
            del self._linked[peer]
            out += [] if peer in self._near else [e.HangUp(peer)]
        for peer, dial in wanted.items():
            known_here = peer in self._linked and self._linked[peer] == dial
            self._linked[peer] = dial
            if known_here:
                continue
            if peer not in self._near:
                where = e.Dial(peer, dial.address, dial.generation) if dial else e.ExpectPeer(peer)
                out.append(where)
            out.append(e.Allow(peer, Role.ROUND, _SLOTS))
        far = [peer for peer in gone if peer not in self._near]
        early = [key for peer in far for key in self._early if key.source == peer]
        for key in early:  # what came too early from who is gone has no effect
            del self._early[key]
        return [*out, *map(e.Release, early)]

    def end(self) -> list[e.Instruction]:
        """The assignment ends."""
        gone = [p for p in self._linked if p not in self._near]
        self._linked = {}
        return [e.HangUp(p) for p in gone]
