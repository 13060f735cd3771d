"""Two byte streams made one: what comes on either side leaves on the other, and so do the ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

__all__ = ["BUFFER_BYTES", "Stream", "close", "join"]

BUFFER_BYTES = 256 * 1024
"""Of a stream's reader; a writer that is held up keeps as much again."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def join(one: Stream, other: Stream) -> None:
    """Passes bytes on, both ways, until both sides have ended or one breaks; closes neither. A
    side that is not read holds the other up, within BUFFER_BYTES. Raises OSError when one breaks.
    """
    tasks = [
        asyncio.create_task(_pass_on(one[0], other[1])),
        asyncio.create_task(_pass_on(other[0], one[1])),
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(BUFFER_BYTES):
        writer.write(data)
        await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()


def close(stream: Stream) -> None:
    with suppress(OSError, RuntimeError):
        stream[1].close()
