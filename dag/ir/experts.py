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

__all__ = ["OPERATORS", "grouped_mm", "histogram"]


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
    rows, groups = _checked(x, weight, ends)
    if ends.is_meta or isinstance(ends, FakeTensor):  # no values: as many rows for each
        asked = [rows * (i + 1) // groups for i in range(groups)]
    else:
        asked = ends.tolist()
    sizes, start = [], 0
    for end in asked:
        sizes.append(max(0, min(end, rows) - start))
        start += sizes[-1]
    *parts, rest = x.split_with_sizes([*sizes, rows - start])
    # One part a matrix, empty ones too: so every gradient is there. `unbind` gathers those of the
    # weight in one piece, which a selection of each matrix would not.
    made = [part @ matrix for part, matrix in zip(parts, weight.unbind(), strict=True)]
    return torch.cat([*made, rest.new_zeros(rest.shape[0], weight.shape[2])])


def _checked(x: Tensor, weight: Tensor, ends: Tensor) -> tuple[int, int]:
    """Rows and groups."""
    fits = (
        (x.dim(), weight.dim(), ends.dim()) == (2, 3, 1)
        and x.shape[1] == weight.shape[1]
        and weight.shape[0] == ends.shape[0]
        and weight.shape[0] > 0
        and x.dtype == weight.dtype
        and ends.dtype in (torch.int32, torch.int64)
    )
    if not fits:
        got = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in (x, weight, ends))
        raise ValueError(f"a grouped product of {got}: expected [S, K], [E, K, N], int32 or 64 [E]")
    return x.shape[0], weight.shape[0]


OPERATORS: dict[str, Callable[..., Any]] = {"grouped_mm": grouped_mm, "histogram": histogram}
"""The functions behind `shoal.NAME.default`."""
