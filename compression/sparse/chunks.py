"""chunks/1: of each chunk of neighbours the numbers of the largest magnitude, in two bits each; the
others become 0 (SparseLoCo, 2508.15706).

    k = max(1, round(density · elements of the chunk))      the last chunk may be short
    bits=2    a sign, and one of two levels of the chunk: the mean of the kept magnitudes above
              their mean, and that of the others
    bits=32   the numbers as they are, whatever the dtype
    header = [that of the levels]     data = [levels, by `bf16`][2-bit codes][indices]
                                      data = [numbers][indices]

By `indices.py` an index takes 8 bits at 64 of 4,096, where one of fixed width takes 12: with codes
and levels that is 0.164 bits per element. A level is a mean of magnitudes, so ‖Δ‖² is never more
than ‖x‖²; what is lost stays so unless `ef` is around it. NaN and infinities are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import DTYPES, check_length, count, dtype_of, flat, from_bytes, views
from ..echo import TensorShape, check_finite
from ..interface import CodecError, Encoded, Spec
from ..plain.cast import bf16
from ..plain.raw import RAW
from . import indices
from .select import largest

__all__ = ["Chunks"]

_WORD = "chunks/1"
_LEVELS = bf16()
_ROUNDED_UP = 1 + 1e-6


class _Rows(NamedTuple):
    """Chunks that are equally long: how many, of how many elements, and how many of each are
    kept."""

    rows: int
    size: int
    kept: int


class Chunks:
    """The codec chunks: keeps the largest numbers of each chunk. `density` in (0, 1]; `chunk`, in
    elements; `bits` 2 or 32."""

    def __init__(self, density: float = 1 / 64, chunk: int = 4096, bits: int = 2) -> None:
        self.name = f"{_WORD}:density={density!r},chunk={chunk},bits={bits}"
        if not 0 < density <= 1:
            raise CodecError(f"{self.name}: expected density = more than 0, at most 1")
        if not 0 < chunk <= 1 << 20:
            raise CodecError(f"{self.name}: expected chunk = 1 to {1 << 20}")
        if bits not in (2, 32):
            raise CodecError(f"{self.name}: expected bits = 2 or 32")
        self.density, self.chunk, self.bits = density, chunk, bits

    def error_bound(self, spec: Spec) -> float:
        """‖Δ‖₂ / ‖x‖₂; see the module."""
        groups = self._groups(count(_WORD, spec))
        if self.bits == 2:
            return _ROUNDED_UP if groups else 0.0
        share = min((g.kept / g.size for g in groups), default=1.0)
        return math.sqrt(1 - share) * _ROUNDED_UP

    def size_bytes(self, spec: Spec) -> int:
        n = count(_WORD, spec)
        return sum(self._sizes(spec.dtype, n, self._groups(n)))

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        """Raises CodecError for what is no floating point tensor, and for NaN and infinities."""
        x = flat(_WORD, tensor)
        if not x.numel():
            return Encoded(b"", ())
        check_finite(_WORD, x)
        groups = self._groups(x.numel())
        found, start = [], 0
        for g in groups:
            part = x[start : start + g.rows * g.size]
            found.append(largest(part, g.kept, rows=g.rows) + start)
            start += part.numel()
        at = torch.cat(found)
        numbers, places = x[at], views(indices.encode(at, x.numel()))
        if self.bits == 32:
            return Encoded(b"", (*views(numbers), *places))
        levels, codes = [], []
        for _, rows in _of_groups(numbers, groups):
            size = rows.double().abs()
            high = size > size.mean(1, keepdim=True)
            for mask in (~high, high):
                levels.append((size * mask).sum(1) / mask.sum(1).clamp(min=1))
            codes.append((high.to(torch.uint8) * 2 + (rows < 0)).view(-1))
        first = _LEVELS.encode(torch.cat(levels).to(x.dtype))
        written = views(indices.pack(torch.cat(codes), 2))
        return Encoded(first.header, (*first.buffers, *written, *places))

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        dtype, n = dtype_of(_WORD, spec), count(_WORD, spec)
        groups = self._groups(n)
        first, second, third = self._sizes(spec.dtype, n, groups)
        check_length(_WORD, "data", first + second + third, data.nbytes)
        if not n or self.bits == 32:
            check_length(_WORD, "header", 0, len(header))
        out = torch.zeros(n, dtype=dtype, device=device)
        if not n:
            return out.view(spec.sizes)
        total = sum(g.rows * g.kept for g in groups)
        at = indices.decode(from_bytes(data[first + second :], device), n, total)
        for start, rows in _of_groups(at // self.chunk, groups):
            wanted = torch.arange(len(rows), device=rows.device).view(-1, 1) + start
            if bool((rows != wanted).any()):
                raise CodecError(f"{_WORD} data: the indices are not of so many of each chunk")
        if self.bits == 32:
            whole = TensorShape((total,), spec.dtype, first)
            return out.index_copy_(0, at, RAW.decode(whole, b"", data[:first], device)).view(
                spec.sizes
            )
        shape = TensorShape((first // 2,), spec.dtype, first // 2 * dtype.itemsize)
        levels = _LEVELS.decode(shape, header, data[:first], device)
        codes = indices.unpack(from_bytes(data[first : first + second], device), 2, total)
        numbers = []
        for start, rows in _of_groups(codes, groups):
            two = levels[2 * start : 2 * (start + len(rows))].view(2, -1, 1)
            size = torch.where(rows > 1, two[1], two[0])
            numbers.append(torch.where(rows % 2 == 1, -size, size).view(-1))
        return out.index_copy_(0, at, torch.cat(numbers)).view(spec.sizes)

    def _groups(self, n: int) -> list[_Rows]:
        """The whole chunks of n elements, and the rest."""
        whole, rest = divmod(n, self.chunk)
        return [
            _Rows(rows, size, max(1, round(self.density * size)))
            for rows, size in ((whole, self.chunk), (1, rest))
            if rows and size
        ]

    def _sizes(self, dtype: str, n: int, groups: list[_Rows]) -> tuple[int, int, int]:
        """Bytes of levels or numbers, of codes, and of indices."""
        total = sum(g.rows * g.kept for g in groups)
        places = indices.size_bytes(n, total)
        if self.bits == 32:
            return total * DTYPES[dtype].itemsize, 0, places
        return 4 * sum(g.rows for g in groups), -(-total // 4), places


def _of_groups(of_kept: Tensor, groups: list[_Rows]) -> Iterator[tuple[int, Tensor]]:
    """What there is of each kept number, as (first chunk, rows of chunks)."""
    chunk = start = 0
    for g in groups:
        stop = start + g.rows * g.kept
        yield chunk, of_kept[start:stop].view(g.rows, g.kept)
        chunk, start = chunk + g.rows, stop
