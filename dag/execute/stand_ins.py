"""What a stage runs in the place of operators whose kernels trust what no shape tells, the strides
of their input or the numbers in it, or are slow.

- `view` and its kin become `reshape`. A tensor that crossed a link is contiguous, whatever strides
  it had with its producer. What follows may then be strided where the captured model had it
  contiguous (a transpose undone by another, with the cut between), and `view` would fail or, given
  explicit strides, read the wrong elements. `reshape` is a view wherever `view` works and copies
  only elsewhere.
- The fused weight norm reads its arguments, and the gradient in its backward, as if they were
  contiguous.
- Batch and group norms read weight, bias and statistics as if they were contiguous. One by running
  statistics has two more results, which are as long as the channels or empty,
  by device; here they are zeros, as long as meta tensors say.
- Statistics of layer and group norms have the dtype that meta tensors say, float32 and that of the
  input: on a CPU it may be another.
- A product of a matrix without columns and a vector is added to what was not expanded.
- The median along a dimension that was expanded gives what lay in memory before.
- Grid sampling on a CPU turns a place that is not finite, or far off, into an index, and reads
  there.
- A product with a 16-bit weight, on a CPU without instructions for it, is torch's slow loop: see
  `linear`.

On honest values each gives what the operator itself gives, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ir.operators import resolve
from ..ir.quantized import product, product_back, slice_rows

__all__ = ["function_of", "gradient_of_bias", "gradient_of_weight", "is_sliced", "linear"]

# Products with 16-bit weights on a CPU that has no instructions for them.
#
# torch multiplies there in a loop of its own. On an AVX2 processor, one thread, 32 rows by a
# bfloat16 weight of 2048 x 2048: 9.8 GFLOP/s forward and 0.27 in the backward, against 36 in
# float32. So a weight is cast as it is used, a slice of rows at a time, both ways: autograd keeps
# the weight as it is, and what is in float32 at once is bounded, whatever its size. Sums are
# float32, and rounded once, as where the processor can do it.


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, frozen: bool = False
) -> Tensor:
    """As torch's: x (…, in), weight (out, in), bias (out,). `frozen`: where it is a loop of our
    own, its backward gives no gradients of weight and bias; `gradient_of_weight` does."""
    if is_sliced(weight):
        if frozen:
            weight, bias = weight.detach(), bias if bias is None else bias.detach()
        made: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return made
    return F.linear(x, weight, bias)


def is_sliced(weight: Tensor) -> bool:
    """Whether a product with this weight is a loop of our own."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return narrow and weight.device.type == "cpu" and not _has_instructions(weight.dtype)


def gradient_of_weight(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a sliced weight (out, in); x (…, in), `grad` (…, out) of the product."""
    wide, flat = x.reshape(-1, x.shape[-1]).float(), grad.reshape(-1, grad.shape[-1]).float()
    found = x.new_empty(flat.shape[1], wide.shape[1])
    rows = slice_rows(wide.shape[1])
    for at in range(0, len(found), rows):
        found[at : at + rows] = flat[:, at : at + rows].t() @ wide
    return found


def gradient_of_bias(grad: Tensor) -> Tensor:
    """The gradient of the bias (out,) of such a product."""
    return grad.reshape(-1, grad.shape[-1]).float().sum(0).to(grad.dtype)


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return asked is not None and bool(asked())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product_back(grads[0], weight) if needs_x else None,
            gradient_of_weight(x, grads[0]) if needs_weight else None,
            gradient_of_bias(grads[0]) if needs_bias else None,
        )


_aten = torch.ops.aten
_FAR = float(1 << 20)
"""In half widths of the picture. Padding by zeros and by the border gives the same anywhere beyond;
reflected places are rounded to whole pixels there."""


def function_of(target: str) -> tuple[Callable[..., Any], int | None]:
    """What runs an operator in a stage, and how many of its arguments it takes (None: all)."""
    return _STAND_INS.get(target) or (resolve(target), None)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norms = torch.norm_except_dim(v, 2, dim)
    return v * (g / norms), norms.detach()


def _batch_norm(source: Tensor, *args: Any) -> tuple[Tensor, ...]:
    vectors = _dense(args[:4])
    made = _aten._native_batch_norm_legit_functional.default(source, *vectors, *args[4:])
    return made if args[4] else (made[0], *_unsaved(source, args[2]), *made[3:])


def _batch_norm_evaluated(source: Tensor, *args: Any) -> tuple[Tensor, ...]:
    vectors = _dense(args[:4])
    made = _aten._native_batch_norm_legit_no_training.default(source, *vectors, *args[4:])
    return (made[0], *_unsaved(source, args[2]))


def _batch_norm_without_statistics(source: Tensor, *args: Any) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = _aten._native_batch_norm_legit.no_stats(
        source, *_dense(args[:2]), *args[2:]
    )
    return made


def _group_norm(source: Tensor, *args: Any) -> tuple[Tensor, ...]:
    made = _aten.native_group_norm.default(source, *_dense(args[:2]), *args[2:])
    return (made[0], made[1].to(source.dtype), made[2].to(source.dtype))


def _median(source: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = _aten.median.dim(source.contiguous(), *how)
    return made


def _layer_norm(source: Tensor, *args: Any) -> tuple[Tensor, ...]:
    made = _aten.native_layer_norm.default(source, *args)
    if source.dtype not in (torch.float16, torch.bfloat16):
        return (*made,)
    return (made[0], made[1].float(), made[2].float())


def _dense(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Nothing is copied where they are contiguous already."""
    return [t if t is None else t.contiguous() for t in tensors]


def _unsaved(source: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    zeros = source.new_zeros(source.shape[1], dtype=mean.dtype)
    return zeros, zeros


def _near(grid: Tensor) -> Tensor:
    """NaN stands for -1, as torch documents."""
    return grid.nan_to_num(-1.0, _FAR, -_FAR).clamp(-_FAR, _FAR)


def _addmv(source: Tensor, matrix: Tensor, vector: Tensor, **factors: Any) -> Tensor:
    """Over no column, the kernel gives what is added as it is, in its own shape."""
    made: Tensor = _aten.addmv.default(source.expand(matrix.shape[0]), matrix, vector, **factors)
    return made


def _grid_sampler(source: Tensor, grid: Tensor, *how: Any) -> Tensor:
    made: Tensor = _aten.grid_sampler.default(source, _near(grid), *how)
    return made


def _grid_sampler_2d(source: Tensor, grid: Tensor, *how: Any) -> Tensor:
    made: Tensor = _aten.grid_sampler_2d.default(source, _near(grid), *how)
    return made


_STAND_INS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "aten.linear.default": (linear, None),
    "aten.view.default": (_aten.reshape.default, 2),
    "aten._unsafe_view.default": (_aten.reshape.default, 2),
    "aten._reshape_alias.default": (_aten.reshape.default, 2),
    "aten.view_as.default": (_aten.reshape_as.default, 2),
    "aten._native_batch_norm_legit_functional.default": (_batch_norm, None),
    "aten._native_batch_norm_legit.no_stats": (_batch_norm_without_statistics, None),
    "aten._native_batch_norm_legit_no_training.default": (_batch_norm_evaluated, None),
    "aten.addmv.default": (_addmv, None),
    "aten.median.dim": (_median, None),
    "aten.native_layer_norm.default": (_layer_norm, None),
    "aten.native_group_norm.default": (_group_norm, None),
    "aten._weight_norm.default": (_weight_norm, None),
    "aten._weight_norm_interface.default": (_weight_norm_interface, None),
    "aten.grid_sampler.default": (_grid_sampler, None),
    "aten.grid_sampler_2d.default": (_grid_sampler_2d, None),
}
