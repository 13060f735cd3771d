"""The client's side of `Broker.Blobs`, for peers and for people's programs.

    client = BlobClient(channel)
    ref = await client.store(Path("weights.safetensors"))
    some = await client.fetch(ref.hash, offset=128, length=4096)

Uploads and downloads go on where they broke, with pauses that grow, up to `attempts` times without
any progress. A whole blob is checked against its hash; a range cannot be.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from ...proto.broker_pb2 import BlobPiece, BlobQuery, BlobRange
from ...proto.broker_pb2_grpc import BlobsStub
from ...proto.common_pb2 import BlobRef
from ..cap import Cap
from ..grpc_quirks import hides_the_reason
from ..surroundings import write_whole
from .pieces import packed

__all__ = ["BlobClient", "BlobTransferError", "Sent", "Source", "Streamed", "blob_ref"]

PIECE_BYTES = 1 << 20
WHOLE_BYTES = 64 << 20
"""Of a blob of unknown size that is taken into memory: a graph of 100,000 operators has 20 MB, and
a manifest of 64 MB 300,000 shards."""
FILE_BYTES = 64 << 30
"""The same of one that becomes a file: the largest that a broker takes."""
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED)


class Streamed(Protocol):
    """Bytes that are made as they are read, the same ones each time."""

    def pieces(self, offset: int, most: int) -> Iterable[memoryview]:
        """From an offset on, in pieces of at most so many."""


Source = Path | bytes | bytearray | memoryview | Streamed
Sent = Callable[[int, float], None]
"""(bytes, seconds) of an upload that ended well, from its first byte to the answer."""


class BlobTransferError(RuntimeError):
    """A blob could not be stored or fetched. `code`: name of the gRPC status that the broker gave,
    "UNAVAILABLE" when it could not be reached, "DATA_LOSS" when the content is not what its name
    says."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def blob_ref(source: Source) -> BlobRef:
    """Hash and size of a file or of bytes; reads all of it. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    for piece in _pieces(source, 0):
        digest.update(piece)
        size += len(piece)
    return BlobRef(hash=digest.hexdigest(), size_bytes=size)


def _pieces(source: Source, offset: int, most: int = PIECE_BYTES) -> Iterable[memoryview | bytes]:
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source).cast("B")
        for at in range(offset, len(view), most):
            yield view[at : at + most]
        return
    if not isinstance(source, Path):
        yield from source.pieces(offset, most)
        return
    with source.open("rb", buffering=0) as file:
        file.seek(offset)
        while piece := file.read(most):
            yield piece


class BlobClient:
    """Stores and fetches over a channel that the caller owns.

    attempts: tries in a row without progress; stall_s: seconds without a byte that end a try;
    floor: bytes per second that whoever is fetched from gives at least, over `stall_s` seconds of
    waiting, or is given up; 0: any byte is progress; up, down: the owner's caps, which others may
    share; sent: is told of each upload what was on the wire, without what was before it (hashing,
    asking, connecting); clock: seconds, as the event loop's.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        attempts: int = 5,
        stall_s: float = 60.0,
        floor: float = 0.0,
        up: Cap | None = None,
        down: Cap | None = None,
        sent: Sent = lambda size_bytes, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.use(channel)
        self._attempts = attempts
        self._stall_s = stall_s
        self._floor, self._sent, self._clock = floor, sent, clock
        self._up, self._down = up or Cap(None), down or Cap(None)

    def use(self, channel: grpc.aio.Channel) -> None:
        """From now on every call goes over this one; transfers that break go on there."""
        self._stub: Any = BlobsStub(channel)  # type: ignore[no-untyped-call]  # generated
        self._channel = channel

    # ------------------------------------------------------------ storing

    async def have(self, refs: Sequence[BlobRef]) -> list[int]:
        """Bytes of each blob that the broker has; less than its size: a part, or nothing."""
        try:
            answer = await self._stub.Have(BlobQuery(blobs=refs), timeout=self._stall_s)
        except grpc.aio.AioRpcError as error:
            raise _translated(error, "asking what blobs are there") from error
        return [ref.size_bytes for ref in answer.blobs]

    async def store(self, source: Source) -> BlobRef:
        """Uploads what the broker lacks of it. Raises BlobTransferError, OSError for the file."""
        ref = await asyncio.to_thread(blob_ref, source)
        what = f"storing blob {ref.hash[:12]} ({ref.size_bytes} bytes)"
        tries, best = 0, 0
        while True:
            try:
                there = (await self.have([ref]))[0]
                if there >= ref.size_bytes > 0:
                    return ref
                tries, best = (0, there) if there > best else (tries, best)
                await self._send(ref, source, there)
                return ref
            except grpc.aio.AioRpcError as error:
                if not _passes(error) or tries >= self._attempts:
                    raise _translated(error, what) from error
            except BlobTransferError as error:
                if (
                    error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
                    or tries >= self._attempts
                ):
                    raise
            tries += 1
            await asyncio.sleep(_pause(tries))

    async def _send(self, ref: BlobRef, source: Source, offset: int) -> None:
        """One upload from an offset to the end. Raises AioRpcError, and BlobTransferError when no
        piece was taken for `stall_s`."""
        at, began_s = offset, 0.0

        async def upload() -> AsyncIterator[bytes]:
            nonlocal at, began_s
            yield packed(offset, ref=ref)
            # Nothing is under way while it may be refused: see grpc_quirks.
            if not await call.initial_metadata():
                await call.code()
                return
            began_s = self._clock()
            pieces = iter(_pieces(source, offset, self._up.piece(PIECE_BYTES)))
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                await self._up.take(len(piece))
                yield packed(at, piece)
                at += len(piece)

        store: Any = self._channel.stream_unary(  # of messages that are packed already
            "/shoal.v1.Blobs/Store", response_deserializer=BlobRef.FromString
        )
        call = store(upload())
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                before = at
                await asyncio.wait({answer}, timeout=self._stall_s)
                if not answer.done() and at == before:
                    text = f"storing blob {ref.hash[:12]}: no byte went for {self._stall_s:g} s"
                    raise BlobTransferError("DEADLINE_EXCEEDED", text)
            answer.result()
            self._sent(at - offset, self._clock() - began_s)
        finally:
            call.cancel()
            answer.cancel()

    # ------------------------------------------------------------ fetching

    async def fetch(
        self, hash: str, offset: int = 0, length: int = 0, *, most_bytes: int = WHOLE_BYTES
    ) -> bytes:
        """Bytes [offset, offset + length) of a blob; length 0: to its end, and no more than
        `most_bytes`. A whole blob is checked against its hash. Raises BlobTransferError."""
        data = bytearray()
        most = length or most_bytes
        async for piece in _bounded(hash, self.pieces(hash, offset, length), most):
            data += piece
        if offset == 0 and length == 0:
            _check(hash, hashlib.sha256(data).hexdigest())
        return bytes(data)

    async def fetch_to(self, hash: str, path: Path, *, most_bytes: int = FILE_BYTES) -> None:
        """Writes a blob to a file, checked; the file appears when it is whole. Raises
        BlobTransferError, OSError. An interrupted call leaves `path` + ".part", which the next one
        goes on from."""
        part = path.with_name(path.name + ".part")
        digest = hashlib.sha256()
        with part.open("ab+", buffering=0) as file:
            size = file.tell()
            file.seek(0)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                digest.update(piece)
            try:
                left = max(0, most_bytes - size)
                async for data in _bounded(hash, self.pieces(hash, size), left):
                    await asyncio.to_thread(write_whole, file, data, part)
                    digest.update(data)
            except BlobTransferError as error:
                # A part that is longer than the blob is none of it.
                if error.code == "OUT_OF_RANGE":
                    part.unlink()
                raise
        if digest.hexdigest() != hash:
            part.unlink()
        _check(hash, digest.hexdigest())
        os.replace(part, path)

    async def pieces(self, hash: str, offset: int = 0, length: int = 0) -> AsyncIterator[bytes]:
        """Bytes of a range in pieces, in order, each once, over as many calls as it takes."""
        what = f"fetching blob {hash[:12]}"
        at, stop, tries = offset, offset + length if length else None, 0
        waited_s, came = 0.0, 0  # in the present window
        while stop is None or at < stop:
            wanted = BlobRange(hash=hash, offset=at, length=0 if stop is None else stop - at)
            call = self._stub.Fetch(wanted)
            try:
                while True:
                    asked_s = self._clock()
                    if (piece := await self._next(call)) is None:
                        break
                    data = piece.data  # a copy, each time that it is asked for
                    waited_s, came = waited_s + self._clock() - asked_s, came + len(data)
                    if piece.offset != at or (stop is not None and at + len(data) > stop):
                        raise BlobTransferError(
                            "DATA_LOSS",
                            f"{what}: {len(data)} bytes at {piece.offset}, expected {at}",
                        )
                    at += len(data)
                    if waited_s >= self._stall_s and at != stop:
                        if came < self._floor * waited_s:
                            raise BlobTransferError(
                                "DEADLINE_EXCEEDED",
                                f"{what}: {came} bytes came in {waited_s:.3g} s, expected "
                                f"{self._floor:g} a second",
                            )
                        waited_s, came = 0.0, 0
                    await self._down.take_in_turns(len(data))
                    tries = 0
                    yield data
                if stop is None or at == stop:
                    return
                raise BlobTransferError("DATA_LOSS", f"{what}: it ended at {at}, expected {stop}")
            except grpc.aio.AioRpcError as error:
                if not _passes(error) or tries >= self._attempts:
                    raise _translated(error, what) from error
            except TimeoutError as error:
                if tries >= self._attempts:
                    text = (
                        f"{what}: no byte came for {self._stall_s:g} s, {tries + 1} times in a row"
                    )
                    raise BlobTransferError("DEADLINE_EXCEEDED", text) from error
            finally:
                call.cancel()
            tries += 1
            await asyncio.sleep(_pause(tries))

    async def _next(self, call: Any) -> BlobPiece | None:
        async with asyncio.timeout(self._stall_s):
            piece = await call.read()
        return piece if isinstance(piece, BlobPiece) else None


async def _bounded(
    hash: str, pieces: AsyncIterator[bytes], most_bytes: int
) -> AsyncIterator[bytes]:
    """Raises BlobTransferError before more than so many bytes are given."""
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > most_bytes:
            raise BlobTransferError(
                "OUT_OF_RANGE", f"blob {hash[:12]} has more than the {most_bytes} bytes expected"
            )
        yield piece


def _pause(tries: int) -> float:
    """Seconds before another try: 0.1, 0.2, 0.4, … up to 5."""
    return min(5.0, 0.1 * 2.0 ** (tries - 1))


def _passes(error: grpc.aio.AioRpcError) -> bool:
    """Whether another try may go better, or say better what is wrong."""
    return error.code() in _AGAIN or hides_the_reason(error)


def _check(wanted: str, found: str) -> None:
    if found != wanted:
        raise BlobTransferError("DATA_LOSS", f"blob {wanted} came with content of SHA-256 {found}")


def _translated(error: grpc.aio.AioRpcError, what: str) -> BlobTransferError:
    return BlobTransferError(error.code().name, f"{what}: {error.details() or 'no details'}")
