"""The gRPC service of blobs: stored and fetched in pieces (`blobs.py`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from ...net.blobs.pieces import unpacked
from ...net.identity.names import Party
from ...proto.broker_pb2 import (
    BlobPiece,
    BlobQuery,
    BlobRange,
)
from ...proto.common_pb2 import BlobRef
from ..access.guard import Guard
from ..access.limits import MOST_PIECE_BYTES
from .blobs import BlobStoreError, Upload
from .calls import MalformedError
from .shell import Shell

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

__all__ = ["BlobsService"]

PIECE_BYTES = 1 << 20
MOST_QUERIED = 10_000
SILENCE_S = 120.0
"""An upload of which too little comes ends, and what it has announced is free for others; what came
of it stays to be gone on from. Twice what a client waits for a piece to be taken."""
LEAST_BYTES = 64 << 10
"""That come within this time: a sixteenth of a piece."""


class BlobsService:
    """The store, with its disk work in threads."""

    def __init__(self, shell: Shell, guard: Guard) -> None:
        self._guard = guard
        self._store = shell.blobs
        self._disk = shell.disk
        self._sweeper = shell.sweeper

    async def store(self, caller: Party | None, context: ServicerContext[Any, Any]) -> None:
        """Takes a blob, and answers with what it was stored as."""
        loop = asyncio.get_running_loop()
        run = loop.run_in_executor
        by = caller.subject if caller else ""
        upload: Upload | None = None
        ref = BlobRef()
        since, before = loop.time(), 0  # of the present window, and what was written then
        try:
            while True:
                try:
                    async with asyncio.timeout_at(since + SILENCE_S):
                        data = await context.read()
                except TimeoutError:
                    raise self._too_slow(ref, 0 if upload is None else upload.written) from None
                if not isinstance(data, bytes):
                    break
                self._guard.still(caller)
                piece, content = _unpacked(data)
                if not ref.hash:
                    ref.CopyFrom(piece.ref)
                    try:
                        upload = await self._begin(ref, piece.offset, by)
                    except BlobStoreError as error:
                        if error.code != "RESOURCE_EXHAUSTED" or not await self._sweeper.sweep():
                            raise
                        upload = await self._begin(ref, piece.offset, by)
                    if upload is None:
                        break
                    await context.send_initial_metadata((("taken", ref.hash),))  # bytes may come
                assert upload is not None, "a ref came, so an upload began"
                if piece.offset != upload.written or len(content) > MOST_PIECE_BYTES:
                    raise BlobStoreError(
                        "INVALID_ARGUMENT",
                        f"blob {ref.hash}: a piece of {len(content)} bytes at {piece.offset}: "
                        f"expected at most {MOST_PIECE_BYTES} bytes at {upload.written}",
                    )
                if content:
                    await run(self._disk, upload.write, content)
                if upload.written - before >= min(LEAST_BYTES, upload.size - before):
                    since, before = loop.time(), upload.written
            if not ref.hash:
                raise BlobStoreError(
                    "INVALID_ARGUMENT", "an upload without a piece: no blob was named"
                )
            if upload is not None:  # else it is here already
                await run(self._disk, upload.finish)
            await context.write(ref)
        finally:
            if upload is not None:
                upload.stop()  # keeps what came for the next try; nothing after a finish

    @staticmethod
    def _too_slow(ref: BlobRef, written: int) -> BlobStoreError:
        return BlobStoreError(
            "ABORTED",
            f"blob {ref.hash}: of {ref.size_bytes} bytes {written} are here, and less than "
            f"{LEAST_BYTES} came within {SILENCE_S:g} s: go on there",
        )

    async def _begin(self, ref: BlobRef, offset: int, by: str) -> Upload | None:
        beginning = asyncio.get_running_loop().run_in_executor(
            self._disk, self._store.begin, ref.hash, ref.size_bytes, offset, by
        )
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # The call is gone, its thread is not: end the upload that it will have begun.
            beginning.add_done_callback(_stop_begun)
            raise

    async def fetch(
        self, span: BlobRange, caller: Party | None, context: ServicerContext[Any, Any]
    ) -> None:
        run, at = asyncio.get_running_loop().run_in_executor, span.offset
        pieces = await run(self._disk, self._store.read, span.hash, at, span.length, PIECE_BYTES)
        while (data := await run(self._disk, next, pieces, None)) is not None:
            self._guard.still(caller)
            await context.write(BlobPiece(offset=at, data=data))
            at += len(data)

    async def have(self, query: BlobQuery, caller: Party | None) -> BlobQuery:
        if len(query.blobs) > MOST_QUERIED:
            raise BlobStoreError(
                "INVALID_ARGUMENT",
                f"{len(query.blobs)} blobs in one query: expected at most {MOST_QUERIED}",
            )
        sizes = await asyncio.get_running_loop().run_in_executor(
            self._disk, lambda: [self._store.size_of(b.hash) for b in query.blobs]
        )
        found = zip(query.blobs, sizes, strict=True)
        return BlobQuery(blobs=[BlobRef(hash=b.hash, size_bytes=size) for b, size in found])


def _unpacked(data: bytes) -> tuple[BlobPiece, memoryview]:
    """A piece and what is in it. Raises MalformedError."""
    try:
        return unpacked(data)
    except DecodeError as error:
        raise MalformedError(f"{len(data)} bytes are no BlobPiece: {error}") from None


def _stop_begun(beginning: asyncio.Future[Upload | None]) -> None:
    upload = None if beginning.cancelled() or beginning.exception() else beginning.result()
    if upload is not None:
        upload.stop()
