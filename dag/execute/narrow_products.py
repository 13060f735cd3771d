"""Products with 16-bit weights on a CPU that has no instructions for them.

torch multiplies there in a loop of its own. On an AVX2 processor, one thread, 32 rows by a bfloat16
weight of 2048 x 2048: 9.8 GFLOP/s forward and 0.27 in the backward, against 36 in float32. So a
weight is cast as it is used, a slice of rows at a time, both ways: autograd keeps the weight as it
is, and what is in float32 at once is bounded, whatever its size. Sums are float32, and rounded
once, as where the processor can do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["linear"]

SLICE = 1 << 22
"""Elements of a weight that are in float32 at once: 16 MiB."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch's: x (…, in), weight (out, in), bias (out,)."""
    if weight.dtype in (torch.bfloat16, torch.float16) and _is_slow(weight.dtype, weight.device):
        made: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return made
    return F.linear(x, weight, bias)


def _is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and not _has_instructions(dtype)


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return asked is not None and bool(asked())


def _slices(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows with their float32 copy, which holds until the next ones."""
    rows = min(len(weight), max(1, SLICE // max(1, weight.shape[1])))
    buffer = weight.new_empty(rows, weight.shape[1], dtype=torch.float32)
    for at in range(0, len(weight), max(1, rows)):
        part = weight[at : at + rows].detach()
        yield slice(at, at + rows), buffer[: len(part)].copy_(part)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        flat = x.reshape(-1, x.shape[-1]).float()
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        made = out.view(-1, weight.shape[0])
        for part, wide in _slices(weight):
            sums = flat @ wide.t()
            if bias is not None:
                sums += bias[part]
            made[:, part] = sums
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat = grads[0].reshape(-1, weight.shape[0]).float()
        dx = dw = db = None
        if needs_x:
            sums = flat.new_zeros(len(flat), weight.shape[1])
            for part, wide in _slices(weight):
                sums.addmm_(flat[:, part], wide)
            dx = sums.to(grads[0].dtype).view(*grads[0].shape[:-1], weight.shape[1])
        if needs_weight:
            wide = x.reshape(-1, x.shape[-1]).float()
            dw = torch.empty_like(weight)
            rows = max(1, SLICE // max(1, weight.shape[1]))
            for at in range(0, len(dw), rows):
                dw[at : at + rows] = flat[:, at : at + rows].t() @ wide
        if needs_bias:
            db = flat.sum(0).to(weight.dtype)
        return dx, dw, db
