"""nonzero/1: the elements that are not 0 and where they are, or all elements where that is smaller.
Nothing is lost: -0 is not 0. For sums of what sparse codecs sent.

    header = [how many, uint64]     data = [elements][indices]
    header = b""                    data = all elements
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ..checks import check_length, count, dtype_of, flat, from_bytes, views
from ..echo import TensorShape
from ..interface import CodecError, Encoded, Spec
from ..plain.raw import RAW
from . import indices

__all__ = ["Nonzero"]

_WORD = "nonzero/1"
_COUNT = struct.Struct("<Q")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Nonzero:
    """The codec nonzero: sends the elements that are not 0, and loses nothing."""

    name = _WORD

    def error_bound(self, spec: Spec) -> float:
        return 0.0

    def size_bytes(self, spec: Spec) -> int:
        dtype_of(_WORD, spec)
        return count(_WORD, spec) * (spec.size_bytes // max(1, count(_WORD, spec)))

    def typical_bytes(self, spec: Spec) -> int:
        """A tensor of which an eighth is not 0 takes so many bytes."""
        n = count(_WORD, spec)
        return min(spec.size_bytes, _sparse_bytes(n, n // 8, dtype_of(_WORD, spec)))

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        """Raises CodecError for what is no floating point tensor."""
        x = flat(_WORD, tensor)
        at = x.view(_BITS[x.itemsize]).nonzero().view(-1)
        n, k = x.numel(), at.numel()
        if _sparse_bytes(n, k, x.dtype) >= n * x.itemsize:
            return Encoded(b"", views(x))
        return Encoded(_COUNT.pack(k), (*views(x[at]), *views(indices.encode(at, n))))

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        dtype, n = dtype_of(_WORD, spec), count(_WORD, spec)
        if not header:
            return RAW.decode(spec, b"", data, device)
        check_length(_WORD, "header", _COUNT.size, len(header))
        (k,) = _COUNT.unpack(header)
        if k > n:
            raise CodecError(f"{_WORD} header: expected at most {n} elements, got {k}")
        check_length(_WORD, "data", _sparse_bytes(n, k, dtype), data.nbytes)
        first = k * dtype.itemsize
        at = indices.decode(from_bytes(data[first:], device), n, k)
        numbers = RAW.decode(TensorShape((k,), spec.dtype, first), b"", data[:first], device)
        return (
            torch.zeros(n, dtype=dtype, device=device).index_copy_(0, at, numbers).view(spec.sizes)
        )


def _sparse_bytes(n: int, k: int, dtype: torch.dtype) -> int:
    return k * dtype.itemsize + indices.size_bytes(n, k)
