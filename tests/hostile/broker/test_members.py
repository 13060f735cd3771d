"""One member against the runs of others, over real connections: by what it says of itself, by a
plan of its own hand, and by what it says of another."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from shoal.proto.broker_pb2 import FAILED, Fault, Hello, Profile, RunSpec, Speeds, WatchRequest
from shoal.proto.broker_pb2_grpc import RunsStub
from shoal.proto.common_pb2 import Reason
from shoal.tests.planner.service.sharing import SHARING

from ...broker.conftest import make_spec
from ...broker.service.loopback import Peer, running, stored_spec, submit, tiny_graph

HUGE = 2**64 - 1
ODD = Profile(
    name="evil",
    operator_set=1,
    device_memory_bytes=HUGE,
    host_memory_bytes=HUGE,
    monthly_bytes=HUGE,
    cores=2**32 - 1,
    threads=2**32 - 1,
    up_bytes_per_s=1e-308,
    down_bytes_per_s=float("inf"),
    stay_s=float("nan"),
    speeds=Speeds(product_flops_per_s=float("nan"), memory_bytes_per_s=1e308, call_s=-1.0),
)


@pytest.fixture(scope="module", autouse=True)
def warm_planner(one_warm_planner: None) -> None:
    """Scripted peers send no heartbeats: none waits out its lease while torch is imported."""
    SHARING.get().wait(lambda: False)


async def said(peer: Peer, kind: str) -> Any:
    """The next message of a kind that the broker has for a peer."""
    while True:
        message = await peer.read()
        assert message is not None, f"its stream ended before {kind} came"
        if message.WhichOneof("kind") == kind:
            return getattr(message, kind)


async def spec_of(channel: grpc.aio.Channel, **plan: Any) -> RunSpec:
    """A run of three operators."""
    stored = await stored_spec(channel, tiny_graph())
    spec = make_spec(plan=plan)
    spec.graph.CopyFrom(stored.graph)
    spec.data.CopyFrom(stored.data)
    return spec


async def test_what_a_peer_says_of_itself_ends_no_run_of_others() -> None:
    async with running() as (_, channel):
        evil, honest = Peer(channel, "evil"), Peer(channel, "honest")
        hello = Hello(version=3, peer="evil", boot="b", counter=1, profile=ODD)
        await evil.say(hello=hello)
        await said(evil, "welcome")
        await honest.join()
        run = await submit(channel, await spec_of(channel, stages=2))
        assert (await said(honest, "assign")).run == run


async def test_a_plan_by_hand_takes_no_more_than_its_peers_offer() -> None:
    async with running() as (_, channel):
        small = Peer(channel, "small")
        profile = Profile(name="small", operator_set=1, device_memory_bytes=50)
        await small.say(hello=Hello(version=3, peer="small", boot="b", counter=1, profile=profile))
        await said(small, "welcome")
        spec = await spec_of(channel)
        spec.plan.microbatch_size, spec.plan.schedule = 2, "gpipe"
        spec.plan.stages.add(start=0, stop=3, holders=["small"])
        for _ in range(2):
            spec.plan.routes.add().visits.add(stage=0, peer="small")
        run = await submit(channel, spec)
        state = [e async for e in RunsStub(channel).Watch(WatchRequest(run=run))][-1].state
        assert (state.phase, state.reason.code) == (FAILED, "plan")
        assert "of small, which offers 50 B: short by" in state.reason.text


async def test_who_accuses_another_goes_itself() -> None:
    async with running() as (broker, channel):
        honest, evil, spare = (Peer(channel, name) for name in ("honest", "evil", "spare"))
        await honest.join()
        await evil.join()
        run = await submit(channel, await spec_of(channel, stages=2))
        assert (await said(honest, "assign")).term == (await said(evil, "assign")).term == 1
        await spare.join()
        reason = Reason(code="link", text="no frame came for 30 s")
        await evil.say(fault=Fault(run=run, term=1, step=0, reason=reason, about="honest"))
        assert (await said(evil, "leave")).run == run
        assert (await said(honest, "assign")).term == (await said(spare, "assign")).term == 2
        assert set(broker.shell.machine.replica(run).record.peers) == {"honest", "spare"}
