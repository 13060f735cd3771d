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
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ....dag.plan.plan import PeerId
from ....dag.rounds.vector import RunVector, Span
from ....dag.rounds.wiring import (
    AUDIT,
    GATHER,
    GIVE,
    RESULT,
    VERSION,
    RoundFrame,
    RoundWiring,
    Share,
    port_of,
    segments_of,
    span_of,
    wiring,
)
from ....dag.schedule.flow import Role
from ....net.links.frame import FrameKey
from ....proto import broker_pb2
from .. import events as e

__all__ = ["RoundExchange", "run_of"]

_NOT_YET = math.inf, 0.0
"""When a contribution began to leave, and when others had all of it: nothing has left."""


def run_of(replica: str) -> str:
    """The run that a replica is of: frames between replicas have its id."""
    return replica.partition(".")[0]


class RoundExchange:
    """The attempt of the round under way, and what came too early. plan: None until there is one.
    late: frames without effect, so far. sent_bytes: of the round. upload_bytes: of its own
    contribution, in this attempt."""

    def __init__(self, peer: PeerId, replica: str, vector: RunVector) -> None:
        self.plan: broker_pb2.RoundPlan | None = None
        self.wiring = RoundWiring()
        self.order: broker_pb2.RoundAudit | None = None
        """What is added up again; None: nothing yet."""
        self.again = RoundWiring()
        """What this peer does for that."""
        self.begun = False
        """Whether frames of the attempt are exchanged."""
        self.late = self.sent_bytes = 0
        self._gave, self.upload_bytes = _NOT_YET, 0
        self._leaving: set[FrameKey] = set()
        """Frames of the contribution that are on their way, where results wait for them."""
        self._peer, self._run, self._vector = peer, run_of(replica), vector
        self._awaited: set[RoundFrame] = set()
        """Frames that are to come."""
        self._unshown: set[RoundFrame] = set()
        """Those of them that come to be added up again."""
        self._early: dict[FrameKey, None] = {}
        """Frames that came of an attempt that has not begun here; each keeps its slot."""

    # ------------------------------------------------------------ attempts

    def begin_round(self) -> None:
        """Nothing is planned yet."""
        self.plan, self.begun, self.sent_bytes = None, False, 0
        self._awaited, self.wiring = set(), RoundWiring()
        self._forget_audit()

    def planned(self, plan: broker_pb2.RoundPlan) -> None:
        """In place of what there is."""
        self.plan, self.begun, self._gave = plan, False, _NOT_YET
        self.upload_bytes, self._leaving = 0, set()
        self._forget_audit()
        segments, fragment, one = segments_of(plan), plan.fragment, plan.by_client
        self.wiring = wiring(
            self._vector, segments, self._peer, fragment, by_client=one, most=plan.part
        )

    def _forget_audit(self) -> None:
        self.order, self.again, self._unshown = None, RoundWiring(), set()

    def ordered(self, order: broker_pb2.RoundAudit) -> None:
        """Sums of the attempt are to be added up again, in place of those before."""
        assert self.plan is not None, "nothing is exchanged"
        self.order, me = order, self._peer
        segments, fragment, most = segments_of(order), self.plan.fragment, self.plan.part
        self.again = wiring(self._vector, segments, me, fragment, again=True, most=most)
        self._unshown = {(AUDIT, *frame[1:]) for frame in self.again.comes(me)}

    def shows(self) -> list[e.Instruction]:
        """Send contributions to who adds up again, and take those that came early."""
        me = self._peer
        out = self._send(self._key(AUDIT, s) for s in self.again.gives if s.peer != me)
        early, self._early = self._early, {}
        for key in early:
            out += self.arrived(key, None)
        return out

    @property
    def adds_again(self) -> bool:
        """Whether this peer adds up again, be it a segment that has no part."""
        order = self.order
        return order is not None and any(s.aggregator == self._peer for s in order.segments)

    @property
    def unshown(self) -> list[PeerId]:
        """Peers whose contributions are still to come, to be added up again."""
        return sorted({peer for _, _, peer, _ in self._unshown})

    def joins(self) -> None:
        """The device hears of it."""
        self._awaited = self.wiring.comes(self._peer)

    def begins(self) -> list[e.Instruction]:
        """Send what is given, and take frames, those too that came early."""
        self.begun = True
        me = self._peer
        keys = [self._key(GIVE, s) for s in self.wiring.gives if s.peer != me]
        self._leaving = {*keys} if self._together else set()
        out = self._send(keys)
        parts = dict.fromkeys((*self.wiring.adds, *(s.part for s in self.wiring.sums)))
        alone = [part for part in parts if self._is_summed(part)]
        early, self._early = self._early, {}
        for key in early:
            out += self.arrived(key, None)
        for part in alone:
            out += self._summed(part)
        return out

    def sends_versions(self) -> list[e.Instruction]:
        """The version is made, and goes to those who take it whole."""
        return self._send([self._key(VERSION, s) for s in self.wiring.sends])

    @property
    def attempt(self) -> int:
        """Number of the attempt; 0: none is planned."""
        return self.plan.attempt if self.plan is not None else 0

    @property
    def patience_s(self) -> float:
        """Return for how long it waits for something to come; 0: nothing is planned."""
        return self.plan.patience_s if self.plan is not None else 0.0

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

    @property
    def leaves(self) -> bool:
        """Whether results wait for the own contribution to leave."""
        return bool(self._leaving)

    def waits_no_longer(self) -> list[e.Instruction]:
        """Send what waits until the own contribution has left, as far as it is there."""
        self._leaving = set()
        parts = self.wiring.adds if self._together and self.begun else ()
        return [i for part in parts if self._is_summed(part) for i in self._summed(part)]

    def _is_summed(self, part: Span) -> bool:
        if self._all_at_once:
            return not self._leaving and not any(hop == GIVE for hop, *_ in self._awaited)
        givers = self.wiring.heard(part)
        return not any((g.hop, part, g.peer, 0) in self._awaited for g in givers)

    @property
    def _together(self) -> bool:
        return self.plan is not None and self.plan.together

    @property
    def _all_at_once(self) -> bool:
        """Whether results of all parts go out together."""
        return self.wiring.by_client or self._together

    def _summed(self, part: Span) -> list[e.Instruction]:
        """All of a part that is added up here has come."""
        if part in self.wiring.adds:
            return self._results(part)
        return self._send(self._key(GATHER, s) for s in self.wiring.sums if s.part == part)

    def _results(self, part: Span) -> list[e.Instruction]:
        return self._send(self._key(RESULT, s) for s in self.wiring.results if s.part == part)

    def _send(self, keys: Iterable[FrameKey]) -> list[e.Instruction]:
        return [e.SendFrame(key) for key in keys]

    # ------------------------------------------------------------ frames

    def queued(self, key: FrameKey, size_bytes: int) -> None:
        """A frame is encoded."""
        self.sent_bytes += size_bytes
        self.upload_bytes += size_bytes * self._is_given(key)

    def acknowledged(self, key: FrameKey, began_s: float | None, now: float) -> list[e.Instruction]:
        """A frame is with who it is for, and `began_s` to leave; None: over a break, which is no
        time of the line's."""
        if not self._is_given(key):
            return []
        self._gave = min(self._gave[0], -math.inf if began_s is None else began_s), now
        if key not in self._leaving:
            return []
        self._leaving.discard(key)
        return [i for part in self.wiring.adds if self._is_summed(part) for i in self._summed(part)]

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

    def _key(self, hop: int, share: Share) -> FrameKey:
        assert self.plan is not None
        number, port = self.plan.round, port_of(share.part)
        return FrameKey(
            *(self._run, self.attempt, number, Role.ROUND, share.block, hop, port),
            *(self._peer, share.peer),
        )

    def expects(self, key: FrameKey) -> bool:
        """Whether a frame is one of the present attempt that has not come yet."""
        plan = self.plan
        if plan is None or not self.begun or key.run != self._run:
            return False
        if (key.step, key.term) != (plan.round, plan.attempt) or key.destination != self._peer:
            return False
        frame = self._frame(key)
        return frame in self._awaited or frame in self._unshown

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
        part = span_of(key.port)
        self._awaited.discard(self._frame(key))
        self._unshown.discard(self._frame(key))
        out: list[e.Instruction] = [e.Release(key, taken=True)]
        if key.hop == RESULT and self.wiring.sums:
            return out + self._results(part)
        if key.hop in (GIVE, GATHER) and self._is_summed(part):
            for done in self.wiring.adds if self._all_at_once else (part,):
                out += self._summed(done)
        return out

    def forget(self, peer: PeerId) -> list[e.Instruction]:
        """There is no link with a peer any more: what came too early from it has no effect."""
        gone = [key for key in self._early if key.source == peer]
        for key in gone:
            del self._early[key]
        return [e.Release(key) for key in gone]
