"""What a stage takes on its device, from graph and costs alone; the peak over one pass of its
operators is swept, not bounded.

    peer       = Σ over its stages of standing
               + max(max over its actions of (Σ live · kept + transient of the action's stage),
                     max over its stages of update, Σ over its stages of exchange,
                     Σ over its stages of meets)
    standing   = parameters + buffers + trainable (gradients) + state · trained numbers
    kept       = of one microbatch between its forward and its backward, each storage once: what
                 autograd saves, the values received, those sent that a gradient comes back for,
                 the data; a stage that recomputes keeps what it received and the data
    live       = microbatches between forward and backward, that of the action included
    transient  = max(forward, backward) - kept + the next microbatch's values and gradients, which
                 came and wait for their action:
      forward  = max over operators i of what is there while i runs
      backward = max over operators i of (kept not yet freed + gradients of values that cross i
                 + what i makes while it runs) + gradients received;
                 a stage that recomputes runs its forward before that, with its saved set in here
    update     = the optimizer's temporaries, when nothing is kept: two of the largest parameter
                 (torch goes through them one by one on a CPU)
    meets      = of a run with rounds between replicas, while one is exchanged and no step is made:
                 so many bytes of each trained number, and the temporaries of the largest, which
                 are the update's; there are no gradients then
    exchange   = gradients in one vector and those of others, when nothing is kept: 2 · trainable
                 of a stage with several holders; by any collective as much, as the vector is
                 gathered into what goes to the row, and all who answer there have equal shares

Storages are followed as in `cost.py`: views of one storage count once, from when its first value
is made to when the last one is read. Bytes inside a kernel are known for convolutions only, whose
layouts are changed for the library (`count.py`). Gradients stand from the first forward on, though
they come with the first backward: where all microbatches are live before it, that much too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..ir.graph import Graph, Operator
from ..plan.action import TRAITS, Action
from ..plan.plan import Plan
from .cost import OperatorCost

__all__ = ["MemoryModel", "Moments", "StageMemory", "live_moments"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a stage; see the module."""

    weights: int
    """Parameters and buffers."""
    trainable: int
    """Bytes of the parameters that are trained; each gradient and copy is as large."""
    numbers: int
    """Numbers in them; one of 64 bits counts as two."""
    changing: int
    """Bytes of the trained parameters, and of the buffers that steps update."""
    kept: int
    transient: int
    update: int
    meets: int

    def standing(self, state_bytes: int, copies: int = 0) -> int:
        """`state_bytes`: of the optimizer, per trained number; `copies`: of the trained parameters
        beside them."""
        return self.weights + (1 + copies) * self.trainable + state_bytes * self.numbers

    def snapshot(self, state_bytes: int) -> int:
        """What must be copied to go on after a step; the rest is in the run's weights files."""
        return self.changing + state_bytes * self.numbers

    @property
    def exchange(self) -> int:
        """Where it has several holders."""
        return 2 * self.trainable

    def peak(self, state_bytes: int, live: int, shared: bool = False, copies: int = 0) -> int:
        """With at most `live` microbatches between forward and backward, alone on its peer."""
        after = max(self.update, self.meets, shared * self.exchange)
        return self.standing(state_bytes, copies) + max(live * self.kept + self.transient, after)


Moments = tuple[tuple[int, tuple[int, ...]], ...]
"""(stage that computes, live microbatches of each stage of its peer, in the plan's order)."""


def live_moments(
    actions: Sequence[Action], held: Sequence[int], backward: Sequence[bool]
) -> Moments:
    """The moments in a peer's list for a training step (`held`: its stages) at its forwards and
    backwards, that microbatch included; only those with more live ones of some stage than every
    other moment of the same stage has. `backward`: whether a stage of the plan has one."""
    place = {k: at for at, k in enumerate(held)}
    live = [0] * len(held)
    seen: dict[int, dict[tuple[int, ...], None]] = {k: {} for k in held}
    for action in actions:
        k = action.stage
        keeps = TRAITS[action.kind].keeps
        if keeps > 0:
            live[place[k]] += keeps
            seen[k][tuple(live)] = None
            live[place[k]] -= not backward[k]
        elif keeps < 0:
            seen[k][tuple(live)] = None
            live[place[k]] += keeps
    return tuple((k, n) for k in held for n in _surpassed_by_none(list(seen[k])))


def _surpassed_by_none(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    rows.sort(reverse=True)
    kept: list[tuple[int, ...]] = []
    for row in rows:
        if not any(all(a <= b for a, b in zip(row, other, strict=True)) for other in kept):
            kept.append(row)
    return kept


class MemoryModel:
    """The memory that the intervals of one bound graph take; answers for any interval of its
    operators in time of its length."""

    def __init__(self, graph: Graph, costs: Sequence[OperatorCost], meets: int = 0) -> None:
        """`meets`: bytes of each trained number while a round is exchanged; 0: there are none."""
        self.meets = meets
        n = len(graph.operators)
        self._reads = [c.reads for c in costs]
        self._trainable = {
            f"param:{p.name}": max(p.spec.elements, p.spec.size_bytes // 4)
            for p in graph.parameters
            if p.trainable
        }
        self._updated = {f"buffer:{b.name}" for b in graph.buffers if b.update}
        storage: dict[str, int] = {}
        size: dict[int, int] = {}
        born: dict[int, int] = {}
        flows: set[int] = set()  # storages that a gradient comes back for
        made: list[tuple[int, int]] = []
        read: list[tuple[int, int]] = []
        data: list[tuple[int, int]] = []
        fresh = 1 + max((k for c in costs for k, _ in (*c.saves, *c.makes)), default=0)
        inputs = {f"in:{i.name}": (k, i.spec.size_bytes) for k, i in enumerate(graph.inputs)}
        for i, (op, cost) in enumerate(zip(graph.operators, costs, strict=True)):
            for value in op.reads:
                if value in storage:
                    read.append((i, storage[value]))
                elif value in inputs:
                    data.append((i, inputs[value][0]))
            for value, output, lies in zip(op.values, op.outputs, _makes(op, cost), strict=True):
                number, bytes_ = lies or (fresh, output.spec.size_bytes if output.spec else 0)
                fresh += lies is None
                if number < 0:
                    continue
                storage[value] = number
                if number not in born:
                    born[number], size[number] = i, bytes_
                    made.append((i, number))
                if output.grad:
                    flows.add(number)
        saved: list[tuple[int, int]] = []
        for i, cost in enumerate(costs):
            for number, bytes_ in cost.saves:
                size[number] = bytes_
                born.setdefault(number, i)
                saved.append((i, number))
        count = 1 + max(size, default=0)
        self._size = _filled(count, size, 0)
        self._born = _filled(count, born, n)
        self._last = np.full(count, -1, np.int64)
        for i, number in read:
            self._last[number] = i
        self._flows = np.zeros(count, bool)
        self._flows[list(flows)] = True
        self._input_bytes: list[int] = [b for _, b in inputs.values()]
        self._saved, self._read, self._made = (_Events(e, n) for e in (saved, read, made))
        self._data = _Events(data, n)
        self._forward: Ints = np.array([_forward_bytes(c) for c in costs], np.int64)
        self._backward: Ints = np.array([_backward_bytes(c) for c in costs], np.int64)
        self._known: dict[tuple[int, int, bool], StageMemory] = {}

    def stage(self, start: int, stop: int, recompute: bool = False) -> StageMemory:
        """Operators [start, stop) for one microbatch."""
        key = (start, stop, recompute)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def peer_bytes(
        self,
        plan: Plan,
        held: Sequence[int],
        moments: Moments,
        state_bytes: int,
    ) -> int:
        """Peak bytes on a peer that holds these stages of a plan: all of them stand and keep, and
        one of them computes. `state_bytes`: of the optimizer, per trained number; beside that a
        stage has the copies that its strategy keeps."""
        found = {}
        for k in held:
            slot = plan.stages[k]
            found[k] = self.stage(slot.start, slot.stop, slot.recompute)
        after = max(
            *(found[k].update for k in held),
            sum(found[k].meets for k in held),
            sum(found[k].exchange for k in held if len(plan.stages[k].holders) > 1),
        )
        computed = (
            found[k].transient + sum(n * found[i].kept for i, n in zip(held, live, strict=True))
            for k, live in moments
        )
        most = max(computed, default=0)  # a holder may be on no route
        standing = sum(found[k].standing(state_bytes, plan.strategy(k).traits.copies) for k in held)
        return standing + max(most, after)

    def _find(self, start: int, stop: int, recompute: bool) -> StageMemory:
        held = {value: size for reads in self._reads[start:stop] for value, size in reads}
        trained = [size for value, size in held.items() if value in self._trainable]
        numbers = sum(self._trainable.get(value, 0) for value in held)
        updated = sum(size for value, size in held.items() if value in self._updated)
        sweep = _Sweep(self, start, stop)
        forward, backward = sweep.forward(), sweep.backward()
        kept = sweep.kept
        if recompute:
            again = sweep.forward(saves=False)
            kept = sweep.received + sweep.data
            backward = max(backward, forward + sweep.answered)
            forward = again
        if not trained and not sweep.gives_gradients:
            kept, backward, forward = 0, 0, sweep.forward(saves=False)
        update = 2 * max(trained, default=0)
        transient = max(forward, backward) - kept + sweep.received + sweep.answered
        return StageMemory(
            weights=sum(held.values()),
            trainable=sum(trained),
            numbers=numbers,
            changing=sum(trained) + updated,
            kept=kept,
            transient=transient,
            update=update,
            meets=max(0, self.meets * numbers - sum(trained) + update) if self.meets else 0,
        )


class _Events:
    """(operator, storage) pairs, by operator."""

    def __init__(self, pairs: Sequence[tuple[int, int]], operators: int) -> None:
        table = np.array(pairs, np.int64).reshape(len(pairs), 2)
        self._at, self._what = table[:, 0], table[:, 1]
        self._first = np.searchsorted(self._at, np.arange(operators + 1))

    def of(self, start: int, stop: int) -> tuple[Ints, Ints]:
        part = slice(self._first[start], self._first[stop])
        return self._at[part], self._what[part]


class _Sweep:
    """The storages of one interval, and when each is there. Positions count from 0."""

    def __init__(self, model: MemoryModel, start: int, stop: int) -> None:
        n = self._n = stop - start
        saved_at, saved = model._saved.of(start, stop)
        read_at, read = model._read.of(start, stop)
        _, made = model._made.of(start, stop)
        every, place = np.unique(np.concatenate([saved, read, made]), return_inverse=True)
        self._size = model._size[every]
        self._born = np.maximum(model._born[every] - start, -1)  # -1: received
        saved_place, read_place = place[: len(saved)], place[len(saved) : len(saved) + len(read)]
        self._freed = np.full(len(every), n, np.int64)  # the first operator that saved it; n: none
        self._freed[saved_place[::-1]] = saved_at[::-1] - start
        last = np.full(len(every), -1, np.int64)  # the last operator that reads it here
        last[read_place] = read_at - start
        flows = model._flows[every]
        self._sent = (self._born >= 0) & (model._last[every] >= stop)
        self._in = self._born < 0
        self._last = np.maximum(last, np.maximum(self._born, 0))
        # Received values stay as leaves, sent ones as roots, until their backward ends.
        self._fixed = (self._in | self._sent) & flows
        self._keeps = self._fixed | (self._freed < n)
        self._flows = flows
        self._model, self._start, self._stop = model, start, stop
        data = set(model._data.of(start, stop)[1].tolist())
        self.data: int = sum(model._input_bytes[k] for k in data)
        self.received = int(self._size[self._in].sum())
        self.kept = int(self._size[self._keeps].sum()) + self.data
        self.answered = int(self._size[self._sent & flows].sum())
        """Gradients of the values that it sent."""
        self.gives_gradients = bool((self._in & flows).any())

    def forward(self, saves: bool = True) -> int:
        """Most bytes of a microbatch while its forward runs."""
        n = self._n
        # There before operator i: born before it, and read from i on, kept, or to be sent.
        stays = self._sent | (self._keeps if saves else self._in)
        end = np.where(stays, n, self._last)
        there = _there(self._size, self._born + 1, end, n)
        work = self._model._forward[self._start : self._stop]
        return self.data + int((there + work).max(initial=0))

    def backward(self) -> int:
        """Most bytes of a microbatch while its backward runs."""
        n = self._n
        size, keeps = self._size, self._keeps
        first = np.where(self._fixed, 0, self._freed)
        there = _there(size[keeps], first[keeps], np.full(int(keeps.sum()), n - 1), n)
        # The gradient of a value: from the backward of who reads it last to that of who makes it;
        # of one that came to the end, of one that was sent from the beginning.
        flows = self._flows & ~self._sent
        low = np.maximum(self._born, 0)[flows]
        there += _there(size[flows], low, self._last[flows] - 1, n)
        work = self._model._backward[self._start : self._stop]
        return int((there + work).max(initial=0)) + self.answered + self.data


def _there(size: Ints, first: Ints, last: Ints, n: int) -> Ints:
    """By position of n: the sum of the sizes whose [first, last] has it."""
    some = first <= last
    change = np.zeros(n + 2, np.int64)
    np.add.at(change, first[some], size[some])
    np.add.at(change, np.minimum(last[some], n) + 1, -size[some])
    return np.cumsum(change)[:n]


def _filled(count: int, given: dict[int, int], missing: int) -> Ints:
    found = np.full(count, missing, np.int64)
    if given:
        found[list(given)] = list(given.values())
    return found


def _makes(op: Operator, cost: OperatorCost) -> Sequence[tuple[int, int] | None]:
    """Where each result lies; None: in a storage of its own, for costs that do not say it."""
    return cost.makes or (None,) * len(op.values)


def _forward_bytes(cost: OperatorCost) -> int:
    return cost.peak_forward if cost.makes else cost.output_bytes


def _backward_bytes(cost: OperatorCost) -> int:
    return cost.peak_backward if cost.makes else cost.output_bytes
