"""The daemon over real gRPC on loopback: streams, runs, and how it leaves."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import grpc.aio
import pytest

from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import Broker, BrokerConfig, BrokerConfigError
from shoal.proto.broker_pb2 import (
    BUILDING,
    DONE,
    FAILED,
    WAITING,
    BlobQuery,
    BlobRange,
    DescribeRequest,
    Exported,
    Goodbye,
    Ready,
    RunRequest,
    StepReport,
    WatchRequest,
)
from shoal.proto.broker_pb2_grpc import BlobsStub, RunsStub
from shoal.proto.common_pb2 import BlobRef

from .loopback import Peer, running, status, stored_spec, submit, tiny_graph

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
