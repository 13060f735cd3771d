"""A bound graph as a chain of operators: the positions at which it may be cut, and what a cut there
sends. What the intervals between them take is in `Needs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.cost import OperatorCost
from ...dag.cost.memory import MemoryModel
from ...dag.cost.memory_table import MemoryTable
from ...dag.cost.pace import IntervalWork
from ...dag.cost.weight_costs import weight_totals
from ...dag.ir.graph import Graph

__all__ = ["IntervalMemory", "OperatorChain"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class OperatorChain:
    """The operators of a bound graph in a row, the positions at which it may be cut, and the bytes
    that each cut sends."""

    def __init__(self, graph: Graph, costs: Sequence[OperatorCost]) -> None:
        self.operators = len(costs)
        flops = np.array([c.flops_forward + c.flops_backward for c in costs], dtype=np.float64)
        self._flops: Floats = np.concatenate(([0.0], np.cumsum(flops)))
        self._crossing = _crossing(graph)
        self._graph, self._costs = graph, costs
        trainable = {f"param:{p.name}" for p in graph.parameters if p.trainable}
        new, seen = [(0.0, 0.0)], set[str]()
        for c in costs:
            sizes = {v: s for v, s in c.reads if v in trainable and v not in seen}
            seen.update(sizes)
            new.append((float(len(sizes)), float(sum(sizes.values()))))
        self.trained: Floats = np.cumsum(new, axis=0).T
        """(2, operators + 1): by position, the trained weights that are read before it, each once,
        and their bytes."""

    @cached_property
    def halves(self) -> IntervalWork:
        """About what a backward is relieved of whose gradients of weights are apart, and what these
        take then, in the place of a forward and a backward."""
        moved, beside = weight_totals(self._graph, self._costs)
        return IntervalWork(
            [
                replace(c, forward=one, backward=one + more)
                for c, one, more in zip(self._costs, moved, beside, strict=True)
            ]
        )

    def crossing_bytes(self, position: int) -> int:
        """Bytes of the values that are made before a position and read behind it."""
        return int(self._crossing[position])

    def positions(self, most: int) -> Ints:
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
    for i, op in enumerate(graph.operators):
        for value, output in zip(op.values, op.outputs, strict=True):
            if output.spec is not None and value in graph.readers:
                change[i + 1] += output.spec.size_bytes
                change[graph.readers[value][-1] + 1] -= output.spec.size_bytes
    return np.cumsum(change)[: n + 1]


# Which intervals between some positions of a chain fit a peer alone: what the judge says of each
# (`CostModel.stage_bytes`), for all of them at once.
#
# bytes(i, j) = standing + max(live · kept + transient, update, exchange)     (dag/cost/memory.py)
#
# The first sum may be more for a later start, where more crosses: it is looked through from the end
# of an interval back, in blocks whose largest summands bound it. The others only grow with an
# interval. What a peer takes that holds several stages is at most the sum of what each takes alone.

BLOCK = 32
"""Starts that are bounded together."""


class IntervalMemory:
    """For the intervals between `positions` (ascending, both ends included). `state_bytes` and
    `copies` as in `StageMemory.standing`."""

    def __init__(
        self, memory: MemoryModel, positions: Ints, state_bytes: int, copies: int = 0
    ) -> None:
        self.positions = positions
        table = MemoryTable(memory.storages, positions, memory.meets)
        standing = table.weights + (1 + copies) * table.trainable + state_bytes * table.numbers
        after = np.maximum(table.update, table.meets)
        self._beside = [
            standing + np.maximum(after, shared * 2 * table.trainable) for shared in (0, 1)
        ]
        inside = np.tri(len(positions), k=-1, dtype=bool)
        self._kept = [_Blocks.of(np.where(inside, kept, 0)) for kept in table.kept]
        self._passing = [
            _Blocks.of(np.where(inside, standing + passing, 0)) for passing in table.transient
        ]
        self._known: dict[tuple[int, int, bool, bool], Ints] = {}

    def low(
        self, size_bytes: int, live: int, recompute: bool = False, shared: bool = False
    ) -> Ints:
        """By end j, the least start from which every interval that ends at j needs no more than
        `size_bytes` with `live` microbatches; j itself if none does. `shared`: the stage has
        several holders. Shape (positions,), the index of a position."""
        key = (size_bytes, live, recompute, shared)
        if key not in self._known:
            passing = self._low_passing(max(0, size_bytes), live, recompute)
            beside = self._low_beside(size_bytes, shared)
            self._known[key] = np.maximum(passing, beside)
        return self._known[key]

    def least(self, live: int, recompute: bool = False) -> Ints:
        """By position but the last: the least that an interval needs which has the operator behind
        it."""
        n = len(self.positions)
        passing = self._passing[recompute].each + live * self._kept[recompute].each
        need = np.maximum(passing.reshape(n, -1)[:, :n], self._beside[0])
        need[~np.tri(n, k=-1, dtype=bool)] = np.iinfo(np.int64).max
        need = np.minimum.accumulate(need, axis=1)  # that start at i or before
        need = np.minimum.accumulate(need[::-1], axis=0)[::-1]  # and end at j or behind
        return np.diagonal(need, offset=-1).copy()

    def _low_passing(self, size_bytes: int, live: int, recompute: bool) -> Ints:
        kept, passing = self._kept[recompute], self._passing[recompute]
        low = np.zeros(len(self.positions), np.int64)
        over = passing.most + live * kept.most > size_bytes
        ends = np.flatnonzero(over.any(axis=1))
        while len(ends):
            blocks = over.shape[1] - 1 - np.argmax(over[ends, ::-1], axis=1)
            need = passing.each[ends, blocks] + live * kept.each[ends, blocks]
            last = BLOCK - 1 - np.argmax((need > size_bytes)[:, ::-1], axis=1)
            found = (need > size_bytes).any(axis=1)
            low[ends[found]] = (blocks * BLOCK + last + 1)[found]
            # The largest summands were not of one start: the block before it.
            ends, blocks = ends[~found], blocks[~found]
            over[ends, blocks] = False
            ends = ends[over[ends].any(axis=1)]
        return low

    def _low_beside(self, size_bytes: int, shared: bool) -> Ints:
        """By bisection for all ends at once."""
        n = len(self.positions)
        end = np.arange(n)
        low, high = np.zeros(n, dtype=np.int64), end.copy()
        for _ in range(n.bit_length()):
            i = (low + high) // 2
            over = (self._beside[shared][end, i] > size_bytes) & (i < end)
            low, high = np.where(over, i + 1, low), np.where(over, high, i)
        return np.minimum(high, end)


class _Blocks:
    """A table by end and start whose starts are in blocks: `each` (n, blocks, BLOCK), and the
    largest of every block, `most` (n, blocks)."""

    def __init__(self, each: Ints) -> None:
        self.each = each
        self.most: Ints = each.max(axis=2)

    @classmethod
    def of(cls, table: Ints) -> _Blocks:
        n = len(table)
        blocks = -(-n // BLOCK)
        return cls(np.pad(table, ((0, 0), (0, blocks * BLOCK - n))).reshape(n, blocks, BLOCK))
