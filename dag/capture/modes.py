"""The module in train and in eval mode, compared as torch.export traced it.

Most models differ in a few flags only. Where that is so, the eval form that
`dag/transforms/evaluation.py` derives needs no second decomposition to compare with: equal programs
decompose equally, and the flags here are those that the derivation changes in the same way.
Anything else (a batch norm, say) is compared operator by operator after the decomposition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn.utils.stateless import _reparametrize_module

from .export import ExportedModel, bare

__all__ = [
    "differing_constant",
    "given_without_values",
    "in_mode",
    "only_flags_differ",
    "uncompiled",
    "with_tensors",
    "without_values",
]

_aten = torch.ops.aten
_FLAGS: dict[Any, tuple[int, Any]] = {
    _aten.dropout.default: (2, False),
    _aten.feature_dropout.default: (2, False),
    _aten.scaled_dot_product_attention.default: (4, 0.0),
    _aten.batch_norm.default: (5, False),
    _aten.lstm.input: (6, False),
    _aten.gru.input: (6, False),
    _aten.rnn_tanh.input: (6, False),
    _aten.rnn_relu.input: (6, False),
}
"""Operator → position of the argument that knows the mode, and what it is in eval mode."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Parts that `torch.compile` was called for run as they are written. Compiled, they would be so
    for every mode that follows a forward; where that fails, torch leaves files (of graphs that it
    could not partition) in the working folder. A few calls are not worth a compiler either."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The module with other parameters and buffers, by its own names; each name of a tied one gets
    the same tensor. A part that has several names is swapped once for each of them, so the last
    swap is undone first (torch's `functional_call` leaves the other tensor in such a part)."""
    with _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True):
        yield


@contextmanager
def without_values(module: nn.Module, on_meta: bool) -> Iterator[dict[str, Tensor]]:
    """For calls of forward in which nothing is computed: with everything that the module has on
    `meta`, or as it is under a fake mode, which is ten times as slow. Gives its tensors by name."""
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    mode: AbstractContextManager[Any] = nullcontext()
    if on_meta:
        tensors = {n: bare(t, "meta") for n, t in tensors.items()}
    else:
        fake = detect_fake_mode([*module.parameters(), *module.buffers()])
        mode = fake or FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), with_tensors(module, tensors), mode:
        yield tensors


def given_without_values(
    inputs: Mapping[str, Tensor], samples: int, on_meta: bool
) -> dict[str, Tensor]:
    """Return so many samples, like these inputs, for a forward `without_values`."""
    return {
        name: torch.empty(
            (samples, *t.shape[1:]), dtype=t.dtype, device="meta" if on_meta else t.device
        )
        for name, t in inputs.items()
    }


@contextmanager
def in_mode(module: nn.Module, train: bool) -> Iterator[None]:
    """The module after its own `train()` or `eval()`, as a training loop calls them: a part that
    came in eval mode trains, unless the module's `train` keeps it. Every flag, and which parameters
    take a gradient, is as before afterwards."""
    before = {m: m.training for m in module.modules()}
    takes = {p: p.requires_grad for p in module.parameters()}
    module.train() if train else module.eval()
    try:
        yield
    finally:
        for m, flag in before.items():
            m.training = flag
        for p, flag in takes.items():
            p.requires_grad_(flag)


def only_flags_differ(trained: ExportedModel, evaluated: ExportedModel) -> bool:
    """Whether two programs that are not decomposed yet are the same, node by node, apart from the
    flags that the eval form changes too."""
    ours, theirs = trained.program, evaluated.program
    return (
        (trained.has_weight, trained.metrics) == (evaluated.has_weight, evaluated.metrics)
        and str(ours.graph_signature) == str(theirs.graph_signature)
        and ours.constants.keys() == theirs.constants.keys()
        and differing_constant(ours.constants, theirs.constants) is None
        and list(_lines(ours.graph_module, True)) == list(_lines(theirs.graph_module, False))
    )


def _lines(program: GraphModule, in_eval: bool) -> Iterator[tuple[str, ...]]:
    """What each node does, also in the bodies of regions. `in_eval`: with the flags of eval mode.
    torch names the nodes of equal programs equally; the text tells 1 from 1.0 and True."""
    for path, module in program.named_modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            args = node.args
            if node.target is _aten.scaled_dot_product_attention.default:
                args = (*args, *(None, 0.0, False)[len(args) - 3 :])  # torch leaves defaults out
            if in_eval and node.target in _FLAGS:
                place, value = _FLAGS[node.target]
                args = (*args[:place], value, *args[place + 1 :])
            yield path, node.op, node.name, str(node.target), repr(args), repr(node.kwargs)


def differing_constant(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The name of a tensor made by the forward itself that is another one in the other mode."""
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a is b:
            continue
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return name
        if not a.is_meta and not torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all():
            return name
    return None
