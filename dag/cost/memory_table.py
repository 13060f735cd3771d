"""What the intervals between some positions take (`memory.py` names the terms), for all of them at
once.

`forward` and `backward` of an interval [i, j) are maxima over its operators o. What is there while
o runs splits into what depends on (o, i), on (i, j), and a few storages that cross j:

    most(i, j) = max over i <= o < j of (V(o, i) - Σ over terms t of j: size(t) · [o >= x(t)])
                 + C(i, j)

A term counts for the i up to its bound, or for those behind it. For a fixed (i, j) the sum only
grows with o, so between two x the largest V so far may stand for the largest V there, and the
maximum over the x, with prefix maxima of V over o, is exact.

V and C are sums over storages, each there in a few rectangles of (o, i) or (i, j), so they are
cumulative sums of differences. For N operators, n positions and c storages that cross a cut:
O(N·n + n²·c) in vector operations; some 0.2 s for 1,000 operators and positions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .storages import Pairs, Storages

__all__ = ["MemoryTable"]

Ints = NDArray[np.int64]

_NEVER = -(2**60)
"""The position that stands for any operator before an interval."""


class _Sum:
    """A table of sums over rectangles [row, row_end) x [column, column_end)."""

    def __init__(self, rows: int, columns: int) -> None:
        self._change = np.zeros((rows + 1, columns + 1), np.int64)

    def add(
        self, row: Ints | int, row_end: Ints | int, column: Ints | int, end: Ints | int, size: Ints
    ) -> None:
        row, column = np.minimum(row, row_end), np.minimum(column, end)  # empty ones cancel out
        for r, sign in ((row, 1), (row_end, -1)):
            np.add.at(self._change, (np.asarray(r), np.asarray(column)), sign * size)
            np.add.at(self._change, (np.asarray(r), np.asarray(end)), -sign * size)

    def table(self) -> Ints:
        found: Ints = self._change
        np.cumsum(found, 0, out=found)
        np.cumsum(found, 1, out=found)
        return found[:-1, :-1]


class MemoryTable:
    """The memory of the intervals between `positions` (ascending). Tables are (positions,
    positions) of int64 bytes: row j, column i is [positions[i], positions[j]); they mean nothing
    where i >= j."""

    weights: Ints
    trainable: Ints
    numbers: Ints
    """Numbers, not bytes."""
    changing: Ints
    update: Ints
    meets: Ints
    kept: tuple[Ints, Ints]
    """By whether the stage recomputes, as `transient`."""
    transient: tuple[Ints, Ints]
    arrives: Ints
    """Values and gradients of the next microbatch, which are in `transient`."""

    def __init__(self, storages: Storages, positions: Ints, meets: int = 0) -> None:
        """`meets`: bytes of each trained number while a round is exchanged; 0: there are none."""
        self.positions = positions
        self._storages = storages
        self._operators = storages.operators
        self._parameters(meets)
        self._size, self._born, self._last = storages.size, storages.born, storages.last
        self._flows = storages.flows
        things = len(self._size)
        self._reads, self._saves = storages.read, storages.saved
        self._touches = storages.read.both(storages.saved)
        self._saved_at, self._saved_last = self._saves.first(things), self._saves.latest(things)
        self._stages()

    def _of(self, operators: Ints | int) -> Ints:
        """How many positions are at most that: an interval that starts behind it begins there, one
        that ends behind it too."""
        return np.searchsorted(self.positions, operators, side="right").astype(np.int64)

    def _once(self, pairs: Pairs, size: Ints, behind: Ints | None = None) -> Ints:
        """The sizes of the things with a pair in [i, j), each once; with i > `behind` only."""
        n = len(self.positions)
        before = pairs.before if behind is None else np.maximum(pairs.before, behind[pairs.what])
        total = _Sum(n, n)
        total.add(self._of(pairs.at), n, self._of(before), self._of(pairs.at), size[pairs.what])
        return total.table()

    def _parameters(self, meets: int) -> None:
        of, held = self._storages, self._storages.held
        trained = of.weights * (of.numbers > 0)
        self.weights, self.trainable = self._once(held, of.weights), self._once(held, trained)
        self.numbers = self._once(held, of.numbers)
        self.changing = self.trainable + self._once(held, of.weights * of.updated)
        each = np.zeros(len(self.positions) + 1, np.int64)
        np.maximum.at(each, self._of(held.at), of.updating[held.what])
        self.update = np.zeros_like(self.weights)
        for j in range(1, len(self.update)):
            self.update[j, :j] = np.maximum(self.update[j - 1, :j], each[j])
        takes = meets * self.numbers - self.trainable + self.update
        self.meets = np.maximum(takes, 0) if meets else np.zeros_like(takes)

    def _stages(self) -> None:
        n, size, born, flows = len(self.positions), self._size, self._born, self._flows
        data = self._once(self._storages.data, self._storages.input_bytes)
        received = self._once(self._touches, size, born) + data
        leaves = self._once(self._touches, size * flows, born)
        gives = leaves > 0
        if (flows & (size == 0)).any():  # a gradient of no bytes is one too
            gives = self._once(self._touches, 1 * flows, born) > 0
        sent = _Sum(n, n)
        sent.add(self._of(born), self._of(self._last), 0, self._of(born), size * flows)
        answered = sent.table()
        waiting = received - data + answered
        # Made here and kept besides: saved.
        made = _Sum(n, n)
        first = np.maximum(self._saved_at, np.where(flows, np.maximum(self._last, born), -1))
        saved = self._saved_at <= self._operators
        made.add(self._of(np.where(saved, first, self._operators)), n, 0, self._of(born), size)
        kept = made.table() + answered + leaves + data
        if not flows.all():
            kept += self._once(self._saves, size * ~flows, born)
        forward = self._forward_most() + leaves + data
        backward = self._backward_most() + 2 * answered + leaves + data
        again = self._again_most() + received
        peak = np.maximum(forward, backward)
        kept_again, peak_again = (
            received,
            np.maximum(again, np.maximum(backward, forward + answered)),
        )
        idle = (self.trainable == 0) & ~gives  # no backward, and nothing is kept for one
        for table in (kept, kept_again):
            table[idle] = 0
        for table in (peak, peak_again):
            table[idle] = again[idle]
        self.kept = kept, kept_again
        self.arrives = waiting
        self.transient = peak - kept + waiting, peak_again - kept_again + waiting

    # ------------------------------------------------------------ maxima over operators

    def _forward_most(self) -> Ints:
        n, size, born, last = self._operators, self._size, self._born, self._last
        saved, saved_last = self._saved_at <= n, self._saved_last
        ends = np.minimum(last + 1, n)
        there = _Sum(n, len(self.positions))
        # Made here: until it is read last, or for good where it is saved.
        there.add(born + 1, np.where(saved, n, ends), 0, self._of(born), size)
        # Received without a gradient: likewise (one with a gradient stays).
        plain = size * ~self._flows
        there.add(0, n, self._of(born), self._of(saved_last), plain)
        until = np.maximum(born, saved_last)
        there.add(0, ends, self._of(until), len(self.positions), plain)
        most = self._prefix_most(there, self._storages.forward)
        found = most[self.positions]
        end = np.maximum(last, saved_last)
        received, ended = (size > 0) & ~self._flows, np.maximum(last, born)
        pending = (size > 0) & saved & (ended < self._saved_at)
        if not received.any() and not pending.any():
            return found
        for k, j in enumerate(self.positions.tolist()[1:], 1):
            # Not saved or read again in [i, j), though later.
            c = np.flatnonzero(received & (born < j) & (end >= j))
            # Saved behind j only.
            d = np.flatnonzero(pending & (ended < j) & (self._saved_at >= j))
            if len(c) + len(d):
                bound = np.maximum(born[c], self._saves.previous(c, j)), born[d]
                x = np.concatenate((self._reads.previous(c, j) + 1, ended[d] + 1))
                below = np.repeat([False, True], [len(c), len(d)])
                both = np.concatenate((c, d))
                found[k, :k] = self._row(most, k, np.concatenate(bound), below, size[both], x)
        return found

    def _again_most(self) -> Ints:
        """Without saving, received values left out, which stay."""
        there = _Sum(self._operators, len(self.positions))
        ends = np.minimum(self._last + 1, self._operators)
        there.add(self._born + 1, ends, 0, self._of(self._born), self._size)
        return self._prefix_most(there, self._storages.forward)[self.positions]

    def _backward_most(self) -> Ints:
        n, size, born = self._operators, self._size, self._born
        first = self._saved_at
        grad = size * self._flows
        last = np.maximum(self._last, 0)
        there = _Sum(n, len(self.positions))
        # Made here: freed behind the backward of who saved it first; its gradient comes with that
        # of who read it last and goes with that of who made it.
        there.add(first, n, 0, self._of(born), size)
        there.add(born, last, 0, self._of(born), grad)
        there.add(0, last, self._of(born), len(self.positions), grad)
        saves, plain = self._saves, size * ~self._flows
        start = np.maximum(saves.before, born[saves.what])
        there.add(saves.at, n, self._of(start), self._of(saves.at), plain[saves.what])
        most = self._prefix_most(there, self._storages.backward)
        found = most[self.positions]
        some = (size > 0) & self._flows
        for k, j in enumerate(self.positions.tolist()[1:], 1):
            c = np.flatnonzero(some & (born < j) & (self._last >= j))
            if len(c):
                # Sent ones and their gradients are there all the time and counted elsewhere; of
                # those that pass by, the gradient comes with who reads it here last.
                x = np.concatenate((first[c], born[c], self._reads.previous(c, j)))
                below = np.repeat([True, True, False], len(c))
                found[k, :k] = self._row(
                    most, k, np.tile(born[c], 3), below, np.tile(size[c], 3), x
                )
        return found

    def _prefix_most(self, there: _Sum, work: Ints) -> Ints:
        """(operators + 1, positions): row t is the largest V of the operators before t."""
        value = there.table()
        value += work[:, None]
        value[np.arange(len(work))[:, None] < self.positions] = _NEVER
        np.maximum.accumulate(value, axis=0, out=value)
        return np.concatenate((np.full((1, len(self.positions)), _NEVER), value))

    def _row(self, most: Ints, k: int, bound: Ints, below: Ints, size: Ints, x: Ints) -> Ints:
        """For the intervals that end at position k, the maximum with the terms of that end, each
        for i <= bound where `below`, else for i > bound."""
        j = int(self.positions[k])
        ends = np.unique(np.append(np.clip(x, 0, j), j))
        order = np.argsort(bound, kind="stable")
        less = np.where(x < ends[:, None], size, 0)[:, order]
        under = below[order]
        sums = np.zeros((len(ends), len(order) + 1), np.int64)
        sums[:, 1:] = np.cumsum(np.where(under, -less, less), axis=1)
        sums += np.where(under, less, 0).sum(1, keepdims=True)
        place = np.searchsorted(bound[order], self.positions[:k], side="left")
        found: Ints = (most[ends, :k] - sums[:, place]).max(0)
        return found
