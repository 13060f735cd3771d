"""What all calls at the broker have in common.

To gRPC every call here is a stream of raw bytes, also one with a single message: so its handler
runs before anything of the message is read, and decides whether and when that happens. Who calls
and whether it is too much is asked first (`broker/access/guard.py`); until then a message waits at
its sender, but for the first 64 KiB, by HTTP/2's flow control. Then it is asked again whether the
caller still may, for a message can be held back until its sender was kicked; then its size is
looked at, then what it would cost in memory (`wire.py`), and only then is it parsed. Before the
answer goes out it is asked once more. The share of a call ends when its answer has been taken.

Messages are parsed here and not by gRPC, so that one that does not parse becomes a readable status
on its own call, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from ...net.grpc_quirks import take_first
from ...net.identity.names import Party
from ..access.admission import AdmissionError
from ..access.guard import Guard
from .blobs import BlobStoreError
from .shell import RejectedError
from .wire import PLAIN_BYTES, TooManyElementsError, check_elements

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

__all__ = [
    "REFUSALS",
    "MalformedError",
    "parsed",
    "read",
    "refuse",
    "refuse_stream",
    "stream_handler",
    "unary_handler",
]

_FIRST_S = 2.0
"""How long who is refused may take to say what it came for."""

M = TypeVar("M", bound=Message)


class MalformedError(Exception):
    """Bytes that are no message of the expected type; the caller's fault."""


def parsed(data: bytes, kind: type[M]) -> M:
    """Raises MalformedError."""
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
            try:
                described: Any = kind.DESCRIPTOR  # its stubs know two classes of them
                await asyncio.to_thread(check_elements, data, described)
            except TooManyElementsError as error:
                raise MalformedError(str(error)) from None
        return parsed(data, kind)


async def refuse(context: ServicerContext[Any, Any], guard: Guard, error: Exception) -> NoReturn:
    """Ends a call with the status of an error that is the caller's fault."""
    code = "INVALID_ARGUMENT" if isinstance(error, MalformedError) else getattr(error, "code", "")
    guard.refused[code.lower()] += 1
    await context.abort(getattr(grpc.StatusCode, code), str(error))
    raise AssertionError("abort raises")


async def refuse_stream(
    context: ServicerContext[Any, Any], guard: Guard, error: Exception
) -> NoReturn:
    """Ends a stream whose caller goes on writing, with the error as its status. Its first message
    is read before, since the caller would not hear why otherwise; when very many are refused at
    once, it is not."""
    if not guard.taking.locked():
        async with guard.taking:
            await take_first(context, _FIRST_S)
    await refuse(context, guard, error)


REFUSALS = (AdmissionError, MalformedError, RejectedError, BlobStoreError)
"""What `refuse` takes."""


def stream_handler(behave: Callable[[Any, Any], Awaitable[None]], answer: type[Message]) -> Any:
    """gRPC's handler of a call whose messages `behave` reads and writes; see the module."""
    return grpc.stream_stream_rpc_method_handler(behave, None, answer.SerializeToString)


def unary_handler(
    guard: Guard,
    method: str,
    behave: Callable[[Any, Party | None], Awaitable[Message]],
    request: type[Message],
    answer: type[Message],
) -> Any:
    """gRPC's handler of SERVICE.METHOD; `behave` gets the message and who sends it."""

    async def call(_: Any, context: ServicerContext[Any, Any]) -> None:
        try:
            with guard.call(method, context) as caller:
                message = await read(context, guard, method, caller, request)
                answered = await behave(message, caller)
                guard.still(caller)  # what took long is for nobody who was kicked meanwhile
                await context.write(answered)
        except REFUSALS as error:
            await refuse(context, guard, error)

    return stream_handler(call, answer)
