"""What all calls at the broker have in common.

To gRPC every call here is a stream of raw bytes, also one with a single message: so its handler
runs before anything of the message is read, and decides whether and when that happens. Who calls
and whether it is too much is asked first (`broker/access/guard.py`); until then a message waits at
its sender, but for the first 64 KiB, by HTTP/2's flow control. Then it is asked again whether the
caller still may, for a message can be held back until its sender was kicked; then its size is
looked at, then what it would cost in memory, and only then is it parsed. Before the
answer goes out it is asked once more. The share of a call ends when its answer has been taken.

Messages are parsed here and not by gRPC, so that one that does not parse becomes a readable status
on its own call, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ...net.blobs.pieces import read_number
from ...net.grpc_quirks import take_first
from ...net.identity.names import Party
from ...net.surroundings import SurroundingsError
from ..access.admission import AdmissionError, CallRefusedError
from ..access.guard import Guard

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

__all__ = [
    "LEAST_BYTES",
    "PLAIN_BYTES",
    "MalformedError",
    "TooManyElementsError",
    "check_elements",
    "parsed",
    "read",
    "refuse",
    "refuse_stream",
    "stream_handler",
    "unary_handler",
]

# What a message would cost in memory, read off its bytes before anything is made of them.
#
# An empty element of a repeated field takes two bytes on the wire and forty to eighty in memory: 15
# MiB became 200. So the elements are counted first, along the message's own description, without
# looking into texts and bytes, which cost what they weigh.

LEAST_BYTES = 8
"""Of the wire, for each element on average: then a message takes at most eight times its bytes.
Honest ones have 20 and more (a visit of a plan with a peer's name, a file with its hash)."""
PLAIN_BYTES = 64 << 10
"""So short a message need not be looked at: it takes 3 MiB at the most."""
_MOST_FIELDS = 500_000
"""In all that are looked at, in a tenth of a second: a plan with a stage for each of the most
operators that a graph may have takes 400,000."""


class MalformedError(CallRefusedError):
    """Bytes that are no message of the expected type; the caller's fault."""

    def __init__(self, reason: str) -> None:
        super().__init__("INVALID_ARGUMENT", reason)


class TooManyElementsError(MalformedError):
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
                tag, at = read_number(data, at - 1, end)
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
                length, at = read_number(data, at - 1, end)
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


_FIRST_S = 2.0
"""How long who is refused may take to say what it came for."""

M = TypeVar("M", bound=Message)


def parsed(data: bytes, kind: type[M]) -> M:
    """Parse a message; raises MalformedError."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise MalformedError(f"{len(data)} bytes are no {name}: {error}") from None
    return message


async def read(
    context: ServicerContext[Any, Any],
    guard: Guard,
    method: str,
    caller: Party | None,
    kind: type[M],
) -> M:
    """The one message of a call. Raises MalformedError, and AdmissionError when none comes, or when
    its caller may not call any more."""
    limit = guard.shares.limit(method)
    async with guard.shares.reading(caller):
        try:
            async with asyncio.timeout(limit.message_s):
                data = await context.read()
        except TimeoutError:
            why = f"no message of {method} came within {limit.message_s:g} s"
            raise AdmissionError("DEADLINE_EXCEEDED", why) from None
        guard.still(caller)
        if not isinstance(data, bytes):
            raise MalformedError(f"{method} without a message")
        name = kind.DESCRIPTOR.name
        if len(data) > limit.bytes:
            raise AdmissionError(
                "RESOURCE_EXHAUSTED",
                f"{len(data)} bytes of a {name}: expected at most {limit.bytes}",
            )
        if len(data) > PLAIN_BYTES:
            described: Any = kind.DESCRIPTOR  # its stubs know two classes of them
            await asyncio.to_thread(check_elements, data, described)
        return parsed(data, kind)


async def refuse(
    context: ServicerContext[Any, Any], guard: Guard, error: CallRefusedError
) -> NoReturn:
    """Ends a call with the status of an error that is the caller's fault."""
    guard.refused[error.code.lower()] += 1
    await context.abort(grpc.StatusCode[error.code], error.reason)
    raise AssertionError("abort raises")


async def refuse_stream(
    context: ServicerContext[Any, Any], guard: Guard, error: CallRefusedError
) -> NoReturn:
    """Ends a stream whose caller goes on writing, with the error as its status. Its first message
    is read before, since the caller would not hear why otherwise; when very many are refused at
    once, it is not."""
    if not guard.taking.locked():
        async with guard.taking:
            await take_first(context, _FIRST_S)
    await refuse(context, guard, error)


def stream_handler(
    guard: Guard,
    method: str,
    behave: Callable[..., Awaitable[None]],
    answer: type[Message],
    request: type[Message] | None = None,
) -> Any:
    """gRPC's handler of SERVICE.METHOD. `behave` gets who calls and what it reads and writes by;
    where the call has one message, a `request`, that comes before them."""

    async def call(_: Any, context: ServicerContext[Any, Any]) -> None:
        refusing = refuse if request else refuse_stream
        try:
            with guard.call(method, context) as caller:
                refusing = refuse
                said = (await read(context, guard, method, caller, request),) if request else ()
                await behave(*said, caller, context)
        except CallRefusedError as error:
            await refusing(context, guard, error)

    return grpc.stream_stream_rpc_method_handler(call, None, answer.SerializeToString)


def unary_handler(
    guard: Guard,
    method: str,
    behave: Callable[[Any, Party | None], Awaitable[Message]],
    request: type[Message],
    answer: type[Message],
) -> Any:
    """gRPC's handler of SERVICE.METHOD; `behave` gets the message and who sends it."""

    async def call(message: Any, caller: Party | None, context: ServicerContext[Any, Any]) -> None:
        try:
            answered = await behave(message, caller)
        except SurroundingsError as error:
            why = f"the broker cannot do that on its host now: {error}"
            raise AdmissionError("RESOURCE_EXHAUSTED", why) from None
        guard.still(caller)  # what took long is for nobody who was kicked meanwhile
        await context.write(answered)

    return stream_handler(guard, method, call, answer, request)
