"""The peer's half of a relayed dial: joins the broker's port to its own Frames service."""

from __future__ import annotations

import asyncio
import logging

from ..net.local import split
from ..net.proxy import ProxyError, open_stream
from ..net.pump import BUFFER_BYTES, Stream, close, join
from .logs import note

__all__ = ["RELAY", "answer"]

RELAY = "relay"
"""The address that stands for the broker's own port in an order to dial."""
_log = logging.getLogger(__name__)
_OPEN_S = 10.0


async def answer(ticket: str, broker: str, frames: str) -> None:
    """Meets who dialled through the broker (HOST:PORT) and lets them speak with the service at
    `frames` (HOST:PORT), until either ends. Never raises for what the network does: the dialler
    tries again by itself."""
    ends: list[Stream] = []
    try:
        async with asyncio.timeout(_OPEN_S):
            ends.append(await open_stream(*split(broker)))
            host, port = split(frames)  # of this process: no proxy is in between
            ends.append(await asyncio.open_connection(host, port, limit=BUFFER_BYTES))
        outer, inner = ends
        outer[1].write(f"SHOAL-RELAY {ticket}\n".encode())
        await join(outer, inner)
    except (OSError, ProxyError) as error:
        note(_log, logging.INFO, "relayed dial ended", why=str(error) or type(error).__name__)
    finally:
        for stream in ends:
            close(stream)
