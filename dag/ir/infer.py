"""Specs and gradients of a graph's values, found by running each operator on `meta` tensors.

Nothing is computed: a meta tensor has a shape, a dtype and an autograd history only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .graph import Arg, Device, Dtype, Graph, GraphError, MemoryFormat, Operator, Ref, TensorSpec
from .operators import resolve, takes_key
from .rules.rules import check

__all__ = [
    "Inferred",
    "call",
    "infer",
    "infer_operator",
    "no_memory",
    "of_torch",
    "outside",
    "results_of",
    "spec_of",
    "with_grads",
]

MOST_BYTES = 1 << 62
"""The most bytes of a tensor: torch counts them in 64 bits."""

Inferred = dict[str, tuple[TensorSpec, bool]]
"""Value → (bound spec, whether autograd could send a gradient through it)."""


def python_arg(arg: Arg, values: dict[str, Any], device: torch.device) -> Any:
    """An argument of a bound graph as torch takes it."""
    if isinstance(arg, Ref):
        return values[arg.value]
    if isinstance(arg, tuple):
        return [python_arg(a, values, device) for a in arg]
    if isinstance(arg, Dtype):
        return getattr(torch, arg.name)
    if isinstance(arg, MemoryFormat):
        return getattr(torch, arg.name)
    if isinstance(arg, Device):
        return device
    return arg


def call(op: Operator, values: dict[str, Any], device: torch.device, key: int = 0) -> list[Any]:
    """The results of one operator of a bound graph, as a list. Raises GraphError where its
    arguments break a rule (dag/ir/rules/rules.py), when nothing has run, or where torch does not
    take them; MemoryError. Anything else is a bug of ours and no fault of the graph."""
    specs = {v: spec_of(values[v]) for v in op.reads}
    check(op, specs)
    args = [python_arg(a, values, device) for a in op.args]
    kwargs = {k: python_arg(a, values, device) for k, a in op.kwargs}
    if takes_key(op.target):
        kwargs["key"] = key
    function = resolve(op.target)
    with of_torch(op, list(specs.values()), "take"):
        result = function(*args, **kwargs)
    if isinstance(result, Tensor) == op.returns_tuple:  # as a list, a tensor is its rows
        made = "one tensor" if op.returns_tuple else "several"
        raise GraphError(f"operator {op.name} ({op.target}) gives {made}: the graph says otherwise")
    return list(result) if op.returns_tuple else [result]


@contextmanager
def of_torch(op: Operator, reads: Sequence[TensorSpec], does: str) -> Iterator[None]:
    """Around a call of torch alone: whatever it raises is the fault of a graph that has the
    operator, which then does not `does` what it reads. Raises GraphError, MemoryError."""
    try:
        yield
    except (GraphError, MemoryError):
        raise
    except Exception as error:
        if no_memory(error):
            raise MemoryError(str(error)) from error
        raise GraphError(
            f"operator {op.name} ({op.target}) does not {does} {', '.join(map(repr, reads))}: "
            f"{type(error).__name__}: {error}"
        ) from error


def spec_of(tensor: Tensor) -> TensorSpec:
    """The bound spec of a tensor."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def no_memory(error: Exception) -> bool:
    """Whether torch says so that there was no memory left, which is no fault of what it ran."""
    return isinstance(error, RuntimeError) and "bad_alloc" in str(error)


def _meta(spec: TensorSpec, grad: bool) -> Tensor:
    made = torch.empty(spec.sizes, dtype=getattr(torch, spec.dtype), device="meta")
    return made.requires_grad_(grad and spec.is_floating)


def outside(graph: Graph) -> Inferred:
    """Specs, and whether gradients go back, of the inputs, parameters and buffers of a bound
    graph."""
    found: Inferred = {f"in:{i.name}": (i.spec, False) for i in graph.inputs}
    found |= {f"buffer:{b.name}": (b.spec, False) for b in graph.buffers}
    return found | {f"param:{p.name}": (p.spec, p.trainable) for p in graph.parameters}


def infer(graph: Graph) -> Inferred:
    """Specs, and whether gradients go back, of every value of a bound graph. Raises GraphError
    naming an operator that does not run."""
    found = outside(graph)
    for op in graph.operators:
        found |= dict(infer_operator(op, found))
    return found


def infer_operator(op: Operator, known: Inferred) -> Iterator[tuple[str, tuple[TensorSpec, bool]]]:
    """Yields specs, and whether gradients go back, of the results of one operator, whose arguments
    are known. An absent result is left out."""
    results = results_of(op, known)
    if len(results) != len(op.values):
        raise GraphError(
            f"operator {op.name} ({op.target}) returns {len(results)} values, the graph says "
            f"{len(op.values)}"
        )
    for value, result in zip(op.values, results, strict=True):
        if result is not None:
            yield value, result


def results_of(op: Operator, known: Inferred) -> list[tuple[TensorSpec, bool] | None]:
    """Spec and gradient of each result of an operator of a bound graph; None for an absent one.
    Raises GraphError where the operator does not run, MemoryError."""
    for value in op.reads:
        if (size := known[value][0].size_bytes) > MOST_BYTES:
            raise GraphError(
                f"operator {op.name} ({op.target}) reads {value} of {size} bytes: expected at most "
                f"{MOST_BYTES}"
            )
    values: dict[str, Any] = {v: _meta(*known[v]) for v in op.reads}
    with torch.enable_grad():
        results = call(op, values, torch.device("meta"))
    for result in results:
        # torch gives such a result a history that raises as soon as it is used.
        if isinstance(result, Tensor) and result.grad_fn and "NotImpl" in result.grad_fn.name():
            raise GraphError(f"operator {op.name} ({op.target}) has no derivative in torch")
    return [_described(result) for result in results]


def _described(result: Any) -> tuple[TensorSpec, bool] | None:
    if not isinstance(result, Tensor):
        return None
    return spec_of(result), result.requires_grad


def with_grads(graph: Graph, inferred: Inferred) -> Graph:
    """The graph with `Output.grad` filled, and `trainable` only where a gradient can arrive."""
    reached = {graph.loss}
    for op in reversed(graph.operators):
        if any(v in reached for v in op.values):
            reached |= {v for v in op.reads if inferred[v][1]}
    return replace(
        graph,
        parameters=tuple(
            replace(p, trainable=p.trainable and f"param:{p.name}" in reached)
            for p in graph.parameters
        ),
        operators=tuple(
            replace(
                op,
                outputs=tuple(
                    replace(o, grad=v in reached and v in inferred and inferred[v][1])
                    for v, o in zip(op.values, op.outputs, strict=True)
                ),
            )
            for op in graph.operators
        ),
    )
