"""Operators that mixtures of experts route tokens with, as composites that trust no value.

torch's own kernels for them do: `_grouped_mm` reads where its offsets point and leaves the rows
behind the last one uninitialised, and both come at run time. Here offsets are clamped, and rows of
no group are zeros. Everything is plain torch underneath, so each has its gradient and its costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .quantized import int8_linear

__all__ = ["OPERATORS", "grouped_mm", "histogram", "int8_grouped_mm"]


def histogram(x: Tensor, bins: int, low: float, high: float) -> Tensor:
    """How many elements of x lie in each of `bins` equal parts of [low, high], as `torch.histc`
    counts them, in x's dtype, (bins,). It also takes the integers that `histc` refuses on CPUs;
    what lies outside, or is NaN, counts nowhere. Raises ValueError for bounds that are no range."""
    if not (bins >= 1 and math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"a histogram of {bins} bins from {low} to {high}: expected low < high")
    x = x.detach().flatten()
    values = x if x.is_floating_point() else x.double()
    place = ((values - low) * bins / (high - low)).long().clamp(0, bins - 1)
    inside = (values >= low) & (values <= high)
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    return counts.scatter_add(0, place, inside.long()).to(x.dtype)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times the matrix of its own: x (S, K), weight (E, K, N) → (S, N).

    `ends` (E), int32 or int64: rows [ends[i-1], ends[i]) belong to matrix i. An end is clamped to
    what the earlier ones left of the S rows; rows behind the last one give zeros, and get a zero
    gradient. Costs 2·S·K·N FLOPs however the rows are shared out, and one wait for the device that
    has `ends`. Raises ValueError for other shapes or dtypes."""
    _checked(x, weight, ends)
    # `unbind` gathers the gradients of the weight in one piece, which a selection of each matrix
    # would not.
    *parts, rest = _parts(x, ends)
    made = [part @ matrix for part, matrix in zip(parts, weight.unbind(), strict=True)]
    return torch.cat([*made, rest.new_zeros(rest.shape[0], weight.shape[2])])


def int8_grouped_mm(x: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm` by weights in 8 bits (quantized.py): int8 (E, N, K) with float32 scales (E, N,
    1), or (E, K, N) with (E, 1, N). Raises ValueError for other shapes or dtypes."""
    if weight.dim() != 3 or scale.dim() != 3 or len(scale) != len(weight):
        raise ValueError(
            f"weights of experts in 8 bits are {_said(weight, scale)}: expected 3 dims"
        )
    by_rows = scale.shape[2] == 1
    _checked(x, weight.transpose(1, 2) if by_rows else weight, ends, torch.int8)
    *parts, rest = _parts(x, ends)
    each = zip(parts, weight.unbind(), scale.unbind(), strict=True)
    made = [int8_linear(*one) for one in each]
    return torch.cat([*made, rest.new_zeros(rest.shape[0], weight.shape[1 if by_rows else 2])])


def _parts(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """The rows of each group, of empty ones too, so that every gradient is there; then the rest."""
    rows, groups = len(x), len(ends)
    if ends.is_meta or isinstance(ends, FakeTensor):  # no values: as many rows for each
        asked = [rows * (i + 1) // groups for i in range(groups)]
    else:
        asked = ends.tolist()
    sizes, start = [], 0
    for end in asked:
        sizes.append(max(0, min(end, rows) - start))
        start += sizes[-1]
    return x.split_with_sizes([*sizes, rows - start])


def _checked(x: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError for what is no grouped product. dtype: of the weight; None: that of x."""
    fits = (
        (x.dim(), weight.dim(), ends.dim()) == (2, 3, 1)
        and x.shape[1] == weight.shape[1]
        and weight.shape[0] == ends.shape[0]
        and weight.shape[0] > 0
        and weight.dtype == (dtype or x.dtype)
        and ends.dtype in (torch.int32, torch.int64)
    )
    if not fits:
        got = _said(x, weight, ends)
        raise ValueError(f"a grouped product of {got}: expected [S, K], [E, K, N], int32 or 64 [E]")


def _said(*tensors: Tensor) -> str:
    return ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)


OPERATORS: dict[str, Callable[..., Any]] = {
    "grouped_mm": grouped_mm,
    "int8_grouped_mm": int8_grouped_mm,
    "histogram": histogram,
}
"""The functions behind `shoal.NAME.default`."""
