"""The messages of a link: bytes ⇄ records (see proto/peer.proto for what they mean).

`encode` gives the small bytes of one message, `piece` the prefix of a piece of a frame; `decode`
gives back a checked record, or raises FrameError, and nothing else, whatever the bytes are.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ..dag.flow import Role
from ..proto import common_pb2, peer_pb2
from .frame import (
    MAX_NAME,
    FrameError,
    FrameHeader,
    header_from_proto,
    header_to_proto,
    role_from_proto,
)

__all__ = [
    "MAX_CHUNK_BYTES",
    "MAX_MESSAGE_BYTES",
    "MIN_CHUNK_BYTES",
    "VERSION",
    "Ack",
    "Credit",
    "Hello",
    "Message",
    "Piece",
    "Refusal",
    "decode",
    "encode",
    "piece",
]

VERSION = 1
MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_CONTROL_BYTES = 64 * 1024
"""Of a LinkMessage; the longest valid one is a FrameHeader with all its names."""
MAX_LISTED = 256
"""Entries of a list in a hello."""

_ENVELOPE = struct.Struct("<BI")  # kind, checksum of what follows
_PIECE = struct.Struct("<QQ")  # frame number, offset
_CONTROL, _BYTES = 1, 2
PIECE_PREFIX_BYTES = _ENVELOPE.size + _PIECE.size
MAX_MESSAGE_BYTES = PIECE_PREFIX_BYTES + MAX_CHUNK_BYTES


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Ack:
    number: int


@dataclass(frozen=True, slots=True)
class Credit:
    role: Role
    frames: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The speaker ends the dial; `code` is stable, `text` for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of an announced frame, from `offset` on; `data` lies in the message that came."""

    number: int
    offset: int
    data: memoryview


Control = Hello | FrameHeader | Ack | Credit | Refusal
Message = Control | Piece


def encode(message: Control) -> bytes:
    body = _to_proto(message).SerializeToString()
    return _ENVELOPE.pack(_CONTROL, zlib.crc32(body)) + body


def piece(number: int, offset: int, parts: list[memoryview]) -> bytes:
    """The prefix of a message with these bytes of a frame; the parts follow it."""
    place = _PIECE.pack(number, offset)
    checksum = zlib.crc32(place)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return _ENVELOPE.pack(_BYTES, checksum) + place


def decode(message: bytes) -> Message:
    """The record in a message that came. Raises FrameError."""
    if not _ENVELOPE.size <= len(message) <= MAX_MESSAGE_BYTES:
        raise FrameError(
            f"a message of {len(message)} bytes: expected {_ENVELOPE.size} to {MAX_MESSAGE_BYTES}"
        )
    kind, said = _ENVELOPE.unpack_from(message)
    body = memoryview(message)[_ENVELOPE.size :]
    if kind not in (_CONTROL, _BYTES):
        raise FrameError(f"message kind {kind}: expected {_CONTROL} or {_BYTES}")
    if (computed := zlib.crc32(body)) != said:
        raise FrameError(
            f"checksum of a message of {len(message)} bytes is {computed:08x}, it says {said:08x}: "
            f"the bytes changed on their way"
        )
    if kind == _BYTES:
        if len(body) <= _PIECE.size:
            raise FrameError(
                f"a piece of a frame in {len(body)} bytes: over {_PIECE.size} expected"
            )
        number, offset = _PIECE.unpack_from(body)
        return Piece(number, offset, body[_PIECE.size :])
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
            hello = peer_pb2.LinkHello(
                version=VERSION,
                source=message.source,
                destination=message.destination,
                generation=message.generation,
                attempt=message.attempt,
                session=message.session,
                knows=message.knows,
                announced=message.announced,
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
    return Hello(
        source=hello.source,
        destination=hello.destination,
        generation=hello.generation,
        attempt=hello.attempt,
        session=hello.session,
        knows=hello.knows,
        announced=hello.announced,
        partial=partial,
        credits=credit,
    )
