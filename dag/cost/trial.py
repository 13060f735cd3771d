"""One operator run on fake tensors, forward and backward: what it would compute, where its results
would lie, and what autograd would keep. Nothing is computed and nothing allocated.

`cost.py` puts the trials of all operators together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..ir.graph import GraphError, Operator, TensorSpec
from ..ir.infer import call, no_memory, of_torch, spec_of
from ..ir.operators import takes_key
from .count import OPERATOR, Counter, nodes, storage_bytes
from .speed import Work

__all__ = ["Lies", "Like", "Trial", "trial"]


@dataclass(frozen=True, slots=True)
class Like:
    """Layout of a value that an operator reads, and whether a gradient flows back through it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    grad: bool
    parameter: bool = False
    """Whether the gradient ends here, and is added up."""


@dataclass(frozen=True, slots=True)
class Lies:
    """Where a tensor lies: in the storage of the i-th value read (`input`), in that of the j-th
    result (`output`), or in one of its own (neither). `bytes`: of a storage made here."""

    input: int | None
    output: int | None
    bytes: int
    strides: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """What the run showed. `outputs` has None for a result that is no tensor; `saved` names each
    storage once that autograd keeps. `peak_forward`, `peak_backward`: most bytes of storages made
    in it that were there at once, results included."""

    forward: Work
    backward: Work
    outputs: tuple[Lies | None, ...]
    saved: tuple[Lies, ...]
    peak_forward: int = 0
    peak_backward: int = 0


def trial(op: Operator, reads: Sequence[Like]) -> Trial:
    """Runs the operator, given the layouts of `op.reads`; to be called under a FakeTensorMode.
    Raises GraphError where it breaks a rule, does not run, or makes other results than the graph
    says; MemoryError. A bug of ours, in the counting too, is raised as what it is."""
    random = takes_key(op.target)
    forward = Counter(random, follow=True)
    backward = Counter(random, later=True, follow=True)
    try:
        return _run(op, reads, forward, backward)
    except Exception as error:
        if bug := forward.bug or backward.bug:  # torch passed it on, as if it were its own
            raise bug from None
        if no_memory(error):
            raise MemoryError(str(error)) from error
        raise


def _run(op: Operator, reads: Sequence[Like], forward: Counter, backward: Counter) -> Trial:
    inputs: dict[str, Tensor] = {}
    for name, like in zip(op.reads, reads, strict=True):
        tensor = torch.empty_strided(like.shape, like.strides, dtype=getattr(torch, like.dtype))
        inputs[name] = tensor.requires_grad_() if like.grad else tensor
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor), forward:
        results: list[Tensor | None] = call(op, inputs, torch.device("cpu"))
    for value, made, output in zip(op.values, results, op.outputs, strict=True):
        if made is not None and output.spec not in (None, spec_of(made)):
            raise GraphError(f"{value}: the graph says {output.spec!r}, it is {spec_of(made)!r}")
    roots = [
        t
        for t, output in zip(results, op.outputs, strict=True)
        if t is not None and output.grad and t.requires_grad
    ]
    leaves = [t for t in inputs.values() if t.requires_grad]
    if roots and leaves:
        seeds = [torch.empty_like(t) for t in roots]
        specs = [TensorSpec(like.shape, like.dtype) for like in reads]
        with of_torch(op, specs, "run forward and backward on"), backward:
            torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        ends = sum(like.parameter and like.grad for like in reads)
        backward.work += Work(calls=nodes(roots, leaf=0.0) + ends)

    place = {_storage(t): Lies(i, None, 0) for i, t in enumerate(inputs.values())}
    outputs: list[Lies | None] = []
    for j, made in enumerate(results):
        if made is None:
            outputs.append(None)
            continue
        lies = place.setdefault(_storage(made), Lies(None, j, storage_bytes(made)))
        outputs.append(Lies(lies.input, lies.output, lies.bytes, made.stride()))
    saved = {
        _storage(t): place.get(_storage(t), Lies(None, None, storage_bytes(t)))
        for t in (kept if roots else ())
    }
    forward.work += Work(calls=OPERATOR)
    return Trial(
        forward.work,
        backward.work,
        tuple(outputs),
        tuple(saved.values()),
        forward.peak_bytes,
        backward.peak_bytes,
    )


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
