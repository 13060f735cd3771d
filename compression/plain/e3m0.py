"""e3m0/1: four bits, a sign and a power of two (Streaming DiLoCo, 2501.18512), in blocks of
neighbouring elements.

    scale_b = max |x| in the block, as `bf16` writes it
    code_i  = 0, or ±1 … ±7 for ±2^-6 … ±2^0 times the scale, whichever is nearest
    header  = [that of the scales]      data = [scales][codes, two in a byte as `block.py` packs]

Bytes, n elements in blocks of B: 2·ceil(n/B) + ceil(n/2), 0.508 per element for B = 256. What is at
least 2^-6 of its block's largest is off by at most a third of itself, and anything smaller by
2^-7 of that largest; nothing by more than itself. NaN and infinities are refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import check_length, count, dtype_of, flat, from_bytes, views
from ..echo import TensorShape, check_finite, wide
from ..interface import CodecError, Encoded, Spec
from .block import fold, unfold
from .cast import bf16

__all__ = ["E3M0"]

_WORD = "e3m0/1"
_SCALES = bf16()


_POWERS = torch.tensor([*(-(2.0**-i) for i in range(7)), 0.0, *(2.0**i for i in range(-6, 1))])
"""By code, from -7 on."""


class E3M0:
    """The codec e3m0: a sign and a power of two for each element. `block`: a power of two, 8 to
    65,536."""

    def __init__(self, block: int = 256) -> None:
        self.name = f"{_WORD}:block={block}"
        if not 8 <= block <= 1 << 16 or block & (block - 1):
            raise CodecError(f"{self.name}: expected block = a power of two from 8 to 65536")
        self.block = block

    def error_bound(self, spec: Spec) -> float:
        n = count(_WORD, spec)
        off = 1 / 3 + 2.0**-7  # of the scale's rounding as well
        return min(1.0, math.sqrt(off**2 + min(n, self.block) * 2.0**-14)) + 2.0**-7 if n else 0.0

    def size_bytes(self, spec: Spec) -> int:
        n = count(_WORD, spec)
        return 2 * -(-n // self.block) + -(-n // 2)

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        """Raises CodecError for what is no floating point tensor, and for NaN and infinities."""
        x = flat(_WORD, tensor)
        if not x.numel():
            return Encoded(b"", ())
        check_finite(_WORD, x)
        rows = torch.nn.functional.pad(x, (0, -x.numel() % self.block)).view(-1, self.block)
        sizes = rows.abs().to(wide(x.dtype))
        most = sizes.amax(1, keepdim=True)
        share = (sizes / torch.where(most > 0, most, 1)).float()
        # From 1.5 on, half of the mantissa carries into the exponent.
        power = (share.view(torch.int32) + (1 << 22) >> 23) - 120
        codes = (power.clamp_(1, 7) * (share >= 2.0**-7)).to(torch.int8)
        codes = torch.where(rows < 0, -codes, codes).view(-1)[: x.numel()]
        scales = _SCALES.encode(most.view(-1).to(x.dtype))
        return Encoded(scales.header, (*scales.buffers, *views(fold(codes, 4).view(torch.uint8))))

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        dtype, n = dtype_of(_WORD, spec), count(_WORD, spec)
        blocks = -(-n // self.block)
        check_length(_WORD, "data", self.size_bytes(spec), data.nbytes)
        if not n:
            check_length(_WORD, "header", 0, len(header))
            return torch.empty(spec.sizes, dtype=dtype, device=device)
        shape = TensorShape((blocks,), spec.dtype, blocks * dtype.itemsize)
        scales = _SCALES.decode(shape, header, data[: 2 * blocks], device)
        codes = unfold(from_bytes(data[2 * blocks :], device).view(torch.int8), 4, n)
        if bool((codes < -7).any()):
            raise CodecError(f"{_WORD} data: a code is -8: expected -7 to 7")
        values = _POWERS.to(device).index_select(0, codes.int() + 7)
        values = torch.nn.functional.pad(values, (0, -n % self.block)).view(-1, self.block)
        return (values.to(dtype) * scales.view(-1, 1)).view(-1)[:n].contiguous().view(spec.sizes)
