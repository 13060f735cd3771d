"""Which links the rounds of one holder make and end. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ....dag.plan.plan import PeerId
from ....dag.schedule.flow import Role
from ....proto.broker_pb2 import DialOrder
from .. import events as e

__all__ = ["RoundLinks"]

_SLOTS = 4
"""Parts that may be here or on their way from one peer: 16 MB in fp32."""


class RoundLinks:
    """Links stay from round to round, as long as they are wanted. Those with `near`, peers of its
    own replica, are there whatever rounds want."""

    def __init__(self, peer: PeerId, near: Collection[PeerId]) -> None:
        self._peer, self._near = peer, frozenset(near)
        self._linked: dict[PeerId, DialOrder | None] = {}
        """By counterpart, how it is dialled from here; None: it dials, or is near."""

    def want(self, peers: Iterable[PeerId], dials: Iterable[DialOrder]) -> list[e.Instruction]:
        """peers: with whom it exchanges, and `dials`: those of them that it dials."""
        orders = {PeerId(d.peer): d for d in dials}
        there = dict.fromkeys(p for p in peers if p != self._peer)
        wanted = {p: None if p in self._near else orders.get(p) for p in there}
        out: list[e.Instruction] = []
        for peer in [p for p in self._linked if p not in wanted]:
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
        return out

    def end(self) -> list[e.Instruction]:
        """The assignment ends."""
        gone = [p for p in self._linked if p not in self._near]
        self._linked = {}
        return [e.HangUp(p) for p in gone]
