"""The messages of a link: bytes ⇄ records (see proto/peer.proto for what they mean).

A message is a checksum and one or more records. `record` and `piece_prefix` give the bytes of a
record, `seal` makes a message of them, `decode` gives the checked records of a message, or raises
FrameError, and nothing else, whatever the bytes are.

The checksum is XXH3: 43 GB/s where CRC-32 of the same machine's zlib has 4, which was a quarter of
all time spent on the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from google.protobuf.message import DecodeError
from xxhash import xxh3_64, xxh3_64_intdigest

from ...dag.ir.graph import TensorSpec
from ...dag.schedule.filled import filled, taken
from ...dag.schedule.flow import Role
from ...proto import common_pb2, peer_pb2
from .frame import (
    MAX_NAME,
    FrameError,
    FrameHeader,
    header_from_proto,
    header_to_proto,
    immutable,
    role_from_proto,
)

__all__ = [
    "MAX_CHUNK_BYTES",
    "MAX_HELLO_BYTES",
    "MAX_MESSAGE_BYTES",
    "MIN_CHUNK_BYTES",
    "VERSION",
    "Ack",
    "Announcement",
    "Chunk",
    "Credit",
    "Hello",
    "Message",
    "Outgoing",
    "Partial",
    "Parts",
    "Piece",
    "Refusal",
    "Said",
    "decode",
    "encoded",
    "piece_prefix",
    "record",
    "seal",
    "sealed_bytes",
    "size_of",
    "written",
]

VERSION = 2
MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_CONTROL_BYTES = 64 * 1024
"""Of a LinkMessage; the longest valid one is a FrameHeader with all its names."""
MAX_LISTED = 256
"""Entries of a list in a hello."""

_CHECKSUM = struct.Struct("<Q")  # of what follows
_RECORD = struct.Struct("<BI")  # kind, length of what follows
_RECORD_BYTES = _RECORD.size
_PIECE = struct.Struct("<QQ")  # frame number, offset
_CONTROL, _BYTES = 1, 2
MAX_HELLO_BYTES = MAX_CONTROL_BYTES + 64
"""A message of one record, which nothing may come before."""
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + 4 * MAX_CONTROL_BYTES
"""One piece of the largest size and some small records."""

MAX_RECORDS = 10_000
"""Of a message: the smallest that fit into the 64 KiB after which it ends. Reading as many takes a
tenth of a second."""

Parts = tuple[bytes | memoryview, ...]
"""A record or a message in parts, to be put together by whoever writes it."""


@immutable
class Hello:
    """How a connection begins; the fields are those of LinkHello."""

    source: str
    destination: str
    generation: int
    attempt: int
    session: str
    knows: str = ""
    announced: int = 0
    partial: tuple[tuple[int, int], ...] = ()
    """(frame number, bytes that are here)"""
    credits: tuple[tuple[Role, int], ...] = ()


@immutable
class Ack:
    number: int


@immutable
class Credit:
    role: Role
    frames: int


@immutable
class Partial:
    """Progress of a frame: so many of its bytes are here."""

    number: int
    have: int


@immutable
class Refusal:
    """The speaker ends the dial; `code` is stable, `text` for people."""

    code: str
    text: str


@immutable
class Piece:
    """Bytes of an announced frame, from `offset` on; `data` lies in the message that came."""

    number: int
    offset: int
    data: memoryview


@immutable
class Chunk:
    """A piece that leaves: `parts` are views of the frame's buffers, `size_bytes` in all."""

    number: int
    offset: int
    size_bytes: int
    parts: tuple[memoryview, ...]

    @property
    def data(self) -> memoryview:
        """As it arrives where nothing has to be written."""
        return self.parts[0] if len(self.parts) == 1 else memoryview(b"".join(self.parts))


@immutable
class Announcement:
    """A frame begins to leave: its header with its first piece; None: it has no bytes. Written, it
    is the records of both."""

    header: FrameHeader
    first: Chunk | None


Control = Hello | FrameHeader | Ack | Credit | Partial | Refusal
Message = Control | Piece
Outgoing = Control | Chunk | Announcement
Said = Sequence[Outgoing] | bytes
"""A message: its records, or itself, written."""


def record(message: Control) -> bytes:
    body = _to_proto(message).SerializeToString()
    return _RECORD.pack(_CONTROL, len(body)) + body


def piece_prefix(number: int, offset: int, size_bytes: int) -> bytes:
    """What stands before so many bytes of a frame to make them a record."""
    return _RECORD.pack(_BYTES, _PIECE.size + size_bytes) + _PIECE.pack(number, offset)


def encoded(message: Outgoing) -> Parts:
    """Return a message as parts of bytes."""
    match message:
        case Chunk(number, offset, size_bytes, parts):
            return (piece_prefix(number, offset, size_bytes), *parts)
        case Announcement(header, first):
            return (record(header), *(encoded(first) if first else ()))
        case _:
            return (record(message),)


def size_of(message: Outgoing) -> int:
    """Bytes of its records, without writing them."""
    if isinstance(message, Ack):
        number = message.number
        return _RECORD_BYTES + 2 + (_SMALL[number] if number < len(_SMALL) else _number(number))
    if isinstance(message, Announcement):
        first = message.first
        rest = _RECORD_BYTES + _PIECE.size + first.size_bytes if first else 0
        return _RECORD_BYTES + _header_bytes(message.header) + rest
    if isinstance(message, Credit):
        frames = message.frames
        return _RECORD_BYTES + 4 + (_SMALL[frames] if frames < len(_SMALL) else _number(frames))
    if isinstance(message, Chunk):
        return _RECORD_BYTES + _PIECE.size + message.size_bytes
    if isinstance(message, Partial):
        return _RECORD_BYTES + 2 + _number(message.number) + _number(message.have)
    if isinstance(message, FrameHeader):
        return _RECORD_BYTES + _header_bytes(message)
    return len(record(message))


def sealed_bytes(records_bytes: int) -> int:
    """Bytes of a message of records that take so many."""
    return _CHECKSUM.size + records_bytes


def _varint(value: int) -> int:
    return (value.bit_length() + 6) // 7 or 1


def _number(value: int) -> int:
    """The encoded size, in bytes, of a field with a number from 0 on; 0 is not written."""
    return 1 + (value.bit_length() + 6) // 7 if value else 0


_SMALL = bytes(map(_number, range(1 << 12)))
"""Of the numbers that are there most."""


def _inside(size: int) -> int:
    """The encoded size, in bytes, of a field whose content takes so many bytes."""
    return 2 + size if size < 128 else 1 + _varint(size) + size


def _header_bytes(header: FrameHeader) -> int:
    run, term, step, _, microbatch, hop, port, source, destination = header.key
    identity = _names_bytes(run, port, source, destination) + 2  # the role
    for number in (term, step, microbatch, hop):
        identity += _SMALL[number] if number < len(_SMALL) else _number(number)
    body = (
        _inside(identity)
        + _number(header.number)
        + _number(header.size_bytes)
        + _spec_bytes(header.codec, header.spec)
        + (_inside(len(header.codec_header)) if header.codec_header else 0)
        + 2 * header.absent
    )
    return _inside(body)


@lru_cache(maxsize=1 << 16)
def _names_bytes(*names: str) -> int:
    return sum(_inside(len(name.encode())) for name in names if name)


@lru_cache(maxsize=1 << 12)
def _spec_bytes(codec: str, spec: TensorSpec) -> int:
    shape = sum(_inside(_number(size)) for size in spec.sizes)
    return (_inside(len(codec.encode())) if codec else 0) + _inside(shape + 2)


def seal(parts: Sequence[bytes | memoryview]) -> Parts:
    """A message of these records, which may lie in several parts."""
    checksum = xxh3_64()
    for part in parts:
        checksum.update(part)
    return (_CHECKSUM.pack(checksum.intdigest()), *parts)


def written(records: Sequence[Outgoing]) -> bytes:
    """The message of these records."""
    return b"".join(seal([bytes(part) for r in records for part in encoded(r)]))


def decode(message: bytes) -> list[Message]:
    """The records in a message that came. Raises FrameError."""
    if not _CHECKSUM.size <= len(message) <= MAX_MESSAGE_BYTES:
        raise FrameError(
            f"a message of {len(message)} bytes: expected {_CHECKSUM.size} to {MAX_MESSAGE_BYTES}"
        )
    (said,) = _CHECKSUM.unpack_from(message)
    rest = memoryview(message)[_CHECKSUM.size :]
    if (computed := xxh3_64_intdigest(rest)) != said:
        raise FrameError(
            f"checksum of a message of {len(message)} bytes is {computed:016x}, it says "
            f"{said:016x}: the bytes changed on their way"
        )
    records: list[Message] = []
    while rest:
        if len(records) == MAX_RECORDS:
            raise FrameError(f"a message of more than {MAX_RECORDS} records")
        if len(rest) < _RECORD.size:
            raise FrameError(f"{len(rest)} bytes at the end of a message are no record")
        kind, length = _RECORD.unpack_from(rest)
        body, rest = rest[_RECORD.size :][:length], rest[_RECORD.size + length :]
        if len(body) < length:
            raise FrameError(f"a record of {length} bytes: only {len(body)} came")
        records.append(_decode_record(kind, body))
    return records


def _decode_record(kind: int, body: memoryview) -> Message:
    if kind == _BYTES:
        if len(body) <= _PIECE.size:
            raise FrameError(f"a piece of {len(body)} bytes in all: expected over {_PIECE.size}")
        number, offset = _PIECE.unpack_from(body)
        return Piece(number, offset, body[_PIECE.size :])
    if kind != _CONTROL:
        raise FrameError(f"record kind {kind}: expected {_CONTROL} or {_BYTES}")
    if len(body) > MAX_CONTROL_BYTES:
        raise FrameError(f"a link message of {len(body)} bytes: at most {MAX_CONTROL_BYTES}")
    try:
        proto = peer_pb2.LinkMessage.FromString(bytes(body))
    except (DecodeError, ValueError) as e:  # ValueError: text that is not UTF-8
        raise FrameError(f"{len(body)} bytes that are no LinkMessage: {e}") from None
    return _from_proto(proto)


def _to_proto(message: Control) -> peer_pb2.LinkMessage:
    match message:
        case Hello():
            hello = filled(
                peer_pb2.LinkHello,
                message,
                version=VERSION,
                partial=[peer_pb2.Partial(number=n, size_bytes=s) for n, s in message.partial],
                credits=[peer_pb2.Credit(role=r.name, frames=n) for r, n in message.credits],
            )
            return peer_pb2.LinkMessage(hello=hello)
        case FrameHeader():
            return peer_pb2.LinkMessage(frame=header_to_proto(message))
        case Ack():
            return peer_pb2.LinkMessage(ack=peer_pb2.FrameAck(number=message.number))
        case Credit():
            credit = peer_pb2.Credit(role=message.role.name, frames=message.frames)
            return peer_pb2.LinkMessage(credit=credit)
        case Partial():
            partial = peer_pb2.Partial(number=message.number, size_bytes=message.have)
            return peer_pb2.LinkMessage(partial=partial)
        case Refusal():
            reason = common_pb2.Reason(code=message.code, text=message.text[:MAX_NAME])
            return peer_pb2.LinkMessage(error=peer_pb2.LinkError(reason=reason))


def _from_proto(message: peer_pb2.LinkMessage) -> Control:
    match message.WhichOneof("kind"):
        case "hello":
            return _hello(message.hello)
        case "frame":
            return header_from_proto(message.frame)
        case "ack":
            return Ack(message.ack.number)
        case "credit":
            return Credit(role_from_proto(message.credit.role), message.credit.frames)
        case "partial":
            return Partial(message.partial.number, message.partial.size_bytes)
        case "error":
            reason = message.error.reason
            return Refusal(reason.code[:MAX_NAME], reason.text[:MAX_NAME])
        case _:
            raise FrameError("a link message of no known kind: another version of the protocol?")


def _hello(hello: peer_pb2.LinkHello) -> Hello:
    if hello.version != VERSION:
        raise FrameError(f"version {hello.version} of the link protocol: expected {VERSION}")
    for field in ("source", "destination", "session"):
        if not 0 < len(getattr(hello, field)) <= MAX_NAME:
            raise FrameError(
                f"{field} of a hello has {len(getattr(hello, field))} characters: "
                f"expected 1 to {MAX_NAME}"
            )
    if max(len(hello.partial), len(hello.credits)) > MAX_LISTED:
        raise FrameError(
            f"a hello with {len(hello.partial)} partial frames and {len(hello.credits)} credits: "
            f"at most {MAX_LISTED} of each"
        )
    partial = tuple((p.number, p.size_bytes) for p in hello.partial)
    credit = tuple((role_from_proto(c.role), c.frames) for c in hello.credits)
    for what, names in (("frame", [n for n, _ in partial]), ("role", [r for r, _ in credit])):
        if len(set(names)) != len(names):
            raise FrameError(f"a hello lists a {what} twice: {names}")
    return taken(Hello, hello, partial=partial, credits=credit)
