"""The numbers that a sparse codec keeps, written by another codec.

They come in pieces, of one tensor or of each of its samples. A codec that shares scales takes each
piece by itself, so that no sample depends on its mates; fp32 and bf16 take all at once (bf16 shares
a power of two, but only beyond 2^-60 … 2^120). The inner codec's headers lie before its bytes:

    [header of piece 0][header of piece 1]…[bytes of piece 0][bytes of piece 1]…

Pieces of equal length, as select=exact gives, are worked on all at once (`_alike`): the bytes are
the same, and 256 samples of 1,024 numbers take a twentieth of the time.

Where the inner codec does not pay (bf16 for a tensor of bf16), the numbers go as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..checks import DTYPES, check_length, from_bytes, views
from ..echo import TensorShape
from ..interface import Codec, CodecError
from ..plain.block import BlockCodec, int4, int6, int8
from ..plain.cast import CastCodec, bf16, fp16
from ..plain.raw import RAW

__all__ = ["VALUES", "Values"]

VALUES: dict[str, Codec] = {
    "fp32": RAW,
    "bf16": bf16(),
    "fp16": fp16(),
    "int8": int8(),
    "int6": int6(),
    "int4": int4(),
}
"""By the word of a `values` parameter; fp32: as they are, whatever the dtype. `codec.parse` knows
them as well, but imports the sparse codecs that need this."""

_TOGETHER = ("fp32", "bf16")


class Values:
    """`word` is one of VALUES. Raises CodecError for another one, which names `codec`.

    text: of the codec that writes them."""

    def __init__(self, codec: str, word: str) -> None:
        if word not in VALUES:
            raise CodecError(f"{codec}: values is {word!r}: expected one of {', '.join(VALUES)}")
        self.text = "raw" if word == "fp32" else word
        self._codec, self._whole = codec, word in _TOGETHER
        self._inner = VALUES[word]

    def error_bound(self, dtype: str, pieces: Sequence[int]) -> float:
        """‖Δ‖₂ / ‖x‖₂ of the numbers alone."""
        lengths = pieces if self._whole else sorted(set(pieces))
        return max(
            (codec.error_bound(spec) for codec, spec in self._parts(dtype, lengths)), default=0.0
        )

    def size_bytes(self, dtype: str, pieces: Sequence[int]) -> int:
        """The encoded bytes of numbers of this dtype in pieces of these lengths, headers
        included."""
        if self._whole:
            return sum(_header(c) + c.size_bytes(spec) for c, spec in self._parts(dtype, pieces))
        return sum(
            times * (_header(codec) + codec.size_bytes(spec))
            for n, times in Counter(pieces).items()
            for codec, spec in self._parts(dtype, [n])
        )

    def encode(self, numbers: Tensor, pieces: Sequence[int], key: int) -> list[memoryview]:
        """numbers (Σ pieces,): the buffers, in order."""
        name = str(numbers.dtype).removeprefix("torch.")
        if (alike := self._alike(name, pieces)) is not None:
            found = alike.encode_rows(numbers.view(len(pieces), -1))
            if found is not None:
                return [memoryview(found[0]), *views(found[1].view(-1))]
        headers, start = b"", 0
        buffers: list[memoryview] = []
        for codec, spec in self._parts(name, pieces):
            encoded = codec.encode(numbers[start : start + spec.sizes[0]], key)
            headers += encoded.header
            buffers += encoded.buffers
            start += spec.sizes[0]
        return [memoryview(headers), *buffers] if headers else buffers

    def decode(
        self, dtype: str, pieces: Sequence[int], data: memoryview, device: str | torch.device
    ) -> Tensor:
        """The numbers on `device`. Raises CodecError."""
        check_length(self._codec, "values", self.size_bytes(dtype, pieces), data.nbytes)
        if (alike := self._alike(dtype, pieces)) is not None:
            split = _header(alike) * len(pieces)
            rows = from_bytes(data[split:], device).view(len(pieces), -1)
            numbers = alike.decode_rows(DTYPES[dtype], pieces[0], bytes(data[:split]), rows)
            if numbers is not None:
                return numbers.reshape(-1)
        parts = list(self._parts(dtype, pieces))
        head, body, found = 0, sum(_header(codec) for codec, _ in parts), []
        for codec, spec in parts:
            header = bytes(data[head : head + _header(codec)])
            size = codec.size_bytes(spec)
            found.append(codec.decode(spec, header, data[body : body + size], device))
            head, body = head + len(header), body + size
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0, dtype=DTYPES[dtype], device=device)

    def _alike(self, dtype: str, pieces: Sequence[int]) -> BlockCodec | CastCodec | None:
        """The codec of pieces that are equally long, and so can be written all at once."""
        if self._whole or len(pieces) < 2 or not pieces[0] or len(set(pieces)) > 1:
            return None
        [(codec, _)] = self._parts(dtype, pieces[:1])
        return codec if isinstance(codec, BlockCodec | CastCodec) else None

    def _parts(self, dtype: str, pieces: Sequence[int]) -> Iterator[tuple[Codec, TensorShape]]:
        item = DTYPES[dtype].itemsize
        for n in [sum(pieces)] if self._whole else pieces:
            spec = TensorShape((n,), dtype, n * item)
            pays = self._inner.size_bytes(spec) < spec.size_bytes
            yield self._inner if pays else RAW, spec


def _header(codec: Codec) -> int:
    """Bytes of the header, which all tensors of a codec have in common."""
    if codec.name not in _HEADERS:
        _HEADERS[codec.name] = len(codec.encode(torch.ones(1)).header)
    return _HEADERS[codec.name]


_HEADERS: dict[str, int] = {}
