"""Who says more than there is to say: over a real connection a peer is held up at its own end and
others are served; and nobody fills the log."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shoal.broker.access.limits import MESSAGES
from shoal.broker.events import Log, PeerSaid
from shoal.broker.machine import _IGNORED
from shoal.broker.service import services
from shoal.broker.service.door import front as fronts
from shoal.net.identity.names import DOOR_NAME, PartyRole
from shoal.net.knocks import RateLimiter
from shoal.peer.core.options import PeerOptions
from shoal.proto.broker_pb2 import Drained, Heartbeat, PeerMessage
from shoal.proto.broker_pb2_grpc import AttachStub

from ...broker.conftest import World, make_world, world  # noqa: F401  # fixtures
from ...broker.service.test_secured import channel, hello_for, made, running
from .test_limits import hello, welcomed


async def test_what_one_peer_says_too_often_waits_with_it_and_others_are_heard(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(services, "MESSAGES", (5, 1e-6))
    said: list[str] = []
    async with running() as broker:
        honest_post = broker.shell.post

        def post(event: object) -> None:
            if isinstance(event, PeerSaid):
                said.append(str(event.stream).rpartition(" ")[2])
            honest_post(event)

        monkeypatch.setattr(broker.shell, "post", post)
        async with (
            channel(broker, made(broker, PartyRole.PEER, "eve")) as evil,
            channel(broker, made(broker, PartyRole.PEER, "eve")) as again,
            channel(broker, made(broker, PartyRole.PEER, "ann")) as stubs,
        ):
            call = await welcomed(evil, "eve")
            for _ in range(50):
                await call.write(PeerMessage(heartbeat=Heartbeat()))
            other = AttachStub(again).Attach()  # by another stream it is no other peer
            await other.write(hello("eve"))
            for _ in range(3):  # each an answer of the broker's loop
                (await welcomed(stubs, "ann")).cancel()
            assert said.count("eve") <= 5
            assert said.count("ann") == 3
            call.cancel()
            other.cancel()


def test_what_is_ignored_fills_no_log(world: World) -> None:  # noqa: F811
    world.join("eve")
    world.join("ann")
    lines = 0
    for _ in range(1000):
        out = world.say("eve", drained=Drained(run="none"))
        lines += sum(isinstance(i, Log) and i.name == "message_ignored" for i in out)
    assert lines == _IGNORED[0]
    assert world.machine.ignored["drained"] == 1000
    out = world.say("ann", drained=Drained(run="none"))
    assert [i.name for i in out if isinstance(i, Log)] == ["message_ignored"]


async def test_a_stranger_who_knocks_on_fills_no_log(caplog: pytest.LogCaptureFixture):
    async with running() as broker:
        front = broker.secured._front
        front._knocks = RateLimiter(0, 0.0, 100)
        host, port = broker.address.rsplit(":", 1)
        with caplog.at_level(logging.WARNING):
            for _ in range(30):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(hello_for(DOOR_NAME))
                assert await reader.read() == b""
                writer.close()
        assert front.refused["knocks"] == 30
        lines = [r for r in caplog.records if r.getMessage().startswith("too_many_knocks")]
        assert 1 <= len(lines) <= fronts._TOLD + 1


def test_an_honest_peer_that_was_away_says_all_that_it_keeps_at_once() -> None:
    assert MESSAGES[0] >= 2 * PeerOptions().reports
