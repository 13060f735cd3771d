"""raw/1: the elements as they lie in memory, little endian, row by row. Nothing is lost.

Cost, n = bytes of the tensor: no copy on the CPU in either direction; from and to CUDA one copy
over the bus through pinned memory. A tensor that is not contiguous is made so first (one copy).
"""

from __future__ import annotations

import sys

import torch

from ..checks import DTYPES, as_dtype, check_length, count, dtype_of, encoded, flat, from_bytes
from ..interface import CodecError, Encoded, Spec

__all__ = ["DTYPES", "RAW", "RawCodec"]

assert sys.byteorder == "little", "raw/1 is little endian; this machine is not"

_ANY = tuple(DTYPES)


class RawCodec:
    """The codec raw: the elements as they lie in memory, unchanged."""

    name = "raw/1"

    def error_bound(self, spec: Spec) -> float:
        return 0.0

    def encode(self, tensor: torch.Tensor, key: int = 0) -> Encoded:
        """The buffer is a view of the tensor's memory where that is on the CPU and contiguous, and
        keeps it alive; otherwise of a copy. From CUDA the copy is awaited: the bytes are there
        when this returns."""
        return encoded(b"", flat("raw/1", tensor, _ANY))

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        dtype = dtype_of("raw/1", spec, _ANY)
        check_length("raw/1", "header", 0, len(header))
        size = count("raw/1", spec) * dtype.itemsize
        check_length("raw/1", f"data of {spec.dtype}{list(spec.sizes)}", size, data.nbytes)
        raw = from_bytes(data, device)
        if dtype is torch.bool and bool((raw > 1).any()):
            raise CodecError("raw/1 data of a bool tensor holds bytes other than 0 and 1")
        return as_dtype(raw, dtype).view(spec.sizes)

    def size_bytes(self, spec: Spec) -> int:
        return spec.size_bytes


RAW = RawCodec()
