"""When bytes leave on shaped paths: arithmetic with the time as an argument, no sockets, no clock.

A flow is one directed pair of ends. While something waits to go on it, it takes part in the
sharing of uplinks and downlinks (`fair_rates`); each piece of n bytes then takes n / rate, behind
the one before it:

    left = max(left before, when it came to wait) + n / rate

So a loop that comes late to a flow that never ran dry takes up where it was, and neither rates nor
delays depend on how often it comes.

Where a pair has a token bucket, what finds tokens goes at the rate that uplinks and downlinks leave
it, and the rest of a piece at the pair's.

Jitter and loss are those of sim/virtual/wan.py: what begins to go on an idle flow draws its latency
anew, and a packet that is lost comes a round trip later, with all behind it.
"""

from __future__ import annotations

import math
import random

from ..virtual.clock import Bucket
from ..virtual.wan import PACKET_BYTES, rounds_lost
from .shaping import Flow, Shaping, fair_rates

__all__ = ["AHEAD_S", "Pacer"]

AHEAD_S = 0.002
"""Pieces are of so many seconds, and are taken that long before they may leave."""
_MOST_BYTES = 256 * 1024
"""The most bytes of a piece: larger ones cost no less for each byte."""


class Pacer:
    """The flows of one Shaping. Times are seconds of any clock that never goes back."""

    def __init__(self, shaping: Shaping, seed: int = 0) -> None:
        self.shaping = shaping
        self._random = random.Random(seed)
        self._delay: dict[Flow, float] = {}  # of what goes on the flow since it last ran dry
        self._factors: dict[Flow, float] = {}
        self._free: dict[Flow, float] = {}  # when the last piece has left
        self._waiting: dict[Flow, None] = {}
        self._leaving: dict[Flow, None] = {}  # nothing waits, and the last piece is not gone
        self._rates: dict[Flow, float] | None = None
        self._bursting: set[Flow] = set()
        self._buckets: dict[Flow, Bucket] = {}
        for a, row in enumerate(shaping.burst):
            for b, size_bytes in enumerate(row):
                if a != b and size_bytes:
                    self._buckets[a, b] = Bucket(size_bytes, shaping.bandwidth[a][b])

    def wait(self, flow: Flow, now: float) -> None:
        """Something waits on the flow, from now on unless it did before."""
        if flow not in self._waiting:
            self._waiting[flow] = None
            if self._leaving.pop(flow, 0) == 0:
                self._rates = None
            if self._free.get(flow, now) <= now:
                self._free[flow] = now
                self._delay.pop(flow, None)

    def rest(self, flow: Flow) -> None:
        """Nothing waits on the flow any more."""
        if self._waiting.pop(flow, 0) is None:
            self._leaving[flow] = None

    def slow(self, flow: Flow, factor: float) -> None:
        """The pair has 1/factor of its bandwidth; 1: all of it again."""
        self._factors[flow] = factor
        if (bucket := self._buckets.get(flow)) is not None:
            bucket.bytes_per_s = self.shaping.bandwidth[flow[0]][flow[1]] / factor
        self._rates = None

    def due(self, flow: Flow) -> float:
        """When the flow's next piece may be taken."""
        return self._free[flow] - AHEAD_S

    def piece_bytes(self, flow: Flow, now: float) -> int:
        """How much to take of it at once."""
        wanted = self.rate(flow, now) * AHEAD_S
        return int(min(max(wanted, PACKET_BYTES), _MOST_BYTES))

    def leave(self, flow: Flow, size_bytes: int, now: float) -> float:
        """Take so much, and return when its last byte has left."""
        loss = self._loss(flow)
        sent = size_bytes / (1.0 - loss)
        if (bucket := self._buckets.get(flow)) is not None:
            fast = self.rate(flow, now)
            taken = bucket.take(sent, self._free[flow])
            self._free[flow] += taken / fast
            sent -= taken
            if not sent:
                return self._free[flow]
        self._free[flow] += sent / self.rate(flow, now)
        if bucket is not None:
            bucket.skip(self._free[flow])
        return self._free[flow]

    def delay_s(self, flow: Flow, size_bytes: int) -> float:
        """How long a piece is under way once it has left. Pieces arrive in order all the same: what
        is behind a late one waits for it."""
        a, b = flow
        latency_s, loss = self.shaping.latency_s[a][b], self._loss(flow)
        if self.shaping.jitter_s:
            if flow not in self._delay:
                off = self.shaping.jitter_s[a][b] * (2.0 * self._random.random() - 1.0)
                self._delay[flow] = max(0.0, latency_s + off)
            latency_s = self._delay[flow]
        if not loss:
            return latency_s
        rounds = rounds_lost(math.ceil(size_bytes / PACKET_BYTES), loss, self._random.random())
        there_and_back_s = self.shaping.latency_s[a][b] + self.shaping.latency_s[b][a]
        return latency_s + rounds * there_and_back_s

    def _loss(self, flow: Flow) -> float:
        return self.shaping.loss[flow[0]][flow[1]] if self.shaping.loss else 0.0

    def rate(self, flow: Flow, now: float) -> float:
        """Bytes/s of a flow on which something waits."""
        bucket = self._buckets.get(flow)
        if bucket is not None and (bucket.there(self._free[flow]) >= 1) != (flow in self._bursting):
            self._bursting ^= {flow}
            self._rates = None
        gone = [f for f in self._leaving if self._free[f] <= now]
        for f in gone:
            del self._leaving[f]
        if gone or self._rates is None:
            flows = [*self._waiting, *self._leaving]
            self._rates = fair_rates(flows, self.shaping, self._factors, self._bursting)
        return self._rates[flow]
