"""The peer's half of a relayed dial: joins the broker's port to its own Frames service."""

from __future__ import annotations

import asyncio
import logging

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


async def _inner(frames: str) -> Stream:
    """To this process itself: no proxy is in between."""
    if frames.startswith(OWN):
        name = "\0" + frames.removeprefix(OWN)
        return await asyncio.open_unix_connection(name, limit=BUFFER_BYTES)
    host, port = split(frames)
    return await asyncio.open_connection(host, port, limit=BUFFER_BYTES)


async def answer(ticket: str, broker: str, frames: str) -> None:
    """Meets who dialled through the broker (HOST:PORT) and lets them speak with the service at
    `frames` (OWN and a name, or HOST:PORT), until either ends. Never raises for what the network
    does: the dialler tries again by itself."""
    ends: list[Stream] = []
    try:
        async with asyncio.timeout(_OPEN_S):
            ends.append(await open_stream(*split(broker)))
            ends.append(await _inner(frames))
        outer, inner = ends
        outer[1].write(f"SHOAL-RELAY {ticket}\n".encode())
        await join(outer, inner)
    except (OSError, ProxyError) as error:
        note(_log, logging.INFO, "relayed dial ended", why=str(error) or type(error).__name__)
    finally:
        for stream in ends:
            close(stream)
