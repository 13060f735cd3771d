"""What one member may take of a broker, over real connections: streams, calls, runs; and that
its streams end with its certificate. Messages: see test_messages.py."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from datetime import timedelta

import grpc.aio
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from shoal.broker.access.admission import AdmissionError
from shoal.broker.access.limits import CALLS, CallLimit, Shares
from shoal.broker.events import Answer, Reject, RunSubmitted, StreamClosed, StreamOpened
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import Broker
from shoal.net.identity.authority import utc
from shoal.net.identity.credential import Credential, new_key, pem_of, request_of
from shoal.net.identity.names import OWNER, Party, PartyRole
from shoal.proto.admission_pb2 import RenewRequest
from shoal.proto.admission_pb2_grpc import AdmissionStub
from shoal.proto.broker_pb2 import (
    BlobQuery,
    Heartbeat,
    Hello,
    PeerMessage,
    Profile,
    Submitted,
    WatchRequest,
)
from shoal.proto.broker_pb2_grpc import AttachStub, BlobsStub, RunsStub
from shoal.tests.broker.conftest import World, make_spec
from shoal.tests.broker.service.test_hostile import joining
from shoal.tests.broker.service.test_secured import channel, made, running, status


def hello(peer: str) -> PeerMessage:
    profile = Profile(name=peer, operator_set=1, device_memory_bytes=1 << 30, flops_per_s=1e9)
    return PeerMessage(hello=Hello(version=3, peer=peer, boot="x", counter=1, profile=profile))


async def welcomed(stubs: grpc.aio.Channel, peer: str) -> grpc.aio.StreamStreamCall:
    call = AttachStub(stubs).Attach()
    await call.write(hello(peer))
    assert (await call.read()).HasField("welcome")
    return call


# ---------------------------------------------------------------- streams and calls


def heard_of(broker: Broker, kind: type) -> asyncio.Semaphore:
    """Released for each event of a kind that the broker's machine was told of."""
    seen, post = asyncio.Semaphore(0), broker.shell.post

    def told(event: object) -> None:
        post(event)
        if isinstance(event, kind):
            seen.release()

    broker.shell.post = told
    return seen


async def test_one_peer_has_few_streams_and_others_still_come():
    """By one certificate, over connections of its own; the ones that it has go on."""
    most = CALLS["Attach.Attach"].of_one
    async with running() as broker, AsyncExitStack() as stack:
        opened, mallory = heard_of(broker, StreamOpened), made(broker, PartyRole.PEER, "mallory")
        streams = []
        for _ in range(most):
            stubs = await stack.enter_async_context(channel(broker, mallory))
            streams.append(AttachStub(stubs).Attach())
            await asyncio.wait_for(opened.acquire(), 20)
        for _ in range(20):
            stubs = await stack.enter_async_context(channel(broker, mallory))
            call = AttachStub(stubs).Attach()
            await call.write(hello("mallory"))
            code, why = await status(call.read())
            assert (code, "the limit for one" in why) == ("RESOURCE_EXHAUSTED", True), why
        assert len(broker.shell.machine.members.streams) == most
        async with channel(broker, made(broker, PartyRole.PEER, "honest")) as stubs:
            await welcomed(stubs, "honest")
        await streams[0].write(hello("mallory"))
        assert (await streams[0].read()).HasField("welcome")


async def test_a_share_comes_back_when_a_call_ends():
    async with running() as broker:
        closed, mallory = heard_of(broker, StreamClosed), made(broker, PartyRole.PEER, "mallory")
        for _ in range(2 * CALLS["Attach.Attach"].of_one):
            async with channel(broker, mallory) as stubs:
                (await welcomed(stubs, "mallory")).cancel()
            await asyncio.wait_for(closed.acquire(), 20)
        assert repr(broker.secured.guard.shares) == "<Shares 0 calls of 0 subjects and methods>"


async def test_one_who_watches_more_than_its_share_is_refused_and_others_watch(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(CALLS, "Runs.Watch", CallLimit(of_one=3))
    async with running() as broker:
        for who in ("ann", "bob"):
            await broker.shell.ask(
                lambda request, who=who: RunSubmitted(request, make_spec(), who), Submitted
            )
        run, bobs = broker.shell.machine.runs
        async with (
            channel(broker, made(broker, PartyRole.SUBMITTER, "ann")) as stubs,
            channel(broker, made(broker, PartyRole.SUBMITTER, "bob")) as others,
        ):
            calls = [RunsStub(stubs).Watch(WatchRequest(run=run)) for _ in range(3)]
            for call in calls:
                assert (await call.read()).state.run == run
            code, why = await status(RunsStub(stubs).Watch(WatchRequest(run=run)).read())
            assert (code, "ann has 3 calls" in why) == ("RESOURCE_EXHAUSTED", True), why
            assert (await RunsStub(others).Watch(WatchRequest(run=bobs)).read()).state.run == bobs


def test_calls_too_often_are_refused_until_time_has_passed():
    shares = Shares({"Runs.Preview": CallLimit(in_a_row=2, per_s=0.5)})
    ann = Party(PartyRole.SUBMITTER, "ann")

    def call(now: float, who: Party | None = ann) -> None:
        with shares.taken("Runs.Preview", who, now):
            pass

    call(0.0)
    call(0.0)
    with pytest.raises(AdmissionError, match=r"ann calls Runs[.]Preview too often"):
        call(1.0)
    call(3.0)
    call(3.0, Party(PartyRole.SUBMITTER, "bob"))
    for who in (None, Party(PartyRole.OPERATOR, OWNER)):
        for _ in range(5):
            call(3.0, who)


def test_what_all_together_may_do_is_bounded_too():
    shares = Shares({"Runs.Watch": CallLimit(of_one=2, of_all=3)})
    with ExitStack() as open_calls:
        for who in ("a", "a", "b"):
            open_calls.enter_context(shares.taken("Runs.Watch", Party(PartyRole.PEER, who), 0.0))
        with (
            pytest.raises(AdmissionError, match=r"3 calls of Runs[.]Watch are open"),
            shares.taken("Runs.Watch", Party(PartyRole.PEER, "c"), 0.0),
        ):
            pass


async def test_messages_of_one_subject_are_read_in_turns():
    shares, ann = Shares(), Party(PartyRole.SUBMITTER, "ann")
    async with shares.reading(ann), shares.reading(ann):
        third = asyncio.create_task(shares.reading(ann).__aenter__())
        async with shares.reading(Party(PartyRole.SUBMITTER, "bob")):
            await asyncio.to_thread(lambda: None)  # a turn of the loop, in which it could begin
            assert not third.done()
    await asyncio.wait_for(third, 20)


# ---------------------------------------------------------------- runs


def test_one_submitter_has_a_share_of_the_open_runs():
    world = World(BrokerMachine("b", BrokerOptions(most_waiting=5, most_waiting_of_one=2)))

    def submit(by: str) -> type:
        out = world.handle(RunSubmitted(world.request(), make_spec(), by))
        (answer,) = [i for i in out if isinstance(i, Answer | Reject)]
        return type(answer)

    assert [submit("mallory") for _ in range(3)] == [Answer, Answer, Reject]
    assert [submit("ann"), submit(OWNER), submit(OWNER)] == [Answer] * 3
    assert submit(OWNER) is Reject, "of all together"
    world.cancel(next(run.id for run in world.machine.runs.values() if run.owner == "mallory"))
    assert submit("mallory") is Answer


def test_nobody_pushes_out_what_others_have_kept():
    world = World(BrokerMachine("b", BrokerOptions(kept_runs=4)))
    for by in ("ann", *("mallory",) * 10):
        world.handle(RunSubmitted(world.request(), make_spec(), by))
        world.cancel(list(world.machine.runs)[-1])
    owners = [run.owner for run in world.machine.runs.values()]
    assert owners.count("ann") == 1
    assert len(owners) == 5, "the newest one ended after the last was submitted"


# ---------------------------------------------------------------- the end of a certificate


async def test_a_stream_ends_with_its_certificate_unless_that_was_renewed():
    """The clock is the broker's: both certificates were made for an hour."""
    async with running() as broker:
        admission, guard = broker.secured.admission, broker.secured.guard
        token = admission.invite(PartyRole.PEER, 2, timedelta(hours=1), "test", time.time())
        parts = {}
        for name in ("late", "honest"):
            key = new_key()
            admitted = admission.join(joining(token, request_of(key), name=name), time.time())
            short = admission.authority.sign(
                request_of(key),
                Party(PartyRole.PEER, admitted.subject),
                utc(time.time()),
                timedelta(hours=1),
            )
            parts[name] = Credential(pem_of(key), short, admission.authority.pem)
        async with (
            channel(broker, parts["late"]) as late,
            channel(broker, parts["honest"]) as honest,
        ):
            calls = {
                name: await welcomed(stubs, parts[name].party.subject)
                for name, stubs in (("late", late), ("honest", honest))
            }
            request = RenewRequest(
                request=request_of(load_pem_private_key(parts["honest"].key, None))
            )
            await AdmissionStub(honest).Renew(request)
            guard._clock = lambda: time.time() + 2 * 3600
            for call in calls.values():
                await call.write(PeerMessage(heartbeat=Heartbeat(sent_at_s=1.0)))
            code, why = await status(calls["late"].read())
            assert (code, "has ended: renew it" in why) == ("UNAUTHENTICATED", True), why
            members = broker.shell.machine.members.members
            assert list(members) == [parts["honest"].party.subject]
            # New calls on the connections that are open, too.
            code, _ = await status(BlobsStub(late).Have(BlobQuery()))
            assert code == "UNAUTHENTICATED"
            assert await BlobsStub(honest).Have(BlobQuery()) == BlobQuery()


async def test_a_stranger_who_holds_a_join_back_is_ended_soon(monkeypatch: pytest.MonkeyPatch):
    """All joins together are so many at once."""
    assert CALLS["Admission.Join"].message_s <= 10.0
    monkeypatch.setitem(CALLS, "Admission.Join", CallLimit(message_s=0.1))
    async with running() as broker, channel(broker, None) as stubs:
        call = stubs.stream_unary("/shoal.v1.Admission/Join")()
        await call.wait_for_connection()
        code, why = await status(call)
        assert (code, why) == (
            "DEADLINE_EXCEEDED",
            "no message of Admission.Join came within 0.1 s",
        )
