"""I8 and what links promise: credits, bounded queues, no acknowledgement before its frame.

A link is looked at when a frame of it arrives, is queued or is acknowledged.

    slots   of each role: taken ≤ allowed; credit that was told and not used ≤ free slots
    queue   frames that wait to be acknowledged ≤ two steps' worth: a peer is at most one step ahead
            of a neighbour, since the norm needs everyone
    acks    the receiver's machine has had the frame before
"""

from __future__ import annotations

from ...dag.schedule.flow import Flow
from ...net.links.frame import FrameKey
from ...net.links.link import Link
from ...peer.core import events as p
from ..virtual.clock import Observed
from ..virtual.world import World
from .violation import Broken, Check

__all__ = ["LinkCheck"]

_SPARE = 64
"""Frames beyond those of the plan: probes, which are few."""


class LinkCheck(Check):
    """Checks I8 and what links promise: credits, bounded queues, acknowledgements after frames."""

    wants = (
        p.FrameArrived,
        p.FrameRefused,
        p.FrameAcknowledged,
        p.FrameQueued,
        p.Built,
        p.Tell,
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._there: set[FrameKey] = set()
        """Frames that arrived and were not acknowledged."""
        self._most: dict[tuple[str, str], int] = {}
        """By (source, destination): frames of two steps."""
        self._flows: set[int] = set()
        self._over: set[str] = set()

    def observe(self, seen: Observed) -> None:
        who, record = seen.who, seen.record
        match record:
            case p.FrameArrived(key) | p.FrameRefused(key):
                if key.destination == who:
                    self._there.add(key)
                    self._slots(who, key.source)
            case p.FrameAcknowledged(key):
                if key not in self._there:
                    raise Broken("I8", f"{key} was acknowledged to {who} before it arrived")
                self._there.remove(key)
            case p.FrameQueued(key):
                self._queue(who, key.destination)
            case p.Built():
                self._plan(self.world.orders.flow(record.run, record.term))
            case p.Tell():
                machine = self.world.peers[who].machine
                part, most = machine.assignment, machine.options.reports
                if part is not None and len(part.reports) > most:
                    kept = len(part.reports)
                    raise Broken("I8", f"{who} keeps {kept} reports for the broker, at most {most}")

    def _plan(self, flow: Flow) -> None:
        if id(flow) in self._flows:
            return
        self._flows.add(id(flow))
        # Of a run that is over, links were hung up: no acknowledgement comes any more.
        self._there = {key for key in self._there if key.run not in self._over}
        found: dict[tuple[str, str], int] = {}
        for transfer in flow.taken_by:
            pair = transfer.source, transfer.destination
            found[pair] = found.get(pair, 0) + 2
        for ends, most in found.items():
            self._most[ends] = max(self._most.get(ends, 0), most)

    def _link(self, who: str, other: str) -> Link | None:
        return self.world.peers[who]._transport.board._links.get(other)

    def _slots(self, who: str, other: str) -> None:
        link = self._link(who, other)
        if link is None:
            return
        inbox = link._inbox
        taken = dict.fromkeys(inbox._slots, 0)
        for key in inbox._held:
            taken[key.role] += 1
        for frame in inbox._partial.values():
            taken[frame.header.key.role] += 1
        for role, slots in inbox._slots.items():
            if taken[role] > slots.allowed:
                raise Broken(
                    "I8",
                    f"{who} holds {taken[role]} {role.value} frames of {other}, of at most "
                    f"{slots.allowed}",
                )
            told, free = slots.granted - slots.announced, slots.allowed - taken[role]
            if told > free:
                raise Broken(
                    "I8",
                    f"{who} has told {other} of {told} slots for {role.value} frames: {free} are "
                    "free",
                )

    def _queue(self, who: str, other: str) -> None:
        link = self._link(who, other)
        most = self._most.get((who, other), 0) + _SPARE
        if link is not None and len(link._outbox) > most:
            raise Broken(
                "I8", f"{len(link._outbox)} frames wait at {who} for {other}: at most {most}"
            )

    def ended(self, run: str) -> None:
        self._over.add(run)
