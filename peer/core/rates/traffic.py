"""What the frames of a run tell about links, for free.

A link is busy from when the first byte of a frame was handed to it until a round trip before the
last frame's acknowledgement, as long as the next one was handed out before the one in front of it
had arrived. Such a *flow* fills the link, so

    rate = bytes of the flow / seconds of the flow

whatever waits for a credit or for the compute of the other side, which is no time of the flow's.
Rules:

- A flow counts of at least LEAST_BYTES that took LONG_S and a round trip: most token buckets have
  let their burst through by then, and the latency's own error hardly matters. One with snapshots
  in it takes fifty round trips, since those begin slowly (`net/links/patience.py`).
- What goes to several neighbours at once shares this peer's uplink. Flows that were alone count
  where they are a quarter of the bytes; else each with what left beside it, which is the rate of
  the uplink that they share, and the report says so. How much that was is known once it is
  acknowledged: until then a flow says nothing.
- Of the flows of a window (of its last three, before it is over) the median byte's rate is told: a
  pause of a process on the one hand and a burst on the other change few of the bytes.
- The least time of small frames that nothing was under way before is the round trip.

Without a round trip, of this window or of an earlier probe, no rate is known. A neighbour is told
of once per window, and once in LEAST_S when its rate is the first one, or by FAR another one than
was told last. Where several peers send to one at once, each sees its share of that one's downlink.

Pure: times are those of the events, and of the links' same clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from ....dag.schedule.flow import Role
from ....net.links.frame import FrameKey
from ....proto import broker_pb2
from .. import events as e

__all__ = ["FAR", "LEAST_S", "WINDOW_S", "Traffic"]

WINDOW_S = 10.0
LEAST_S = 0.5
FAR = 1.5
LONG_S = 0.05
"""A bucket of 4 MiB has passed a gigabit by then, one of 128 KiB anything."""
SMALL_BYTES = 4 * 1024
LEAST_BYTES = 8 * 1024
"""Fewer that took long have waited for a process: a norm's eight bytes, acknowledged 50 ms late on
a busy machine, would make a line of 160 bytes/s."""
_ENDLESS_S = 5.0
"""A flow that goes on for so long counts as far as it was acknowledged."""
_TRIPS, _SNAPSHOT_TRIPS = 1.0, 50.0
_REMEMBERED = 1024
_MOST_FLOWS = 64
_NEWEST = 3
_ALONE, _ENOUGH_ALONE = 1.25, 0.25


@dataclass(eq=False, slots=True)
class _Flow:
    """Times of its first and last byte. `trips`: how many round trips it has to take. `after`: what
    went before that time was told already."""

    began: float
    until: float
    size_bytes: int = 0
    trips: float = _TRIPS
    after: float = -math.inf

    def within(self, other: _Flow) -> float:
        """Bytes that went while the other one did, taken as even over its own time."""
        seconds = min(self.until, other.until) - max(self.began, other.began)
        return self.size_bytes * seconds / (self.until - self.began) if seconds > 0 else 0.0


@dataclass(eq=False)
class _Neighbour:
    under_way: dict[FrameKey, tuple[int, float]] = field(default_factory=dict)  # bytes, queued at
    timed: tuple[FrameKey, float] | None = None  # a small frame, and when it was queued
    flow: _Flow | None = None  # the newest
    flows: deque[_Flow] = field(default_factory=lambda: deque(maxlen=_MOST_FLOWS))  # those before
    since: float | None = None  # begin of the window; None: it has no sample
    round_trip_s: float = 0.0  # least of the window; 0: none
    looked: float = 0.0  # when its rate was asked for last
    told: float = 0.0  # bytes/s that were told last; 0: none in this assignment

    def all_flows(self) -> list[_Flow]:
        return [*self.flows, self.flow] if self.flow else [*self.flows]


class Traffic:
    """The neighbours of one assignment."""

    def __init__(self) -> None:
        self._neighbours: dict[str, _Neighbour] = {}
        self._round_trips: dict[str, float] = {}  # newest known, oldest first

    def queued(self, key: FrameKey, size_bytes: int, now: float) -> None:
        peer = key.destination
        near = self._neighbours.get(peer)
        if near is None:
            near = self._neighbours[peer] = _Neighbour()
        if not near.under_way and size_bytes <= SMALL_BYTES:
            near.timed = (key, now)
        near.under_way[key] = (size_bytes, now)

    def acknowledged(self, key: FrameKey, began_s: float | None, now: float) -> list[e.Instruction]:
        """`began_s`: when its first byte was handed to the link; None: over a break."""
        peer = key.destination
        near = self._neighbours.get(peer)
        if near is None or key not in near.under_way:
            return []
        size_bytes, _ = near.under_way.pop(key)
        if near.timed is not None and near.timed[0] == key:
            seconds, near.timed = now - near.timed[1], None
            if seconds > 0:
                near.round_trip_s = min(near.round_trip_s or seconds, seconds)
                self.know(peer, near.round_trip_s)
                near.since = now if near.since is None else near.since
        trip_s = self._round_trips.get(peer)
        if trip_s is not None and began_s is not None:
            self._flows_on(near, key.role, size_bytes, began_s, now - trip_s)
            near.since = now if near.since is None else near.since
        return self._told(peer, near, now)

    @staticmethod
    def _flows_on(
        near: _Neighbour, role: Role, size_bytes: int, began_s: float, until: float
    ) -> None:
        flow = near.flow
        if flow is None or began_s > flow.until:
            if flow is not None and flow.until - flow.began >= LONG_S:
                near.flows.append(flow)
            near.flow = flow = _Flow(began_s, until)
        flow.began = max(flow.after, min(flow.began, began_s))
        flow.until = max(flow.until, until)
        flow.size_bytes += size_bytes
        if role is Role.SNAPSHOT:
            flow.trips = _SNAPSHOT_TRIPS

    def _told(self, peer: str, near: _Neighbour, now: float) -> list[e.Instruction]:
        if near.since is None:
            return []
        passed = now - near.since
        due = passed >= WINDOW_S
        if not due and (passed < LEAST_S or now - near.looked < LEAST_S):
            return []
        near.looked = now
        found = self._rate(peer, near, _MOST_FLOWS + 1 if due else _NEWEST)
        if found is None:
            return []
        rate, size_bytes, shared = found
        surprises = rate > 0 and not near.told / FAR < rate < near.told * FAR
        if not due and not surprises:
            return []
        near.told = rate or near.told
        latency_s = near.round_trip_s / 2
        near.since, near.round_trip_s = None, 0.0
        if not rate and not latency_s:
            return []
        flow = near.flow
        if flow is not None and near.under_way and flow.until - flow.began >= _ENDLESS_S:
            near.flows.append(flow)  # it is told; what goes on counts from here
            near.flow = _Flow(flow.until, flow.until, 0, flow.trips, flow.until)
        report = broker_pb2.LinkReport(
            peer=peer, latency_s=latency_s, bytes_per_s=rate, size_bytes=size_bytes, shared=shared
        )
        return [e.Tell(broker_pb2.PeerMessage(link=report))]

    def _rate(self, peer: str, near: _Neighbour, newest: int) -> tuple[float, int, bool] | None:
        """(bytes/s, of so many bytes, whether with what left beside them) of the window's newest
        flows; zeros: nothing is known; None: nothing yet, before what left beside them is
        acknowledged."""
        assert near.since is not None
        trip_s = self._round_trips.get(peer)
        if trip_s is None:
            return 0.0, 0, False
        others = [
            flow
            for name, other in self._neighbours.items()
            if name != peer
            for flow in other.all_flows()
        ]
        # Since when something leaves for others of which nobody knows yet how much was when.
        open_since = min(
            (
                queued
                for name, other in self._neighbours.items()
                if name != peer
                for _, queued in other.under_way.values()
            ),
            default=math.inf,
        )
        undecided = False
        alone: list[tuple[float, int]] = []
        every: list[tuple[float, int]] = []
        for flow in near.all_flows():
            seconds = flow.until - flow.began
            if flow is near.flow and near.under_way and seconds < _ENDLESS_S:
                continue  # what of it has left and was not acknowledged would be missing
            if flow.until < near.since - trip_s or flow.size_bytes < LEAST_BYTES:
                continue
            if seconds < max(LONG_S, flow.trips * trip_s):
                continue
            if open_since < flow.until:
                undecided = True
                continue
            together = flow.size_bytes + sum(other.within(flow) for other in others)
            shared = together > _ALONE * flow.size_bytes
            sample = ((together if shared else flow.size_bytes) / seconds, flow.size_bytes)
            every.append(sample)
            alone += [] if shared else [sample]
        every, alone = every[-newest:], alone[-newest:]
        shared = _bytes(alone) < _ENOUGH_ALONE * _bytes(every)
        found = every if shared else alone
        if not found:
            return None if undecided else (0.0, 0, False)
        half, seen = _bytes(found) / 2, 0
        for rate, size_bytes in sorted(found):
            seen += size_bytes
            if seen >= half:
                return rate, _bytes(found), shared
        raise AssertionError("a median that is not there")

    def know(self, peer: str, round_trip_s: float) -> None:
        """A round trip that was measured, here or by a probe."""
        self._round_trips.pop(peer, None)
        self._round_trips[peer] = round_trip_s
        if len(self._round_trips) > _REMEMBERED:
            del self._round_trips[next(iter(self._round_trips))]

    def broke(self, peer: str) -> None:
        """A connection broke: what is under way goes on after a pause that is none of its own."""
        if near := self._neighbours.get(peer):
            near.timed = near.flow = None

    def clear(self) -> None:
        """The assignment is over, its links are hung up."""
        self._neighbours.clear()


def _bytes(flows: list[tuple[float, int]]) -> int:
    return sum(size_bytes for _, size_bytes in flows)
