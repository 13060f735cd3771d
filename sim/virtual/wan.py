"""The modelled wide-area network: what messages take when they share what they go through.

A message of n bytes from a to b is a flow. It leaves at a rate and arrives a latency after its last
byte:

    alone:   n / min(pair, uplink of a, downlink of b) + latency
    shared:  rates are max-min fair over pairs, uplinks and downlinks (`dag.play.max_min`, the same
             definition as the planner's), and change whenever a flow begins or ends

- Only the flows that a change can reach are shared out again: those that are joined with it through
  resources that bind. An uplink binds when the flows on it could together take more than it has.
- Where more than `MOST_EXACT` flows are joined, each gets the least equal share of its resources,
  min over r of room(r) / flows(r). No flow gets more than max-min gives it, and nothing is
  overbooked, but what a flow cannot use for lack elsewhere stays unused. The error: none where all
  meet at one endpoint or all endpoints have equally many (a star, an all-to-all). Of 100 to 1,000
  flows between random peers the median flow gets 2 % less than max-min gives it where all links are
  alike and 9 % less where they differ 1 : 10, the worst one a fifth; together 10 to 40 % less.
- A message of at most one packet takes an equal share for itself and leaves the others theirs.
- A pair may have a token bucket (`clock.py`), filled at its bandwidth. A message takes the tokens
  that are there when it begins: so many of its bytes leave as fast as its uplink and its downlink
  allow, shared out with all others there (at once, where both are without limit), and the rest at
  the pair's rate. While anything goes at that rate, the bucket stays as it is.
- Jitter: the latency of each message is drawn evenly from latency ± jitter, not below 0.
- Loss as delay: each packet is lost with probability p, independently. Those lost are sent again in
  the next round, a round trip later. So a message of k packets comes r round trips later with
  P(r <= x) = (1 - p^(x+1))^k, and takes n / (1 - p) bytes of its link. There is no congestion
  control: a loss delays, and takes no rate away.
- A parted direction: what has left arrives, all else waits for `mend`.

Whoever sends keeps the order of its stream (net/transports/memory.py, and InOrder of
net/transports/carrier.py). Draws come from a generator per sender, seeded by (seed, name): not one
depends on another sender's messages.
"""

from __future__ import annotations

import math
import random

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.network import Network
from ...dag.cost.play import max_min
from .clock import Bucket, VirtualClock
from .wan_flows import Call, Pair, WanFlow

__all__ = ["MOST_EXACT", "PACKET_BYTES", "Wan", "rounds_lost"]

MOST_EXACT = 64
"""Flows that are shared out exactly together."""
PACKET_BYTES = 1448
"""Bytes of the payload of one packet: an Ethernet frame's 1500 less IP, TCP and its options."""

Floats = NDArray[np.float64]
_INF = float("inf")


def rounds_lost(packets: int, loss: float, u: float) -> int:
    """How many rounds of repeats it takes until each of the packets has come, from a number u drawn
    evenly from [0, 1): the least r with (1 - loss^(r+1))^packets >= u."""
    if loss <= 0 or u <= 0:
        return 0
    missed = -math.expm1(math.log(u) / packets)  # 1 - u^(1/packets)
    return max(0, math.ceil(math.log(missed) / math.log(loss)) - 1)


class Wan:
    """A modelled wide-area network: how long messages take that share what they go through.
    `network`: latency, pairs, uplinks and downlinks by name, the broker's too. `jitter_s`, `loss`,
    `burst` (bytes): (P, P), rows send; None: none. Give it to one World, or `attach` it."""

    def __init__(
        self,
        network: Network,
        *,
        jitter_s: Floats | None = None,
        loss: Floats | None = None,
        burst: Floats | None = None,
        seed: int = 0,
        most_exact: int = MOST_EXACT,
    ) -> None:
        self.network, self._jitter_s, self._loss = network, jitter_s, loss
        self._burst = burst
        self._seed, self._most_exact = seed, most_exact
        self._index = {str(name): i for i, name in enumerate(network.peers)}
        self._alone = network.rates()
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._randoms: dict[int, random.Random] = {}
        # Resources: i is an uplink, P + j a downlink, 2P and above pairs.
        n = len(network)
        self._room: dict[int, float] = dict(enumerate(map(float, (*network.up, *network.down))))
        self._at: list[dict[WanFlow, None]] = [{} for _ in range(2 * n)]  # flows by endpoint
        self._wanted = [0.0] * (2 * n)  # what they could take together
        self._changed: dict[int, None] = {}  # endpoints that are to be shared out now
        self._changed_pairs: dict[Pair, None] = {}
        self._asked = False
        self._ending: WanFlow | None = None
        self.shared_out = 0
        """How often flows were shared out."""

    def attach(self, clock: VirtualClock) -> None:
        """Attach the clock, once."""
        self._clock = clock

    # ------------------------------------------------------------ messages

    def send(
        self, source: str, destination: str, size_bytes: int, left: Call, arrived: Call
    ) -> float | None:
        """Starts a message; see Carrier. Raises KeyError for a name that the network does not
        have."""
        pair = self._pairs.get((source, destination)) or self._pair(source, destination)
        flow = WanFlow(pair, size_bytes, left, arrived)
        if pair.held is not None:
            pair.held.append(flow)
            return None
        if pair.bucket is not None:
            self._take_tokens(flow, pair, pair.bucket)
        if flow.bytes_left <= PACKET_BYTES:
            busy_s = flow.bytes_left / self._equal_share(flow.pair, 1)
            self._clock.after(busy_s + self._delay_s(flow), arrived)
            return busy_s
        else:
            self._start(flow)
        return None

    def _take_tokens(self, flow: WanFlow, pair: Pair, bucket: Bucket) -> None:
        """What finds tokens goes first, if it is more than a packet or all of the message."""
        now = self._clock.now
        if pair.flows:
            bucket.skip(now)
        there = bucket.there(now)
        if there < flow.bytes_left and there <= PACKET_BYTES:
            return
        taken = bucket.take(flow.bytes_left, now)
        if pair.fast is None:
            flow.bytes_left -= taken
        else:
            flow.pair, flow.rest, flow.bytes_left = pair.fast, flow.bytes_left - taken, taken

    def _start(self, flow: WanFlow) -> None:
        pair, clock = flow.pair, self._clock
        if flow.bytes_left <= PACKET_BYTES:
            clock.after(flow.bytes_left / self._equal_share(pair, 1), lambda: self._has_left(flow))
            return
        flow.since = clock.now
        before = self._ending
        if before is not None and before.pair is pair:
            # The next message of a stream takes the place of the one before: nobody else notices.
            self._ending = None
            flow.equal = before.equal
            rate = before.rate
            self._replace(before, flow)
            self._pace(flow, rate)
            return
        self._add(flow)
        ends = self._binding(pair)
        if ends or len(pair.flows) > 1:
            self._change(pair, ends)
        else:
            self._pace(flow, pair.alone)

    def _ended(self, flow: WanFlow) -> None:
        """The last byte has left. The flow keeps its place while its sender says what is next."""
        if flow.rest:
            self._go_on(flow)
            return
        self._ending = flow
        self._has_left(flow)
        if self._ending is flow:
            self._ending = None
            ends = self._binding(flow.pair)
            self._remove(flow)
            if ends or flow.pair.flows:
                self._change(flow.pair, ends)

    def _go_on(self, flow: WanFlow) -> None:
        """What found tokens has left; the rest follows at the pair's rate."""
        fast, ends = flow.pair, self._binding(flow.pair)
        self._remove(flow)
        if ends or fast.flows:
            self._change(fast, ends)
        self._slowed(flow)
        self._start(flow)

    def _slowed(self, flow: WanFlow) -> None:
        """Move a flow to the pair of ends of a sender that has no tokens any more."""
        i, j = flow.pair.ends
        names = self.network.peers
        flow.pair = self._pairs[str(names[i]), str(names[j - len(names)])]
        flow.bytes_left, flow.rest = flow.bytes_left + flow.rest, 0.0

    def _has_left(self, flow: WanFlow) -> None:
        self._clock.after(self._delay_s(flow), flow.arrived)
        flow.left()

    def _delay_s(self, flow: WanFlow) -> float:
        """From its last byte's leaving to its arrival."""
        pair, delay = flow.pair, flow.pair.latency_s
        if pair.random is not None:
            if pair.jitter_s:
                delay = max(0.0, delay + pair.jitter_s * (2.0 * pair.random.random() - 1.0))
            if pair.loss:
                packets = max(1, math.ceil(flow.size / PACKET_BYTES))
                rounds = rounds_lost(packets, pair.loss, pair.random.random())
                delay += rounds * (pair.latency_s + pair.back_s)
        return delay

    # ------------------------------------------------------------ faults

    def part(self, source: str, destination: str) -> None:
        pair = self._pair(source, destination)
        if pair.held is None:
            pair.held = []
            for way in (pair,) if pair.fast is None else (pair.fast, pair):
                flows, ends = list(way.flows), self._binding(way)
                for flow in flows:
                    self._remove(flow)
                    if way is pair.fast:
                        self._slowed(flow)
                pair.held += flows
                self._change(way, ends)

    def mend(self, source: str, destination: str) -> None:
        pair = self._pair(source, destination)
        held, pair.held = pair.held, None
        for flow in held or ():
            self._start(flow)

    def parted(self, source: str, destination: str) -> bool:
        pair = self._pairs.get((source, destination))
        return pair is not None and pair.held is not None

    def slow(self, source: str, destination: str, factor: float) -> None:
        pair = self._pair(source, destination)
        flows, ends = list(pair.flows), self._binding(pair)
        for flow in flows:
            self._remove(flow)
        i, j = pair.ends
        pair.alone = float(self._alone[i, j - len(self.network)]) / factor
        self._room[pair.index] = pair.alone
        if pair.bucket is not None:
            pair.bucket.bytes_per_s = pair.alone
        for flow in flows:
            self._add(flow)
        self._change(pair, {**ends, **self._binding(pair)})

    def rates(self) -> list[tuple[tuple[str, str], float]]:
        """(pair, bytes/s) of every flow that is under way now, in the order of the pairs' first
        messages."""
        return [
            (names, flow.rate)
            for names, pair in self._pairs.items()
            for way in (pair, pair.fast)
            if way is not None
            for flow in way.flows
        ]

    # ------------------------------------------------------------ pairs and endpoints

    def _pair(self, source: str, destination: str) -> Pair:
        known = self._pairs.get((source, destination))
        if known is not None:
            return known
        for name in (source, destination):
            if name not in self._index:
                raise KeyError(f"{name} is not on the network of {len(self._index)} peers")
        i, j, n = self._index[source], self._index[destination], len(self.network)
        alone = float(self._alone[i, j])
        pair = Pair(2 * n + len(self._pairs), (i, n + j), alone)
        self._path(pair, i, j)
        ends = min(self._room[i], self._room[n + j])
        if self._burst is not None and self._burst[i, j] > 0 and alone < ends:
            pair.bucket = Bucket(float(self._burst[i, j]), alone)
            if ends < _INF:
                # Resources below 0 are those of such pairs, beside each.
                pair.fast = Pair(-1 - len(self._pairs), pair.ends, ends)
                self._path(pair.fast, i, j)
                self._room[pair.fast.index] = ends
        self._pairs[source, destination] = pair
        self._room[pair.index] = alone
        return pair

    def _path(self, pair: Pair, i: int, j: int) -> None:
        """What every message on it meets: latency, jitter and loss."""
        pair.latency_s = float(self.network.latency_s[i, j])
        pair.back_s = float(self.network.latency_s[j, i])
        pair.jitter_s = 0.0 if self._jitter_s is None else float(self._jitter_s[i, j])
        pair.loss = 0.0 if self._loss is None else float(self._loss[i, j])
        if pair.jitter_s or pair.loss:
            if i not in self._randoms:
                self._randoms[i] = random.Random(f"{self._seed} {self.network.peers[i]}")
            pair.random = self._randoms[i]

    def _add(self, flow: WanFlow) -> None:
        pair = flow.pair
        if pair.bucket is not None and not pair.flows:
            pair.bucket.take(0.0, self._clock.now)
        pair.flows[flow] = None
        for end in pair.ends:
            self._at[end][flow] = None
            self._wanted[end] += pair.alone

    def _remove(self, flow: WanFlow) -> None:
        pair = flow.pair
        self._settle(flow)
        flow.rate, flow.due, flow.equal = 0.0, _INF, False
        del pair.flows[flow]
        if pair.bucket is not None and not pair.flows:
            pair.bucket.skip(self._clock.now)
        for end in pair.ends:
            del self._at[end][flow]
            # Exactly nothing when nobody is left: rounding does not pile up.
            self._wanted[end] = self._wanted[end] - pair.alone if self._at[end] else 0.0

    def _replace(self, before: WanFlow, after: WanFlow) -> None:
        before.due = _INF  # a call that is still to come for it finds another time
        del before.pair.flows[before]
        before.pair.flows[after] = None
        for end in before.pair.ends:
            del self._at[end][before]
            self._at[end][after] = None

    def _binds(self, end: int) -> bool:
        return self._wanted[end] > self._room[end] * (1.0 + 1e-12)

    def _binding(self, pair: Pair) -> dict[int, None]:
        return {end: None for end in pair.ends if self._binds(end)}

    def _equal_share(self, pair: Pair, more: int = 0) -> float:
        """The least equal share of the resources that bind, with so many more flows of the pair."""
        share = pair.alone / (len(pair.flows) + more)
        for end in pair.ends:
            if self._wanted[end] + more * pair.alone > self._room[end] * (1.0 + 1e-12):
                share = min(share, self._room[end] / (len(self._at[end]) + more))
        return share

    # ------------------------------------------------------------ sharing out

    def _change(self, pair: Pair, ends: dict[int, None]) -> None:
        """Flows of the pair began or ended, at endpoints that bind or did: shared out once
        everything of this moment has happened."""
        self._changed.update(ends)
        self._changed_pairs[pair] = None
        if not self._asked:
            self._asked = True
            self._clock.after(0.0, self._share_out)

    def _share_out(self) -> None:
        self._asked = False
        first: dict[WanFlow, None] = {}
        for end in self._changed:
            first.update(self._at[end])
        for pair in self._changed_pairs:
            first.update(pair.flows)
        self._changed, self._changed_pairs = {}, {}
        reached = self._joined(first)
        if reached is None:
            for flow in self._too_many(first):
                self._pace(flow, self._equal_share(flow.pair))
            return
        self.shared_out += 1
        wanted = []
        for flow in reached:
            pair = flow.pair
            wanted.append((pair.index, *(end for end in pair.ends if self._binds(end))))
        for flow, rate in zip(reached, max_min(wanted, self._room), strict=True):
            flow.equal = False
            self._pace(flow, rate)

    def _joined(self, first: dict[WanFlow, None]) -> list[WanFlow] | None:
        """Return these flows and all that resources which bind join with them; None: more than
        `most_exact`."""
        reached, ahead, seen = dict(first), list(first), set[int]()
        while ahead:
            if len(reached) > self._most_exact:
                return None
            pair = ahead.pop().pair
            if pair.index in seen:
                continue
            seen.add(pair.index)
            groups = [pair.flows] if len(pair.flows) > 1 else []
            for end in pair.ends:
                if end not in seen and self._binds(end):
                    seen.add(end)
                    groups.append(self._at[end])
            for flows in groups:
                if len(flows) > self._most_exact:
                    return None
                for flow in flows:
                    if flow not in reached:
                        reached[flow] = None
                        ahead.append(flow)
        return list(reached) if len(reached) <= self._most_exact else None

    def _too_many(self, first: dict[WanFlow, None]) -> list[WanFlow]:
        """The flows whose equal shares have changed: these, and all joined ones whose rates are
        exact still."""
        reached, ahead, seen = dict(first), list(first), set[int]()
        while ahead:
            flow = ahead.pop()
            if flow.equal:
                continue
            flow.equal = True
            for end in flow.pair.ends:
                if end in seen or not self._binds(end):
                    continue
                seen.add(end)
                for other in self._at[end]:
                    if not other.equal and other not in reached:
                        reached[other] = None
                        ahead.append(other)
        return list(reached)

    def _settle(self, flow: WanFlow) -> None:
        """Takes off what has left by now."""
        now = self._clock.now
        if flow.rate > 0:
            flow.bytes_left = max(0.0, flow.bytes_left - flow.rate * (now - flow.since))
        flow.since = now

    def _pace(self, flow: WanFlow, rate: float) -> None:
        if rate == flow.rate:
            return
        self._settle(flow)
        flow.rate = rate
        now = self._clock.now
        ends = now + flow.bytes_left / rate
        if ends < flow.due:
            self._call(flow, ends)

    def _call(self, flow: WanFlow, at: float) -> None:
        """When it should have left. A flow that has become slower is asked again later; one that
        has become faster gets an earlier call, and the later one finds another time."""
        flow.due = at

        def call() -> None:
            if flow.due != at:
                return
            ends = flow.since + flow.bytes_left / flow.rate if flow.rate > 0 else _INF
            if ends > at * (1.0 + 1e-15):
                self._call(flow, ends)
            else:
                self._ended(flow)

        self._clock.after(max(0.0, at - self._clock.now), call)
