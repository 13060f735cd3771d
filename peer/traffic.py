"""What the frames of a run tell about links, for free.

A frame that nothing was under way before takes R(n) = round trip + n / bandwidth from being queued
to its acknowledgement, and more when other frames join it. So over a window the least disturbed
samples count: the least time of small frames is the round trip, the greatest rate of large ones
the bandwidth. A rate needs a known round trip, of this window or of an earlier probe, and bytes
that take at least a quarter of it; a snapshot's, fifty of it, since those begin slowly
(`net/patience.py`); else nothing is said.

At most one report per neighbour and window. Pure: times are those of the events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..dag.flow import Role
from ..net.frame import FrameKey
from ..proto import broker_pb2
from . import events as e

__all__ = ["WINDOW_S", "Traffic"]

WINDOW_S = 10.0
SMALL_BYTES = 4 * 1024
LARGE_BYTES = 64 * 1024
_TRIPS, _SNAPSHOT_TRIPS = 0.25, 50.0
_REMEMBERED = 1024


@dataclass(eq=False)
class _Neighbour:
    under_way: dict[FrameKey, None] = field(default_factory=dict)
    timed: tuple[FrameKey, int, float] | None = None  # (frame, bytes, when it was queued)
    since: float | None = None  # begin of the window; None: it has no sample
    round_trip_s: float = 0.0  # least of the window; 0: none
    bytes_per_s: float = 0.0  # greatest of the window; 0: none
    size_bytes: int = 0  # of the samples


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
        if not near.under_way and (size_bytes <= SMALL_BYTES or size_bytes >= LARGE_BYTES):
            near.timed = (key, size_bytes, now)
        near.under_way[key] = None

    def acknowledged(self, key: FrameKey, now: float) -> list[e.Instruction]:
        peer = key.destination
        near = self._neighbours.get(peer)
        if near is None or key not in near.under_way:
            return []
        del near.under_way[key]
        if near.timed is not None and near.timed[0] == key:
            _, size_bytes, queued_s = near.timed
            trips = _SNAPSHOT_TRIPS if key.role is Role.SNAPSHOT else _TRIPS
            self._sample(peer, near, size_bytes, now - queued_s, now, trips)
            near.timed = None
        if near.since is None or now - near.since < WINDOW_S:
            return []
        report = broker_pb2.LinkReport(
            peer=peer,
            latency_s=near.round_trip_s / 2,
            bytes_per_s=near.bytes_per_s,
            size_bytes=near.size_bytes,
        )
        near.since, near.round_trip_s, near.bytes_per_s, near.size_bytes = None, 0.0, 0.0, 0
        return [e.Tell(broker_pb2.PeerMessage(link=report))]

    def _sample(
        self,
        peer: str,
        near: _Neighbour,
        size_bytes: int,
        seconds: float,
        now: float,
        trips: float,
    ) -> None:
        """`trips`: how many round trips a rate's bytes have to take."""
        if seconds <= 0:
            return
        if size_bytes <= SMALL_BYTES:
            near.round_trip_s = min(near.round_trip_s or seconds, seconds)
            self.know(peer, near.round_trip_s)
        else:
            round_trip = near.round_trip_s or self._round_trips.get(peer, 0.0)
            alone = seconds - round_trip
            if not round_trip or alone < trips * round_trip:
                return
            near.bytes_per_s = max(near.bytes_per_s, size_bytes / alone)
        near.size_bytes += size_bytes
        if near.since is None:
            near.since = now

    def know(self, peer: str, round_trip_s: float) -> None:
        """A round trip that was measured, here or by a probe."""
        self._round_trips.pop(peer, None)
        self._round_trips[peer] = round_trip_s
        if len(self._round_trips) > _REMEMBERED:
            del self._round_trips[next(iter(self._round_trips))]

    def broke(self, peer: str) -> None:
        """A connection broke: what is under way goes on after a pause that is none of its own."""
        if peer in self._neighbours:
            self._neighbours[peer].timed = None

    def clear(self) -> None:
        """The assignment is over, its links are hung up."""
        self._neighbours.clear()
