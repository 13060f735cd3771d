"""bf16, fp16: every element rounded to 16 bits, to nearest, ties to even.

2 bytes per element, and a header of 2: a power of two (int16 e) by which the whole tensor is
divided before it is rounded. So no finite element becomes infinite, and small numbers are not lost
among the denormals: fp16 alone, without it, ends at 6e-8, where gradients of activations still go
on.

    fp16   always: the largest element lands in 2^14 … 2^15
    bf16   only where the largest lies outside 2^-60 … 2^120; else e = 0 and x.bfloat16() is sent

Error: an element x that is a normal number after the division is off by at most u·|x|, u = 2^-11
for fp16 and 2^-8 for bf16; any other by half the smallest denormal, which is 2^-39 of the largest
element for fp16 and 2^-74 for bf16. So ‖Δ‖² ≤ (u² + n·2^-78)·‖x‖², n·2^-148 for bf16.

NaN and infinities stay what they are (a NaN's payload may change).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..checks import (
    PIECE,
    as_dtype,
    check_length,
    count,
    dtype_of,
    encoded,
    flat,
    from_bytes,
    pack_exponent,
    times_power,
    unpack_exponent,
)
from ..interface import Encoded, Spec

__all__ = ["CastCodec", "bf16", "fp16"]

_PLAIN = 100
"""Powers of two up to here, either way, leave float32 in its normal range."""


def bf16() -> CastCodec:
    return CastCodec("bf16", torch.bfloat16, 2.0**-8, 2.0**-74)


def fp16() -> CastCodec:
    return CastCodec("fp16", torch.float16, 2.0**-11, 2.0**-39)


class CastCodec:
    """The codecs bf16 and fp16: every element is rounded to 16 bits. `rounding`: u; `smallest`:
    half the smallest denormal, in units of the largest element."""

    def __init__(self, word: str, dtype: torch.dtype, rounding: float, smallest: float) -> None:
        self.name = f"{word}/1"
        self._dtype = dtype
        self._rounding, self._smallest = rounding, smallest

    def error_bound(self, spec: Spec) -> float:
        u = self._rounding + 2.0**-23  # float64 is rounded twice, by way of float32
        return math.sqrt(u * u + count(self.name, spec) * self._smallest**2)

    def size_bytes(self, spec: Spec) -> int:
        return 2 * count(self.name, spec)

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        x = flat(self.name, tensor)
        exponent = self._exponent(x)
        if not exponent:
            return encoded(pack_exponent(0), x.to(self._dtype))
        out = torch.empty(x.shape, dtype=self._dtype, device=x.device)
        for piece, part in _pieces(x, out):
            part.copy_(_times(piece, -exponent))
        return encoded(pack_exponent(exponent), out)

    def encode_rows(self, rows: Tensor) -> tuple[bytes, Tensor] | None:
        """The headers of all rows (R, n), n > 0, and their bytes (R, 2·n): of each what `encode`
        gives for it alone. None for bf16 and for what float32 does not hold."""
        if self._dtype is torch.bfloat16 or rows.dtype is torch.float64:
            return None
        tops = torch.where(rows.isfinite(), rows, 0).abs().amax(1).float()
        exponents = torch.where(tops > 0, torch.frexp(tops).exponent - 15, 0)
        if int(exponents.abs().max()) > _PLAIN:
            return None
        sent = (rows.float() * _powers(-exponents)).to(self._dtype)
        header = exponents.to("cpu", torch.int16).numpy().tobytes()
        return header, sent.view(torch.uint8)

    def decode_rows(
        self, dtype: torch.dtype, n: int, headers: bytes, data: Tensor
    ) -> Tensor | None:
        """The reverse: (R, n) of `dtype` from data (R, 2·n) uint8. None as above."""
        exponents = torch.frombuffer(bytearray(headers), dtype=torch.int16).to(data.device).int()
        wide = self._dtype is torch.bfloat16 or dtype is torch.float64
        if wide or int(exponents.abs().max()) > _PLAIN:
            return None
        sent = as_dtype(data.reshape(-1), self._dtype).view(-1, n)
        values = sent.float() * _powers(exponents)
        if dtype is torch.float16:
            limit = torch.finfo(dtype).max
            values = torch.where(sent.isinf(), values, values.clamp(-limit, limit))
        return values.to(dtype)

    def _exponent(self, x: Tensor) -> int:
        """e of the header."""
        if x.numel() == 0:
            return 0
        low, high = torch.stack([x.amin(), x.amax()]).tolist()  # one wait; NaN wins both
        top = max(-low, high)
        if not math.isfinite(low + high):
            top = torch.where(x.isfinite(), x, 0).abs().amax().item()
        if top == 0 or (self._dtype is torch.bfloat16 and 2.0**-60 <= top < 2.0**120):
            return 0
        power = math.frexp(top)[1]
        return power if self._dtype is torch.bfloat16 else power - 15

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        dtype, n = dtype_of(self.name, spec), count(self.name, spec)
        exponent = unpack_exponent(self.name, header)
        check_length(self.name, f"data of {spec.dtype}{list(spec.sizes)}", 2 * n, data.nbytes)
        sent = as_dtype(from_bytes(data, device), self._dtype)
        if not exponent and dtype is not torch.float16:
            return sent.to(dtype).view(spec.sizes)
        out = torch.empty(n, dtype=dtype, device=device)
        # What was rounded up may lie beyond the dtype's largest number; infinities stay.
        limit = torch.finfo(dtype).max
        may_exceed = dtype is torch.float16 or abs(exponent) > _PLAIN
        for piece, part in _pieces(sent, out):
            values = _times(piece, exponent)
            if may_exceed:
                values = torch.where(piece.isinf(), values, values.clamp(-limit, limit))
            part.copy_(values)
        return out.view(spec.sizes)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields pieces of all tensors in step: each item holds the same range of every tensor."""
    size = PIECE[tensors[0].device.type]
    return zip(*(torch.split(t, size) for t in tensors), strict=True)


def _powers(exponents: Tensor) -> Tensor:
    """2^e of each (R,) int32, at most _PLAIN, as a column of float32; exact, as no exp2 must be."""
    return ((exponents + 127) << 23).view(torch.float32).view(-1, 1)


def _times(x: Tensor, exponent: int) -> Tensor:
    """x · 2^exponent, as float32 where that is exact for what matters, else as float64."""
    if x.dtype is torch.float64 or abs(exponent) > _PLAIN:
        return times_power(x, exponent)
    return x.float() * 2.0**exponent
