"""Certificates that end while a call is under way, over real connections: it goes no further, in
whichever direction its bytes go, also when nothing happens in it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import pytest

from shoal.broker.events import RunSubmitted
from shoal.broker.service import services
from shoal.broker.service.server import Broker
from shoal.net.blobs.client import BlobTransferError
from shoal.net.identity.authority import Authority
from shoal.net.identity.names import PartyRole
from shoal.peer.blobs import sharing
from shoal.proto.broker_pb2 import BlobPiece, BlobRange, RunEvent, Submitted, WatchRequest
from shoal.proto.broker_pb2_grpc import BlobsStub, RunsStub
from shoal.proto.common_pb2 import BlobRef
from shoal.tests.broker.conftest import make_spec
from shoal.tests.broker.service.test_secured import channel, made, running, status
from shoal.tests.peer.blobs.test_sharing import NAME, fellows, holding, party, serving

MIB = 1 << 20


def ends_after(broker: Broker, looks: float) -> None:
    """All certificates, when the broker has looked at its clock so often."""
    guard, left = broker.secured.guard, looks

    def clock() -> float:
        nonlocal left
        left -= 1
        return time.time() + (0 if left >= 0 else 2 * 3600)

    guard._clock = clock


async def came(call: grpc.aio.UnaryStreamCall) -> int:
    """How many messages came before the call ended as it should."""
    count = 0

    async def whole() -> None:
        nonlocal count
        while await call.read() is not grpc.aio.EOF:
            count += 1

    code, why = await status(whole())
    assert (code, "has ended: renew it" in why) == ("UNAUTHENTICATED", True)
    return count


async def submitted(broker: Broker, events: int) -> str:
    """A run of ann's in which so much has happened."""
    await broker.shell.ask(lambda request: RunSubmitted(request, make_spec(), "ann"), Submitted)
    (run,) = broker.shell.machine.runs.values()
    for _ in range(events):
        run.record.history.add(RunEvent(note="something"))
    return run.id


async def test_a_watcher_gets_no_event_more_in_the_middle_of_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(services, "_LOOK_S", 0.05)
    async with (
        running() as broker,
        channel(broker, made(broker, PartyRole.SUBMITTER, "ann")) as stubs,
    ):
        run = await submitted(broker, events=8)
        ends_after(broker, looks=4)
        assert 0 < await came(RunsStub(stubs).Watch(WatchRequest(run=run))) < 8


async def test_a_watcher_of_a_run_in_which_nothing_happens_is_asked_too(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(services, "_LOOK_S", 0.05)
    async with (
        running() as broker,
        channel(broker, made(broker, PartyRole.SUBMITTER, "ann")) as stubs,
    ):
        run = await submitted(broker, events=0)
        call = RunsStub(stubs).Watch(WatchRequest(run=run))
        assert (await call.read()).state.run == run
        ends_after(broker, looks=0)
        assert await asyncio.wait_for(came(call), 20) == 0


async def test_a_blob_is_given_no_further():
    async with running() as broker, channel(broker, made(broker, PartyRole.PEER)) as stubs:
        name = broker.blobs.put(bytes(8 * MIB))
        ends_after(broker, looks=4)
        assert 0 < await came(BlobsStub(stubs).Fetch(BlobRange(hash=name))) < 8


async def test_a_blob_is_taken_no_further():
    data = bytes(2 * MIB)
    ref = BlobRef(hash=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    async with running() as broker, channel(broker, made(broker, PartyRole.PEER)) as stubs:
        call = BlobsStub(stubs).Store()
        await call.write(BlobPiece(ref=ref))
        await call.initial_metadata()  # the broker has taken it
        ends_after(broker, looks=0)
        await call.write(BlobPiece(offset=0, data=data[:MIB]))
        code, why = await status(asyncio.wait_for(call, 10))
        assert (code, "has ended: renew it" in why) == ("UNAUTHENTICATED", True)
        assert not broker.blobs.size_of(ref.hash)


async def test_a_peer_gives_no_blob_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    authority = Authority.new(datetime.now(UTC))
    late = SimpleNamespace(time=lambda: time.time() + 2 * 86_400)
    monkeypatch.setattr(sharing, "time", late)
    async with (
        serving(holding(tmp_path / "a"), credential=party(authority, "a")) as address,
        fellows({"a": address}, party(authority, "b")) as found,
    ):
        with pytest.raises(BlobTransferError, match="b has ended: dial with a newer one"):
            await found.clients[0].fetch(NAME, 0, 9)
