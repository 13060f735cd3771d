"""Dropout on a card in one launch, by Triton, which comes with torch for CUDA.

The masks are those of random.py, bit for bit; nothing is kept for the backward pass, which draws
them again. There it takes ten launches, six passes over 32-bit integers, and a byte per element.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["dropout", "takes"]

_BLOCK = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(x: Tensor) -> bool:
    """Positions are counted in the order of memory, so that what is transposed is not for it."""
    return x.is_contiguous() and x.dtype in _DTYPES and x.numel() > 0


def dropout(x: Tensor, scale: float, below: int, word: int, multipliers: tuple[int, ...]) -> Tensor:
    """x · scale, zero where the element's 16 bits, as a signed number, are less than `below`.
    `word`: of the key and the operator; `multipliers`: the three of the hash."""
    made: Tensor = _Dropout.apply(x, scale, below, word, multipliers)  # type: ignore[no-untyped-call]  # torch's is untyped
    return made


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: float, below: int, word: int, multipliers: tuple[int, ...]
    ) -> Tensor:
        ctx.how = scale, below, word, multipliers
        return _launch(x, *ctx.how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _launch(grad.contiguous(), *ctx.how), None, None, None, None


def _launch(x: Tensor, scale: float, below: int, word: int, multipliers: tuple[int, ...]) -> Tensor:
    out = torch.empty_like(x)
    count = x.numel()
    with torch.cuda.device(x.device):
        _dropout_kernel[(triton.cdiv(count, _BLOCK),)](
            x, out, count, scale, below, word, *multipliers, BLOCK=_BLOCK
        )
    return out


@triton.jit(do_not_specialize=["below", "word"])  # type: ignore[untyped-decorator]  # of Triton
def _dropout_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
    x,
    out,
    count,
    scale,
    below,
    word,
    m1: tl.constexpr,
    m2: tl.constexpr,
    m3: tl.constexpr,
    BLOCK: tl.constexpr,  # noqa: N803  # as Triton writes constants
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    w = (at >> 1).to(tl.int32)
    w = (w ^ ((w >> 16) & 0xFFFF)) * m1
    w = (w ^ ((w >> 15) & 0x1FFFF)) * m2
    w = w ^ ((w >> 16) & 0xFFFF)
    w = (w ^ word) * m1
    w = (w ^ (w >> 16)) * m2
    w = (w ^ (w >> 15)) * m3
    half = tl.where((at & 1) == 0, (w << 16) >> 16, w >> 16)
    given = tl.load(x + at, mask=there).to(tl.float32)
    kept = tl.where(half < below, 0.0, given * scale)
    tl.store(out + at, kept.to(out.dtype.element_ty), mask=there)
