"""The event calculation: when each action and message of a program begins and ends.

- A peer works through its list; an action begins when the one before has ended and every message
  that it waits for has arrived.
- A message leaves when its lane is free, takes bytes over the lane's rate, and arrives a latency
  later. Lanes that send at once share pairs, uplinks and downlinks max-min fairly: no lane can get
  more without taking from one that has no more than it (Bertsekas and Gallager, Data Networks,
  6.5.2). Only lanes that a change can reach are shared out again.
- With codecs that run beside the compute, a message is encoded before it can leave and decoded
  before it has arrived; each end of a lane does so one message after another.
- Peers on one machine share its cores: when more want to compute than it has cores, each gets the
  same part of them.

Equal times are handled in the order in which they came up, so the same arguments give the same
answer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .network import Network
from .program import Program

__all__ = ["Coding", "Hosts", "Timeline", "max_min", "play"]

_COMPUTED, _SENT, _ARRIVED, _ENCODED = 0, 1, 2, 3
_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Hosts:
    """Which machine each peer of a program computes on, and how many threads run there at once."""

    host: tuple[int, ...]
    """By peer: number of its machine."""
    threads: tuple[int, ...]
    """By peer: threads of one action."""
    cores: tuple[float, ...]
    """By machine: how many threads' work it does, all of its cores together; 0: no limit."""
    whole: tuple[float, ...]
    """By machine: how many threads compute there at once, none of them as fast as alone when
    `cores` is less: two virtual cores may be one real one."""


@dataclass(frozen=True, slots=True)
class Coding:
    """By message, seconds of a codec that runs beside the compute: at the source, and at the
    destination. What delays the compute belongs to the actions instead."""

    encode_s: Sequence[float]
    decode_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Timeline:
    """By action: `start`, `end`, `cause`: the message that it began upon, -1 for the action before
    it, and `computed`: what its thread computed between the two, waits for a core left out. By
    message: `sent` (begin of sending) and `arrived`. Seconds."""

    start: list[float]
    end: list[float]
    computed: Sequence[float]
    cause: list[int]
    sent: list[float]
    arrived: list[float]

    @property
    def step_s(self) -> float:
        return max(self.end, default=0.0)


def max_min(wanted: Sequence[tuple[int, ...]], room: dict[int, float]) -> list[float]:
    """Max-min fair rates. `wanted[i]` are the resources that flow i needs, `room` what each has;
    inf for a flow whose resources are all without limit."""
    rates = [_INF] * len(wanted)
    users: dict[int, list[int]] = {}
    for i, resources in enumerate(wanted):
        for r in resources:
            users.setdefault(r, []).append(i)
    room = {r: room[r] for r in users}
    count = {r: len(flows) for r, flows in users.items()}
    # The resource that gives its flows least fixes them. What others then have for each of theirs
    # only grows, so an entry of the heap that is out of date goes back with its new share.
    heap = [(room[r] / count[r], r) for r in users]
    heapq.heapify(heap)
    fixed = [False] * len(wanted)
    while heap:
        share, r = heap[0]
        if not count[r]:
            heapq.heappop(heap)
            continue
        now = room[r] / count[r]
        if now > share * (1 + 1e-12):
            heapq.heapreplace(heap, (now, r))
            continue
        heapq.heappop(heap)
        if share == _INF:
            break
        for i in users[r]:
            if not fixed[i]:
                fixed[i] = True
                rates[i] = share
                for other in wanted[i]:
                    room[other] = max(0.0, room[other] - share)
                    count[other] -= 1
    return rates


def play(
    program: Program,
    seconds: Sequence[float],
    network: Network,
    hosts: Hosts | None = None,
    coding: Coding | None = None,
) -> Timeline:
    """`seconds`: of each action alone on its machine. `network`: of the program's peers, in their
    order."""
    return _Player(program, seconds, network, hosts, coding).run()


class _Player:
    def __init__(
        self,
        program: Program,
        seconds: Sequence[float],
        network: Network,
        hosts: Hosts | None,
        coding: Coding | None,
    ) -> None:
        self.program, self.seconds, self.coding = program, seconds, coding
        n, t = len(program.actions), len(program.giver)
        self.start, self.end, self.cause = [0.0] * n, [0.0] * n, [-1] * n
        self.computed = seconds
        self.sent, self.arrived = [0.0] * t, [0.0] * t
        self.waits = list(program.needs)
        self.next = list(program.first[:-1])
        self.busy = [False] * len(program.peers)
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.order = 0
        # Lanes. A lane whose rate nobody else can change needs no sharing out.
        self.queue: list[deque[int]] = [deque() for _ in program.lanes]
        self.on: list[int] = [-1] * len(program.lanes)
        self.encoded = [0.0] * len(program.lanes)
        self.decoded = [0.0] * len(program.lanes)
        """Until when the codecs of a lane are at work."""
        self.latency = [float(network.latency_s[i, j]) for i, j, _ in program.lanes]
        self.fixed: list[float] = []
        self.resources, self.room = _resources(program, network)
        users: dict[int, int] = {}
        for resources in self.resources:
            for r in resources:
                users[r] = users.get(r, 0) + 1
        for resources in self.resources:
            alone = all(users[r] == 1 for r in resources)
            self.fixed.append(min((self.room[r] for r in resources), default=_INF) if alone else 0)
        self.active: dict[int, list[int]] = {}  # by resource: lanes that send, shared ones only
        self.rate = [0.0] * len(program.lanes)
        self.left = [0.0] * len(program.lanes)
        self.since = [0.0] * len(program.lanes)
        self.version = [0] * len(program.lanes)
        self.changed: dict[int, None] = {}  # lanes that began or ended at this moment
        # Machines that have fewer cores than their peers have threads.
        self.hosts = hosts
        self.crowded = [False] * len(program.peers)
        if hosts is not None:
            wanted: dict[int, int] = {}
            for h, threads in zip(hosts.host, hosts.threads, strict=True):
                wanted[h] = wanted.get(h, 0) + threads
            self.crowded = [0 < hosts.cores[h] < wanted[h] for h in hosts.host]
            self.computing: dict[int, list[int]] = {h: [] for h in wanted}
            self.compute_left = [0.0] * n
            self.thread_s = self.computed = list(seconds)
            self.thread_rate: dict[int, float] = dict.fromkeys(wanted, 1.0)
            self.compute_rate: dict[int, float] = dict.fromkeys(wanted, 1.0)
            self.compute_since: dict[int, float] = dict.fromkeys(wanted, 0.0)
            self.compute_version: dict[int, int] = dict.fromkeys(wanted, 0)

    def run(self) -> Timeline:
        for i, at in enumerate(self.next):
            if at < self.program.first[i + 1] and not self.waits[at]:
                self._begin(at, 0.0, -1)
        heap, program = self.heap, self.program
        now = 0.0
        while heap or self.changed:
            if self.changed and (not heap or heap[0][0] > now):
                self._share_out(now)
                continue
            now, _, kind, what, version = heapq.heappop(heap)
            if kind == _ARRIVED:
                self.arrived[what] = now
                to = program.taker[what]
                self.waits[to] -= 1
                i = program.owner[to]
                if not self.waits[to] and not self.busy[i] and self.next[i] == to:
                    self._begin(to, now, what)
            elif kind == _COMPUTED:
                if version >= 0:
                    if version != self.compute_version[what]:
                        continue
                    what = self._leave_host(what, now)
                self._ended(what, now)
            elif kind == _ENCODED:
                self._offer(what, now)
            elif version == self.version[what]:
                self._left(what, now)
        done = [self.next[i] == stop for i, stop in enumerate(program.first[1:])]
        assert all(done), "action lists that wait for each other: check() refuses them"
        return Timeline(self.start, self.end, self.computed, self.cause, self.sent, self.arrived)

    def _push(self, at: float, kind: int, what: int, version: int = -1) -> None:
        self.order += 1
        heapq.heappush(self.heap, (at, self.order, kind, what, version))

    # ------------------------------------------------------------ computing

    def _begin(self, action: int, now: float, cause: int) -> None:
        i = self.program.owner[action]
        self.busy[i] = True
        self.start[action], self.cause[action] = now, cause
        if not self.crowded[i]:
            self._push(now + self.seconds[action], _COMPUTED, action)
            return
        assert self.hosts is not None
        host = self.hosts.host[i]
        self._progress(host, now)
        self.computing[host].append(action)
        self.compute_left[action] = self.seconds[action]
        self.thread_s[action] = 0.0
        self._share_cores(host, now)

    def _ended(self, action: int, now: float) -> None:
        program = self.program
        self.end[action] = now
        i = program.owner[action]
        self.busy[i] = False
        for message in program.gives[action]:
            if self.coding is None:
                self._offer(message, now)
                continue
            lane = program.lane[message]
            begin = max(now, self.encoded[lane])
            self.encoded[lane] = ready = begin + self.coding.encode_s[message]
            self._push(ready, _ENCODED, message)
        self.next[i] = following = action + 1
        if following < program.first[i + 1] and not self.waits[following]:
            self._begin(following, now, -1)

    def _progress(self, host: int, now: float) -> None:
        passed = now - self.compute_since[host]
        done, had = passed * self.compute_rate[host], passed * self.thread_rate[host]
        for action in self.computing[host]:
            self.compute_left[action] = max(0.0, self.compute_left[action] - done)
            self.thread_s[action] += had
        self.compute_since[host] = now

    def _share_cores(self, host: int, now: float) -> None:
        assert self.hosts is not None
        computing = self.computing[host]
        self.compute_version[host] += 1
        if not computing:
            return
        threads = sum(self.hosts.threads[self.program.owner[a]] for a in computing)
        rate = min(1.0, self.hosts.cores[host] / threads)
        self.compute_rate[host] = rate
        self.thread_rate[host] = min(1.0, self.hosts.whole[host] / threads)
        soonest = min(self.compute_left[a] for a in computing)
        self._push(now + soonest / rate, _COMPUTED, host, self.compute_version[host])

    def _leave_host(self, host: int, now: float) -> int:
        """The action that has ended on a crowded machine."""
        self._progress(host, now)
        action = min(self.computing[host], key=lambda a: self.compute_left[a])
        self.computing[host].remove(action)
        self._share_cores(host, now)
        return action

    # ------------------------------------------------------------ sending

    def _offer(self, message: int, now: float) -> None:
        """A message can leave."""
        lane = self.program.lane[message]
        self.sent[message] = now  # overwritten when it has to wait for its lane
        if self.on[lane] < 0:
            self._send(lane, message, now)
        else:
            self.queue[lane].append(message)

    def _send(self, lane: int, message: int, now: float) -> None:
        self.on[lane] = message
        self.sent[message] = now
        size = self.program.size_bytes[message]
        if self.fixed[lane]:
            self.version[lane] += 1
            self._push(now + size / self.fixed[lane], _SENT, lane, self.version[lane])
            return
        self.left[lane], self.since[lane], self.rate[lane] = float(size), now, 0.0
        for r in self.resources[lane]:
            self.active.setdefault(r, []).append(lane)
        self._share_links(lane, now)

    def _left(self, lane: int, now: float) -> None:
        """The last byte of a message has left."""
        message = self.on[lane]
        arrives = now + self.latency[lane]
        if self.coding is not None:
            begin = max(arrives, self.decoded[lane])
            self.decoded[lane] = arrives = begin + self.coding.decode_s[message]
        self._push(arrives, _ARRIVED, message)
        self.on[lane] = -1
        if not self.fixed[lane]:
            for r in self.resources[lane]:
                self.active[r].remove(lane)
        if self.queue[lane]:
            self._send(lane, self.queue[lane].popleft(), now)
        elif not self.fixed[lane]:
            self._share_links(lane, now)

    def _share_links(self, lane: int, now: float) -> None:
        """A lane began or ended: what that can reach is shared out again, once everything that
        happens at this moment has happened."""
        own, active = self.resources[lane], self.active
        if self.on[lane] >= 0 and all(len(active[r]) == 1 for r in own):
            self._pace(lane, min(self.room[r] for r in own), now)
        else:
            self.changed[lane] = None

    def _share_out(self, now: float) -> None:
        reached: dict[int, None] = {}
        seen: set[int] = set()
        ahead = [r for lane in self.changed for r in self.resources[lane]]
        while ahead:
            r = ahead.pop()
            if r in seen:
                continue
            seen.add(r)
            for other in self.active.get(r, ()):
                if other not in reached:
                    reached[other] = None
                    ahead.extend(self.resources[other])
        lanes = sorted(reached)
        rates = max_min([self.resources[x] for x in lanes], self.room)
        for x, rate in zip(lanes, rates, strict=True):
            if rate != self.rate[x] or x in self.changed:
                self._pace(x, rate, now)
        self.changed.clear()

    def _pace(self, lane: int, rate: float, now: float) -> None:
        if self.rate[lane] > 0:
            passed = self.rate[lane] * (now - self.since[lane])
            self.left[lane] = max(0.0, self.left[lane] - passed)
        self.since[lane], self.rate[lane] = now, rate
        self.version[lane] += 1
        self._push(now + self.left[lane] / rate, _SENT, lane, self.version[lane])


def _resources(
    program: Program, network: Network
) -> tuple[list[tuple[int, ...]], dict[int, float]]:
    """By lane the limited resources that it uses (pair, uplink, downlink), and what each has. An
    endpoint that cannot bind, because its pairs together have no more, is left out."""
    n = len(program.peers)
    pairs = {(i, j): float(network.bandwidth[i, j]) for i, j, _ in program.lanes}
    out: dict[int, float] = {}
    into: dict[int, float] = {}
    for (i, j), rate in pairs.items():
        out[i] = out.get(i, 0.0) + rate
        into[j] = into.get(j, 0.0) + rate
    room: dict[int, float] = {}
    resources: list[tuple[int, ...]] = []
    for i, j, _ in program.lanes:
        found = []
        for key, limit in (
            (n * (i + 2) + j, pairs[i, j]),
            (i, float(network.up[i]) if out[i] > network.up[i] else _INF),
            (n + j, float(network.down[j]) if into[j] > network.down[j] else _INF),
        ):
            if limit < _INF:
                room[key] = limit
                found.append(key)
        resources.append(tuple(found))
    return resources, room
