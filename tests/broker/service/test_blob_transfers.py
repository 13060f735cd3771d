"""Blobs over real gRPC on loopback: by range, within caps, again after a break, or refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from shoal.broker.service.blobs import BlobLimits, BlobStoreError
from shoal.net.blobs.client import BlobClient, BlobTransferError, blob_ref
from shoal.net.cap import Cap
from shoal.proto.broker_pb2 import BlobPiece, BlobRange
from shoal.proto.broker_pb2_grpc import BlobsStub
from shoal.proto.common_pb2 import BlobRef

from .loopback import running, status, until


async def test_blobs_go_up_and_down_whole_and_by_range(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "up").write_bytes(data)
    async with running(state=tmp_path / "state") as (broker, channel):
        client = BlobClient(channel)
        ref = await client.store(tmp_path / "up")
        assert ref == blob_ref(data)
        assert await client.store(data) == ref  # is there already
        assert await client.fetch(ref.hash) == data
        assert await client.fetch(ref.hash, 2_000_001, 10) == data[2_000_001:2_000_011]
        await client.fetch_to(ref.hash, tmp_path / "down")
        assert (tmp_path / "down").read_bytes() == data
        assert await client.have([ref, blob_ref(b"x")]) == [len(data), 0]
        empty = await client.store(b"")
        assert await client.fetch(empty.hash) == b""
        name = broker.shell.machine.members.broker_id
    async with running(state=tmp_path / "state") as (broker, channel):
        assert await BlobClient(channel).fetch(ref.hash, 5, 5) == data[5:10]
        assert broker.shell.machine.members.broker_id == name


class Asked(Cap):
    """Notes what it is asked for, and holds nothing up."""

    def __init__(self, bytes_per_s: float | None) -> None:
        super().__init__(bytes_per_s)
        self.sizes: list[int] = []

    async def take(self, size_bytes: int) -> None:
        self.sizes.append(size_bytes)


async def test_blobs_leave_and_come_by_the_caps_of_the_owner() -> None:
    """In pieces of a tenth of a second at most, so that frames have their turn between them."""
    data, up, down = os.urandom(1_234_567), Asked(1e6), Asked(5e5)
    async with running() as (_, channel):
        client = BlobClient(channel, up=up, down=down)
        ref = await client.store(data)
        assert (sum(up.sizes), max(up.sizes), down.sizes) == (len(data), 100_000, [])
        assert await client.fetch(ref.hash) == data
    assert (sum(up.sizes), sum(down.sizes)) == (len(data), len(data))
    assert max(down.sizes) == 50_000


async def test_a_transfer_goes_on_over_another_channel() -> None:
    """Of a broker that has moved: the channel to where it was is closed while somebody tries."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        gone = f"127.0.0.1:{nobody.getsockname()[1]}"
    async with running() as (_, channel):
        ref = await BlobClient(channel).store(b"x" * 1000)
        old = grpc.aio.insecure_channel(gone)
        client = BlobClient(old)
        storing = asyncio.create_task(client.store(b"y" * 1000))
        fetching = asyncio.create_task(client.fetch(ref.hash))
        failed = grpc.ChannelConnectivity.TRANSIENT_FAILURE  # it stays so
        while (state := old.get_state(try_to_connect=True)) is not failed:
            await old.wait_for_state_change(state)
        client.use(channel)
        closing = asyncio.create_task(old.close(grace=10))
        assert (await storing).size_bytes == 1000
        assert await fetching == b"x" * 1000
        await closing


async def test_an_upload_that_broke_goes_on_where_it_ended() -> None:
    data = os.urandom(2_500_000)
    ref = blob_ref(data)
    async with running() as (broker, channel):
        call = BlobsStub(channel).Store()
        await call.write(BlobPiece(ref=ref))
        await call.write(BlobPiece(offset=0, data=data[:1_000_000]))
        await until(lambda: any(u.written for u in broker.blobs._open))
        call.cancel()
        await until(lambda: not broker.blobs._open)
        client = BlobClient(channel)
        assert await client.have([ref]) == [1_000_000]
        await client.store(data)
        assert await client.fetch(ref.hash) == data


async def test_uploads_of_one_blob_at_once() -> None:
    data = os.urandom(1_500_000)
    async with running() as (_, channel):
        refs = await asyncio.gather(*(BlobClient(channel).store(data) for _ in range(4)))
        assert refs == [blob_ref(data)] * 4
        assert await BlobClient(channel).fetch(refs[0].hash) == data


async def test_large_uploads_that_are_refused_are_told_why() -> None:
    """Each of them would begin to send while it is refused."""
    async with running(limits=BlobLimits(blob_bytes=3_000_000)) as (_, channel):
        for _ in range(3):
            uploads = [
                BlobClient(channel, attempts=0).store(os.urandom(6_000_000)) for _ in "abcdef"
            ]
            for error in await asyncio.gather(*uploads, return_exceptions=True):
                assert isinstance(error, BlobTransferError)
                assert error.code == "RESOURCE_EXHAUSTED"
                assert "6000000 bytes: expected at most 3000000" in error.reason


async def test_a_download_goes_on_from_a_part(tmp_path: Path) -> None:
    data = os.urandom(100_000)
    (tmp_path / "down.part").write_bytes(data[:40_000])
    async with running() as (_, channel):
        client = BlobClient(channel)
        ref = await client.store(data)
        await client.fetch_to(ref.hash, tmp_path / "down")
        assert (tmp_path / "down").read_bytes() == data
        (tmp_path / "other.part").write_bytes(b"not of this blob")
        with pytest.raises(BlobTransferError, match="came with content of") as caught:
            await client.fetch_to(ref.hash, tmp_path / "other")
        assert caught.value.code == "DATA_LOSS"
        await client.fetch_to(ref.hash, tmp_path / "other")  # the wrong part is gone
        assert (tmp_path / "other").read_bytes() == data


async def test_bad_blob_requests_get_a_status() -> None:
    async with running(limits=BlobLimits(blob_bytes=100)) as (_, channel):
        client = BlobClient(channel)
        with pytest.raises(BlobTransferError, match="expected at most 100") as caught:
            await client.store(b"x" * 101)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        with pytest.raises(BlobTransferError, match="there is no blob") as caught:
            await client.fetch("ab" * 32)
        assert caught.value.code == "NOT_FOUND"
        ref = await client.store(b"abc")
        with pytest.raises(BlobTransferError, match="it has 3 bytes"):
            await client.fetch(ref.hash, 0, 4)

        async def wrong() -> AsyncIterator[BlobPiece]:
            yield BlobPiece(ref=BlobRef(hash=hashlib.sha256(b"xyz").hexdigest(), size_bytes=3))
            yield BlobPiece(offset=0, data=b"xyy")

        stub = BlobsStub(channel)
        code, text = await status(stub.Store(wrong()))
        assert code == "INVALID_ARGUMENT"
        assert "have SHA-256" in text

        async def nothing() -> AsyncIterator[BlobPiece]:
            for piece in ():
                yield piece

        assert (await status(stub.Store(nothing())))[0] == "INVALID_ARGUMENT"
        raw = channel.unary_stream("/shoal.v1.Blobs/Fetch")
        assert (await status(raw(b"\xff").read()))[0] == "INVALID_ARGUMENT"
        assert (await stub.Fetch(BlobRange(hash=ref.hash)).read()).data == b"abc"


async def test_a_broker_that_is_not_there_is_a_clear_error() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        client = BlobClient(channel, attempts=0)
        with pytest.raises(BlobTransferError) as caught:
            await client.store(b"abc")
        assert caught.value.code == "UNAVAILABLE"


async def test_a_download_that_breaks_goes_on_where_it_was(monkeypatch) -> None:
    data = os.urandom(2_500_000)
    asked: list[int] = []
    async with running() as (broker, channel):
        client = BlobClient(channel)
        ref = await client.store(data)
        read = broker.blobs.read

        def breaks(name: str, offset: int, length: int, piece_bytes: int) -> Iterator[bytes]:
            asked.append(offset)
            pieces = read(name, offset, length, piece_bytes)
            if len(asked) > 2:
                yield from pieces
            else:
                yield next(pieces)
                raise BlobStoreError("ABORTED", "broken on purpose")

        monkeypatch.setattr(broker.blobs, "read", breaks)
        assert await client.fetch(ref.hash) == data
        assert asked == [0, 2**20, 2**21]
