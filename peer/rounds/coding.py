"""How a part of the vector is written: piece by piece, each by the codec of the job, or raw where
that would not pay; buffers always are. In front of a coded piece stand the lengths of its header
and of its bytes, and the header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from ...compression.codec import (
    RAW,
    Codec,
    CodecError,
    Encoded,
    fitting,
    is_stateful,
    parse,
    typical_bytes,
)
from ...dag.ir.graph import TensorSpec
from ...dag.rounds.sums import WeightedSum
from ...dag.rounds.vector import RunVector, Span, VectorPiece
from ...proto import broker_pb2

__all__ = [
    "CountedCoding",
    "MultiplesCoding",
    "PartCoding",
    "SideBySide",
    "flat_spec",
    "side_by_side",
]

LEAST_ELEMENTS = 1024
"""A smaller piece, a bias or a norm, goes raw: what stands before it would be much of it."""
_SIZES = struct.Struct("<HI")
_FIRST = struct.Struct("<Q")
_MOST_HEADER, _USUAL_HEADER = 64, 2
_FRONT = struct.Struct("<QQ")
"""What stands in front of each contribution that is passed on."""
_MOST_MEMBERS = 64
"""Contributions in one result that has all, before a plan says how many."""


def flat_spec(elements: int) -> TensorSpec:
    """Return the spec of so many numbers."""
    return TensorSpec((elements,), "float32")


class PartCoding:
    """`text`: of the codec, "none" for none. `least`: pieces with fewer elements go raw. `rows`:
    numbers of each element; with more than one of them they go raw. Raises CodecError for a codec
    that cannot be had here."""

    framed = True
    """Whether lengths and header stand in front of a coded piece."""

    def __init__(
        self, vector: RunVector, text: str, least: int | None = None, *, rows: int = 1
    ) -> None:
        codec = RAW if text == "none" else parse(text)
        if is_stateful(codec):
            raise CodecError(
                f"{text!r} remembers what it encoded, and attempts of a round may be done again: "
                "expected a codec of rounds without ef, efd, delta and lowrank"
            )
        self._least = LEAST_ELEMENTS if least is None else least
        self.vector, self._rows = vector, rows
        self._codec: Codec = codec  # type: ignore[assignment]  # it has no state

    @property
    def name(self) -> str:
        """What frames say."""
        return self._codec.name

    def of(self, piece: VectorPiece) -> Codec:
        """What carries a piece; both ends find the same."""
        if piece.elements < self._least or piece.entry.is_buffer:
            return RAW
        return fitting(self._codec, flat_spec(piece.elements))  # type: ignore[return-value]

    def encode(self, piece: VectorPiece, values: Tensor, round_: int, whose: str) -> Encoded:
        """`values`: (elements of the piece,), float32, on the host, which stay as they are from
        here on. What is random in it hangs on the piece, the round and `whose`."""
        words = f"{whose}\0{round_}\0{piece.entry.value}\0{piece.start}"
        return self.of(piece).encode(values, xxh3_64_intdigest(words.encode()))

    def echo(self, piece: VectorPiece, values: Tensor, encoded: Encoded) -> Tensor:
        """What others make of a piece: (elements,), float32."""
        if (codec := self.of(piece)) is RAW:
            return values
        data = memoryview(bytearray(b"".join(encoded.buffers)))
        return codec.decode(flat_spec(piece.elements), encoded.header, data)

    def written(self, pieces: Iterable[tuple[VectorPiece, Encoded]]) -> tuple[memoryview, ...]:
        """The bytes of a part, of all its pieces in order."""
        found: list[memoryview] = []
        for piece, encoded in pieces:
            if self._has_front(piece):
                sizes = _SIZES.pack(len(encoded.header), encoded.size_bytes)
                found.append(memoryview(sizes + encoded.header))
            found += encoded.buffers
        return tuple(found)

    def spec(self, part: Span) -> TensorSpec:
        """Return the spec that its frames announce."""
        return flat_spec(self._rows * (part[1] - part[0]))

    def most_bytes(self, part: Span) -> int:
        """Return the most that a part can take."""
        return self.size_bytes(part, most=True)

    def typical_bytes(self, part: Span) -> int:
        """Return what a part takes as a rule; of a part that a plan has."""
        return self.size_bytes(part, most=False)

    def size_bytes(self, part: Span, *, most: bool) -> int:
        """Return the most that a part can take, or what it takes as a rule."""
        header, total = _MOST_HEADER if most else _USUAL_HEADER, 0
        for piece in self.vector.pieces(part):
            codec, spec = self.of(piece), flat_spec(self._rows * piece.elements)
            total += codec.size_bytes(spec) if most else typical_bytes(codec, spec)
            total += _SIZES.size + header if self._has_front(piece) else 0
        return total

    def _has_front(self, piece: VectorPiece) -> bool:
        return self.framed and self.of(piece) is not RAW

    def decode(self, part: Span, data: memoryview) -> Tensor:
        """(elements of the part,), float32; `data` is flat and writable, and is given away. Raises
        CodecError."""
        pieces = [*self.vector.pieces(part)]
        if all(self.of(piece) is RAW for piece in pieces):
            return RAW.decode(self.spec(part), b"", data)
        found, at, done = torch.empty(part[1] - part[0]), 0, 0
        for piece in pieces:
            codec, spec, header = self.of(piece), flat_spec(piece.elements), b""
            size = codec.size_bytes(spec)
            if self._has_front(piece):
                if len(data) < at + _SIZES.size:
                    raise CodecError(f"{len(data)} bytes of a part: they end before its pieces do")
                length, size = _SIZES.unpack_from(data, at)
                at += _SIZES.size + length
                header = bytes(data[at - length : at])
            values = codec.decode(spec, header, data[at : at + size])
            found[done : done + piece.elements] = values
            at, done = at + size, done + piece.elements
        if at != len(data):
            raise CodecError(f"{len(data)} bytes of a part: expected {at} for its pieces")
        return found


class MultiplesCoding(PartCoding):
    """Writes integers of 64 bits, as two float32 each; so many of a part as `kept` says."""

    def __init__(self, vector: RunVector, kept: Callable[[Span], int]) -> None:
        super().__init__(vector, "none", rows=2)
        self._kept = kept

    def spec(self, part: Span) -> TensorSpec:
        return flat_spec(2 * self._kept(part))

    def size_bytes(self, part: Span, *, most: bool) -> int:
        return self.spec(part).size_bytes


class CountedCoding(PartCoding):
    """Writes a part's numbers, and behind them how many sent each, both in the same way.

    [length of the first][numbers][counts]
    """

    def __init__(self, vector: RunVector, text: str) -> None:
        super().__init__(vector, text)
        self._each = PartCoding(vector, text)

    def joined(
        self, numbers: Iterable[memoryview], counts: Iterable[memoryview]
    ) -> tuple[memoryview, ...]:
        """Return the bytes of both, each as `written` gives them."""
        first = tuple(numbers)
        return (memoryview(_FIRST.pack(sum(b.nbytes for b in first))), *first, *counts)

    def spec(self, part: Span) -> TensorSpec:
        return flat_spec(2 * (part[1] - part[0]))

    def size_bytes(self, part: Span, *, most: bool) -> int:
        return _FIRST.size + 2 * self._each.size_bytes(part, most=most)

    def decode(self, part: Span, data: memoryview) -> Tensor:
        """(2, elements of the part), float32, as `PartCoding.decode`."""
        size = _FIRST.unpack_from(data)[0] if len(data) >= _FIRST.size else 0
        rest = data[_FIRST.size :]
        if not 0 < size <= len(rest):
            raise CodecError(f"{len(data)} bytes of a part: no length of its numbers is in front")
        return torch.stack([self._each.decode(part, d) for d in (rest[:size], rest[size:])])


class SideBySide(PartCoding):
    """Writes results of methods whose contributions, written by `given`, are smaller side by side
    than their mean is: whoever adds up a part passes all of them on as they came, and whoever takes
    the result adds them up as well. A sum has no order (`dag/rounds/sums.py`), so all come to the
    same bits.

    [weight, length, a contribution to the part as its giver wrote it] for each giver
    """

    def __init__(self, given: PartCoding, plan: broker_pb2.RoundPlan | None = None) -> None:
        self.vector, self._given = given.vector, given
        self._plan = plan or broker_pb2.RoundPlan(members=_MOST_MEMBERS)

    @property
    def name(self) -> str:
        return self._given.name

    def spec(self, part: Span) -> TensorSpec:
        return self._given.spec(part)

    def size_bytes(self, part: Span, *, most: bool) -> int:
        return self._plan.members * (_FRONT.size + self._given.size_bytes(part, most=most))

    def decode(self, part: Span, data: memoryview) -> Tensor:
        """Raises LargeContributionError, too."""
        plan, integers = self._plan, self.vector.integers(part)
        found = WeightedSum(part[1] - part[0], plan.weight, plan.exponent, integers)
        at = weights = 0
        while at + _FRONT.size <= len(data):
            weight, size = _FRONT.unpack_from(data, at)
            at += _FRONT.size
            weights += weight
            if weights > plan.weight:
                break
            found.add(self._given.decode(part, data[at : at + size]), weight)
            at += size
        if (at, weights) != (len(data), plan.weight):
            raise CodecError(
                f"{len(data)} bytes of contributions that weigh {weights}: expected {at} that "
                f"weigh {plan.weight}"
            )
        return found.mean()


def side_by_side(given: Iterable[tuple[int, Sequence[memoryview]]]) -> tuple[memoryview, ...]:
    """Return the bytes of such a result. `given`: by giver, the weight and the bytes."""
    found: list[memoryview] = []
    for weight, buffers in given:
        size = sum(b.nbytes for b in buffers)
        found += (memoryview(_FRONT.pack(weight, size)), *buffers)
    return tuple(found)
