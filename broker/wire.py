"""What a message would cost in memory, read off its bytes before anything is made of them.

An empty element of a repeated field takes two bytes on the wire and forty to eighty in memory: 15
MiB became 200. So the elements are counted first, along the message's own description, without
looking into texts and bytes, which cost what they weigh.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

__all__ = ["LEAST_BYTES", "PLAIN_BYTES", "CrowdedError", "check_elements"]

LEAST_BYTES = 8
"""Of the wire, for each element on average: then a message takes at most eight times its bytes.
Honest ones have 20 and more (a visit of a plan with a peer's name, a file with its hash)."""
PLAIN_BYTES = 64 << 10
"""So short a message need not be looked at: it takes 3 MiB at the most."""
_MOST_FIELDS = 1_000_000
"""In all: looking at half as many took 1.7 to 2.7 s of a thread on a busy machine."""


class CrowdedError(ValueError):
    """A message of more elements than its bytes are worth."""


_Fields = dict[int, tuple[bool, Descriptor | None]]


@cache
def _inside(kind: Descriptor) -> _Fields:
    """Of each field by number: whether it is repeated, and the message in it."""
    message = FieldDescriptor.TYPE_MESSAGE
    return {
        f.number: (f.is_repeated, f.message_type if f.type == message else None)
        for f in kind.fields
    }


def check_elements(data: bytes, kind: Descriptor) -> None:
    """Raises CrowdedError. Bytes that are no message at all may pass: parsing says so."""
    most = (len(data) + PLAIN_BYTES) // LEAST_BYTES
    left, seen = most, 0
    at, end, fields = 0, len(data), _inside(kind)
    around: list[tuple[int, _Fields]] = []  # the messages that this one is in
    while True:
        while at >= end:
            if not around:
                return
            end, fields = around.pop()
        tag, at = _varint(data, at, end)
        repeated, inner = fields.get(tag >> 3, (False, None))
        seen += 1
        left -= repeated or inner is not None
        if left < 0 or seen > _MOST_FIELDS:
            raise CrowdedError(
                f"{len(data)} bytes of a {kind.name} with more than {most} elements: expected "
                f"{LEAST_BYTES} bytes or more for each"
            )
        match tag & 7:
            case 0:
                _, at = _varint(data, at, end)
            case 1:
                at += 8
            case 2:
                length, at = _varint(data, at, end)
                if inner is None:
                    at += length
                else:
                    around.append((end, fields))
                    end, fields = min(at + length, end), _inside(inner)
            case 5:
                at += 4
            case _:  # no message of ours has groups, and what hides in one is not counted
                raise CrowdedError(f"{len(data)} bytes of a {kind.name} with a group in it")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number, and where the next thing begins; at the end of the data 0."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end
