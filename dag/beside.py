"""Which operators must run where data is kept, so that neither it nor what is as good as it crosses
a link.

A value is *bare* when a path leads to it from the data that passes no operator with a matrix of
weights (at least two dimensions, as it is or cast). A gradient is bare when a path leads back to it
from an operator that reads bare values, again past no such operator: the gradient of the logits
under a cross entropy is the labels, up to what the model has predicted. Operators that take bare
values, or make them, or their gradients, stay. So at least one product with weights stands between
the data and every link, in both directions.

That is no secrecy: docs/security.md says what such products still reveal.
"""

from __future__ import annotations

from collections.abc import Collection

from .graph import Graph

__all__ = ["beside_data"]


def beside_data(graph: Graph, names: Collection[str]) -> tuple[int, ...]:
    """Indices of the operators that must run where the data of these inputs is, ascending."""
    weighs = _weighs(graph)
    bare = {f"in:{name}" for name in names}
    stays: set[int] = set()
    for i, op in enumerate(graph.operators):
        if not bare.isdisjoint(op.reads):
            stays.add(i)
            if not weighs[i]:
                bare.update(op.values)
    reported = (graph.weight, *(value for _, value in graph.metrics))
    if not bare.isdisjoint(reported):
        stays.add(graph.producer[graph.loss])  # results are gathered where the loss is made
    back: set[str] = set()  # values whose gradients are bare
    for i in range(len(graph.operators) - 1, -1, -1):
        op = graph.operators[i]
        if back.isdisjoint(op.values) and i not in stays:
            continue
        stays.add(i)
        if not weighs[i]:
            back.update(v for v in op.reads if v in graph.grads and v in graph.producer)
    return tuple(sorted(stays))


def _weighs(graph: Graph) -> list[bool]:
    """By operator, whether it multiplies data by a matrix of weights; not those that only make
    another form of a weight."""
    weights = {f"param:{p.name}" for p in graph.parameters if len(p.spec.shape) > 1}
    still = weights | {f"param:{p.name}" for p in graph.parameters}
    still |= {f"buffer:{b.name}" for b in graph.buffers}
    found = []
    for op in graph.operators:
        weighed = not weights.isdisjoint(op.reads)
        form = weighed and still.issuperset(op.reads)
        if form:
            weights.update(op.values)
            still.update(op.values)
        found.append(weighed and not form)
    return found
