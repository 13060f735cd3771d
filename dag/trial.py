"""One operator run on fake tensors, forward and backward: what it would compute, where its results
would lie, and what autograd would keep. Nothing is computed and nothing allocated.

`cost.py` puts the trials of all operators together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    conv_flop_count,
    flop_registry,
    sdpa_backward_flop,
    sdpa_flop,
)

from .graph import Operator
from .infer import call
from .operators import takes_key
from .speed import Work

__all__ = ["Counter", "Lies", "Like", "Trial", "trial"]

HASH_BYTES = 36
"""Memory traffic per element of the integer hash behind a random mask (dag/random.py)."""
HASH_CALLS = 8
"""Kernels of that hash."""

_aten = torch.ops.aten


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *args: Any, out_val: Any = None
) -> int:
    """As much as the forward for each of the two gradients. (The formula of torch 2.13 forgets that
    groups divide the work for the weight's: a depthwise one would count channels times too much.)
    """
    transposed, needed = args[4], args[7]
    forward: int = conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)
    return forward * (int(needed[0]) + int(needed[1]))


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
_CONVOLUTIONS = frozenset({_aten.convolution, _aten._convolution, _aten.convolution_backward})
_SPECIAL = frozenset(
    {
        *(_aten.exp, _aten.exp2, _aten.expm1, _aten.log, _aten.log2, _aten.log1p, _aten.pow),
        *(_aten.sin, _aten.cos, _aten.tanh, _aten.sigmoid, _aten.erf, _aten.erfc),
        *(_aten.gelu, _aten.gelu_backward, _aten.silu, _aten.silu_backward),
        *(_aten.mish, _aten.mish_backward, _aten.elu, _aten.elu_backward),
        *(_aten.softplus, _aten.softplus_backward, _aten.logaddexp, _aten.logsumexp),
        *(_aten.log_sigmoid_forward, _aten.log_sigmoid_backward),
        *(_aten._softmax, _aten._log_softmax, _aten._log_softmax_backward_data),
    }
)
"""Operators whose time on a CPU goes into a function per element, not into the bytes."""
_GATHERS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})
"""Operators that read only as much of their first input as they return."""
_FREE = frozenset({_aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.empty_strided})
"""Operators that move nothing, beside the views."""


@dataclass(frozen=True, slots=True)
class Like:
    """Layout of a value that an operator reads, and whether a gradient flows back through it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    grad: bool


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
    storage once that autograd keeps."""

    forward: Work
    backward: Work
    outputs: tuple[Lies | None, ...]
    saved: tuple[Lies, ...]


def trial(op: Operator, reads: Sequence[Like]) -> Trial:
    """Runs the operator, given the layouts of `op.reads`; to be called under a FakeTensorMode."""
    inputs: dict[str, Tensor] = {}
    for name, like in zip(op.reads, reads, strict=True):
        tensor = torch.empty_strided(like.shape, like.strides, dtype=getattr(torch, like.dtype))
        inputs[name] = tensor.requires_grad_() if like.grad else tensor
    random = takes_key(op.target)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    forward, backward = Counter(random), Counter(random)
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor), forward:
        results: list[Tensor | None] = call(op, inputs, torch.device("cpu"))
    roots = [
        t
        for t, output in zip(results, op.outputs, strict=True)
        if t is not None and output.grad and t.requires_grad
    ]
    leaves = [t for t in inputs.values() if t.requires_grad]
    if roots and leaves:
        seeds = [torch.empty_like(t) for t in roots]
        with backward:
            torch.autograd.grad(roots, leaves, seeds, allow_unused=True)

    place = {_storage(t): Lies(i, None, 0) for i, t in enumerate(inputs.values())}
    outputs: list[Lies | None] = []
    for j, made in enumerate(results):
        if made is None:
            outputs.append(None)
            continue
        lies = place.setdefault(_storage(made), Lies(None, j, _storage_bytes(made)))
        outputs.append(Lies(lies.input, lies.output, lies.bytes, made.stride()))
    saved = {
        _storage(t): place.get(_storage(t), Lies(None, None, _storage_bytes(t)))
        for t in (kept if roots else ())
    }
    return Trial(forward.work, backward.work, tuple(outputs), tuple(saved.values()))


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Adds up, in `work`, everything that is dispatched below autograd while the mode is active, on
    fake tensors and on real ones alike. `random`: what runs is a random operator."""

    def __init__(self, random: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.work = Work()
        self._random = random

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        formula = _FORMULAS.get(packet)
        if formula is not None:
            flops = float(formula(*args, **kwargs, out_val=out))
            if packet in _CONVOLUTIONS:
                self.work += Work(convolution=flops, calls=1)
            elif "attention" in packet.__name__:
                self.work += Work(attention=flops, calls=1)
            else:
                self.work += Work(product=flops, calls=1)
        elif func.namespace == "aten" and not func.is_view and packet not in _FREE:
            read, made = list(_tensors([args, kwargs])), list(_tensors(out))
            if packet in _GATHERS:
                read = [*read[1:], *made]
            self.work += self._moved(packet in _SPECIAL, read, made)
        return out

    def _moved(self, special: bool, read: list[Tensor], made: list[Tensor]) -> Work:
        """Bytes moved. The hash of a random operator counts where its integers become a mask or
        numbers, and its own steps not: the first of them are kept from call to call."""
        if self._random and not any(t.is_floating_point() for t in read):
            if all(t.dtype in (torch.int32, torch.int16) for t in made):
                return Work()
            return Work(special=HASH_BYTES * sum(t.numel() for t in made), calls=HASH_CALLS)
        # An expanded tensor has more elements than bytes behind it.
        moved = sum(min(t.numel() * t.itemsize, _storage_bytes(t)) for t in (*read, *made))
        return Work(special=moved, calls=1) if special else Work(memory=moved, calls=1)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
