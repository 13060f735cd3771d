"""int8, int6, int4, int2: blocks of neighbouring elements, each with one scale and small integers.

    scale_b = max |x| in the block / m, rounded up to bfloat16    m = 127, 31, 7, 1
    code_i  = round(x_i / scale_b)                                for 8, 6, 4, 2 bits
                                                                  decoded: code_i · scale_b

Bytes, n elements in blocks of B: 2·ceil(n/B) for the scales, then ceil(n·bits/8), for 6 bits
ceil(n/2) + ceil(n/4): 1.008 and 0.758 per element for int8 and int6 and B = 256, 0.531 and 0.281
for int4 and int2 and B = 64. Scales are never fp16: they would underflow on gradients of
activations. A tensor whose largest element lies outside
2^-60 … 2^100 is scaled by a power of two first, which the header (int16) holds; else it holds 0.

A block that holds a NaN or an infinity is NaN as a whole afterwards.

Rounding: `nearest` (ties to even), or `stochastic`: up with the probability of the fraction, met
to 2^-17, so that the mean over keys is x (Alistarh et al. 2017, QSGD, section 3). What is lost is
lost.

The largest error, t = (1 + 2^-7) / m a step in units of the block's largest element a: an element
is off by no more than half a step before the result is rounded to its dtype, and rounding to a
number at least as near as x itself at most doubles that: t·a. With `nearest` it is never off by
more than its own size either. So the worst block has a, and t·a in all other places:

    nearest      ‖Δ‖² / ‖x‖² ≤ N·t² / (1 + (N - 1)·t²)       N = min(n, B)
    stochastic   ‖Δ‖² / ‖x‖² ≤ 4·N·t²

Where denormals play no part and x is float32, half of t (of 2t) holds. Gaussian data is far below:
0.007 for int8, 0.03 for int6, 0.11 for int4.

Packing: c codes in a byte, w = ceil(n / c) bytes; byte i holds codes i, i + w, …, the first in its
lowest bits, in two's complement. Of 6 bits the lower four of all codes go first, packed so, then
the upper two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import counter
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
from ..interface import CodecError, Encoded, Spec

__all__ = ["BlockCodec", "fold", "int2", "int4", "int6", "int8", "unfold"]

_SMALLEST, _LARGEST = 2.0**-60, 2.0**100
_NAN, _INFINITE = 0x7FC0, 0x7F80
"""Patterns of bfloat16."""
_NO_SCALE = 2.0**-120
"""Scales below are 0: a reciprocal must be a float32. It is 2^-53 of the largest element."""


def int8(block: int = 256, rounding: str = "nearest") -> BlockCodec:
    return BlockCodec(8, block, rounding)


def int6(block: int = 256, rounding: str = "nearest") -> BlockCodec:
    return BlockCodec(6, block, rounding)


def int4(block: int = 64, rounding: str = "nearest") -> BlockCodec:
    return BlockCodec(4, block, rounding)


def int2(block: int = 64, rounding: str = "nearest") -> BlockCodec:
    return BlockCodec(2, block, rounding)


class BlockCodec:
    """The codecs int8, int6, int4 and int2: small integers, and one scale per block of elements.
    `block`: a power of two, 8 to 65,536. `rounding`: nearest or stochastic."""

    def __init__(self, bits: int, block: int, rounding: str) -> None:
        self._word = f"int{bits}/1"
        self.name = f"{self._word}:block={block},rounding={rounding}"
        if not 8 <= block <= 1 << 16 or block & (block - 1):
            raise CodecError(f"{self.name}: expected block = a power of two from 8 to 65536")
        if rounding not in ("nearest", "stochastic"):
            raise CodecError(f"{self.name}: expected rounding = nearest or stochastic")
        self.bits, self.block, self.rounding = bits, block, rounding
        self._m = (1 << (bits - 1)) - 1

    def error_bound(self, spec: Spec) -> float:
        n = count(self._word, spec)
        if not n:
            return 0.0
        width = min(n, self.block)
        t = (1 + 2.0**-7) / self._m * (1 + 2.0**-12)  # float32 in between
        if self.rounding == "nearest":
            bound = math.sqrt(width * t * t / (1 + (width - 1) * t * t))
        else:
            bound = 2 * math.sqrt(width) * t
        return bound + math.sqrt(n) * 2.0**-52  # blocks without a scale

    def size_bytes(self, spec: Spec) -> int:
        scales, codes = self._sizes(count(self._word, spec))
        return scales + codes

    def _sizes(self, n: int) -> tuple[int, int]:
        """Bytes of the scales and of the codes."""
        return 2 * -(-n // self.block), sum(-(-n * width // 8) for width in _fields(self.bits))

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        x = flat(self._word, tensor)
        if x.numel() == 0:
            return encoded(pack_exponent(0))
        exponent, scales, integers = self._quantised(x, key)
        return encoded(pack_exponent(exponent), scales, *_packed(integers, self.bits))

    def encode_rows(self, rows: Tensor) -> tuple[bytes, Tensor] | None:
        """The headers of all rows (R, n), n > 0, and their bytes (R, `size_bytes`): of each what
        `encode` gives for it alone. None where one wants a power of two of its own."""
        count, n = rows.shape
        assert self.rounding == "nearest", "noise depends on where in its tensor a number is"
        padded = torch.nn.functional.pad(rows, (0, -n % self.block))
        peaks = padded.view(count, -1, self.block).abs().amax(2)
        tops = torch.where(peaks.isfinite(), peaks, 0.0).amax(1).double()
        plain = (tops == 0) | ((tops >= _SMALLEST) & (tops < _LARGEST))
        if not bool(plain.all()):
            return None
        _, scales, integers = self._quantised(padded.view(-1), 0)
        codes = _packed(integers.view(count, -1)[:, :n], self.bits)
        bytes_of_scales = scales.view(torch.uint8).view(count, -1)
        parts = [bytes_of_scales, *(c.contiguous().view(torch.uint8) for c in codes)]
        return pack_exponent(0) * count, torch.cat(parts, 1)

    def decode_rows(
        self, dtype: torch.dtype, n: int, headers: bytes, data: Tensor
    ) -> Tensor | None:
        """The reverse: (R, n) of `dtype` from data (R, `size_bytes`) uint8. None where a header
        has a power of two."""
        if any(headers):
            return None
        count = len(data)
        for_scales, _ = self._sizes(n)
        scales = self._checked(as_dtype(data[:, :for_scales].reshape(-1), torch.bfloat16)).float()
        integers = _unpacked(data[:, for_scales:].view(torch.int8), self.bits, n)
        values = torch.nn.functional.pad(integers, (0, -n % self.block)).float()
        values = values.view(-1, self.block).mul_(scales.view(-1, 1)).view(count, -1)[:, :n]
        if dtype is torch.float16:  # the scales were rounded up
            limit = torch.finfo(dtype).max
            values = values.clamp(-limit, limit)
        return values.to(dtype)

    def _quantised(self, x: Tensor, key: int) -> tuple[int, Tensor, Tensor]:
        """The exponent of x (n,), n > 0, its scales (bfloat16) and its codes (n,) int8."""
        size = min(PIECE[x.device.type], x.numel() + self.block)
        working = torch.float64 if x.dtype is torch.float64 else torch.float32
        scratch = torch.empty(size, dtype=working, device=x.device)
        found = []
        for _, rows in self._chunks(x):
            values = scratch[: rows.numel()].view_as(rows).copy_(rows) if x.itemsize == 2 else rows
            found.append(torch.abs(values, out=scratch[: rows.numel()].view_as(rows)).amax(1))
        peaks = torch.cat(found).double()
        finite = peaks.isfinite()
        kept = torch.where(finite, peaks, 0.0)
        top, whole = torch.stack([kept.max(), finite.all().double()]).tolist()  # one wait
        exponent = 0 if top == 0 or _SMALLEST <= top < _LARGEST else math.frexp(top)[1]
        scales = _round_up((times_power(kept, -exponent) / self._m).float())
        scales = torch.where(scales < _NO_SCALE, 0.0, scales)
        inverse = torch.where(scales > 0, scales.reciprocal(), 0.0).view(-1, 1)
        integers = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
        scratch = scratch if working is torch.float32 else scratch.float()
        for start, rows in self._chunks(x):
            at = slice(start // self.block, start // self.block + len(rows))
            if exponent:
                rows = times_power(rows, -exponent)
            if not whole:
                rows = torch.where(finite[at].view(-1, 1), rows, 0.0)
            steps = scratch[: rows.numel()].view_as(rows)
            values = rows if rows.dtype is torch.float32 else steps.copy_(rows)
            torch.mul(values, inverse[at], out=steps)
            self._round_(steps, start, key)
            integers[start : start + size] = steps.view(-1)[: x.numel() - start]
        marked = scales.bfloat16()
        marked.view(torch.int16).masked_fill_(~finite, _NAN)  # torch's own NaN may be negative
        return exponent, marked, integers

    def _chunks(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """x in pieces as (first element, rows of blocks), the last one with zeros behind it."""
        size = PIECE[x.device.type]
        for start in range(0, x.numel(), size):
            piece = x[start : start + size]
            if piece.numel() % self.block:
                piece = torch.nn.functional.pad(piece, (0, -piece.numel() % self.block))
            yield start, piece.view(-1, self.block)

    def _round_(self, steps: Tensor, start: int, key: int) -> None:
        """Makes integers of `steps`, whose first element is element `start`."""
        if self.rounding == "nearest":
            steps.round_()
            return
        noise = counter.halves(key, steps.numel(), steps.device, start).view_as(steps)
        # Uniform in (0, 1), in the middle of its 65,536 parts: an integer stays what it is.
        steps.add_(noise, alpha=2.0**-16).add_(0.5 + 2.0**-17).floor_().clamp_(-self._m, self._m)

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        dtype, n = dtype_of(self._word, spec), count(self._word, spec)
        exponent = unpack_exponent(self._word, header)
        for_scales, for_codes = self._sizes(n)
        what = f"data of {spec.dtype}{list(spec.sizes)}"
        check_length(self._word, what, for_scales + for_codes, data.nbytes)
        scales = as_dtype(from_bytes(data[:for_scales]), torch.bfloat16)
        scales = self._checked(scales).to(device).float()
        integers = _unpacked(from_bytes(data[for_scales:], device).view(torch.int8), self.bits, n)
        out = torch.empty(n, dtype=dtype, device=device)
        size = PIECE[out.device.type]
        for start in range(0, n, size):
            piece = out[start : start + size]
            direct = dtype is torch.float32 and not exponent
            values = piece if direct else torch.empty_like(piece, dtype=torch.float32)
            values.copy_(integers[start : start + size])
            self._scale_(values, scales[start // self.block :])
            if exponent:
                values = times_power(values, exponent)
            if exponent or dtype is torch.float16:  # the scales were rounded up
                limit = torch.finfo(dtype).max
                values.clamp_(-limit, limit)
            if not direct:
                piece.copy_(values)
        return out.view(spec.sizes)

    def _checked(self, scales: Tensor) -> Tensor:
        """The bfloat16 themselves. Raises CodecError for what `encode` does not write."""
        patterns = scales.view(torch.int16)
        if bool(((patterns < 0) | (patterns == _INFINITE)).any()):
            raise CodecError(f"{self._word} data: a scale is negative or infinite")
        return scales

    def _scale_(self, values: Tensor, scales: Tensor) -> None:
        """Multiplies each block of `values` by the next scale; the last block may be short."""
        full, rest = divmod(values.numel(), self.block)
        values[: full * self.block].view(full, self.block).mul_(scales[:full].view(-1, 1))
        if rest:
            values[-rest:].mul_(scales[full])


def _round_up(scale: Tensor) -> Tensor:
    """float32 that are bfloat16 as well, not below `scale` (float32, 0 or more, below 2^101)."""
    return ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _fields(bits: int) -> tuple[int, ...]:
    """The widths that a code is cut into, the lowest bits first."""
    return (4, 2) if bits == 6 else (bits,)


def _packed(integers: Tensor, bits: int) -> list[Tensor]:
    """(…, n) int8 to the bytes of each field; see "Packing" in the module."""
    found = []
    for width in _fields(bits):
        found.append(integers if width == 8 else fold(integers, width))
        if width < bits:
            integers = integers >> width
    return found


def _unpacked(packed: Tensor, bits: int, n: int) -> Tensor:
    """The reverse: (…, n) int8."""
    if bits == 8:
        return packed
    sizes = [-(-n * width // 8) for width in _fields(bits)]
    split = torch.split(packed, sizes, -1)
    parts = [unfold(p, w, n) for p, w in zip(split, _fields(bits), strict=True)]
    found = parts[-1]  # which has the sign
    for part, width in zip(parts[-2::-1], _fields(bits)[-2::-1], strict=True):
        found = (found << width) | (part & ((1 << width) - 1))
    return found


def fold(integers: Tensor, bits: int) -> Tensor:
    """The lowest bits of (…, n) int8, as bytes."""
    per_byte = 8 // bits
    width = -(-integers.shape[-1] // per_byte)
    folded = integers[..., :width] & ((1 << bits) - 1)
    for part in range(1, per_byte):
        codes = integers[..., part * width : (part + 1) * width]
        # In the last part the bits above are gone by themselves.
        low = codes & ((1 << bits) - 1) if part < per_byte - 1 else codes
        folded[..., : codes.shape[-1]] |= low * (1 << part * bits)
    return folded


def unfold(folded: Tensor, bits: int, n: int) -> Tensor:
    """The reverse: bytes to (…, n) int8."""
    per_byte, width = 8 // bits, folded.shape[-1]
    integers = torch.empty((*folded.shape[:-1], n), dtype=torch.int8, device=folded.device)
    for part in range(per_byte):
        codes = integers[..., part * width : (part + 1) * width]
        # The part moves to the top, and comes down with its sign.
        torch.mul(folded[..., : codes.shape[-1]], 1 << (8 - bits - part * bits), out=codes)
        codes >>= 8 - bits
    return integers
