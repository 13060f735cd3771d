"""Frozen weights in 8 bits: an int8 number for each, and a float32 scale for each output.

    scale = max |w| / 127, over the weights of one output (1 where that is no normal number)
    q     = w / scale, rounded to the nearest integer, to the even one of two; in [-127, 127]
    w'    = q · scale

This is symmetric absmax quantisation by vectors (Dettmers et al. 2022, LLM.int8(), section 2). Each
number is one IEEE operation of float32 on the CPU, so all who quantise have the same bits.

The operators here read weights so, and nothing of w' is there for longer than its use: a product
casts a slice of q at a time, both ways, and applies the scales to what comes out. No gradient
of q or scale: neither is ever trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "OPERATORS",
    "int8_embedding",
    "int8_linear",
    "product",
    "product_back",
    "quantized",
    "scale_sizes",
    "slice_rows",
]

SLICE = 1 << 22
"""Elements of a narrow weight that are wide at once: 16 MiB of float32."""
_MOST = 127


def quantized(weight: Tensor, outputs: int = 0) -> tuple[Tensor, Tensor]:
    """The int8 numbers of a floating weight, in its shape, and its float32 scales: (…, out, 1) for
    outputs in rows, (…, 1, out) for `outputs` = 1. Raises ValueError for a weight that is not
    finite."""
    wide = weight.detach().float()
    if not wide.numel():
        return wide.to(torch.int8), wide.new_ones(scale_sizes(wide.shape, outputs))
    most = wide.abs().amax(-1 - outputs, keepdim=True)
    if not bool(most.isfinite().all()):
        raise ValueError("a weight is infinite or NaN: expected finite ones for int8")
    scale = most / _MOST
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
    return (wide / scale).round_().to(torch.int8), scale


def scale_sizes(sizes: Sequence[int], outputs: int) -> tuple[int, ...]:
    """Sizes of the scales of a weight."""
    *before, rows, columns = sizes
    return (*before, 1, columns) if outputs else (*before, rows, 1)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · w'ᵀ + bias: x (…, in), weight int8 (out, in) with scale (out, 1), or (in, out) with scale
    (1, out); scale float32, bias (out,) → (…, out) in the dtype of x. On a CPU sums are float32 at
    least and rounded once; elsewhere the product has x's dtype, in which an int8 number is exact.
    Costs 2 · elements of x · out FLOPs and a cast of the weight, each way. Raises ValueError for
    other shapes or dtypes."""
    outputs = _checked(x.shape[-1:], weight, scale)
    fits = x.is_floating_point() and (bias is None or tuple(bias.shape) == (outputs,))
    if not fits:
        raise ValueError(f"an int8 product of {_said(x, weight, scale, bias)}: expected one bias")
    made: Tensor = _Linear.apply(x, weight, scale, bias)  # type: ignore[no-untyped-call]  # torch's is untyped
    return made


def int8_embedding(weight: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """Rows of w': weight int8 (words, in), scale float32 (words, 1), ids int32 or int64 (…) → (…,
    in) float32. Only the rows that are asked for are dequantised. Raises ValueError for other
    shapes or dtypes, IndexError for a row that is not there."""
    _checked(weight.shape[1:], weight, scale)
    if scale.shape[1] != 1:
        raise ValueError(f"an int8 lookup in {_said(weight, scale)}: expected a scale for each row")
    return F.embedding(ids, weight) * F.embedding(ids, scale)


def _checked(inputs: tuple[int, ...], weight: Tensor, scale: Tensor) -> int:
    """How many outputs there are."""
    if scale.requires_grad:
        raise ValueError(
            "a scale of weights in 8 bits is not differentiable: expected a frozen one"
        )
    if weight.dim() == 2 and scale.dim() == 2:
        rows = scale.shape[1] == 1
        outputs = weight.shape[0 if rows else 1]
        wanted = ((outputs, *inputs), (outputs, 1)) if rows else ((*inputs, outputs), (1, outputs))
        kinds = weight.dtype is torch.int8 and scale.dtype is torch.float32
        if kinds and wanted == (tuple(weight.shape), tuple(scale.shape)):
            return outputs
    raise ValueError(
        f"weights in 8 bits are {_said(weight, scale)} for {list(inputs)} inputs: expected int8 "
        "(out, in) with float32 (out, 1), or (in, out) with (1, out)"
    )


def _said(*tensors: Tensor | None) -> str:
    given = (t for t in tensors if t is not None)
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in given)


def slice_rows(columns: int) -> int:
    """How many rows of so many columns are wide at once."""
    return max(1, SLICE // max(1, columns))


def _slices(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight (out, in) with their copy in another dtype, which holds until the next
    ones."""
    rows = min(len(weight), slice_rows(weight.shape[1]))
    buffer = weight.new_empty(rows, weight.shape[1], dtype=dtype)
    for at in range(0, len(weight), max(1, rows)):
        part = weight[at : at + rows].detach()
        yield slice(at, at + rows), buffer[: len(part)].copy_(part)


def product(
    x: Tensor, matrix: Tensor, bias: Tensor | None, factors: Tensor | None = None
) -> Tensor:
    """x · matrixᵀ · factors + bias, with the rows of `matrix` (out, in) wide a slice at a time, and
    rounded once: x (…, in), factors and bias (out,)."""
    flat = x.reshape(-1, x.shape[-1]).to(_dtype(x))
    out = x.new_empty(*x.shape[:-1], len(matrix))
    made = out.view(-1, len(matrix))
    for part, wide in _slices(matrix, flat.dtype):
        sums = flat @ wide.t()
        if factors is not None:
            sums *= factors[part]
        if bias is not None:
            sums += bias[part]
        made[:, part] = sums
    return out


def product_back(grad: Tensor, matrix: Tensor, factors: Tensor | None = None) -> Tensor:
    """The gradient of x of such a product, of that of its result (…, out)."""
    flat = grad.reshape(-1, len(matrix)).to(_dtype(grad))
    if factors is not None:
        flat = flat * factors.to(flat.dtype)
    sums = flat.new_zeros(len(flat), matrix.shape[1])
    for part, wide in _slices(matrix, flat.dtype):
        sums.addmm_(flat[:, part], wide)
    return sums.to(grad.dtype).view(*grad.shape[:-1], matrix.shape[1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        matrix, factors = _by_rows(weight, scale)
        return product(x, matrix, bias, factors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        matrix, factors = _by_rows(*ctx.saved_tensors)
        needs_x, _, _, needs_bias = ctx.needs_input_grad
        dx = db = None
        if needs_bias:
            db = grad.reshape(-1, len(matrix)).to(_dtype(grad)).sum(0).to(grad.dtype)
        if needs_x:
            dx = product_back(grad, matrix, factors)
        return dx, None, None, db


def _by_rows(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The weight with its outputs in rows, and their scales (out,)."""
    return (weight if scale.shape[1] == 1 else weight.t()), scale.flatten()


def _dtype(x: Tensor) -> torch.dtype:
    """What a product with x is computed in."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if narrow and x.device.type == "cpu" else x.dtype


OPERATORS: dict[str, Callable[..., Any]] = {
    "int8_linear": int8_linear,
    "int8_embedding": int8_embedding,
}
"""The functions behind `shoal.NAME.default`."""
