"""What gRPC for Python does that its users would not expect.

A call that its server ends while the client writes may end with an INTERNAL error of gRPC's own,
in place of the status that came (grpc/grpc#36066, seen with 1.85: one in sixty to one in two
hundred). So who may be refused writes one message and no more before it is taken in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from grpc.aio import AioRpcError, ServicerContext

__all__ = ["hides_the_reason", "in_words", "is_reached", "pass_over_broken_streams", "take_first"]

_HIDDEN = "Internal error from Core"
_UP, _REFUSED = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE


async def take_first(context: ServicerContext[Any, Any], within_s: float) -> None:
    """Takes what a client says first, before its stream is refused: it would not hear why."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await context.read()


async def is_reached(channel: grpc.aio.Channel, within_s: float) -> bool:
    """Whether a connection came up. A refused one is known at once, without gRPC's own retries."""
    state = channel.get_state(try_to_connect=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while state not in (_UP, _REFUSED):
                await channel.wait_for_state_change(state)
                state = channel.get_state()
    return state is _UP


def hides_the_reason(error: AioRpcError) -> bool:
    """Whether a call ended for a reason that gRPC did not tell; another try may."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _HIDDEN


_WORDS = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r"failed to connect to all addresses.*Connection refused.*", "nobody listens there"),
        (r"failed to connect to all addresses.*(No route|unreachable).*", "there is no way to it"),
        (r"failed to connect to all addresses.*[Tt]ime.?out.*", "it gave no answer in time"),
        (
            r"failed to connect to all addresses.*(handshake|Handshake|SSL).*",
            "what listens there does not speak TLS as a broker does",
        ),
        (
            r"failed to connect to all addresses.*(HTTP/2|http1).*",
            "what listens there is no broker, or one that wants TLS",
        ),
        (r"failed to connect to all addresses.*", "the connection breaks off at once"),
        (r"(errors resolving|DNS resolution failed).*", "its name is not known"),
        (r"Deadline Exceeded", "it gave no answer in time"),
        (
            r"Cancelling all calls|Socket closed|Stream removed.*|(recvmsg|sendmsg):.*"
            r"|keepalive watchdog timeout|ping timeout|GOAWAY received.*",
            "the connection broke off",
        ),
    )
)


def in_words(details: str) -> str:
    """The details of a status with what gRPC itself says of a connection put plainly; what a server
    said stays as it is."""
    for pattern, words in _WORDS:
        if match := pattern.search(details):
            return details[: match.start()] + words + details[match.end() :]
    return details


def pass_over_broken_streams() -> None:
    """No traceback any more for a stream that broke while gRPC sent its last status: whoever it was
    for is gone, and our side of the stream has ended."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")
