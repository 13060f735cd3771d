"""The peer's half of a relayed dial: joins the broker's port to its own Frames service."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from ...net.local import split
from ...net.web.proxy import ProxyError, open_stream
from ...net.web.pump import BUFFER_BYTES, Stream, close, join
from ..logs import note

__all__ = ["OWN", "RELAY", "answer"]

RELAY = "relay"
"""The address that stands for the broker's own port in an order to dial."""
OWN = "unix-abstract:"
"""Before the name of a socket without a file, which Linux has, in gRPC's terms."""
_log = logging.getLogger(__name__)
_OPEN_S = 10.0


_UNUSED_S = 20.0
"""Until a link uses what was dialled, and while bytes pass without one: a handshake and a hello
have ten seconds each, and partners ping each other every ten."""


async def _inner(frames: str, ticket: str) -> tuple[Stream, str]:
    """To this process itself, where no proxy is in between; and how gRPC calls this end."""
    if frames.startswith(OWN):
        ours = f"{frames.removeprefix(OWN)}-{ticket}"
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.setblocking(False)
            stream.bind(f"\0{ours}")
            await asyncio.get_running_loop().sock_connect(stream, "\0" + frames.removeprefix(OWN))
            return await asyncio.open_unix_connection(sock=stream, limit=BUFFER_BYTES), OWN + ours
        except BaseException:
            stream.close()
            raise
    inner = await asyncio.open_connection(*split(frames), limit=BUFFER_BYTES)
    host, port = inner[1].get_extra_info("sockname")[:2]
    return inner, f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def answer(ticket: str, broker: str, frames: str, carries: Callable[[str], bool]) -> None:
    """Meets who dialled through the broker (HOST:PORT) and lets them speak with the service at
    `frames` (OWN and a name, or HOST:PORT), until either ends, or none of its links uses that any
    more: any member can end a handshake. `carries` says whether one does, of where a connection
    comes from. Never raises for what the network does: the dialler tries again by itself."""
    ends: list[Stream] = []
    try:
        async with asyncio.timeout(_OPEN_S):
            ends.append(await open_stream(*split(broker)))
            inner, where = await _inner(frames, ticket)
            ends.append(inner)
        outer = ends[0]
        outer[1].write(f"SHOAL-RELAY {ticket}\n".encode())
        async with asyncio.timeout(_UNUSED_S) as patience:

            def passes() -> None:
                if carries(where) and not patience.expired():
                    patience.reschedule(asyncio.get_running_loop().time() + _UNUSED_S)

            await join(outer, inner, passes)
    except (OSError, ProxyError) as error:
        note(_log, logging.INFO, "relayed dial ended", why=str(error) or type(error).__name__)
    finally:
        for stream in ends:
            close(stream)
