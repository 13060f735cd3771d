"""The event calculation where nothing is shared: a longest path, for many peers' choices at once.

    end(a)     = seconds(a) + max of end(action before a), arrived(m) of all m that a waits for
    sent(m)    = max of end(giver of m), sent(m') + bytes(m') / rate of the m' before in its lane
    arrived(m) = sent(m) + bytes(m) / rate + latency

(where codecs run beside the compute, a message is encoded between the first two lines and decoded
at the end of the third, each end of a lane one after another, as in `play.py`) with the rate that a
lane has alone: the least of pair, uplink and downlink. Lists and lanes keep
their order whatever the times are, so these times are monotone in every number. Sharing links or
cores (`play.py`) only lowers rates: `step_s` is never above what `play` finds, and equal to it when
no two lanes of one resource send at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .network import Network
from .play import Coding
from .program import Program

__all__ = ["Unshared"]

Floats = NDArray[np.float64]


class Unshared:
    """A program in an order in which each action stands behind all that it waits for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.order = _order(program)
        self.takes: list[list[int]] = [[] for _ in program.actions]
        for message, to in enumerate(program.taker):
            self.takes[to].append(message)
        self.ends = np.array([lane[:2] for lane in program.lanes], dtype=np.int64).reshape(-1, 2)
        # Lanes that may have to share: the same pair, or other pairs of one uplink or downlink.
        self._crowds: list[
            tuple[str, int, list[tuple[int, int]], list[tuple[int, int]]]
        ] = []  # (what they share, its peer, their pairs, (lane, message) of all)
        together: dict[tuple[str, int, int], list[int]] = {}
        for lane, (i, j, _) in enumerate(program.lanes):
            for key in (("pair", i, j), ("up", i, -1), ("down", j, -1)):
                together.setdefault(key, []).append(lane)
        messages: list[list[int]] = [[] for _ in program.lanes]
        for message, lane in enumerate(program.lane):
            messages[lane].append(message)
        for (side, peer, _), crowd in together.items():
            pairs = list(dict.fromkeys(program.lanes[k][:2] for k in crowd))
            if len(crowd) > 1 and (side == "pair" or len(pairs) > 1):
                both = [(k, m) for k in crowd for m in messages[k]]
                self._crowds.append((side, peer, pairs, both))

    def step_s(
        self,
        size_bytes: Sequence[int],
        seconds: Sequence[float],
        network: Network,
        peers: Sequence[int],
        rates: Floats,
        coding: Coding | None = None,
    ) -> tuple[float, bool]:
        """(seconds of the step, whether it is what `play` would find without crowded machines).
        `size_bytes` by message, `seconds` by action; `peers`: who of `network` stands for each of
        the program's; `rates`: `network.rates()`."""
        program = self.program
        at_peers = np.asarray(peers, dtype=np.int64)
        a, b = at_peers[self.ends[:, 0]], at_peers[self.ends[:, 1]]
        rate, latency = rates[a, b].tolist(), network.latency_s[a, b].tolist()
        free = [0.0] * len(rate)
        encoded, decoded = [0.0] * len(rate), [0.0] * len(rate)
        encode_s, decode_s = (coding.encode_s, coding.decode_s) if coding else (None, None)
        done = [0.0] * len(program.peers)
        arrived = [0.0] * len(size_bytes)
        sent = [0.0] * len(size_bytes)
        left = [0.0] * len(size_bytes)
        takes, gives, lane_of, owner = self.takes, program.gives, program.lane, program.owner
        for action in self.order:
            at = done[owner[action]]
            for message in takes[action]:
                at = max(at, arrived[message])
            at += seconds[action]
            done[owner[action]] = at
            for message in gives[action]:
                lane, ready = lane_of[message], at
                if encode_s is not None:
                    encoded[lane] = ready = max(at, encoded[lane]) + encode_s[message]
                sent[message] = begin = max(ready, free[lane])
                left[message] = free[lane] = end = begin + size_bytes[message] / rate[lane]
                there = end + latency[lane]
                if decode_s is not None:
                    decoded[lane] = there = max(there, decoded[lane]) + decode_s[message]
                arrived[message] = there
        return max(done, default=0.0), self._apart(network, peers, sent, left)

    def _apart(
        self, network: Network, peers: Sequence[int], sent: Sequence[float], left: Sequence[float]
    ) -> bool:
        """Whether no two lanes that share a resource which can bind send at the same time."""
        for side, peer, pairs, messages in self._crowds:
            # As in `play`: an endpoint whose pairs have no more together cannot bind.
            room = sum(float(network.bandwidth[peers[i], peers[j]]) for i, j in pairs)
            if side == "pair":
                limit = room
            else:
                limit = float((network.up if side == "up" else network.down)[peers[peer]])
                if room <= limit:
                    continue
            if limit == np.inf:
                continue
            spans = sorted((sent[m], left[m], k) for k, m in messages)
            until, last = -1.0, -1
            for begin, end, lane in spans:
                if lane != last and begin <= until:
                    return False
                until, last = max(until, end), lane
        return True

    def many(
        self,
        size_s: Floats,
        size_row: Sequence[int],
        work_s: Floats,
        work_row: Sequence[int],
        latency: Floats,
    ) -> Floats:
        """`step_s` for N choices of peers at once, shape (N,). Messages and actions of one row are
        alike: `size_s` (rows, N) are seconds on the wire, `work_s` (rows, N) seconds of computing,
        `latency` (lanes, N); `size_row[m]` and `work_row[a]` name the rows."""
        program = self.program
        n = work_s.shape[1]
        free: list[Floats | None] = [None] * len(program.lanes)
        done: list[Floats] = [np.zeros(n) for _ in program.peers]
        arrived: list[Floats | None] = [None] * len(program.lane)
        for action in self.order:
            at = done[program.owner[action]]
            for message in self.takes[action]:
                then = arrived[message]
                assert then is not None, "its giver stands before it"
                at = np.maximum(at, then)
                arrived[message] = None
            at = at + work_s[work_row[action]]
            done[program.owner[action]] = at
            for message in program.gives[action]:
                lane = program.lane[message]
                before = free[lane]
                begin = at if before is None else np.maximum(at, before)
                free[lane] = end = begin + size_s[size_row[message]]
                arrived[message] = end + latency[lane]
        return np.asarray(np.max(done, axis=0))


def _order(program: Program) -> list[int]:
    """Actions so that each one's list and messages stand before it."""
    waits = list(program.needs)
    following = list(program.first[:-1])
    ready = list(range(len(program.peers)))
    found: list[int] = []
    while ready:
        i = ready.pop()
        while following[i] < program.first[i + 1] and not waits[following[i]]:
            action = following[i]
            following[i] += 1
            found.append(action)
            for message in program.gives[action]:
                to = program.taker[message]
                waits[to] -= 1
                if not waits[to] and following[program.owner[to]] == to:
                    ready.append(program.owner[to])
    assert len(found) == len(program.actions), "action lists that wait for each other"
    return found
