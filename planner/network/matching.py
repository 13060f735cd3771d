"""Which peers are alike, which of two groups work together, and in which order groups follow.

All three are parts of what a grouping of peers costs (grouping.py), and small enough to be exact.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from .order import EXACT, widest_path

__all__ = ["kinds_of", "match", "shortest_path"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def kinds_of(*matrices: Floats) -> tuple[int, ...]:
    """By peer, the number of its kind: peers of one kind may change places and no matrix (P, P)
    changes. A diagonal says what a peer is by itself."""
    n = len(matrices[0])
    found: list[int] = []
    firsts: dict[bytes, list[tuple[int, int]]] = {}
    for i in range(n):
        others = np.arange(n) != i
        # Interchangeable peers have the same links, in some order: most are told apart by that.
        mark = b"".join(np.sort(m[i, others]).tobytes() for m in matrices)
        for kind, j in firsts.setdefault(mark, []):
            rest = others & (np.arange(n) != j)
            if all(
                m[i, j] == m[j, i]
                and m[i, i] == m[j, j]
                and np.array_equal(m[i, rest], m[j, rest])
                and np.array_equal(m[rest, i], m[rest, j])
                for m in matrices
            ):
                found.append(kind)
                break
        else:
            kind = max(found, default=-1) + 1
            firsts[mark].append((kind, i))
            found.append(kind)
    return tuple(found)


def match(cost: Floats) -> tuple[float, tuple[int, ...]]:
    """The perfect matching of rows with columns (D, D) whose dearest pair is cheapest: that pair's
    cost, and the column of every row. Augmenting paths under a threshold, found by bisection."""
    # No matching is cheaper than the cheapest column of any row, or row of any column.
    least = max(float(cost.min(1).max()), float(cost.min(0).max()))
    best = _matched(cost <= least)
    if best is not None:
        return least, tuple(best)
    values = np.unique(cost[cost > least])
    low, high = 0, len(values)
    while low < high:
        at = (low + high) // 2
        found = _matched(cost <= values[at])
        if found is None:
            low = at + 1
        else:
            best, high = found, at
    assert best is not None, "every row reaches every column at the largest value"
    return float(values[high]), tuple(best)


def _matched(allowed: NDArray[np.bool_]) -> list[int] | None:
    """A column for every row (D, D), or None."""
    n = len(allowed)
    # Sets of columns as the bits of a number.
    rows = [int.from_bytes(r.tobytes(), "little") for r in np.packbits(allowed, 1, "little")]
    row_of = [-1] * n
    free, seen = (1 << n) - 1, 0

    def place(row: int) -> bool:
        nonlocal free, seen
        at_once = rows[row] & free
        if at_once:
            bit = at_once & -at_once
            free ^= bit
            row_of[bit.bit_length() - 1] = row
            return True
        while taken := rows[row] & ~seen:
            bit = taken & -taken
            seen |= bit
            if place(row_of[bit.bit_length() - 1]):
                row_of[bit.bit_length() - 1] = row
                return True
        return False

    for row in range(n):
        seen = 0
        if not place(row):
            return None
    column_of = [0] * n
    for column, row in enumerate(row_of):
        column_of[row] = column
    return column_of


@functools.cache
def _levels(n: int) -> tuple[tuple[Ints, Ints], ...]:
    """By size of sets of n nodes, from one: every set, and a node outside of it."""
    found = []
    for level in range(1, n):
        pairs = [
            (m, j)
            for m in range(1 << n)
            if m.bit_count() == level
            for j in range(n)
            if not (m >> j) & 1
        ]
        rows = np.array(pairs, dtype=np.int64)
        found.append((rows[:, 0], rows[:, 1]))
    return tuple(found)


def shortest_path(distance: Floats) -> tuple[float, tuple[int, ...]]:
    """The open path over all n nodes with the least sum of a symmetric matrix (n, n): exact up to
    order.EXACT nodes, improved by exchanges beyond."""
    n = len(distance)
    if n > EXACT:
        path = widest_path(np.ones_like(distance), distance)
        return float(distance[path[:-1], path[1:]].sum()), tuple(path)
    best = np.full((1 << n, n), np.inf)
    best[1 << np.arange(n), np.arange(n)] = 0.0
    for nodes, j in _levels(n):
        best[nodes | (1 << j), j] = (best[nodes] + distance[j]).min(1)
    nodes_left = (1 << n) - 1
    last, found = int(best[nodes_left].argmin()), []
    while True:
        found.append(last)
        nodes_left ^= 1 << last
        if not nodes_left:
            break
        last = int((best[nodes_left] + distance[last]).argmin())
    return float(best[-1].min()), tuple(found[::-1])
