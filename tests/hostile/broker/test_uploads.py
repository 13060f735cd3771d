"""Uploads that are announced and never come, over real connections: they end, they keep little from
others meanwhile, and one that broke goes on where it was."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.broker.service import blobs_service
from shoal.broker.service.blobs import BlobLimits
from shoal.net.blobs.client import BlobClient
from shoal.net.identity.names import PartyRole
from shoal.proto.broker_pb2 import BlobPiece, BlobQuery
from shoal.proto.broker_pb2_grpc import BlobsStub
from shoal.proto.common_pb2 import BlobRef

from ...broker.service.test_secured import channel, made, running, status
from .test_calls import until

MIB = 1 << 20


def never(n: int, size: int) -> BlobRef:
    return BlobRef(hash=hashlib.sha256(b"%d" % n).hexdigest(), size_bytes=size)


@asynccontextmanager
async def announced(blobs: BlobsStub, ref: BlobRef, first: bytes = b"") -> AsyncIterator[Any]:
    """An upload of which some bytes came, and nothing more comes."""
    call = blobs.Store()
    await call.write(BlobPiece(ref=ref))
    await call.initial_metadata()  # the broker has taken it
    if first:
        await call.write(BlobPiece(offset=0, data=first))
    yield call
    call.cancel()


async def test_what_one_announces_and_does_not_bring_leaves_room_for_others():
    limits = BlobLimits(total_bytes=64 * MIB, blob_bytes=64 * MIB)
    async with (
        running(limits=limits) as broker,
        channel(broker, made(broker, PartyRole.SUBMITTER, "eve")) as eve,
        channel(broker, made(broker, PartyRole.PEER, "ann")) as ann,
        announced(BlobsStub(eve), never(1, 10 * MIB)),
        announced(BlobsStub(eve), never(2, 6 * MIB)),
    ):
        more = BlobsStub(eve).Store(iter([BlobPiece(ref=never(3, MIB))]))
        code, why = await status(more)
        assert code == "RESOURCE_EXHAUSTED"
        assert f"eve has announced {16 * MIB} that have not come" in why
        assert f"at most {16 * MIB} of one subject" in why
        ref = await BlobClient(ann).store(bytes(16 * MIB))
        assert ref.size_bytes == 16 * MIB


async def test_of_the_last_room_an_announcement_keeps_a_quarter_from_others():
    limits = BlobLimits(total_bytes=16 * MIB)
    async with (
        running(limits=limits) as broker,
        channel(broker, made(broker, PartyRole.SUBMITTER, "eve")) as eve,
        channel(broker, made(broker, PartyRole.PEER, "ann")) as ann,
    ):
        broker.blobs.put(bytes(12 * MIB))
        async with announced(BlobsStub(eve), never(1, 4 * MIB)):
            await BlobClient(ann).store(b"x" * (2 * MIB))
            more = BlobsStub(ann).Store(iter([BlobPiece(ref=never(2, 2 * MIB))]))
            code, why = await status(more)
            assert code == "RESOURCE_EXHAUSTED"
            assert f"the broker holds {14 * MIB + MIB // 2} of at most {16 * MIB}" in why


async def test_one_that_falls_silent_ends_and_goes_on_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blobs_service, "SILENCE_S", 0.5)
    data = bytes(range(256)) * 4096
    ref = BlobRef(hash=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    async with running() as broker, channel(broker, made(broker, PartyRole.PEER, "ann")) as stubs:
        blobs = BlobsStub(stubs)
        async with announced(blobs, ref, data[:300_000]) as call:
            code, why = await status(call)
            assert code == "ABORTED"
            assert f"of {len(data)} bytes 300000 are here" in why
        assert not broker.blobs._open
        assert (await blobs.Have(BlobQuery(blobs=[ref]))).blobs[0].size_bytes == 300_000
        assert (await BlobClient(stubs).store(data)).hash == ref.hash
        assert broker.blobs.get(ref.hash) == data


async def test_one_that_drips_ends_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blobs_service, "SILENCE_S", 0.5)
    ref = never(1, 32 * MIB)

    async def drip() -> AsyncIterator[BlobPiece]:
        yield BlobPiece(ref=ref)
        at = 0
        while not call.done():
            yield BlobPiece(offset=at, data=b"x")
            at += 1
            await asyncio.wait({ended}, timeout=0.05)

    async with running() as broker, channel(broker, made(broker, PartyRole.PEER, "ann")) as stubs:
        call = BlobsStub(stubs).Store(drip())
        ended = asyncio.ensure_future(call)
        code, why = await status(ended)
        assert code == "ABORTED"
        assert "less than 65536 came within 0.5 s" in why
        assert not broker.blobs._open


async def test_one_whose_caller_goes_while_it_begins_is_over():
    begins, may_go_on, begun = (threading.Event() for _ in range(3))
    async with running() as broker, channel(broker, made(broker, PartyRole.PEER, "eve")) as stubs:
        real = broker.blobs.begin

        def slow(*announced: Any) -> Any:
            begins.set()
            may_go_on.wait(20)
            try:
                return real(*announced)
            finally:
                begun.set()

        broker.blobs.begin = slow
        call = BlobsStub(stubs).Store()
        await call.write(BlobPiece(ref=never(1, MIB)))
        await asyncio.to_thread(begins.wait, 20)
        call.cancel()
        await until(lambda: not broker.secured.guard.shares._open["Blobs.Store"])
        may_go_on.set()
        await asyncio.to_thread(begun.wait, 20)
        await until(lambda: not broker.blobs._open)
