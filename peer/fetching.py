"""Blobs for the threads of a worker: its clients live in the event loop, threads wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

from ..net.blobs_client import BlobClient
from ..net.gather import RANGE_BYTES, gather
from ..proto import common_pb2
from .sharing import Fellows

__all__ = ["Fetching"]


class Fetching:
    """`from_broker` and `from_all` are what a BlobCache fetches with: called in threads, they
    block. `broker` gives the newest client."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        broker: Callable[[], BlobClient],
        fellows: Fellows,
    ) -> None:
        self._loop, self._broker, self._fellows = loop, broker, fellows
        self._waited_for: set[Future[bytes | None]] = set()

    def cancel(self) -> None:
        """Whoever waits gets a CancelledError."""
        for future in list(self._waited_for):
            future.cancel()

    def from_broker(self, name: str, offset: int, length: int) -> Iterator[bytes]:
        return self._blocking(self._broker().pieces(name, offset, length))

    def from_all(self, name: str, offset: int, length: int) -> Iterator[bytes]:
        """A whole blob also from others of the run."""
        return self._blocking(self._gathered(name, offset, length))

    async def _gathered(self, name: str, offset: int, length: int) -> AsyncIterator[bytes]:
        client, fellows = self._broker(), self._fellows.clients
        pieces = client.pieces(name, offset, length)
        if fellows and not length:
            (size,) = await client.have([common_pb2.BlobRef(hash=name)])
            if size - offset > RANGE_BYTES:
                pieces = gather((client, *fellows), name, size, offset)
        async for piece in pieces:
            yield piece

    def _blocking(self, pieces: AsyncIterator[bytes]) -> Iterator[bytes]:
        async def following() -> bytes | None:
            return await anext(pieces, None)

        while True:
            future = asyncio.run_coroutine_threadsafe(following(), self._loop)
            self._waited_for.add(future)
            try:
                piece = future.result()
            finally:
                self._waited_for.discard(future)
            if piece is None:
                return
            yield piece
