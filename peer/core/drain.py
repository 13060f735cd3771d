"""A peer on its way out: of its run, as its owner closed it, or for good. Pure; `PeerMachine` acts.

- The broker's drain: no new run is taken; when the present one ends it leaves for good.
- The owner's stop, or the owner closing it: the broker is told, which has its part handed over to
  another peer and then says Leave, or says that nobody takes it (HandoverReply). In that case it
  leaves after the step that it is in, or after the round where its clients make no steps, and so it
  does without a broker; at the latest when the broker said, or after `drain_s`.
"""

from __future__ import annotations

from typing import Literal

from ...proto import broker_pb2
from ...proto.common_pb2 import Reason
from . import events as e
from .assignment import Assignment
from .options import PeerOptions
from .part import Phase

__all__ = ["Drain", "Leaves"]

Leaves = Literal["", "for good", "the run"]
"""What a drain that is over comes to; "the run": it stays a member."""


def _has_a_part(part: Assignment | None) -> bool:
    """Whether something runs, or others still need what it has done."""
    return part is not None and (_busy(part) or part.phase is Phase.FINISHED)


def _busy(part: Assignment) -> bool:
    """Whether something runs that a drain waits for."""
    return part.phase in (Phase.RUNNING, Phase.EXPORTING)


class Drain:
    """How far a peer is on its way out: of its run, closed by its owner, or for good."""

    def __init__(self, options: PeerOptions) -> None:
        self._options = options
        self.by: Literal["", "owner", "broker", "closed"] = ""
        """Who asked for it; "closed": the owner, and it comes back."""
        self.hands_over = False
        """Whether it waits for its part to be handed over, or for the broker's word on it."""
        self._place = (-1, -1)  # step and round, whose end it waits for otherwise
        self._at_once = False
        self.shut: Reason | None = None
        """Why its owner keeps it out of runs for the time being; None: the peer takes part."""

    @property
    def closed(self) -> Reason | None:
        """Why the owner keeps it out of runs, for good too; None: it takes part."""
        if self.by == "owner":
            return Reason(code="stopped", text="its owner stops it")
        return self.shut

    def _tell_closed(self) -> e.Instruction:
        told = broker_pb2.Availability(closed=self.closed)
        return e.Tell(broker_pb2.PeerMessage(availability=told))

    def stop_asked(
        self, part: Assignment | None, now: float, *, at_once: bool, away: bool
    ) -> list[e.Instruction]:
        """The owner stops the peer; a second time, with nothing running, or `at_once`: it does not
        wait for anything."""
        again, self.by = self.by == "owner", "owner"
        if part is None or at_once or again or not _has_a_part(part):
            self._at_once = True
            return []
        return [self._tell_closed(), *self._part_from(part, now, away=away)]

    def broker_asked(self, part: Assignment | None) -> list[e.Instruction]:
        """The broker wants no new run here."""
        if self.by != "owner":
            self.by = "broker"
        if part is not None and part.alive:
            return []
        drained = broker_pb2.Drained(run=part.run if part else "")
        return [e.Tell(broker_pb2.PeerMessage(drained=drained))]

    def owner_looked(
        self, facts: e.OwnerLooked, part: Assignment | None, now: float, *, away: bool
    ) -> list[e.Instruction]:
        """Tells the broker what has changed; closed, it leaves its run after the step."""
        before, self.shut = self.shut, self._options.terms.closed(facts)
        if before == self.shut or self.by == "owner":
            return []  # stopped, it is closed until its end
        out = [self._tell_closed()]
        if self.shut is None:
            if self.by == "closed":
                self.end()
        elif part is not None and part.alive and not self.by:
            self.by = "closed"
            if _has_a_part(part):
                out += self._part_from(part, now, away=away)
        return out

    def _part_from(self, part: Assignment, now: float, *, away: bool) -> list[e.Instruction]:
        """A drain of the owner's begins, of which the broker hears if it is not away."""
        self._place, self.hands_over = part.place, not away
        what = "the end of the step" if away else "the broker to say who takes its part"
        return self._wait(what, self._options.drain_s, now)

    def told(
        self, stay: broker_pb2.HandoverReply, part: Assignment, now: float
    ) -> list[e.Instruction]:
        """What becomes of the part, by the broker's word."""
        if stay.within_s > 0:
            within_s = min(stay.within_s, self._options.hand_over_s)
            return self._wait(stay.reason.text, within_s, now)
        self.hands_over, self._place = False, part.place
        return self._wait(f"the end of the step: {stay.reason.text}", self._options.drain_s, now)

    def _wait(self, what: str, within_s: float, now: float) -> list[e.Instruction]:
        return [e.SetTimer("drain", now + within_s), e.ShowWaiting(what, within_s)]

    def end(self) -> None:
        """End the draining, done or not wanted any more."""
        self.by, self.hands_over = "", False

    def due(self, part: Assignment | None) -> Leaves:
        """Whether what it waits for is over."""
        if not self.by:
            return ""
        if self._at_once:
            return "for good"
        if self.by == "broker":
            return "" if part is not None and part.alive else "for good"
        if part is None:
            if self.by == "owner":
                return "for good"
            self.end()  # the run let it go meanwhile
            return ""
        if self.hands_over and part.phase not in (Phase.WARM, Phase.FAILED):
            return ""
        stepped = part.phase is Phase.RUNNING and part.place > self._place
        if self.by == "closed":
            return "the run" if stepped or not _has_a_part(part) else ""
        return "for good" if stepped or not _busy(part) else ""

    @property
    def why(self) -> str:
        """The reason why the peer leaves for good, for people."""
        return "the broker drained it" if self.by == "broker" else "the owner stopped it"
