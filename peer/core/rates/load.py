"""The load that a probe puts on a link, and what its acknowledgements tell: latency, the rate that
the link sustains, and the burst that it lets through before.

Networks are shaped by token buckets: up to `burst` bytes go at once, all else at the bucket's rate.
TCP shows the opposite at first: it begins slowly. So neither the first bytes nor two sizes that
agree tell the rate; only time does.

    pings    frames of 1 KiB, one after the other, before any load: the least round trip
    load     frames behind each other. On their way may be `FIRST_BYTES`, twice what was
             acknowledged within a round trip, and 0.2 s of the rate up to 1 MiB, or 4 MiB of a rate
             that lasts: this grows as TCP does, fills the link, and is little once a bucket is
             empty
    tail     0.5 s, 3 round trips or 6 frames, the longest, back from now. When its halves carried
             the same within a tenth, and so did those of the later one, without a pause, slow start
             and burst are over, and the load ends. What fills `LARGEST_BURST` twice in a tail may
             be slower than the line because of the processes, and empties a bucket slowly: it takes
             two tails
    pings    a few once more, when nothing is on its way: a process that had something else to do
             before may have none now

The rate is that of the tail's later half. Where the tail never became even (a policer that drops),
or the bytes were used up before (a fast link), it is that of the later half of the bytes, which
counts once twice `LARGEST_BURST` went: no bucket that we look for can still have been full. Fewer
bytes in less time tell a burst and no rate.

The burst is what arrived beyond the rate, counted from the first byte on: max over t of
N(t) - rate · t. All times are of one clock. Acknowledgements come back on the way that is idle, so
they are as far apart as the frames were at the receiver; how long they took cancels out.

Pure arithmetic, times are arguments.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

__all__ = ["LARGEST_BURST", "PING_BYTES", "FirstBurst", "LinkMeasurement", "ProbeLoad"]

PING_BYTES = 1024
_PINGS, _MOST_PINGS, _LAST_PINGS = 3, 16, 4
_PINGS_S = 0.25
"""More than three pings, while all of them together took no longer: the least of few still has
some milliseconds in it that processes paused."""

FIRST_BYTES = 16 * 1024
_LEAST_FRAME, _MOST_FRAME = 4 * 1024, 1024 * 1024
_QUEUE_S, _QUEUE_BYTES = 0.2, 1 << 20
"""For so long the load may wait in front of the link: enough that it does not run dry when a
process pauses, no more than routers keep, and little where a bucket was empty all at once."""
_LONG_QUEUE_BYTES = 4 << 20
"""Where the rate of a whole second is behind it: beside a stream that keeps a router's queue full,
1 MiB got 0.4 of 200 Mbit/s in place of its half."""
_TAIL_S, _TAIL_TRIPS, _TAIL_FRAMES = 0.5, 3.0, 6
"""Half a second at the rate, and several round trips: TCP doubles in one of them."""
_EVEN = 0.1
_PAUSE = 0.25
"""Share of a tail in which nothing came at all: then nobody knows how it was divided."""
_MOST_S, _MOST_TRIPS = 4.0, 6.0
"""A load ends after so long whatever it showed."""
LARGEST_BURST = 4 << 20
"""The largest size of a bucket that is seen behind any link; behind one that takes longer than a
tail to fill it, smaller ones are."""
_FASTEST_S = 1e-3
"""No burst is timed more finely."""
_BURST_BYTES, _BURST_S, _BURST_TIMES, _MOST_OF_IT = 12 * 1024, 0.005, 1.5, 0.9
"""A burst has more bytes than a pause of a process explains, and goes notably faster."""


class FirstBurst(NamedTuple):
    """The first bytes went at least so fast, so many of them."""

    bytes_per_s: float
    size_bytes: int


class LinkMeasurement(NamedTuple):
    """What a link carries. `latency_s`: one way. `bytes_per_s`: sustained; 0: it was not shown.
    `burst`: None where the first bytes were no faster."""

    latency_s: float
    bytes_per_s: float
    burst: FirstBurst | None


class ProbeLoad:
    """One direction of one probe, at its sender. `most_bytes`: pings included."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.sent_bytes = 0
        """Handed out so far."""
        self.over = most_bytes < 2 * PING_BYTES
        """Whether nothing more is to be sent."""
        self._pings: list[float] = []
        self._trip_s = math.inf  # the least of any frame
        self._ping_out = False
        self._pinging = True
        self._last_pings = _LAST_PINGS
        self._shown: tuple[float, FirstBurst | None] | None = None  # once the load has ended
        self._ahead = 0  # bytes of load that are not acknowledged
        self._times: list[float] = []  # of acknowledgements; the first is when they could begin
        self._totals: list[int] = []  # bytes acknowledged by then

    # ------------------------------------------------------------ what happens

    def next_bytes(self, now: float) -> int:
        """The size of a frame to send now; 0: none. It counts as sent."""
        left = self.most_bytes - self.sent_bytes
        if self.over or self._ping_out:
            return 0
        if self._pinging and self._wants_ping and left >= PING_BYTES:
            self._ping_out = True
            self._last_pings -= self._shown is not None
            self.sent_bytes += PING_BYTES
            return PING_BYTES
        self._pinging = False
        left -= _LAST_PINGS * PING_BYTES
        if not self._ahead and (self._shown or left <= 0):
            self.over = True
        window = self._window(now)
        if self._shown or left <= 0 or self._ahead >= window:
            return 0
        # A fifth of a window: enough points for a tail, few enough for a fast link.
        size = min(max(window // 5, _LEAST_FRAME), _MOST_FRAME, left)
        self._ahead += size
        self.sent_bytes += size
        return size

    def acknowledged(self, size_bytes: int, queued_at: float | None, now: float) -> None:
        """A frame is there. `queued_at`: when it was handed to the transport; None: its time does
        not count."""
        if self._ping_out:
            self._ping_out = False
            if queued_at is not None:
                self._pings.append(now - queued_at)
                self._trip_s = min(self._trip_s, now - queued_at)
            return
        if queued_at is not None:  # what waited in no queue is as good as a ping
            self._trip_s = min(self._trip_s, now - queued_at)
        self._ahead -= size_bytes
        if not self._times:
            begin = now if queued_at is None else min(queued_at + self._round_trip_s, now)
            self._times, self._totals = [begin], [0]
        if self._shown is None:
            self._times.append(now)
            self._totals.append(self._totals[-1] + size_bytes)
            passed = now - self._times[0]
            longest = _MOST_S + _MOST_TRIPS * self._round_trip_s
            left = self.most_bytes - self.sent_bytes - _LAST_PINGS * PING_BYTES
            used_up = left <= 0 and not self._ahead
            if used_up or passed >= longest or self._is_even(now):
                self._shown = self._rate_and_burst()
        self._pinging = self._shown is not None and not self._ahead

    def broke(self) -> None:
        """The connection broke: bytes go on after a pause that is none of the link's."""
        self._times, self._totals = [], []

    # ------------------------------------------------------------ what it tells

    def found(self) -> LinkMeasurement | None:
        """None before a ping and some load came back."""
        if not self._pings or not (self._shown or len(self._times) >= 3):
            return None
        rate, burst = self._shown or self._rate_and_burst()
        return LinkMeasurement(self._latency_s(burst.bytes_per_s if burst else rate), rate, burst)

    def _rate_and_burst(self) -> tuple[float, FirstBurst | None]:
        """As in LinkMeasurement, of what was acknowledged."""
        now, total = self._times[-1], self._totals[-1]
        passed = now - self._times[0]
        if self._is_even(now):
            half = self._tail_s(now) / 2
            rate = self._carried(now - half, now) / half
        elif total >= 2 * LARGEST_BURST or passed >= _MOST_S + _MOST_TRIPS * self._round_trip_s:
            begin = self._time_of(total / 2)
            rate = (total - self._at(begin)) / max(now - begin, _FASTEST_S)
        else:
            return 0.0, FirstBurst(total / max(passed, _FASTEST_S), total)
        return rate, self._burst(rate)

    @property
    def _wants_ping(self) -> bool:
        if self._shown:
            return self._last_pings > 0
        if len(self._pings) < _PINGS:
            return True
        return len(self._pings) < _MOST_PINGS and sum(self._pings) < _PINGS_S

    @property
    def _round_trip_s(self) -> float:
        return self._trip_s if math.isfinite(self._trip_s) else 0.0

    def _tail_s(self, now: float) -> float:
        frames = now - self._times[max(0, len(self._times) - 1 - _TAIL_FRAMES)]
        return max(_TAIL_S, _TAIL_TRIPS * self._round_trip_s, frames)

    def _latency_s(self, bytes_per_s: float) -> float:
        """Half of the least round trip, less the time that a ping's bytes took."""
        ping = min(self._pings)
        return min(self._trip_s, max(ping - PING_BYTES / bytes_per_s, ping / 20)) / 2

    def _window(self, now: float) -> int:
        """Bytes that may be on their way."""
        if not self._times:
            return FIRST_BYTES
        path = 2 * self._carried(now - self._round_trip_s, now)
        queue = 2 * self._carried(now - _QUEUE_S / 2, now)
        lasting = min(_QUEUE_S * self._carried(now - 1.0, now), _LONG_QUEUE_BYTES)
        return FIRST_BYTES + int(path + min(queue, max(_QUEUE_BYTES, lasting)))

    def _is_even(self, now: float) -> bool:
        """Whether a tail ends now that carried the same all the time, without a pause."""
        if len(self._times) <= _TAIL_FRAMES:
            return False
        tail = self._tail_s(now)
        fast = self._carried(now - tail, now) >= 2 * LARGEST_BURST
        if now - self._times[0] < tail * (2 if fast else 1):
            return False
        first = bisect_right(self._times, now - tail)
        within = [now - tail, *self._times[first:], now]
        if max(b - a for a, b in pairwise(within)) > _PAUSE * tail:
            return False
        return all(
            abs(self._carried(now - part / 2, now) - self._carried(now - part, now - part / 2))
            <= _EVEN * self._carried(now - part, now) / 2
            for part in (tail, tail / 2)
        )

    def _burst(self, rate: float) -> FirstBurst | None:
        begin = self._times[0]
        beyond = [n - rate * (t - begin) for t, n in zip(self._times, self._totals, strict=True)]
        most = max(beyond)
        i = next(i for i, n in enumerate(beyond) if n >= _MOST_OF_IT * most)
        fast = self._totals[i] / max(self._times[i] - begin, _FASTEST_S)
        if most < _BURST_BYTES + _BURST_S * rate or fast < _BURST_TIMES * rate:
            return None
        return FirstBurst(fast, round(most))

    def _carried(self, begin: float, end: float) -> float:
        return self._at(end) - self._at(begin)

    def _at(self, time: float) -> float:
        """Bytes acknowledged by then, even between two acknowledgements."""
        i = bisect_right(self._times, time)
        if i == 0:
            return 0.0
        if i == len(self._times):
            return float(self._totals[-1])
        t0, t1 = self._times[i - 1], self._times[i]
        n0, n1 = self._totals[i - 1], self._totals[i]
        return n0 + (n1 - n0) * (time - t0) / (t1 - t0)

    def _time_of(self, total: float) -> float:
        i = bisect_right(self._totals, total)
        t0, t1 = self._times[i - 1], self._times[i]
        n0, n1 = self._totals[i - 1], self._totals[i]
        return t0 + (t1 - t0) * (total - n0) / (n1 - n0)
