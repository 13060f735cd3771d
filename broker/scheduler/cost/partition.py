"""A bound graph as a chain of operators: the positions at which it may be cut, and what a cut there
sends. What the intervals between them take is in `needs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....dag.cost.cost import OperatorCost
from ....dag.ir.graph import Graph

__all__ = ["OperatorChain"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class OperatorChain:
    """The operators of a bound graph in a row, the positions at which it may be cut, and the bytes
    that each cut sends."""

    def __init__(self, graph: Graph, costs: Sequence[OperatorCost]) -> None:
        self.operators = len(costs)
        flops = np.array([c.flops_forward + c.flops_backward for c in costs], dtype=np.float64)
        self._flops: Floats = np.concatenate(([0.0], np.cumsum(flops)))
        self._crossing = _crossing(graph)

    def flops(self, start: int, stop: int) -> float:
        """Forward and backward, for one microbatch."""
        return float(self._flops[stop] - self._flops[start])

    def crossing_bytes(self, position: int) -> int:
        """Bytes of the values that are made before a position and read behind it."""
        return int(self._crossing[position])

    def positions(self, most: int) -> Ints:
        """Positions to cut at, both ends included: all of them, or of each of `most` buckets of
        equal FLOPs the one that fewest bytes cross."""
        n = self.operators
        if n < most:
            return np.arange(n + 1)
        inner = np.arange(1, n)
        share = self._flops[inner] / max(float(self._flops[-1]), 1.0)
        bucket = np.minimum((share * most).astype(np.int64), most - 1)
        order = np.lexsort((inner, self._crossing[inner], bucket))
        _, first = np.unique(bucket[order], return_index=True)
        return np.concatenate(([0], np.sort(inner[order][first]), [n]))


def _crossing(graph: Graph) -> Floats:
    """By position: bytes of the values that operators before it make and operators from it on read;
    0 at both ends."""
    n = len(graph.operators)
    change = np.zeros(n + 2)
    last: dict[str, int] = {}
    for i, op in enumerate(graph.operators):
        for value in op.reads:
            last[value] = i
    for i, op in enumerate(graph.operators):
        for value, output in zip(op.values, op.outputs, strict=True):
            if output.spec is not None and value in last:
                change[i + 1] += output.spec.size_bytes
                change[last[value] + 1] -= output.spec.size_bytes
    return np.cumsum(change)[: n + 1]
