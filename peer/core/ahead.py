"""Rounds of gossip that the broker has told ahead, and that this peer begins by itself. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ...dag.plan.plan import PeerId
from ...proto import broker_pb2

__all__ = ["RoundsAhead"]


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
