"""Pieces of blobs on the wire, without copying what is in them.

A BlobPiece is some bytes about it and then, last, a megabyte that nobody has to look at. Making the
message and reading it copies that four times, each time into memory that the kernel has to clear:
a third of what an upload costs the broker. So it is put together and taken apart here; the bytes
are those of the message (proto/broker.proto), and one in another order is parsed as any.
"""

from __future__ import annotations

from ...proto.broker_pb2 import BlobPiece
from ...proto.common_pb2 import BlobRef

__all__ = ["packed", "read_number", "unpacked"]

_DATA = BlobPiece.DATA_FIELD_NUMBER << 3 | 2
_OFFSET = BlobPiece.OFFSET_FIELD_NUMBER << 3
_REF = BlobPiece.REF_FIELD_NUMBER << 3 | 2


def packed(offset: int, data: bytes | memoryview = b"", ref: BlobRef | None = None) -> bytes:
    """A BlobPiece as it is on the wire."""
    head = BlobPiece(ref=ref, offset=offset).SerializeToString()
    return b"".join((head, bytes((_DATA,)), _varint(len(data)), data)) if len(data) else head


def unpacked(message: bytes) -> tuple[BlobPiece, memoryview]:
    """A BlobPiece without its data, and that, in the memory of the message. Raises DecodeError."""
    view, at = memoryview(message), 0
    while at < len(message):
        begin, tag = at, message[at]
        length, at = read_number(message, at + 1, len(message))
        if tag == _DATA and at + length == len(message):
            piece = BlobPiece.FromString(message[:begin])
            if not piece.data:
                return piece, view[at:]
            break
        if tag == _REF:
            at += length
        elif tag != _OFFSET:
            break
    piece = BlobPiece.FromString(message)
    data = memoryview(piece.data)
    piece.ClearField("data")
    return piece, data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_number(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The varint there, and where the next thing begins; where it does not end before `end`, 0 and
    `end`."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end
