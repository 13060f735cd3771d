"""Memory of every interval between some positions of a chain at once.

    bytes(i, j, l) = state(i, j) + l · saved(i, j) + 2 · largest(i, j)       as in `partition.py`
    recomputed     = state(i, j) + saved(i, j) + 2 · largest(i, j) + (l - 1) · crossing(i)

Between few positions, FEW at most, what is kept and passes comes from `dag/memory.py` itself, as
the judge counts it.

A thing of some bytes that operators in the blocks b1 < b2 < … touch counts once in (i, j) when any
of them is in it: when for one t, b(t-1) < i <= b(t) < j. Each t is a rectangle of (i, j), so all
things together are a sum of differences: O(touches + positions²).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...dag.cost import OperatorCost
from .partition import Chain

__all__ = ["Needs"]

FEW = 48
"""Positions between which every interval is swept: some 0.1 s."""

Ints = NDArray[np.int64]


class Needs:
    """For the intervals between `positions` (ascending, both ends included) of a chain."""

    def __init__(self, chain: Chain, positions: Ints) -> None:
        self.positions = positions
        costs, n = chain.costs, len(positions)
        block = np.searchsorted(positions, np.arange(chain.operators), side="right") - 1
        self._state = _once((((v, chain.state[v]) for v, _ in c.reads) for c in costs), block, n)
        self._saved = _once((c.saves for c in costs), block, n)
        self._largest = _largest(costs, block, n)
        self._crossing = np.array([chain.crossing_bytes(int(p)) for p in positions], np.int64)
        self._swept = {r: self._sweep(chain, r) for r in (False, True)} if n <= FEW else {}
        self._known: dict[tuple[int, int, bool], Ints] = {}

    def _sweep(self, chain: Chain, recompute: bool) -> tuple[Ints, Ints]:
        """(n, n) bytes that a live microbatch keeps, and those that pass."""
        n = len(self.positions)
        kept, passing = np.zeros((n, n), dtype=np.int64), np.zeros((n, n), dtype=np.int64)
        for i, j in itertools.combinations(range(n), 2):
            stage = chain.memory.stage(int(self.positions[i]), int(self.positions[j]), recompute)
            kept[i, j], passing[i, j] = stage.kept, stage.transient
        return kept, passing

    def low(self, size_bytes: int, live: int, recompute: bool = False) -> Ints:
        """By end j, the least start from which every interval that ends at j needs no more than
        `size_bytes` with `live` microbatches; j itself if none does. Shape (positions,)."""
        key = (size_bytes, live, recompute)
        if key not in self._known:
            if self._swept:
                kept, passing = self._swept[recompute]
                self._known[key] = _behind(self._state + live * kept + passing > size_bytes)
            else:
                find = self._low_recomputed if recompute else self._low
                self._known[key] = find(size_bytes, live)
        return self._known[key]

    def _low(self, size_bytes: int, live: int) -> Ints:
        """By bisection in all columns at once: an interval that starts later never needs more."""
        n = len(self.positions)
        end = np.arange(n)
        low, high = np.zeros(n, dtype=np.int64), end.copy()
        for _ in range(n.bit_length()):
            i = (low + high) // 2
            need = self._state[i, end] + live * self._saved[i, end] + 2 * self._largest[i, end]
            over = (need > size_bytes) & (i < end)
            low, high = np.where(over, i + 1, low), np.where(over, high, i)
        return np.minimum(high, end)

    def _low_recomputed(self, size_bytes: int, live: int) -> Ints:
        """What crosses the start may be less further on: behind the last start that is too much."""
        need = self._state + self._saved + 2 * self._largest
        need += max(0, live - 1) * self._crossing[:, None]
        return _behind(need > size_bytes)


def _behind(over: NDArray[np.bool_]) -> Ints:
    """By column, the row behind the last one above the diagonal that is set."""
    over = np.triu(over, 1)
    last = len(over) - 1 - np.argmax(over[::-1], axis=0)
    return np.where(over.any(axis=0), last + 1, 0).astype(np.int64)


def _once(touches: Iterable[Iterable[tuple[object, int]]], block: Ints, n: int) -> Ints:
    """(n, n) bytes of what operators in (i, j) touch, each thing once. `touches`: by operator."""
    last: dict[object, int] = {}
    rows: list[tuple[int, int, int]] = []  # (first i, block, bytes)
    for b, things in zip(block.tolist(), touches, strict=True):
        for thing, size in things:
            before = last.get(thing, -1)
            if before < b:
                rows.append((before + 1, b, size))
                last[thing] = b
    change = np.zeros((n + 1, n + 1), dtype=np.int64)
    if rows:
        first, at, size_bytes = np.array(rows, dtype=np.int64).T
        np.add.at(change, (first, at + 1), size_bytes)
        np.add.at(change, (at + 1, at + 1), -size_bytes)
    return change.cumsum(0).cumsum(1)[:n, :n]


def _largest(costs: Sequence[OperatorCost], block: Ints, n: int) -> Ints:
    """(n, n) bytes of the largest result of one operator in (i, j)."""
    each = np.zeros(n, dtype=np.int64)
    np.maximum.at(each, block, [c.output_bytes for c in costs])
    found = np.zeros((n, n), dtype=np.int64)
    for i in range(n - 1):
        np.maximum.accumulate(each[i : n - 1], out=found[i, i + 1 :])
    return found
