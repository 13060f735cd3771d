"""Two byte streams made one: what comes on either side leaves on the other, and so do the ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

__all__ = ["BUFFER_BYTES", "Stream", "close", "join"]

BUFFER_BYTES = 256 * 1024
"""Of a stream's reader; a writer that is held up keeps as much again."""

LINGER_S = 10.0
"""For what is still on its way once one side has ended: nobody keeps a connection half open."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _nothing() -> None:
    """Nobody asks whether bytes pass."""


async def join(one: Stream, other: Stream, passes: Callable[[], None] = _nothing) -> None:
    """Passes bytes on, both ways, until both sides have ended or one breaks; closes neither. A
    side that is not read holds the other up, within BUFFER_BYTES; when one has ended, the other
    gets LINGER_S to do so. `passes` is called whenever some do. Raises OSError when one breaks."""
    tasks = [
        asyncio.create_task(_pass_on(one[0], other[1], passes)),
        asyncio.create_task(_pass_on(other[0], one[1], passes)),
    ]
    try:
        _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if left:
            await asyncio.wait(left, timeout=LINGER_S)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: Callable[[], None]
) -> None:
    while data := await reader.read(BUFFER_BYTES):
        passes()
        writer.write(data)
        await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()


def close(stream: Stream) -> None:
    with suppress(OSError, RuntimeError):
        stream[1].close()
