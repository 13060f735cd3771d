"""The weight half of a stage's backward: gradients of weights, computed later than those that other
stages wait for.

Which operators have one is said in `dag/analysis/weight_gradients.py`. The forward is the plain
one; beside it, `note` keeps of each such operator what its weights' gradients need, and where in
autograd's graph the gradient of its result comes by. The input half is one pass of autograd that
goes where other stages wait, takes down the gradients of those results, and leaves out the weights:
so no kernel runs for them, and the rest of the graph is freed. `accumulate` then computes what was
left out, by torch's own functions on the same arguments as autograd's: every bit is that of an
undivided backward, as long as microbatches come in one order in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..analysis.weight_gradients import SPLIT, WeightGradient
from ..ir.graph import Graph, Operator
from ..ir.operators import resolve
from .stand_ins import gradient_of_bias, gradient_of_weight, is_sliced

__all__ = [
    "Noted",
    "WaitingOperator",
    "WeightHalf",
    "accumulate",
    "held_bytes",
    "input_half",
    "note",
]

_aten = torch.ops.aten


class Noted(NamedTuple):
    """What one microbatch keeps of an operator whose weights' gradients wait."""

    edges: tuple[GradientEdge | None, ...]
    """Where the gradients of its results come by; None of one that has none."""
    weights: tuple[Tensor, ...]
    kept: tuple[Any, ...]
    """Arguments of its rule; tensors are apart from autograd's graph."""


def note(
    made: tuple[Tensor, ...], weights: tuple[Tensor, ...], args: tuple[Any, ...]
) -> Noted | None:
    """Takes down, behind an operator in a forward, what its weight half needs: from its results,
    its weights, and the arguments that its rule keeps. None where autograd records nothing."""
    if not any(tensor.requires_grad for tensor in made):
        return None
    edges = tuple(get_gradient_edge(t) if t.requires_grad else None for t in made)
    saved = bool(args) and isinstance(args[0], str)
    kept = _saved_by(made[0]) if saved else tuple(map(_apart, args))
    return Noted(edges, weights, kept)


_SAVED = "what autograd's node has"


def _saved_by(made: Tensor) -> tuple[Any, ...]:
    """Name of a norm's node, and what it saves, as the arguments of its backward."""
    node = made.grad_fn
    assert node is not None, "a result that requires a gradient has a node"
    _, names = _NORMS.get(node.name(), (None, ("self",)))
    saved = (n if n is None or n is False else getattr(node, f"_saved_{n}") for n in names)
    return (node.name(), *map(_apart, saved))


def _apart(arg: Any) -> Any:
    return arg.detach() if isinstance(arg, Tensor) else arg


Weights = Mapping[int, Tensor]
"""By position of the argument."""
Rule = Callable[[Tensor, Weights, tuple[Any, ...]], Iterator[tuple[int, Tensor]]]
"""(gradient of the result, weights, what was kept) -> each weight's gradient by its position, as
torch's derivatives.yaml has it, in a tensor of its own."""


class WaitingOperator:
    """An operator whose weights' gradients wait, for all microbatches."""

    def __init__(self, graph: Graph, waits: WeightGradient) -> None:
        op = graph.operators[waits.index]
        self.weights = waits.weights
        self.whole = waits.whole
        self.direct = waits.direct
        self.made = tuple(v for v, o in zip(op.values, op.outputs, strict=True) if o.grad)
        self.args: tuple[Any, ...] = ()
        """What is kept for its rule; values as `Ref`."""
        self._place = {position: at for at, (position, _) in enumerate(waits.weights)}
        self._rule: Rule | None = None
        if not waits.whole:
            self._rule, self.args = _rule(op, graph)

    def gradients(self, grad: Tensor, noted: Noted) -> Iterator[tuple[int, Tensor]]:
        """The gradient of each weight, with its place among `weights`, from that of the result."""
        assert self._rule is not None, "what waits as a whole is autograd's"
        weights = dict(zip(self._place, noted.weights, strict=True))
        for position, found in self._rule(grad, weights, noted.kept):
            yield self._place[position], found


def _rule(op: Operator, graph: Graph) -> tuple[Rule, tuple[Any, ...]]:
    """The rule of an operator, and the arguments that it keeps."""
    name = op.target.split(".")[1]
    schema = resolve(op.target)._schema  # type: ignore[attr-defined]  # of an operator of ATen
    args = (*op.args, *(a.default_value for a in schema.arguments[len(op.args) :]))
    match name:
        case "linear":
            return _linear, (args[0],)
        case "addmm":
            return _addmm, (args[1],)
        case "mm" | "matmul":
            return _matmul, (args[0],)
        case "mul":
            return _mul, args[:2]
        case "add":
            return _add_tensor, ()
        case _ if name.startswith("conv"):
            dimensions = len(graph.spec[args[1].value].shape) - 2
            return _convolution, (*args[:2], *_of_convolution(name, args, dimensions))
        case _:
            return partial(_norm, SPLIT[op.target]), (_SAVED,)


def _of_convolution(name: str, args: tuple[Any, ...], dimensions: int) -> tuple[Any, ...]:
    """Stride, padding, dilation, whether transposed, output padding, groups."""
    stride, padding, *rest = args[3:]
    match name:
        case "convolution":
            dilation, transposed, beyond, groups = rest
        case _ if name.startswith("conv_transpose"):
            beyond, groups, dilation = rest
            transposed = True
        case _:
            dilation, groups = rest
            transposed, beyond = False, (0,)
    wide = [
        (sizes,) * dimensions
        if isinstance(sizes, int)
        else tuple(sizes) * (dimensions if len(sizes) == 1 else 1)
        for sizes in (stride, padding, dilation, beyond)
    ]
    return (*wide[:3], transposed, wide[3], groups)


def _linear(grad: Tensor, weights: Weights, kept: tuple[Any, ...]) -> Iterator[tuple[int, Tensor]]:
    grads = grad.reshape(-1, grad.shape[-1])
    if any(map(is_sliced, weights.values())):
        if 1 in weights:
            yield 1, gradient_of_weight(kept[0], grad)
        if 2 in weights:
            yield 2, gradient_of_bias(grad)
        return
    if 2 in weights:  # first, as it brings the gradient into the cache the quickest
        yield 2, _sum_to(grads, weights[2])
    if 1 in weights:
        yield 1, _of_matrix(grads, kept[0], weights[1].t()).t()


def _addmm(grad: Tensor, weights: Weights, kept: tuple[Any, ...]) -> Iterator[tuple[int, Tensor]]:
    if 0 in weights:
        yield 0, _sum_to(grad, weights[0])
    if 2 in weights:
        yield 2, _of_matrix(grad, kept[0], weights[2])


def _matmul(grad: Tensor, weights: Weights, kept: tuple[Any, ...]) -> Iterator[tuple[int, Tensor]]:
    yield 1, _of_matrix(grad.reshape(-1, grad.shape[-1]), kept[0], weights[1])


def _of_matrix(grads: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """The gradient of `matrix` (k, m), which x (…, k) was multiplied by, laid out as that is."""
    rows = x.reshape(-1, x.shape[-1])
    if matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]:
        return grads.t().mm(rows).t()
    return rows.t().mm(grads)


def _mul(grad: Tensor, weights: Weights, kept: tuple[Any, ...]) -> Iterator[tuple[int, Tensor]]:
    for position, weight in weights.items():
        yield position, (grad * kept[1 - position]).sum_to_size(weight.shape)


def _add_tensor(
    grad: Tensor, weights: Weights, kept: tuple[Any, ...]
) -> Iterator[tuple[int, Tensor]]:
    for position, weight in weights.items():
        yield position, _sum_to(grad, weight)


def _sum_to(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.clone() if grad.shape == weight.shape else grad.sum_to_size(weight.shape)


def _convolution(
    grad: Tensor, weights: Weights, kept: tuple[Any, ...]
) -> Iterator[tuple[int, Tensor]]:
    x, kernel, *how = kept
    bias = list(weights[2].shape) if 2 in weights else None
    mask = [False, 1 in weights, 2 in weights]
    found = _aten.convolution_backward.default(grad, x, kernel, bias, *how, mask)
    yield from ((k, found[k]) for k in weights)


def _norm(
    positions: tuple[int, ...], grad: Tensor, weights: Weights, kept: tuple[Any, ...]
) -> Iterator[tuple[int, Tensor]]:
    """`positions`: of weight and bias among its arguments."""
    name, *saved = kept
    if name == "MulBackward0":  # an RMS norm on a CPU: its last step is the product with the weight
        yield from ((k, (grad * saved[0]).sum_to_size(w.shape)) for k, w in weights.items())
        return
    backward, _ = _NORMS[name]
    found = backward(grad, *saved, [False, *(k in weights for k in positions)])
    yield from ((k, found[1 + at]) for at, k in enumerate(positions) if k in weights)


_NORMS: Mapping[str, tuple[Callable[..., Any], tuple[str | bool | None, ...]]] = {
    "NativeLayerNormBackward0": (
        _aten.native_layer_norm_backward.default,
        ("input", "normalized_shape", "result1", "result2", "weight", "bias"),
    ),
    "NativeBatchNormLegitNoTrainingBackward0": (
        _aten.native_batch_norm_backward.default,
        (
            *("input", "weight", "running_mean", "running_var", "result1", "result2"),
            *(False, "eps"),
        ),
    ),
    "FusedRmsNormBackward0": (
        _aten._fused_rms_norm_backward.default,
        ("input", "normalized_shape", "result1", "weight"),
    ),
}
"""By the node that autograd makes of a norm: its backward, and what the node saves for that, by the
names of torch's derivatives.yaml. The last argument is the mask of gradients."""


# ------------------------------------------------------------ one microbatch


class WeightHalf(NamedTuple):
    """What waits of one operator and microbatch: with the gradients of its results."""

    operator: WaitingOperator
    noted: Noted
    grads: tuple[Tensor | None, ...]


def input_half(
    roots: Sequence[Tensor],
    seeds: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
    notes: Sequence[tuple[WaitingOperator, Noted | None]],
) -> tuple[dict[str, Tensor | None], list[WeightHalf]]:
    """One pass of autograd from `roots`, which have the gradients `seeds`: the gradients of
    `leaves` by name, and what waits. Those of `parameters`, which do not, are accumulated."""
    there = [(operator, noted) for operator, noted in notes if noted is not None]
    edges = [edge for _, noted in there for edge in noted.edges if edge is not None]
    asked: list[Any] = [*leaves.values(), *parameters, *edges]
    found: list[Tensor | None] = [None] * len(asked)
    if roots and asked:
        found = [*torch.autograd.grad(roots, asked, seeds, allow_unused=True)]
    grads = iter(found)
    back: dict[str, Tensor | None] = dict.fromkeys(leaves)
    for value, leaf in leaves.items():
        grad = next(grads)
        back[value] = grad if grad is None else laid_out_as(leaf, grad)
    own = [(p, grad) for p in parameters if (grad := next(grads)) is not None]
    if own:
        at = [get_gradient_edge(p) for p, _ in own]
        torch.autograd.backward(at, [grad for _, grad in own])
    waiting = []
    for operator, noted in there:
        given = tuple(None if edge is None else next(grads) for edge in noted.edges)
        if any(grad is not None for grad in given):
            waiting.append(WeightHalf(operator, noted, given))
    return back, waiting


def held_bytes(waiting: Iterable[Iterable[WeightHalf]], without: Iterable[Tensor]) -> int:
    """Bytes of the storages that wait, each once; those of `without` do not count."""
    held = [t for halves in waiting for half in halves for t in (*half.noted.kept, *half.grads)]
    sizes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in held
        if isinstance(t, Tensor)
    }
    for tensor in without:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def accumulate(waiting: Sequence[WeightHalf]) -> None:
    """Adds the gradients of a microbatch's weights to those of the microbatches before (`.grad`).
    `waiting` is in the order of operators, so that what the input half made last, and is still in a
    cache, comes first; what several operators read is added up in autograd's order, from the last
    of them."""
    uses = Counter(id(w) for half in waiting for w in half.noted.weights)
    parts: dict[int, list[Tensor]] = {}
    through: list[tuple[GradientEdge, Tensor]] = []
    with torch.no_grad():
        for operator, noted, grads in waiting:
            if operator.whole:
                given = zip(noted.edges, grads, strict=True)
                through += [(e, grad) for e, grad in given if e is not None and grad is not None]
                continue
            assert grads[0] is not None, "an operator that is split has one result"
            for at, grad in operator.gradients(grads[0], noted):
                weight = noted.weights[at]
                if not operator.direct:
                    through.append((get_gradient_edge(weight), grad))
                elif uses[id(weight)] == 1:
                    _add(weight, grad)
                else:
                    parts.setdefault(id(weight), []).append(grad)
                    if len(parts[id(weight)]) == uses[id(weight)]:
                        _add(weight, reduce(torch.add, reversed(parts.pop(id(weight)))))
    if through:
        edges, seeds = zip(*reversed(through), strict=True)
        torch.autograd.backward(edges, seeds)


def _add(parameter: Tensor, grad: Tensor) -> None:
    """As autograd does: the first gradient is taken over, laid out as the parameter is."""
    if parameter.grad is not None:
        parameter.grad.add_(grad)
        return
    parameter.grad = laid_out_as(parameter, grad)


def laid_out_as(tensor: Tensor, grad: Tensor) -> Tensor:
    """A gradient with the strides of what it belongs to, as autograd leaves it in `.grad`."""
    return grad if grad.stride() == tensor.stride() else torch.empty_like(tensor).copy_(grad)
