"""Who was kicked with calls that began before: what it says in them later has no effect, and
nothing is told to it, over real connections with TLS."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message

from shoal.broker.service.server import Broker
from shoal.net.identity.names import Party, PartyRole
from shoal.proto.admission_pb2 import Invitation, InviteRequest, Kicked, KickRequest
from shoal.proto.broker_pb2 import DescribeRequest, Description
from shoal.proto.broker_pb2_grpc import RunsStub

from ...broker.service.test_secured import channel, made, running, status


async def held_back(stubs: grpc.aio.Channel, method: str, answer: type[Message]) -> Any:
    """A call whose message does not come yet."""
    call = stubs.stream_unary(
        f"/shoal.v1.{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer.FromString,
    )()
    await call.wait_for_connection()
    return call


def let_in(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a call has passed the guard, and its message is waited for."""
    shares, found = broker.secured.guard.shares, asyncio.Event()
    reading = shares.reading

    def noted(caller: Party | None) -> Any:
        found.set()
        return reading(caller)

    monkeypatch.setattr(shares, "reading", noted)
    return found


@pytest.mark.parametrize(
    ("method", "message", "answer"),
    [
        ("Admission/Invite", InviteRequest(role="operator", uses=9, lasts_s=3600.0), Invitation),
        ("Admission/Kick", KickRequest(subject="honest"), Kicked),
        ("Runs/Describe", DescribeRequest(), Description),
    ],
)
async def test_a_message_that_was_held_back_until_after_the_kick_does_nothing(
    method: str, message: Message, answer: type[Message], monkeypatch: pytest.MonkeyPatch
):
    async with (
        running() as broker,
        channel(broker, made(broker, PartyRole.OPERATOR, "eve")) as stubs,
    ):
        passed = let_in(broker, monkeypatch)
        call = await held_back(stubs, method, answer)
        await asyncio.wait_for(passed.wait(), 10)
        broker.secured.admission._kicked.add("eve")
        await call.write(message)
        await call.done_writing()
        assert await status(call) == ("PERMISSION_DENIED", "eve was kicked")
        made_by = broker.secured.admission._db.execute("SELECT by FROM invitations").fetchall()
        assert ("eve",) not in made_by


async def test_an_answer_that_took_long_is_not_for_who_was_kicked_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
):
    async with (
        running() as broker,
        channel(broker, made(broker, PartyRole.SUBMITTER, "eve")) as stubs,
    ):
        asked, honest = asyncio.Event(), broker.shell.ask
        kicked = asyncio.Event()

        async def slowly(*args: Any) -> Any:
            answer = await honest(*args)
            asked.set()
            await kicked.wait()
            return answer

        monkeypatch.setattr(broker.shell, "ask", slowly)
        call = RunsStub(stubs).Describe(DescribeRequest())
        await asked.wait()
        broker.secured.admission._kicked.add("eve")
        kicked.set()
        assert await status(call) == ("PERMISSION_DENIED", "eve was kicked")
