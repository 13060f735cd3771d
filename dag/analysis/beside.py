"""Which operators must run where data is kept, so that neither it nor what is as good as it crosses
a link.

A value is *bare* when a path leads to it from the data that passes no product with a matrix of
weights: one of those that `products.py` lists, in which every number is a sum of MIXES numbers of
the data or more. A gradient is bare when a path leads back to it from an operator that reads bare
values, again past no such product: the gradient of the logits under a cross entropy is the labels,
up to what the model has predicted, and that of a single output is one factor times as much for each
number in front of it. Operators that take bare values, or make them, or their gradients, stay. So
at least one product with weights stands between the data and every link, in both directions. Where
ids are looked up and the rows are carried along by residual connections, that is all of the model.

With `blended`, a sum of a bare value and one that comes of products of bare values is bare no more:
behind the first residual connection of a transformer the looked-up rows are in a sum with what
attention made of them, and only its ends stay.

That is no secrecy: docs/security.md says what such products still reveal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..ir.graph import Graph
from .products import MIXES, sums

__all__ = ["beside_data"]


def beside_data(graph: Graph, names: Collection[str], *, blended: bool = False) -> tuple[int, ...]:
    """Return the indices of the operators that must run where the data of these inputs is,
    ascending. blended: sums with products may leave."""
    if not names:
        return ()
    if graph.batch is None:
        graph = graph.bind(1)  # the fewest numbers that a sum can be made of
    hidden = list(_hidden(graph))
    bare = {f"in:{name}" for name in names}
    mixed: set[str] = set()  # made of bare values, past a product of each
    stays: set[int] = set()
    for i, op in enumerate(graph.operators):
        read, veiled = bare.intersection(op.reads), not mixed.isdisjoint(op.reads)
        if read:
            stays.add(i)
            veiled = read <= hidden[i].forward or (blended and veiled and op.target in _SUMS)
        if read and not veiled:
            bare.update(op.values)
        elif veiled:
            mixed.update(op.values)
    reported = (graph.weight, *(value for _, value in graph.metrics))
    if not bare.isdisjoint(reported):
        stays.add(graph.producer[graph.loss])  # results are gathered where the loss is made
    back: set[str] = set()  # values whose gradients are bare
    for i in range(len(graph.operators) - 1, -1, -1):
        op = graph.operators[i]
        if back.isdisjoint(op.values) and i not in stays:
            continue
        stays.add(i)
        shown = (v for v in op.reads if v not in hidden[i].backward)
        back.update(v for v in shown if v in graph.grads and v in graph.producer)
    return tuple(sorted(stays))


_SUMS = frozenset({"aten.add.Tensor", "aten.add_.Tensor", "aten.sub.Tensor"})


@dataclass(frozen=True)
class _Hidden:
    """Two sets of what an operator reads: what its values are products of, and what its gradients
    go back to as products only."""

    forward: frozenset[str] = frozenset()
    backward: frozenset[str] = frozenset()


def _hidden(graph: Graph) -> Iterator[_Hidden]:
    """Yields the `_Hidden` of every operator in order. What only makes another form of a weight is
    no product."""
    weights = {f"param:{p.name}" for p in graph.parameters if len(p.spec.shape) > 1}
    still = weights | {f"param:{p.name}" for p in graph.parameters}
    still |= {f"buffer:{b.name}" for b in graph.buffers}
    chosen: set[str] = set()  # ones and zeros that say which row of a matrix is taken
    for op in graph.operators:
        data = [v for v in op.reads if v not in still]
        if op.reads and not data:
            still.update(op.values)
            if not weights.isdisjoint(op.reads):
                weights.update(op.values)
            yield _Hidden()
            continue
        products = sums(op, graph.spec, weights)
        found = {v: s for v, s in products.items() if v not in chosen}  # else a lookup
        if not products and (op.target == _ONE_HOT or (data and chosen.issuperset(data))):
            chosen.update(op.values)
        forward = frozenset(v for v, (mixed, _) in found.items() if mixed >= MIXES)
        backward = {v for v, (_, mixed) in found.items() if mixed >= MIXES}
        if found:  # gradients of parameters, which holders of a stage exchange anyway
            backward |= still.intersection(op.reads)
        yield _Hidden(forward, frozenset(backward))


_ONE_HOT = "aten.one_hot.default"
