"""What the weight half of a stage's backward costs, from graph and costs alone: bytes that it keeps
of a microbatch, and work.

    waiting = Σ storages that operators with a weight half need for it, each once
                (`WeightGradient.keeps`; of a norm, of one whose backward waits as a whole and of
                one that makes a weight: what autograd saves)
            + Σ gradients of their results
    work    = Σ backward of operators whose backward waits as a whole, and of makers of weights
            + Σ backward of the others with a weight half / 2: each of a product's two gradients is
                one of its size, and each half of a norm's reads what both read
    beside  = 2 · waiting, which leaves the caches and is read again, and calls for each operator

Parameters and buffers are not counted. Gradients that autograd passes on as they are, as a sum does
to both of its terms, lie in one storage and are counted for each: never too few.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.weight_gradients import WeightGradients, weight_gradients
from ..ir.graph import Graph
from .cost import OperatorCost
from .speed import Work

__all__ = ["WaitingMemory", "weight_totals", "weight_work"]

APART_CALLS = 15
"""Kernels' fixed times that an operator costs whose weights' gradients wait: taking down what they
need, and a call of its own. As CPU seconds of a ResNet of width 16 (benchmarks/schedules/split.py),
whose operators are so small that it is most of what halves cost there."""


class WaitingMemory:
    """What the intervals of one bound graph keep between the halves of a backward."""

    def __init__(self, graph: Graph, costs: Sequence[OperatorCost]) -> None:
        self._graph, self._costs = graph, costs
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def of(self, start: int, stop: int) -> tuple[int, int]:
        """Bytes that operators [start, stop) keep of a microbatch between the halves, and the most
        that one of them makes while the second half runs."""
        if (start, stop) not in self._known:
            waits = weight_gradients(self._graph, start, stop, _roots(self._graph, start, stop))
            running = {*waits.makers, *(w.index for w in waits.operators)}
            self._known[start, stop] = (
                _bytes_of(self._graph, self._costs, waits),
                max((self._costs[i].peak_backward for i in running), default=0),
            )
        return self._known[start, stop]


def weight_work(
    graph: Graph, costs: Sequence[OperatorCost], start: int, stop: int
) -> tuple[Work, Work]:
    """Work of the weights' gradients of operators [start, stop) for one microbatch, without their
    sum over microbatches: what the backward is relieved of, and what it costs to have them
    apart."""
    waits = weight_gradients(graph, start, stop, _roots(graph, start, stop))
    whole = {*waits.makers, *(w.index for w in waits.operators if w.whole)}
    parts = {w.index for w in waits.operators} - whole
    total = sum((costs[i].backward for i in sorted(whole)), Work())
    moved = total + sum((costs[i].backward for i in sorted(parts)), Work()).times(0.5)
    beside = Work(
        memory=2 * _bytes_of(graph, costs, waits), calls=APART_CALLS * len(waits.operators)
    )
    return moved, beside


def weight_totals(graph: Graph, costs: Sequence[OperatorCost]) -> tuple[list[Work], list[Work]]:
    """By operator, about what `weight_work` says of it in any interval: there, what several keep
    counts once."""
    n = len(graph.operators)
    waits = weight_gradients(graph, 0, n, _roots(graph, 0, n))
    moved, beside = [Work()] * n, [Work()] * n
    for i in waits.makers:
        moved[i] = costs[i].backward
    for one in waits.operators:
        i = one.index
        moved[i] = costs[i].backward.times(1.0 if one.whole else 0.5)
        kept = _bytes_of(graph, costs, WeightGradients((one,)))
        beside[i] = Work(memory=2 * kept, calls=APART_CALLS)
    return moved, beside


def _roots(graph: Graph, start: int, stop: int) -> set[str]:
    """Values made there that gradients start from or come back for."""
    made = {v for op in graph.operators[start:stop] for v in op.values}
    read = {v for op in graph.operators[stop:] for v in op.reads}
    return (made & read & graph.grads) | (made & {graph.loss})


def _bytes_of(graph: Graph, costs: Sequence[OperatorCost], waits: WeightGradients) -> int:
    saved: dict[int, int] = {}  # by number of the storage
    outside: dict[str, int] = {}  # data, which have no number
    grads = 0
    for i in waits.makers:
        saved.update(costs[i].saves)
    for waiting in waits.operators:
        op = graph.operators[waiting.index]
        grads += sum(o.spec.size_bytes for o in op.outputs if o.grad and o.spec)
        if waiting.whole or "norm" in op.target:
            saved.update(costs[waiting.index].saves)
        for value in () if waiting.whole else waiting.keeps:
            number, size = -1, graph.spec[value].size_bytes
            if value in graph.producer:
                maker = graph.producer[value]
                made = graph.operators[maker].values.index(value)
                number, size = costs[maker].makes[made]
            if number >= 0:
                saved[number] = size
            elif not value.startswith(("param:", "buffer:")):
                outside[value] = size
    return sum(saved.values()) + sum(outside.values()) + grads
