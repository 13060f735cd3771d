"""Calls that say too much, too late or nothing, over real connections: what each of them holds, and
how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal.broker.access import limits
from shoal.broker.access.limits import CALLS, MOST_MESSAGE_BYTES, CallLimit
from shoal.broker.service import services
from shoal.net.identity.names import PartyRole
from shoal.proto.broker_pb2 import DescribeRequest, Goodbye, PeerMessage
from shoal.proto.broker_pb2_grpc import AttachStub, RunsStub
from shoal.proto.common_pb2 import Reason

from ...broker.service.test_secured import channel, made, outcome, running, status
from .test_limits import welcomed


async def until(true: Callable[[], bool]) -> None:
    """Turns of the loop, and no more."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.to_thread(lambda: None)


async def test_one_connection_has_only_so_many_calls(monkeypatch: pytest.MonkeyPatch):
    """What comes beyond them waits at its client; other connections go on."""
    monkeypatch.setattr(services, "MOST_STREAMS", 3)
    async with (
        running() as broker,
        channel(broker, made(broker, PartyRole.SUBMITTER, "eve")) as stubs,
        channel(broker, made(broker, PartyRole.SUBMITTER, "ann")) as others,
    ):
        have: Any = stubs.stream_stream("/shoal.v1.Blobs/Have")
        silent = [have() for _ in range(8)]
        mine = broker.secured.guard.shares._of
        await until(lambda: mine["Blobs.Have", "eve"] >= 3)
        assert await RunsStub(others).Describe(DescribeRequest(), timeout=20)
        assert mine["Blobs.Have", "eve"] == 3
        for call in silent:
            call.cancel()
        await until(lambda: not mine["Blobs.Have", "eve"])


@pytest.mark.parametrize(
    ("method", "role"),
    [
        ("Attach.Attach", PartyRole.PEER),
        ("Runs.Watch", PartyRole.SUBMITTER),
        ("Runs.Describe", PartyRole.SUBMITTER),
        ("Blobs.Store", PartyRole.PEER),
        ("Blobs.Fetch", PartyRole.PEER),
    ],
)
async def test_a_call_counts_before_it_says_anything(
    method: str, role: PartyRole, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(CALLS, method, CallLimit(of_one=2))
    async with running() as broker, channel(broker, made(broker, role, "eve")) as stubs:
        start: Any = stubs.stream_stream(f"/shoal.v1.{method.replace('.', '/')}")
        silent = [start(), start()]
        mine = broker.secured.guard.shares._of
        await until(lambda: mine[method, "eve"] == 2)
        third = start()
        await third.done_writing()
        assert (await third.code()).name == "RESOURCE_EXHAUSTED"
        for call in silent:
            call.cancel()
        await until(lambda: not mine[method, "eve"])


async def test_a_message_is_refused_that_is_longer_than_its_method_takes():
    """Most have names and numbers only: 64 KiB, of the 4 MiB that gRPC lets in."""
    async with running() as broker, channel(broker, made(broker, PartyRole.SUBMITTER)) as stubs:
        for method, most in (("Runs/Describe", 64 << 10), ("Blobs/Have", 1 << 20)):
            send: Any = stubs.unary_unary(f"/shoal.v1.{method}")
            code, why = await outcome(send(bytes(most + 1)))
            assert code == "RESOURCE_EXHAUSTED", why
            assert f"{most + 1} bytes of a " in why
            assert f"expected at most {most}" in why


async def test_what_is_longer_than_any_message_is_not_read_at_all():
    """gRPC ends the call by the first five bytes; what we say of a length was read before."""
    async with running() as broker, channel(broker, made(broker, PartyRole.SUBMITTER)) as stubs:
        send: Any = stubs.unary_unary("/shoal.v1.Runs/Submit")
        code, why = await outcome(send(bytes(MOST_MESSAGE_BYTES + 1)))
        assert (code, "expected at most" in why) == ("RESOURCE_EXHAUSTED", False), why


async def test_one_subject_has_two_messages_read_at_a_time():
    async with (
        running() as broker,
        channel(broker, made(broker, PartyRole.SUBMITTER, "eve")) as stubs,
        channel(broker, made(broker, PartyRole.SUBMITTER, "ann")) as others,
    ):
        reading = broker.secured.guard.shares._reading
        have: Any = stubs.stream_stream("/shoal.v1.Blobs/Have")
        silent = [have(), have()]
        await until(lambda: "eve" in reading and reading["eve"][1] == 2)
        third = asyncio.ensure_future(RunsStub(stubs).Describe(DescribeRequest(), timeout=20))
        await until(lambda: third.done() or reading["eve"][1] == 3)
        assert await RunsStub(others).Describe(DescribeRequest(), timeout=20)
        assert not third.done()
        silent[0].cancel()
        assert await third


async def test_a_call_without_its_message_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "_USUAL", limits.CallLimit(message_s=0.2))
    async with running() as broker, channel(broker, made(broker, PartyRole.SUBMITTER)) as stubs:
        call: Any = stubs.stream_stream("/shoal.v1.Runs/Describe")()
        code, why = await status(asyncio.wait_for(call.read(), 20))
        assert (code, why) == ("DEADLINE_EXCEEDED", "no message of Runs.Describe came within 0.2 s")


async def test_a_long_word_of_a_peer_is_refused_unread(monkeypatch: pytest.MonkeyPatch):
    looked_at: list[int] = []
    real = services.parsed
    monkeypatch.setattr(
        services, "parsed", lambda data, kind: looked_at.append(len(data)) or real(data, kind)
    )
    async with running() as broker, channel(broker, made(broker, PartyRole.PEER, "eve")) as stubs:
        call = await welcomed(stubs, "eve")
        await call.write(PeerMessage(goodbye=Goodbye(reason=Reason(text="x" * (64 << 10)))))
        while (said := await asyncio.wait_for(call.read(), 20)).WhichOneof("kind") != "refused":
            pass
        assert "expected at most 65536" in said.refused.reason.text
        assert max(looked_at) < 64 << 10


async def test_of_very_many_that_are_refused_nothing_is_taken():
    """Else each would hold a message for two seconds. Nothing is written either: a write that
    meets a call which has ended hides its status."""
    async with running() as broker, channel(broker, made(broker, PartyRole.SUBMITTER)) as stubs:
        broker.secured.guard.taking = asyncio.Semaphore(0)  # as many are refused now
        call = AttachStub(stubs).Attach()
        code, _ = await status(asyncio.wait_for(call.read(), 20))
        assert code == "PERMISSION_DENIED"
