"""Bytes that a stage's weight half keeps of a microbatch, from graph and costs alone.

    waiting = Σ storages that operators with a weight half need for it, each once
                (`WeightGradient.keeps`; of a norm, of one whose backward waits as a whole and of
                one that makes a weight: what autograd saves)
            + Σ gradients of their results

Parameters and buffers are not counted. Gradients that autograd passes on as they are, as a sum does
to both of its terms, lie in one storage and are counted for each: never too few.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..analysis.weight_gradients import weight_gradients
from ..ir.graph import Graph
from .cost import OperatorCost

__all__ = ["waiting_bytes"]


def waiting_bytes(
    graph: Graph, costs: Sequence[OperatorCost], start: int, stop: int, roots: Collection[str]
) -> int:
    """Bytes that operators [start, stop) of a bound graph keep between the halves of a backward.
    `roots`: values made there that gradients start from or come back for."""
    waits = weight_gradients(graph, start, stop, roots)
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
