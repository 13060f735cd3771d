"""Blobs for the threads of a worker: its clients live in the event loop, threads wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future

from ...net.blobs.client import BlobClient
from ...net.blobs.gather import RANGE_BYTES, gather
from ...net.cap import Cap
from ...net.web.places import reachable, why_not
from ...net.web.web import Web, WebFile
from ...proto import common_pb2
from .cache import Fetch
from .sharing import Fellows
from .weight_shards import WeightShard

__all__ = ["Fetching"]

_WEB_PIECE = 1 << 20
_WEB_STALL_S = 20.0
_WEB_FLOOR = 64 << 10
"""Bytes per second of a shard that a server gives at least."""


class Fetching:
    """`from_broker` and `from_all` are what a BlobCache fetches with, `from_web` makes another:
    called in threads, they block. `broker` gives the newest client; `places`: where on the web the
    owner lets it read; `down`: the owner's cap."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        broker: Callable[[], BlobClient],
        fellows: Fellows,
        places: Sequence[str] = (),
        down: Cap | None = None,
    ) -> None:
        self._loop, self._broker, self._fellows = loop, broker, fellows
        self._places, self._down = places, down or Cap(None)
        self._web = Web(
            allowed=lambda url: why_not(url, places),
            reachable=reachable(places),
            timeout_s=_WEB_STALL_S,
            floor=_WEB_FLOOR,
            attempts=3,
        )
        self._files: dict[str, WebFile] = {}
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

    def from_web(self, shard: WeightShard) -> Fetch:
        """What reads a shard where it lies on the web, if the owner lets it. Raises WebError."""

        async def pieces(offset: int) -> AsyncIterator[bytes]:
            if shard.url not in self._files:
                self._files[shard.url] = await asyncio.to_thread(self._web.look, shard.url)
            file, at = self._files[shard.url], shard.at + offset
            data = await asyncio.to_thread(self._web.read, file, at, shard.size_bytes - offset)
            for start in range(0, len(data), _WEB_PIECE):
                piece = data[start : start + _WEB_PIECE]
                await self._down.take_in_turns(len(piece))  # the owner's cap, and count, of it
                yield piece

        return lambda name, offset, length: self._blocking(pieces(offset))

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
