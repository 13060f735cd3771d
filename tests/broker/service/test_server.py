"""The daemon over real gRPC on loopback: streams, calls, blobs, and how it leaves."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from shoal.broker.membership.member import PROTOCOL
from shoal.broker.options import BrokerOptions
from shoal.broker.service.blobs import BlobLimits, BlobStoreError
from shoal.broker.service.server import Broker, BrokerConfig, BrokerConfigError
from shoal.net.blobs.client import BlobClient, BlobTransferError, blob_ref
from shoal.net.cap import Cap
from shoal.proto.broker_pb2 import (
    BUILDING,
    DONE,
    FAILED,
    WAITING,
    BlobPiece,
    BlobQuery,
    BlobRange,
    DescribeRequest,
    Exported,
    Goodbye,
    Hello,
    PeerMessage,
    Profile,
    Ready,
    RunRequest,
    RunSpec,
    StepReport,
    WatchRequest,
)
from shoal.proto.broker_pb2_grpc import AttachStub, BlobsStub, RunsStub
from shoal.proto.common_pb2 import BlobRef


class Peer:
    """A scripted peer on a real stream."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        self.name = name
        self.call = AttachStub(channel).Attach()

    async def join(self, counter: int = 1, version: int = PROTOCOL) -> Any:
        profile = Profile(name=self.name, operator_set=1, device_memory_bytes=2**30)
        hello = Hello(
            version=version,
            peer=self.name,
            boot=f"b{counter}",
            counter=counter,
            profile=profile,
            address="127.0.0.1:1",
        )
        await self.say(hello=hello)
        return await self.read()

    async def say(self, **kind: Any) -> None:
        await self.call.write(PeerMessage(**kind))

    async def read(self) -> Any:
        message = await self.call.read()
        return None if message == grpc.aio.EOF else message


@asynccontextmanager
async def running(**config: Any) -> AsyncIterator[tuple[Broker, grpc.aio.Channel]]:
    # The peers of these tests are scripts and answer no probes.
    config = {"insecure": True, "port": 0, "options": BrokerOptions(probe_s=0.0), **config}
    async with (
        Broker(BrokerConfig(**config)) as broker,
        grpc.aio.insecure_channel(broker.address) as channel,
    ):
        yield broker, channel


async def until(holds: Callable[[], bool]) -> None:
    """Lets everything else run until something holds; the test's timeout ends it otherwise."""
    while not holds():  # noqa: ASYNC110 (what it waits for has no event of its own)
        await asyncio.sleep(0)


async def status(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.org", "::"])
def test_insecure_binds_to_loopback_only(host) -> None:
    with pytest.raises(BrokerConfigError, match="loopback only"):
        BrokerConfig(insecure=True, host=host)


async def test_a_port_that_is_taken_is_a_clear_error() -> None:
    async with running() as (broker, _):
        port = int(broker.address.rpartition(":")[2])
        with pytest.raises(BrokerConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with running(port=port):
                pass


async def test_the_join_line() -> None:
    async with running() as (broker, _):
        assert broker.join_line() == f"shoal join {broker.address} --insecure"


# ---------------------------------------------------------------- streams


async def test_peers_join_and_show_in_the_description() -> None:
    async with running() as (broker, channel):
        a = Peer(channel, "a")
        welcome = (await a.join()).welcome
        assert (welcome.lease_s, welcome.heartbeat_s) == (10.0, 2.0)
        described = await RunsStub(channel).Describe(DescribeRequest())
        assert [(p.peer, p.membership) for p in described.peers] == [("a", "pool")]
        assert repr(broker) == f"<Broker at {broker.address}: 1 peer (1 in pool), 0 runs>"
        await a.say(goodbye=Goodbye())
        assert await a.read() is None
        assert repr(broker.shell.machine) == "<Broker 0 peers (0 in pool), 0 runs>"


async def test_a_refused_peer_is_told_why_and_its_stream_ends() -> None:
    async with running() as (_, channel):
        a = Peer(channel, "a")
        refused = (await a.join(version=9)).refused
        assert refused.reason.code == "version"
        assert await a.read() is None


async def test_a_takeover_ends_the_old_stream_only() -> None:
    async with running() as (broker, channel):
        old, new = Peer(channel, "a"), Peer(channel, "a")
        await old.join(counter=1)
        assert (await new.join(counter=2)).HasField("welcome")
        assert (await old.read()).refused.reason.code == "fenced"
        assert await old.read() is None
        assert broker.shell.machine.members.members["a"].counter == 2


async def test_a_malformed_message_ends_its_own_stream_only() -> None:
    async with running() as (broker, channel):
        good = Peer(channel, "good")
        await good.join()
        raw = channel.stream_stream("/shoal.v1.Attach/Attach")()
        await raw.write(b"\xff\xff\xff")
        answer = await raw.read()
        assert b"no known kind" in answer
        assert await raw.read() == grpc.aio.EOF
        assert list(broker.shell.machine.members.members) == ["good"]


async def test_a_broken_connection_is_a_lost_peer() -> None:
    async with running() as (broker, channel):
        async with grpc.aio.insecure_channel(broker.address) as other:
            a = Peer(other, "a")
            await a.join()
        run = await submit(channel)
        watching = RunsStub(channel).Watch(WatchRequest(run=run))
        async for event in watching:
            if event.state.reason.code == "peers":
                break
        assert not broker.shell.machine.members.members
        watching.cancel()


async def test_a_peer_that_does_not_read_loses_its_stream(monkeypatch) -> None:
    monkeypatch.setattr("shoal.broker.service.shell.OUTBOX_MESSAGES", 0)
    async with running() as (broker, channel):
        a = Peer(channel, "a")
        assert await a.join() is None
        assert not broker.shell.machine.members.members


# ---------------------------------------------------------------- runs


async def submit(channel: grpc.aio.Channel, spec: RunSpec | None = None) -> str:
    if spec is None:
        spec = await stored_spec(channel)
    return (await RunsStub(channel).Submit(spec)).run


async def stored_spec(channel: grpc.aio.Channel, graph: bytes = b"graph") -> RunSpec:
    from shoal.job import Job

    client = BlobClient(channel)
    plan = {"scheduler": "uniform"}  # a graph this small is best run by one peer
    job = Job(model="m.py:f", steps=1, batch=4, microbatch=2, eval_every=0, plan=plan)
    return RunSpec(
        version=1,
        name="test",
        job=job.to_json(),
        graph=await client.store(graph),
        data=await client.store(b"{}"),
        microbatches=2,
        microbatch_size=2,
        steps=1,
    )


def tiny_graph() -> bytes:
    from shoal.dag.ir.convert import graph_to_bytes
    from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, Size, TensorSpec

    batch = Size(1)
    hidden = Output(TensorSpec((batch, 3), "float32"), True)
    loss = Output(TensorSpec((), "float32"), True)
    args = (Ref("in:x"), Ref("param:w"))
    return graph_to_bytes(
        Graph(
            inputs=(Input("x", TensorSpec((batch, 3), "float32")),),
            parameters=(Parameter("w", TensorSpec((3, 3), "float32")),),
            buffers=(),
            operators=(
                Operator("linear", "aten.linear.default", args, (), (hidden,)),
                Operator("relu", "aten.relu.default", (Ref("linear"),), (), (hidden,)),
                Operator("loss", "aten.sum.default", (Ref("relu"),), (), (loss,)),
            ),
            loss="loss",
        )
    )


async def test_a_run_is_planned_built_and_trained_by_scripted_peers() -> None:
    async with running() as (_, channel):
        peers = [Peer(channel, name) for name in "ab"]
        for peer in peers:
            await peer.join()
        run = await submit(channel, await stored_spec(channel, tiny_graph()))
        assigns = [(await peer.read()).assign for peer in peers]
        assert [len(a.dials) for a in assigns] == [1, 0]
        assert {(s.start, tuple(s.holders)) for s in assigns[0].slice.plan.stages} >= {(0, ("a",))}
        for peer in peers:
            await peer.say(ready=Ready(run=run, term=1))
        for peer in peers:
            assert (await peer.read()).HasField("start")
            await peer.say(step=StepReport(run=run, term=1, step=0))
            weights = BlobRef(hash="ab" * 32, size_bytes=1)
            await peer.say(exported=Exported(run=run, term=1, step=1, weights=weights))
        for peer in peers:
            assert (await peer.read()).leave.reason.code == "done"
        events = [e async for e in RunsStub(channel).Watch(WatchRequest(run=run))]
        assert [e.number for e in events] == list(range(len(events)))
        assert events[-1].state.phase == DONE
        some = [
            e.number async for e in RunsStub(channel).Watch(WatchRequest(run=run, from_event=3))
        ]
        assert some == list(range(3, len(events)))


async def test_events_so_far_end_though_the_run_goes_on() -> None:
    async with running() as (_, channel):
        a = Peer(channel, "a")
        await a.join()
        run = await submit(channel, await stored_spec(channel, tiny_graph()))
        await a.read()
        wanted = WatchRequest(run=run, so_far=True)
        events = [e async for e in RunsStub(channel).Watch(wanted)]
        assert [e.number for e in events] == list(range(len(events)))
        assert events[-1].HasField("state")
        assert events[-1].state.phase == BUILDING
        beyond = WatchRequest(run=run, so_far=True, from_event=1000)
        assert [e async for e in RunsStub(channel).Watch(beyond)] == []


async def test_a_graph_that_is_none_fails_the_run_and_nothing_else() -> None:
    async with running() as (_, channel):
        a = Peer(channel, "a")
        await a.join()
        run = await submit(channel, await stored_spec(channel, b"\x00garbage"))
        events = [e async for e in RunsStub(channel).Watch(WatchRequest(run=run))]
        assert events[-1].state.phase == FAILED
        assert events[-1].state.reason.code == "graph"
        described = await RunsStub(channel).Describe(DescribeRequest())
        assert described.peers[0].membership == "pool"


async def test_watching_follows_a_run_live_until_it_is_cancelled() -> None:
    async with running() as (_, channel):
        runs = RunsStub(channel)
        run = await submit(channel)
        watching = runs.Watch(WatchRequest(run=run))
        first = await watching.read()
        assert first.state.phase == WAITING
        assert "has 0 in the pool" in first.state.reason.text
        cancelled = await runs.Cancel(RunRequest(run=run))
        last = await watching.read()
        assert last.state == cancelled
        assert await watching.read() == grpc.aio.EOF


async def test_bad_requests_get_a_status_with_a_readable_message() -> None:
    async with running() as (_, channel):
        runs = RunsStub(channel)
        assert (await status(runs.Cancel(RunRequest(run="r-x"))))[0] == "NOT_FOUND"
        assert (await status(runs.Watch(WatchRequest(run="r-x")).read()))[0] == "NOT_FOUND"
        spec = await stored_spec(channel)
        spec.steps = 7
        code, text = await status(runs.Submit(spec))
        assert (code, text) == ("INVALID_ARGUMENT", "steps of the run is 7, its job says 1")
        spec = await stored_spec(channel)
        spec.graph.hash = "ab" * 32
        code, text = await status(runs.Submit(spec))
        assert code == "NOT_FOUND"
        assert "upload them before the run is submitted" in text
        raw = channel.unary_unary("/shoal.v1.Runs/Submit")
        code, text = await status(raw(b"\xff\xff"))
        assert code == "INVALID_ARGUMENT"
        assert "2 bytes are no RunSpec" in text


async def test_a_store_that_is_busy_holds_up_nobody_else() -> None:
    """Its lock is held by the thread of the event loop, which waits for nobody then."""
    async with running() as (broker, channel):
        runs, blobs = RunsStub(channel), BlobsStub(channel)
        spec = await stored_spec(channel)
        with broker.shell.blobs._lock:
            waiting = [
                asyncio.ensure_future(call)
                for call in (
                    runs.Submit(spec),
                    blobs.Have(BlobQuery(blobs=[spec.graph])),
                    blobs.Fetch(BlobRange(hash=spec.graph.hash)).read(),
                )
            ]
            for _ in range(3):
                assert not (await runs.Describe(DescribeRequest())).runs
            assert not any(call.done() for call in waiting)
        submitted, had, piece = await asyncio.gather(*waiting)
        assert had.blobs[0].size_bytes == len(piece.data)
        assert [r.run for r in (await runs.Describe(DescribeRequest())).runs] == [submitted.run]


# ---------------------------------------------------------------- blobs


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


# ---------------------------------------------------------------- leaving


async def test_it_leaves_no_thread_no_folder_and_no_port() -> None:
    before = {t.ident for t in threading.enumerate()}
    async with Broker(BrokerConfig(insecure=True, port=0)) as broker:
        folder = broker.blobs.folder
        channel = grpc.aio.insecure_channel(broker.address)
        a = Peer(channel, "a")
        await a.join()
        await submit(channel)
    refused = (await a.read()).refused
    assert refused.reason.code == "leaving"
    assert refused.again
    assert await a.read() is None
    await channel.close()
    assert not folder.exists()
    left = [t.name for t in threading.enumerate() if t.ident not in before]
    assert [name for name in left if name.startswith("shoal-broker")] == []
    async with running(port=int(broker.address.rpartition(":")[2])):
        pass


async def test_draining_ends_when_no_run_is_active_or_when_asked_again() -> None:
    async with running(drain_s=1000.0) as (broker, channel):
        await broker.drain(asyncio.Event())
        assert (await status(RunsStub(channel).Submit(await stored_spec(channel))))[
            0
        ] == "UNAVAILABLE"
    async with running(drain_s=1000.0) as (broker, channel):
        a = Peer(channel, "a")
        await a.join()
        run = await submit(channel, await stored_spec(channel, tiny_graph()))
        assert (await a.read()).assign.run == run
        leave = asyncio.Event()
        draining = asyncio.create_task(broker.drain(leave))
        await asyncio.sleep(0)
        assert not draining.done()
        leave.set()
        await draining


async def test_a_broker_with_a_state_folder_leaves_its_runs_as_they_are(tmp_path: Path) -> None:
    async with running(state=tmp_path) as (broker, channel):
        run = await submit(channel)
        await broker.drain(asyncio.Event())  # at once
    async with running(state=tmp_path) as (broker, channel):
        described = await RunsStub(channel).Describe(DescribeRequest())
        assert [(r.run, r.phase) for r in described.runs] == [(run, WAITING)]


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two heartbeats"):
        BrokerOptions(lease_s=3.0, heartbeat_s=2.0)
    with pytest.raises(ValueError, match="drained_s is 0"):
        BrokerOptions(drained_s=0.0)


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
