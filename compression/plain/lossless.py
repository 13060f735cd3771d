"""lossless: byte planes, each through zstd where that pays. Bit for bit the same, any dtype.

Neighbouring numbers have unlike mantissas and like exponents. So the bits of each floating point
number are rotated left by one, which gathers a bfloat16's or float32's exponent in its highest byte
and puts the sign lowest; then byte j of all elements stands together, plane j. Integers are not
rotated.

The planes of mantissas do not compress; zstd sees that in passing, and a plane that it makes less
than 2 % shorter is stored as it is. It looks for hardly any matches (the smallest table, the
shortest search), because what is to be gained is entropy: of the exponents of bell-shaped data
there are 2.54 bits (2604.27844), so bfloat16 comes to (8 + 2.6) / 16 = 0.66 of its size.

Header: per plane its bytes in `data` (uint64); as many as elements: stored. Never more than the raw
bytes. zstd works on the CPU: from and to CUDA the planes are split and joined on the device, and
cross the bus once.
"""

from __future__ import annotations

import struct

import torch
import zstandard
from torch import Tensor

from ..checks import DTYPES, check_length, count, dtype_of, encoded, flat, from_bytes, views
from ..interface import CodecError, Encoded, Spec

__all__ = ["LosslessCodec"]

_ANY = tuple(DTYPES)
_PAYS = 0.98
_TYPICAL = {"bfloat16": 0.70, "float16": 0.87, "float32": 0.84, "float64": 0.91}
"""By dtype, the part that is left of bell-shaped data, with a little to spare."""

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
)


class LosslessCodec:
    """The codec lossless: byte planes, each through zstd where that makes it smaller. Its size
    depends on the content."""

    name = "lossless/1"

    def error_bound(self, spec: Spec) -> float:
        return 0.0

    def size_bytes(self, spec: Spec) -> int:
        return spec.size_bytes

    def typical_bytes(self, spec: Spec) -> int:
        return round(spec.size_bytes * _TYPICAL.get(spec.dtype, 1.0))

    def encode(self, tensor: Tensor, key: int = 0) -> Encoded:
        x = flat(self.name, tensor, _ANY)
        if x.numel() == 0:
            return encoded(struct.pack(f"<{x.itemsize}Q", *[0] * x.itemsize))
        raw = (_rotated(x) if x.is_floating_point() else x).view(torch.uint8)
        planes = views(*(raw[j :: x.itemsize].contiguous() for j in range(x.itemsize)))
        zstd = zstandard.ZstdCompressor(compression_params=_PARAMETERS)  # not for two threads
        parts = [self._shorter(zstd, plane) for plane in planes]
        return Encoded(struct.pack(f"<{len(parts)}Q", *map(len, parts)), tuple(parts))

    def _shorter(self, zstd: zstandard.ZstdCompressor, plane: memoryview) -> memoryview:
        packed = zstd.compress(plane)
        return memoryview(packed) if len(packed) < _PAYS * len(plane) else plane

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor:
        dtype, n = dtype_of(self.name, spec, _ANY), count(self.name, spec)
        width = dtype.itemsize
        check_length(self.name, f"header of {spec.dtype}", 8 * width, len(header))
        lengths = struct.unpack(f"<{width}Q", header)
        if max(lengths) > n or (n and not min(lengths)):
            raise CodecError(
                f"{self.name} header: planes of {list(lengths)} bytes, expected each from 1 to {n}"
            )
        check_length(self.name, "data", sum(lengths), data.nbytes)
        raw = torch.empty(n * width, dtype=torch.uint8, device=device)
        start = 0
        for j, length in enumerate(lengths):
            part = data[start : start + length]
            plane = part if length == n else self._plain(part, n)
            raw[j::width] = from_bytes(plane, device)
            start += length
        if dtype is torch.bool and bool((raw > 1).any()):
            raise CodecError(f"{self.name} data of a bool tensor holds bytes other than 0 and 1")
        out = raw.view(dtype)
        return (_restored(out) if dtype.is_floating_point else out).view(spec.sizes)

    def _plain(self, part: memoryview, n: int) -> memoryview:
        """The plane of n bytes that a zstd frame holds; writable. What the frame says of its size
        is looked at first: nothing larger than n is allocated, whatever it would unpack to."""
        try:
            said = zstandard.frame_content_size(part)
            if said != n:
                raise CodecError(
                    f"{self.name} data: a frame of {said} bytes unpacked (-1: unknown), "
                    f"expected a plane of {n}"
                )
            plain = zstandard.ZstdDecompressor().decompress(
                part, max_output_size=n, read_across_frames=False, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise CodecError(f"{self.name} data: not a whole zstd frame: {error}") from error
        check_length(self.name, "plane", n, len(plain))
        return memoryview(bytearray(plain))


def _rotated(x: Tensor) -> Tensor:
    """The bits of each element, one to the left, the highest coming in below; a copy."""
    words = x.view(_WORDS[x.itemsize])
    # x + x shifts; the sign, copied by >> to all bits, is -1 or 0.
    return torch.add(words, words).sub_(words >> (8 * x.itemsize - 1))


def _restored(x: Tensor) -> Tensor:
    """The reverse of `_rotated`, over x's own memory."""
    size = 8 * x.itemsize
    words = x.view(_WORDS[x.itemsize])
    signs = words * -(1 << (size - 1))  # the lowest bit, moved to the highest
    words >>= 1
    words &= (1 << (size - 1)) - 1
    words |= signs
    return x
