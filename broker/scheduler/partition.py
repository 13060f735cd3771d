"""Cutting a chain of operators into intervals: exact, by dynamic programming. Memory is here a
simple form of `dag/memory.py`, by which the judge decides, that follows an interval whose ends
move:

    device_bytes(i, j, l) = Σ state(p) over the parameters and buffers that [i, j) reads, each once
                          + l · Σ bytes of the storages that [i, j) keeps for backward, each once
                          + 2 · largest result of one operator in [i, j)     (it and its gradient)
    state(p)              = bytes(p) · (1 weight + 1 gradient + optimizer slots [+ 1 flat copy for
                            the exchange with other holders]) if trainable, else bytes(p)
    l                     = live microbatches of the stage under the schedule

Among all cuts whose stages fit, the first pass finds the least bottleneck in FLOPs:

    f(k, j) = min over i of max(f(k-1, i), flops(i, j))

and the second pass, with every stage at most (1 + SLACK) · bottleneck, the fewest bytes that cross:

    c(k, j) = min over i of c(k-1, i) + crossing(i)

because many operators cost nothing and a cut beside them is free to be a good one. Time is O(k·n²)
in vector operations; beyond MOST_POSITIONS operators only the best position of each bucket of equal
FLOPs is tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...dag.cost import OperatorCost
from ...dag.graph import Graph
from ...dag.memory import MemoryModel

__all__ = ["MOST_POSITIONS", "SLACK", "Chain", "Room"]

SLACK = 0.05
"""How much above the best bottleneck a stage may be for a cheaper cut."""
MOST_POSITIONS = 2048
"""Positions that are tried; 2,000 operators on 16 peers take under a second."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Room:
    """What one stage may take: bytes of the device, and its live microbatches."""

    bytes: int
    live: int


class _Window:
    """Bytes of the operators [start, stop) while both ends move forward."""

    def __init__(self, costs: Sequence[OperatorCost], state: Mapping[str, int]) -> None:
        self._costs = costs
        self._state = state
        self.start = self.stop = 0
        self.state_bytes = self.saved_bytes = 0
        self._reads: dict[str, int] = {}
        self._saves: dict[int, int] = {}
        self._largest: deque[tuple[int, int]] = deque()  # (operator, bytes), bytes falling

    def grow(self) -> None:
        cost = self._costs[self.stop]
        for value, _ in cost.reads:
            self._reads[value] = self._reads.get(value, 0) + 1
            if self._reads[value] == 1:
                self.state_bytes += self._state[value]
        for storage, size in cost.saves:
            self._saves[storage] = self._saves.get(storage, 0) + 1
            if self._saves[storage] == 1:
                self.saved_bytes += size
        while self._largest and self._largest[-1][1] <= cost.output_bytes:
            self._largest.pop()
        self._largest.append((self.stop, cost.output_bytes))
        self.stop += 1

    def shrink(self) -> None:
        cost = self._costs[self.start]
        for value, _ in cost.reads:
            self._reads[value] -= 1
            if self._reads[value] == 0:
                self.state_bytes -= self._state[value]
        for storage, size in cost.saves:
            self._saves[storage] -= 1
            if self._saves[storage] == 0:
                self.saved_bytes -= size
        if self._largest[0][0] == self.start:
            self._largest.popleft()
        self.start += 1

    def bytes(self, live: int) -> int:
        largest = self._largest[0][1] if self._largest else 0
        return self.state_bytes + live * self.saved_bytes + 2 * largest


class Chain:
    """A bound graph as a chain to cut. `copies`: fp32 numbers per trainable number besides the
    weight itself (gradient, optimizer slots, flat copy)."""

    def __init__(self, graph: Graph, costs: Sequence[OperatorCost], copies: int) -> None:
        self.operators = len(costs)
        self.costs = costs
        self._graph = graph
        trainable = {f"param:{p.name}" for p in graph.parameters if p.trainable}
        self.state = {
            value: size * (1 + copies) if value in trainable else size
            for cost in costs
            for value, size in cost.reads
        }
        flops = np.array([c.flops_forward + c.flops_backward for c in costs], dtype=np.float64)
        self._flops: Floats = np.concatenate(([0.0], np.cumsum(flops)))
        self._crossing = _crossing(graph)
        self.positions = self.coarse(MOST_POSITIONS)

    def flops(self, start: int, stop: int) -> float:
        """Forward and backward, for one microbatch."""
        return float(self._flops[stop] - self._flops[start])

    def device_bytes(self, start: int, stop: int, live: int) -> int:
        window = _Window(self.costs[start:stop], self.state)
        for _ in range(start, stop):
            window.grow()
        return window.bytes(live)

    @cached_property
    def memory(self) -> MemoryModel:
        """What intervals take, swept; `device_bytes` is about the same and follows both ends."""
        return MemoryModel(self._graph, self.costs)

    def crossing_bytes(self, position: int) -> int:
        """Bytes of the values that are made before a position and read behind it."""
        return int(self._crossing[position])

    def largest_operator(self) -> tuple[int, int]:
        """(operator, device bytes) of the operator that needs most alone, with one microbatch."""
        sizes = [self.device_bytes(i, i + 1, 1) for i in range(self.operators)]
        worst = max(range(self.operators), key=lambda i: sizes[i])
        return worst, sizes[worst]

    # ------------------------------------------------------------ cutting

    def lows(self, rooms: Sequence[Room]) -> list[Ints]:
        """By stage: low[j] is the least position i such that [i, j) fits; j itself if none does."""
        known: dict[Room, Ints] = {}
        for room in rooms:
            if room not in known:
                known[room] = self._low(room)
        return [known[room] for room in rooms]

    def _low(self, room: Room) -> Ints:
        at = self.positions
        low = np.zeros(len(at), dtype=np.int64)
        window = _Window(self.costs, self.state)
        first = 0
        for j in range(1, len(at)):
            while window.stop < at[j]:
                window.grow()
            while first < j and window.bytes(room.live) > room.bytes:
                first += 1
                while window.start < at[first]:
                    window.shrink()
            low[j] = first
        return low

    def fits(self, rooms: Sequence[Room]) -> bool:
        """Whether some cut gives every stage at least one operator and no more than its room."""
        n = len(self.positions)
        can = np.zeros(n, dtype=bool)
        can[0] = True
        index = np.arange(n)
        for low in self.lows(rooms):
            before = np.concatenate(([0], np.cumsum(can)))  # before[i]: reachable below position i
            can = before[index] > before[low]
        return bool(can[-1])

    def cut(self, rooms: Sequence[Room]) -> list[tuple[int, int]] | None:
        """The best intervals, one for each room in order; None when nothing fits."""
        lows = self.lows(rooms)
        flops = self._flops[self.positions]
        n = len(self.positions)
        best = np.full(n, np.inf)
        best[0] = 0.0
        for low in lows:
            longer = np.full(n, np.inf)
            for j in range(1, n):
                i = low[j]
                if i < j:
                    longer[j] = np.maximum(best[i:j], flops[j] - flops[i:j]).min()
            best = longer
        if not np.isfinite(best[-1]):
            return None
        most = best[-1] * (1 + SLACK)
        light = np.searchsorted(
            flops, flops - most * (1 + 1e-12)
        )  # least i with flops(i,j) <= most
        cross = self._crossing[self.positions]
        total = np.full(n, np.inf)
        total[0] = 0.0
        choices: list[Ints] = []
        for low in lows:
            paid = total + cross
            total = np.full(n, np.inf)
            choice = np.zeros(n, dtype=np.int64)
            for j in range(1, n):
                i = max(low[j], light[j])
                if i < j:
                    choice[j] = i + int(np.argmin(paid[i:j]))
                    total[j] = paid[choice[j]]
            choices.append(choice)
        found: list[tuple[int, int]] = []
        j = n - 1
        for choice in reversed(choices):
            i = int(choice[j])
            found.append((int(self.positions[i]), int(self.positions[j])))
            j = i
        assert j == 0, "the second pass keeps within what the first one found"
        return found[::-1]

    def coarse(self, most: int) -> Ints:
        """Positions to cut at, both ends included: all of them, or of each of `most` buckets of
        equal FLOPs the one that fewest bytes cross."""
        n = self.operators
        if n < most:
            return np.arange(n + 1)
        inner = np.arange(1, n)
        share = self._flops[inner] / max(float(self._flops[-1]), 1.0)
        bucket = np.minimum((share * most).astype(np.int64), most - 1)
        order = np.lexsort((inner, self._crossing[inner], bucket))
        _, first = np.unique(bucket[order], return_index=True)
        return np.concatenate(([0], np.sort(inner[order][first]), [n]))


def _crossing(graph: Graph) -> Floats:
    """By position: bytes of the values that operators before it make and operators from it on read;
    0 at both ends."""
    n = len(graph.operators)
    change = np.zeros(n + 2)
    last: dict[str, int] = {}
    for i, op in enumerate(graph.operators):
        for value in op.reads:
            last[value] = i
    for i, op in enumerate(graph.operators):
        for value, output in zip(op.values, op.outputs, strict=True):
            if output.spec is not None and value in last:
                change[i + 1] += output.spec.size_bytes
                change[last[value] + 1] -= output.spec.size_bytes
    return np.cumsum(change)[: n + 1]
