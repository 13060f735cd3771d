"""Which trained matrices are hidden: multiplied with data on the way to another product.

An embedding is looked up, a table of positions is added, and behind the last layer's matrix there
is no product more, so none of them is one; nor is a matrix that is read in such a way beside a
product, as one that is tied to an embedding.
"""

from __future__ import annotations

from ..ir.graph import Graph
from .products import sums

__all__ = ["hidden_matrices"]


def hidden_matrices(graph: Graph) -> frozenset[str]:
    """Return the names of them, of a bound graph."""
    made_of = {f"param:{p.name}": frozenset({p.name}) for p in graph.parameters}
    made_of |= {f"buffer:{b.name}": frozenset[str]() for b in graph.buffers}
    products: dict[int, frozenset[str]] = {}
    elsewhere: set[str] = set()
    for place, op in enumerate(graph.operators):
        weights = [made_of[value] for value in op.reads if value in made_of]
        of = frozenset[str]().union(*weights)
        if op.reads and len(weights) == len(op.reads):
            made_of |= dict.fromkeys(op.values, of)
        elif sums(op, graph.spec, made_of):
            products[place] = of
        else:
            elsewhere |= of
    # Backwards: values that some product with weights is made of.
    used: set[str] = set()
    hidden: set[str] = set()
    for place, op in reversed([*enumerate(graph.operators)]):
        goes_on = any(value in used for value in op.values)
        if goes_on:
            hidden |= products.get(place, frozenset())
        if goes_on or place in products:
            used |= {value for value in op.reads if value not in made_of}
    flat = {p.name for p in graph.parameters if p.trainable and len(p.spec.shape) == 2}
    return frozenset(hidden - elsewhere) & flat
