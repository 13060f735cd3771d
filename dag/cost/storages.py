"""The storages and the parameters of a bound graph as arrays: when each is made, read and saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..ir.graph import Graph, Operator
from .cost import OperatorCost
from .optimizer_states import counted_in_8_bits, update_in_8_bits

__all__ = ["Pairs", "Storages"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pairs:
    """(operator, thing) pairs without doubles, by thing and then by operator."""

    at: Ints
    what: Ints
    before: Ints
    """The operator of the pair before it of the same thing; -1: it is the first."""
    last: int
    """Above all operators."""

    @classmethod
    def of(cls, at: Ints, what: Ints, last: int) -> Pairs:
        key = np.unique(what * last + at)
        what, at = np.divmod(key, last)
        before = np.concatenate(([-1], at[:-1]))
        before[np.concatenate(([True], what[1:] != what[:-1]))[: len(before)]] = -1
        return cls(at, what, before[: len(at)], last)

    @classmethod
    def listed(cls, pairs: Sequence[tuple[int, int]], last: int) -> Pairs:
        """Return the pairs of a list."""
        at, what = np.array(pairs, np.int64).reshape(len(pairs), 2).T
        return cls.of(at, what, last)

    def part(self, start: int, stop: int, number: Ints | None = None) -> Pairs:
        """The pairs with operators in [start, stop), which count from 0 then. `number`: by thing,
        another number for it, in the same order."""
        some = (start <= self.at) & (self.at < stop)
        what = self.what[some] if number is None else number[self.what[some]]
        before = np.maximum(self.before[some] - start, -1)
        return Pairs(self.at[some] - start, what, before, stop - start + 1)

    def both(self, other: Pairs) -> Pairs:
        """Return the pairs that are in one of the two."""
        at, what = np.append(self.at, other.at), np.append(self.what, other.what)
        return Pairs.of(at, what, self.last)

    def previous(self, things: Ints, operator: int) -> Ints:
        """Finds, for each thing, the last operator before the given one; -1: there is none."""
        key = self.what * self.last + self.at
        k = np.searchsorted(key, things * self.last + operator) - 1
        some = (k >= 0) & (self.what[k] == things) if len(key) else np.zeros(len(things), bool)
        found: Ints = np.where(some, self.at[k] if len(key) else -1, -1)
        return found

    def first(self, things: int) -> Ints:
        """By thing its first operator; `last`: it has none."""
        found = np.full(things, self.last, np.int64)
        found[self.what[self.before < 0]] = self.at[self.before < 0]
        return found

    def latest(self, things: int) -> Ints:
        """By thing its last operator; -1: it has none."""
        found = np.full(things, -1, np.int64)
        np.maximum.at(found, self.what, self.at)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Storages:
    """What the operators of a graph, or of an interval of it, make, read and save. Operators count
    from 0; arrays are by storage where nothing else is said."""

    size: Ints
    """Bytes."""
    born: Ints
    """The operator that makes it; -1: it comes from before the interval."""
    last: Ints
    """The last operator that reads it, the number of operators where that is behind the interval;
    -1: nobody from the interval on."""
    flows: Bools
    """Whether a gradient comes back for it."""
    read: Pairs
    saved: Pairs
    data: Pairs
    """(operator, input)."""
    input_bytes: Ints
    held: Pairs
    """(operator, parameter or buffer)."""
    weights: Ints
    """Bytes by parameter or buffer."""
    numbers: Ints
    """Trained numbers by parameter or buffer; with `in_8_bits`, bytes of one moment of them."""
    updating: Ints
    """Bytes that its update takes while it is made, by parameter or buffer; 0: it has none."""
    updated: Bools
    """By parameter or buffer: whether steps change it though it is not trained."""
    forward: Ints
    """By operator: bytes that its forward takes while it runs."""
    backward: Ints

    @property
    def operators(self) -> int:
        return len(self.forward)

    @classmethod
    def of(
        cls, graph: Graph, costs: Sequence[OperatorCost], *, in_8_bits: bool = False
    ) -> Storages:
        n = len(graph.operators)
        storage: dict[str, int] = {}
        size: dict[int, int] = {}
        born: dict[int, int] = {}
        flows: set[int] = set()
        read: list[tuple[int, int]] = []
        data: list[tuple[int, int]] = []
        fresh = 1 + max((k for c in costs for k, _ in (*c.saves, *c.makes)), default=0)
        inputs = {f"in:{i.name}": k for k, i in enumerate(graph.inputs)}
        for i, (op, cost) in enumerate(zip(graph.operators, costs, strict=True)):
            for value in op.reads:
                if value in storage:
                    read.append((i, storage[value]))
                elif value in inputs:
                    data.append((i, inputs[value]))
            for value, output, lies in zip(op.values, op.outputs, _makes(op, cost), strict=True):
                number, bytes_ = lies or (fresh, output.spec.size_bytes if output.spec else 0)
                fresh += lies is None
                if number < 0:
                    continue
                storage[value] = number
                if number not in born:
                    born[number], size[number] = i, bytes_
                if output.grad:
                    flows.add(number)
        saved: list[tuple[int, int]] = []
        for i, cost in enumerate(costs):
            for number, bytes_ in cost.saves:
                size[number] = bytes_
                born.setdefault(number, i)
                saved.append((i, number))
        count = 1 + max(size, default=0)
        reads = Pairs.listed(read, n + 1)
        place: dict[str, int] = {}
        held = [
            (i, place.setdefault(v, len(place))) for i, c in enumerate(costs) for v, _ in c.reads
        ]
        weights = {place[value]: bytes_ for c in costs for value, bytes_ in c.reads}
        trained: dict[str, int] = {}
        updating: dict[str, int] = {}
        for name, spec in ((f"param:{p.name}", p.spec) for p in graph.parameters if p.trainable):
            trained[name] = max(spec.elements, spec.size_bytes // 4)
            updating[name] = 2 * spec.size_bytes
            if in_8_bits:
                trained[name] = counted_in_8_bits(spec.elements, 4 * trained[name])
                updating[name] = update_in_8_bits(spec.elements, updating[name])
        updates = {f"buffer:{b.name}" for b in graph.buffers if b.update}
        return cls(
            size=_filled(count, size, 0),
            born=_filled(count, born, n),
            last=reads.latest(count),
            flows=np.isin(np.arange(count), list(flows)),
            read=reads,
            saved=Pairs.listed(saved, n + 1),
            data=Pairs.listed(data, n + 1),
            input_bytes=np.array([i.spec.size_bytes for i in graph.inputs], np.int64),
            held=Pairs.listed(held, n + 1),
            weights=_filled(len(place), weights, 0),
            numbers=np.array([trained.get(value, 0) for value in place], np.int64),
            updating=np.array([updating.get(value, 0) for value in place], np.int64),
            updated=np.array([value in updates for value in place], bool),
            forward=np.array(
                [c.peak_forward if c.makes else c.output_bytes for c in costs], np.int64
            ),
            backward=np.array(
                [c.peak_backward if c.makes else c.output_bytes for c in costs], np.int64
            ),
        )

    def part(self, start: int, stop: int) -> Storages:
        """Return the storages of the operators [start, stop) alone."""
        there = (start <= self.born) & (self.born < stop)
        for pairs in (self.read, self.saved):
            there[pairs.what[(start <= pairs.at) & (pairs.at < stop)]] = True
        number = np.cumsum(there) - 1
        return replace(
            self,
            size=self.size[there],
            born=np.maximum(self.born[there] - start, -1),
            last=np.clip(self.last[there], start - 1, stop) - start,
            flows=self.flows[there],
            read=self.read.part(start, stop, number),
            saved=self.saved.part(start, stop, number),
            data=self.data.part(start, stop),
            held=self.held.part(start, stop),
            forward=self.forward[start:stop],
            backward=self.backward[start:stop],
        )


def _filled(count: int, given: dict[int, int], missing: int) -> Ints:
    found = np.full(count, missing, np.int64)
    found[list(given)] = list(given.values())
    return found


def _makes(op: Operator, cost: OperatorCost) -> Sequence[tuple[int, int] | None]:
    """Where each result lies; None: in a storage of its own, for costs that do not say it."""
    return cost.makes or (None,) * len(op.values)
