"""Which peers are alike, and which of two groups work together.

Both are parts of what a grouping of peers costs (grouping.py), and small enough to be exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["kinds_of", "match"]

Floats = NDArray[np.float64]


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
