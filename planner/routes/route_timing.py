"""How long a step of routes takes: one calculation of events, in seconds.

- A node does one job at a time and rests `rest_s` behind it; what has come waits. It begins what
  came first, or, by `backward_first`, losses and backwards before forwards.
- A forward takes one of the node's places and a backward gives it back; a forward without a place
  waits. A lane begins its next microbatch when the last one is back.
- A message holds its link for `hold_s` and comes `latency_s` later. Links carry one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from .route_rules import LanePath

__all__ = ["RouteClock", "RouteTimes"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class RouteTimes:
    """Seconds of everything. N nodes with equal stages."""

    latency_s: Floats
    """(N, N)"""
    hold_s: Floats
    """(N, N): how long a message holds its link; all 0: links carry any number at once."""
    forward_s: Floats
    """(N,): of one stage."""
    backward_s: Floats
    """(N,)"""
    loss_s: Floats
    """(N,)"""
    rest_s: float = 0.0
    memory: int = 3
    """Microbatches that a node keeps between forward and backward."""
    backward_first: bool = False

    def __post_init__(self) -> None:
        n = len(self.forward_s)
        for name, wanted in (
            ("latency_s", (n, n)),
            ("hold_s", (n, n)),
            ("backward_s", (n,)),
            ("loss_s", (n,)),
        ):
            shape = getattr(self, name).shape
            if shape != wanted:
                raise ValueError(f"{name} has shape {shape}: expected {wanted}")

    def hop_s(self) -> Floats:
        """(N, N): seconds from node to node on a link that is free."""
        found: Floats = self.latency_s + self.hold_s
        return found

    def visit_s(self) -> Floats:
        """(N,): forward and backward of one microbatch."""
        found: Floats = self.forward_s + self.backward_s
        return found


class RouteClock:
    """Times routes again and again on one network; what is known of a path is kept.

    A microbatch of a path of L visits has steps 0 to L - 1: forwards; L: the loss at the first
    node; L + 1 to 2 L: backwards.
    """

    def __init__(self, times: RouteTimes) -> None:
        self.times = times
        self._n = len(times.forward_s)
        self._latency: list[list[float]] = times.latency_s.tolist()
        self._hold: list[list[float]] = times.hold_s.tolist()
        self._holds = bool(times.hold_s.any())
        self._known: dict[LanePath, tuple[list[int], list[float]]] = {}

    def of(self, path: LanePath) -> tuple[list[int], list[float]]:
        """The node and the seconds of each step."""
        known = self._known.get(path)
        if known is None:
            if len(self._known) > 200_000:
                self._known.clear()
            t, nodes = self.times, [node for _, node in path]
            seconds = [
                *(float(t.forward_s[k]) for k in nodes),
                float(t.loss_s[nodes[0]]),
                *(float(t.backward_s[k]) for k in reversed(nodes)),
            ]
            known = self._known[path] = ([*nodes, nodes[0], *reversed(nodes)], seconds)
        return known

    def run(
        self,
        waves: Sequence[Sequence[LanePath]],
        ready_s: Sequence[float] = (),
        jobs: list[tuple[int, float, float, int, int]] | None = None,
    ) -> list[float]:
        """The end of each microbatch, by wave and lane; infinity where microbatches wait for each
        other's places for ever. `ready_s`: by lane, when the first one may begin; empty: at once,
        in the order of the lanes. `jobs` is given (node, begin, end, microbatch, step) of all
        that is done, in the order in which it begins."""
        t = self.times
        lanes, n = len(waves[0]), self._n
        flat = [self.of(path) for wave in waves for path in wave]
        length = len(waves[0][0])
        steps, last = 2 * length + 1, 2 * length
        latency, hold, rest_s = self._latency, self._hold, t.rest_s
        free, room, ends = [0.0] * n, [t.memory] * n, [inf] * len(flat)
        waiting: list[list[int]] = [[] for _ in range(n)]
        link: dict[int, float] = {}
        # What happens: (second, job), a job being microbatch · steps + step, or below 0 a node
        # that is free again.
        heap = [(ready_s[m] if ready_s else 0.0, m * steps) for m in range(lanes)]
        heapify(heap)
        while heap:
            now, job = heappop(heap)
            node = ~job if job < 0 else flat[job // steps][0][job % steps]
            queue = waiting[node]
            if free[node] > now:
                if job >= 0:
                    if not queue:
                        heappush(heap, (free[node], ~node))
                    queue.append(job)
                continue
            if job < 0 or queue or (job % steps < length and not room[node]):
                if job >= 0:
                    queue.append(job)
                chosen = _first(queue, steps, length, room[node], t.backward_first)
                if chosen < 0:
                    continue
                job = queue.pop(chosen)
            m, step = divmod(job, steps)
            nodes, seconds = flat[m]
            end = now + seconds[step]
            free[node] = end + rest_s
            if jobs is not None:
                jobs.append((node, now, end, m, step))
            if queue:
                heappush(heap, (free[node], ~node))
            room[node] += (step > length) - (step < length)
            if step == last:
                ends[m] = end
                if m + lanes < len(flat):
                    heappush(heap, (free[node], (m + lanes) * steps))
                continue
            to = nodes[step + 1]
            if self._holds and to != node:
                key = node * n + to
                end = link[key] = max(end, link.get(key, 0.0)) + hold[node][to]
            heappush(heap, (end + latency[node][to], job + 1))
        return ends


def _first(queue: Sequence[int], steps: int, length: int, room: int, backward_first: bool) -> int:
    """The place of the first job in a queue that may begin, losses and backwards before forwards if
    so asked; -1: none may."""
    chosen = -1
    for i, job in enumerate(queue):
        if job % steps >= length:
            return i
        if room and chosen < 0:
            chosen = i
            if not backward_first:
                break
    return chosen
