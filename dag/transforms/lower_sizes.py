"""One core form for several microbatch sizes.

Lowering works on a bound graph, because the decomposition of an operator leaves plain numbers where
its sizes were. Here the form is made for the smallest and for the largest size. Where the two
differ, they may differ in whole numbers only, and each of those becomes the Size through both:

    times = (at large - at small) / (large - small),  plus = at small - times · small

A third size in between, where there is one, must then give the same form as lowering for it does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ..ir.graph import Arg, Graph, GraphError, Lowered, Operator, Output, Size, TensorSpec
from .lower import lower

__all__ = ["lower_for_sizes"]


def lower_for_sizes(graph: Graph, sizes: Collection[int]) -> Lowered:
    """The core form of a full graph that is for any batch. With one size it is bound to it, else it
    is for any batch and right for these.

    Raises GraphError when an operator has no core form, or none that is the same for all sizes.
    """
    known = sorted(set(sizes))
    small, between, large = known[0], known[1:-1], known[-1]
    one = lower(graph.bind(small))
    if small == large:
        return one
    other = lower(graph.bind(large))
    if one.start != other.start:
        raise GraphError(
            f"its core form has other operators with {small} samples than with {large}"
        )
    fit = _Fit(small, large)
    form = replace(
        one.graph,
        batch=None,
        inputs=graph.inputs,
        operators=tuple(map(fit.operator, one.graph.operators, other.graph.operators)),
    )
    if between:
        middle = between[len(between) // 2]
        if form.bind(middle) != lower(graph.bind(middle)).graph:
            raise GraphError(f"its core form for {small} and {large} samples is wrong for {middle}")
    return Lowered(form, one.start)


class _Fit:
    """Fit of a size for any batch to its values for two batches."""

    def __init__(self, small: int, large: int) -> None:
        self.small, self.large = small, large

    def operator(self, a: Operator, b: Operator) -> Operator:
        if len(a.outputs) != len(b.outputs):
            raise self._differs(a)
        found = replace(
            a,
            args=self._arg(a.args, b.args, a),
            kwargs=self._arg(a.kwargs, b.kwargs, a),
            outputs=tuple(self._output(x, y, a) for x, y in zip(a.outputs, b.outputs, strict=True)),
        )
        if replace(b, args=a.args, kwargs=a.kwargs, outputs=a.outputs) != a:
            raise self._differs(a)
        return found

    def _output(self, a: Output, b: Output, op: Operator) -> Output:
        if a.spec is None or b.spec is None or a == b:
            if a != b:
                raise self._differs(op)
            return a
        shape = self._arg(a.spec.shape, b.spec.shape, op)
        spec = TensorSpec(shape, a.spec.dtype)
        if replace(b, spec=replace(b.spec, shape=a.spec.shape)) != a:
            raise self._differs(op)
        return replace(a, spec=spec)

    def _arg(self, a: Arg, b: Arg, op: Operator) -> Any:
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self._arg(x, y, op) for x, y in zip(a, b, strict=True))
        if type(a) is int and type(b) is int and a != b:  # not bool
            times, rest = divmod(b - a, self.large - self.small)
            if not rest:
                return Size(times, a - times * self.small)
        if type(a) is not type(b) or a != b:
            raise self._differs(op)
        return a

    def _differs(self, op: Operator) -> GraphError:
        return GraphError(
            f"the core form of {op.name} ({op.target}) with {self.small} samples differs from that "
            f"with {self.large} in more than sizes"
        )
