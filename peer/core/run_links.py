"""The links that an assignment needs: which are up, which were down when the broker last heard of
them, and since when a needed one has been down.

Pure: no I/O, no clock, no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...dag.plan.plan import PeerId
from ...proto import broker_pb2
from . import events as e

__all__ = ["RunLinks"]


class RunLinks:
    """Links of one run; the methods return what is to be done, in order. `most_s`: how long a
    needed link may be down."""

    def __init__(self, run: str, term: int, most_s: float) -> None:
        self._run, self._term, self._most_s = run, term, most_s
        self._up: dict[PeerId, bool] = {}
        self._told_down: set[PeerId] = set()
        self._down_since: dict[PeerId, float] = {}
        """Of needed ones."""
        self._dialled = 0
        """Generation of the newest dial of a keeper that came after the plan was made."""

    def __contains__(self, peer: object) -> bool:
        return peer in self._up

    def expect(self, peers: Iterable[PeerId]) -> None:
        """Expect links with exactly these peers; none is up."""
        self._up = dict.fromkeys(peers, False)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._up)

    def keeper(self, order: broker_pb2.SnapshotOrder) -> list[e.Instruction]:
        """Dial or expect the keeper that an order names: it may have come, or come back, after the
        plan was made."""
        peer, dial = PeerId(order.keeper), order.dial
        if not peer:
            return []
        known = peer in self._up
        self._up.setdefault(peer, False)
        if dial.peer == peer and dial.generation > self._dialled:
            self._dialled = dial.generation
            return [e.Dial(peer, dial.address, dial.generation)]
        return [] if known else [e.ExpectPeer(peer)]

    def changed(self, peer: PeerId, up: bool, *, tells: bool) -> list[e.Instruction]:
        """A link came up or broke; with `tells` the broker hears of it, unless it knows."""
        before, self._up[peer] = self._up[peer], up
        if up:
            self._down_since.pop(peer, None)
        if not tells or not (peer in self._told_down if up else before):
            return []
        self._told_down ^= {peer}
        return [self._status(peer, up)]

    def need(self, peers: Sequence[PeerId], now: float) -> list[e.Instruction]:
        """Require the links with these peers to be up before long."""
        out: list[e.Instruction] = []
        for peer in peers:
            if not self._up[peer]:
                since = self._down_since.setdefault(peer, now)
                out.append(e.SetTimer(f"link:{peer}", since + self._most_s))
        return out

    def too_long(self, peer: PeerId, now: float) -> float:
        """Seconds that a needed link has been down when it is too long, otherwise 0: a timer may be
        of an earlier break."""
        away = now - self._down_since.get(peer, now)
        return away if away >= self._most_s * 0.999 else 0.0

    def told_again(self) -> list[e.Instruction]:
        """What the broker knew of broken ones, which may not have come to it."""
        return [self._status(peer, False) for peer in sorted(self._told_down)]

    def validate(self) -> None:
        assert all(p in self._up for p in self._down_since)

    def _status(self, peer: PeerId, up: bool) -> e.Tell:
        status = broker_pb2.LinkStatus(run=self._run, term=self._term, peer=peer, up=up)
        return e.Tell(broker_pb2.PeerMessage(link_status=status))
