"""What a message would cost in memory, read off its bytes before anything is made of them.

An empty element of a repeated field takes two bytes on the wire and forty to eighty in memory: 15
MiB became 200. So the elements are counted first, along the message's own description, without
looking into texts and bytes, which cost what they weigh.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

__all__ = ["LEAST_BYTES", "PLAIN_BYTES", "TooManyElementsError", "check_elements"]

LEAST_BYTES = 8
"""Of the wire, for each element on average: then a message takes at most eight times its bytes.
Honest ones have 20 and more (a visit of a plan with a peer's name, a file with its hash)."""
PLAIN_BYTES = 64 << 10
"""So short a message need not be looked at: it takes 3 MiB at the most."""
_MOST_FIELDS = 500_000
"""In all that are looked at, in a tenth of a second: a plan with a stage for each of the most
operators that a graph may have takes 400,000."""


class TooManyElementsError(ValueError):
    """A message of more elements than its bytes are worth."""


_Counted = dict[int, Descriptor | None]


@cache
def _counted(kind: Descriptor) -> _Counted:
    """The fields that are elements, by tag, with the message to look into, if there is one."""
    found: _Counted = {}
    for field in kind.fields:
        inner = field.message_type if field.type == FieldDescriptor.TYPE_MESSAGE else None
        if inner is not None or field.is_repeated:
            look = inner if inner is not None and not _is_flat(inner) else None
            found |= {field.number << 3 | wire: None for wire in (0, 1, 5)}
            found[field.number << 3 | 2] = look
    return found


def _is_flat(kind: Descriptor) -> bool:
    """Whether there is nothing in it that takes more memory the more often it comes."""
    message = FieldDescriptor.TYPE_MESSAGE
    return not any(field.is_repeated or field.type == message for field in kind.fields)


def check_elements(data: bytes, kind: Descriptor) -> None:
    """Raises TooManyElementsError. Bytes that are no message at all may pass: parsing says so."""
    size = len(data)
    most = left = (size + PLAIN_BYTES) // LEAST_BYTES
    at, end, counted = 0, size, _counted(kind)
    around: list[tuple[int, _Counted]] = []  # the messages that this one is in
    data += bytes(2)  # a tag and what follows can be looked at without asking for the end
    for _ in range(_MOST_FIELDS):
        while at >= end:
            if not around:
                return
            end, counted = around.pop()
        tag = data[at]
        at += 1
        if tag > 127:
            if data[at] < 128:  # of two bytes, as all of ours have at most
                tag += (data[at] << 7) - 128
                at += 1
            else:
                tag, at = _varint(data, at - 1, end)
        look = counted.get(tag, False)
        if look is not False:
            left -= 1
            if left < 0:
                break
        wire = tag & 7
        if wire == 2:
            length = data[at]
            at += 1
            if length > 127:
                length, at = _varint(data, at - 1, end)
            if look and length:
                around.append((end, counted))
                end, counted = min(at + length, end), _counted(look)
            else:
                at += length
        elif wire == 0:
            while data[at] > 127:
                at += 1
            at += 1
        elif wire == 1:
            at += 8
        elif wire == 5:
            at += 4
        else:  # no message of ours has groups, and what hides in one is not counted
            raise TooManyElementsError(f"{size} bytes of a {kind.name} with a group in it")
    raise TooManyElementsError(
        f"{size} bytes of a {kind.name} with more than {most} elements, or {_MOST_FIELDS} fields: "
        f"expected {LEAST_BYTES} bytes or more for each element"
    )


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
