"""A broker whose own process is stopped for longer than a lease, as by SIGSTOP: nobody is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import grpc.aio
import pytest

from shoal.broker.events import Event, Instruction, TimerFired, WasAway
from shoal.proto.broker_pb2 import RUNNING, DescribeRequest, Heartbeat, Hello, PeerMessage, Profile
from shoal.proto.broker_pb2_grpc import AttachStub, RunsStub
from shoal.proto.graph_pb2 import FULL

from ...broker.conftest import World, make_world, world  # noqa: F401  # fixtures
from ...broker.service.test_secured import running

PROGRAM = """
import asyncio, sys
from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import BrokerConfig, serve
options = BrokerOptions(lease_s=1.0, heartbeat_s=0.3, probe_s=0.0)
config = BrokerConfig(port=0, insecure=True, options=options)
asyncio.run(serve(config, ready=lambda b: print(b.address, flush=True)))
"""


def test_leases_and_deadlines_begin_anew(world: World) -> None:  # noqa: F811
    run = world.start("a", "b")
    world.now += 3600.0
    world.handle(WasAway(3600.0))
    world.wait(5.0)
    assert set(world.machine.members.members) == {"a", "b"}
    assert world.state(run).phase == RUNNING
    world.wait(20.0)  # and who is silent from now on is lost
    assert not world.machine.members.members


def test_who_was_to_come_back_has_as_much_more_time(world: World) -> None:  # noqa: F811
    run = world.start("a", "b")
    world.break_stream("a")
    world.now += 3600.0
    world.handle(WasAway(3600.0))
    world.wait(5.0)
    assert world.state(run).phase == RUNNING
    world.say("b", heartbeat=Heartbeat())
    world.wait(6.0)
    assert "did not come back within a lease" in world.state(run).reason.text


def test_who_was_to_leave_its_run_has_as_much_more_time(world: World) -> None:  # noqa: F811
    world.cancel(world.start("a"))
    world.now += 3600.0
    world.handle(WasAway(3600.0))
    world.wait(5.0)
    assert world.machine.members.members["a"].state == "draining"


async def test_a_pause_is_noticed_by_whatever_comes_first() -> None:
    """What came meanwhile is handled behind it: a timer, a message, or nothing at all."""
    async with running() as broker:
        shell, told = broker.shell, list[object]()
        handle = shell.machine.handle

        def seen(event: Event, now: float) -> list[Instruction]:
            told.append(event)
            return handle(event, now)

        shell.machine.handle = seen  # type: ignore[method-assign]
        for wakes in (lambda: shell.post(TimerFired("peer:nobody")), shell._tick):
            told.clear()
            shell._alive.cancel()
            shell._alive_at -= 60.0
            wakes()
            assert isinstance(told[0], WasAway), told
            assert 60.0 <= told[0].seconds < 70.0


@pytest.mark.process
async def test_a_broker_that_was_stopped_keeps_its_peers() -> None:
    broker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert broker.stdout is not None
        address = (await asyncio.wait_for(broker.stdout.readline(), 60)).decode().strip()
        async with grpc.aio.insecure_channel(address) as channel:
            call = AttachStub(channel).Attach()
            profile = Profile(name="a", device_memory_bytes=1, operator_set=FULL)
            hello = Hello(version=3, peer="a", boot="b", counter=1, profile=profile)
            await call.write(PeerMessage(hello=hello))
            assert (await call.read()).HasField("welcome")
            lost = asyncio.ensure_future(call.read())
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                await asyncio.wait({lost}, timeout=4.0)  # four leases
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            await call.write(PeerMessage(heartbeat=Heartbeat(sent_at_s=1.0)))
            found = await RunsStub(channel).Describe(DescribeRequest(), timeout=20)
            assert [p.peer for p in found.peers] == ["a"]
            assert not lost.done()
    finally:
        broker.send_signal(signal.SIGTERM)
        _, said = await broker.communicate()
    assert b"broker_was_away" in said
