"""Rounds of gossip that the broker has told ahead, and that the holders of a replica begin by
themselves. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from ....dag.plan.plan import PeerId
from ....proto import broker_pb2

__all__ = ["Agreement", "RoundsAhead"]


class Agreement:
    """Whether all holders of a replica are done with a round: each has its part of the version, and
    all that it sent has come. None of them goes past it before, for a holder could be lost, and the
    others had nothing to go back to. All tell the hub, and the hub tells all."""

    def __init__(self, peer: PeerId, hub: PeerId, near: Collection[PeerId]) -> None:
        """`near`: the other holders, at the hub all of them."""
        self._is_hub = peer == hub
        self.others = tuple(near) if self._is_hub else (hub,)
        """To whom it says so, and who say so to it."""
        self._heard: dict[int, set[PeerId]] = {}
        self._said = -1

    def hears(self, number: int, source: PeerId) -> None:
        """One of the others is done with a round."""
        if number >= self._said and source in self.others:
            self._heard.setdefault(number, set()).add(source)

    def says(self, number: int) -> tuple[PeerId, ...]:
        """This peer is done: to whom that is to be said now, once."""
        if self._said >= number or (self._is_hub and not self._all(number)):
            return ()
        self._said = number
        self._heard = {n: who for n, who in self._heard.items() if n >= number}
        return self.others

    def holds(self, number: int) -> bool:
        """Whether this peer knows it of all."""
        return self._said >= number and self._all(number)

    def _all(self, number: int) -> bool:
        return self._heard.get(number, set()).issuperset(self.others)


class RoundsAhead:
    """Those of one replica, in order."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self._rounds: deque[broker_pb2.RoundAhead] = deque()

    @property
    def next(self) -> broker_pb2.RoundAhead | None:
        """The first of them; None: there is none."""
        return self._rounds[0] if self._rounds else None

    def add(self, ahead: broker_pb2.RoundAhead, now: broker_pb2.RoundStart | None) -> bool:
        """Whether it is new: the round behind the last that is known. `now`: the round under
        way."""
        last = self._rounds[-1].start if self._rounds else now
        if last is None or ahead.start.round != last.round + 1:
            return False
        self._rounds.append(ahead)
        return True

    def begun(self) -> None:
        """The first of them is the round under way."""
        self._rounds.popleft()

    def clear(self) -> None:
        """None of them holds any more."""
        self._rounds.clear()

    @property
    def dials(self) -> dict[PeerId, broker_pb2.DialOrder | None]:
        """With whom it will exchange, and how that peer is dialled from here; None: it dials."""
        found: dict[PeerId, broker_pb2.DialOrder | None] = {}
        for ahead in self._rounds:
            found |= dict.fromkeys(p for p in _named(ahead.plan) if p != self._peer)
            found |= {PeerId(d.peer): d for d in ahead.plan.dials}
        return found


def _named(plan: broker_pb2.RoundPlan) -> Iterator[PeerId]:
    for s in plan.segments:
        yield PeerId(s.aggregator)
        yield from map(PeerId, (*(g.peer for g in s.givers), *s.takers))
        for v in s.versions:
            yield from (PeerId(v.source), PeerId(v.destination))
