"""What all calls at the broker have in common.

Messages are parsed here and not by gRPC, so that one that does not parse becomes a readable status
on its own call, and nothing else. Who calls is asked first (`guard.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from ..net.identity.names import Party
from .admission import AdmissionError
from .blobs import BlobError
from .guard import Guard
from .shell import RejectedError

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

__all__ = [
    "FIRST_S",
    "REFUSALS",
    "MalformedError",
    "checked",
    "parser",
    "refuse",
    "unary_handler",
]

FIRST_S = 2.0
"""How long who is refused may take to say what it came for."""

M = TypeVar("M", bound=Message)


class MalformedError(Exception):
    """Bytes that are no message of the expected type; the caller's fault."""


def parser(kind: type[M]) -> Callable[[bytes], M | MalformedError]:
    """Parses, or gives back the error: an exception here would become gRPC's own unreadable one."""

    def parse(data: bytes) -> M | MalformedError:
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            return MalformedError(f"{len(data)} bytes are no {kind.DESCRIPTOR.name}: {error}")
        return message

    return parse


async def refuse(context: ServicerContext, guard: Guard, error: Exception) -> NoReturn:
    """Ends a call with the status of an error that is the caller's fault."""
    code = "INVALID_ARGUMENT" if isinstance(error, MalformedError) else getattr(error, "code", "")
    guard.refused[code.lower()] += 1
    await context.abort(getattr(grpc.StatusCode, code), str(error))
    raise AssertionError("abort raises")


REFUSALS = (AdmissionError, MalformedError, RejectedError, BlobError)
"""What `refuse` takes."""


def checked(message: M | MalformedError) -> M:
    """Raises MalformedError for what did not parse."""
    if isinstance(message, MalformedError):
        raise message
    return message


def unary_handler(
    guard: Guard,
    method: str,
    behave: Callable[[Any, Party | None], Awaitable[Message]],
    request: type[Message],
    answer: type[Message],
) -> Any:
    """gRPC's handler of SERVICE.METHOD; `behave` gets the message and who sends it."""

    async def call(message: Any, context: ServicerContext) -> Message:
        try:
            caller = guard.caller(method, context)
            return await behave(checked(message), caller)
        except REFUSALS as error:
            await refuse(context, guard, error)

    return grpc.unary_unary_rpc_method_handler(call, parser(request), answer.SerializeToString)
