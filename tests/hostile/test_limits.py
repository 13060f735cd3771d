"""What one member may take of a broker, over real connections: streams, calls, the memory of
messages, runs; and what it costs to say anything without a certificate, or after a kick."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from datetime import timedelta

import grpc.aio
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.admission import AdmissionError
from shoal.broker.events import Answer, Reject, RunSubmitted, StreamClosed, StreamOpened
from shoal.broker.limits import CALLS, CallLimit, Shares
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.broker.server import Broker
from shoal.broker.wire import LEAST_BYTES, PLAIN_BYTES, CrowdedError, check_elements
from shoal.net.identity.authority import utc
from shoal.net.identity.credential import Credential, new_key, pem_of, request_of
from shoal.net.identity.names import OWNER, Party, Role
from shoal.proto.admission_pb2 import RenewRequest
from shoal.proto.admission_pb2_grpc import AdmissionStub
from shoal.proto.broker_pb2 import (
    BlobQuery,
    DescribeRequest,
    Heartbeat,
    Hello,
    PeerMessage,
    Plan,
    Profile,
    Route,
    RunSpec,
    StageSlot,
    Visit,
    WatchRequest,
    WeightFile,
)
from shoal.proto.broker_pb2_grpc import AttachStub, BlobsStub, RunsStub
from shoal.proto.common_pb2 import BlobRef
from shoal.tests.broker.conftest import World, make_spec
from shoal.tests.broker.test_hostile import joining
from shoal.tests.broker.test_secured import channel, made, outcome, running, status

from .conftest import MIB, BrokerProcess

GROWN = 256 * MIB
"""What an attack may add to a broker's memory: gRPC takes up to 4 MiB of each connection before
anybody is asked, as its windows grow with the line, and two messages are read at once. Without
these limits 24 messages of 15 MiB took 5 GiB."""


def crowd(size: int) -> bytes:
    """A RunSpec of so many bytes that takes two dozen times as many in memory."""
    empty = b"\x32\x00"  # an element of `weights`
    return empty * (size // len(empty))


def hello(peer: str) -> PeerMessage:
    profile = Profile(name=peer, operator_set=1, device_memory_bytes=1 << 30, flops_per_s=1e9)
    return PeerMessage(hello=Hello(version=1, peer=peer, boot="x", counter=1, profile=profile))


async def welcomed(stubs: grpc.aio.Channel, peer: str) -> grpc.aio.StreamStreamCall:
    call = AttachStub(stubs).Attach()
    await call.write(hello(peer))
    assert (await call.read()).HasField("welcome")
    return call


async def still_serves(broker: BrokerProcess) -> None:
    """It answers an honest operator, and lets an honest peer in."""
    async with broker.channel(broker.made(Role.OPERATOR, "honest")) as stubs:
        assert await RunsStub(stubs).Describe(DescribeRequest(), timeout=20)
    async with broker.channel(broker.made(Role.PEER, "honest-1")) as stubs:
        await welcomed(stubs, "honest-1")


# ---------------------------------------------------------------- the memory of messages


@asynccontextmanager
async def attackers(broker: BrokerProcess, credential, count: int):
    """So many connections of one member."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(broker.channel(credential)) for _ in range(count)]


@pytest.mark.process
@pytest.mark.parametrize("size", [15 * MIB, 4 * MIB - 1024])
async def test_messages_made_to_fill_memory_cost_the_broker_little(
    size: int, start_broker: Callable[..., BrokerProcess]
):
    """24 of them at once, of one submitter, over connections of their own."""
    broker = start_broker("--no-page")
    await still_serves(broker)
    before = broker.memory_bytes()
    async with attackers(broker, broker.made(Role.SUBMITTER, "mallory"), 24) as stubs:
        data = crowd(size)
        calls = [s.unary_unary("/shoal.v1.Runs/Submit")(data, timeout=60) for s in stubs]
        said = await asyncio.gather(*map(status, calls))
    assert {code for code, _ in said} <= {"RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"}, said
    assert broker.most_memory_bytes() - before < GROWN
    await still_serves(broker)


@pytest.mark.process
async def test_who_may_not_call_costs_nothing_whatever_it_sends(
    start_broker: Callable[..., BrokerProcess],
):
    """A peer that submits, on more connections and streams than it could ever use."""
    broker = start_broker("--no-page")
    await still_serves(broker)
    before = broker.memory_bytes()
    data = crowd(4 * MIB - 1024)
    async with attackers(broker, broker.made(Role.PEER, "mallory"), 8) as stubs:
        calls = [
            s.unary_unary("/shoal.v1.Runs/Submit")(data, timeout=60)
            for s in stubs
            for _ in range(8)
        ]
        said = await asyncio.gather(*map(status, calls))
    assert {code for code, _ in said} == {"PERMISSION_DENIED"}, said
    assert broker.most_memory_bytes() - before < GROWN
    await still_serves(broker)


async def test_who_was_kicked_is_refused_before_its_message_is_read(
    monkeypatch: pytest.MonkeyPatch,
):
    looked_at: list[int] = []
    monkeypatch.setattr(
        "shoal.broker.calls.check_elements", lambda data, kind: looked_at.append(len(data))
    )
    async with running() as broker:
        mallory = made(broker, Role.SUBMITTER, "mallory")
        broker.secured.admission._kicked.add("mallory")
        async with channel(broker, mallory) as stubs:
            send = stubs.unary_unary("/shoal.v1.Runs/Submit")
            assert await status(send(crowd(MIB))) == ("PERMISSION_DENIED", "mallory was kicked")
        assert looked_at == []
        async with channel(broker, made(broker, Role.SUBMITTER, "ann")) as stubs:
            await status(stubs.unary_unary("/shoal.v1.Runs/Submit")(crowd(MIB)))
        assert looked_at == [MIB]


async def test_long_honest_messages_pass():
    """A plan by hand of very many microbatches, and the names of ten thousand blobs."""
    peers = [f"home-{i}-gaydtlnz" for i in range(4)]
    visits = [Visit(stage=i, peer=peer) for i, peer in enumerate(peers)]
    spec = make_spec(microbatches=32_768)
    stages = [StageSlot(start=i, stop=i + 1, holders=[p]) for i, p in enumerate(peers)]
    plan = Plan(stages=stages, routes=[Route(visits=visits)] * 32_768, microbatch_size=2)
    spec.plan.CopyFrom(plan)
    assert 2.5 * MIB < spec.ByteSize() < 4 * MIB
    async with running() as broker, channel(broker, made(broker, Role.SUBMITTER)) as stubs:
        code, why = await outcome(RunsStub(stubs).Submit(spec))
        assert (code, "blobs of the run are not here" in why) == ("NOT_FOUND", True), why
        names = [BlobRef(hash=f"{i:064x}", size_bytes=1 << 40) for i in range(10_000)]
        assert len((await BlobsStub(stubs).Have(BlobQuery(blobs=names))).blobs) == 10_000


def test_elements_are_counted_along_the_description():
    plan = Plan(routes=[Route(visits=[Visit()] * 1000)] * 50, reasons=[""] * 100)
    much = RunSpec(plan=plan, job="j" * (LEAST_BYTES * 60_000)).SerializeToString()
    check_elements(much, RunSpec.DESCRIPTOR)  # a long text weighs what it weighs
    for data in (RunSpec(plan=plan).SerializeToString(), crowd(MIB)):
        with pytest.raises(CrowdedError, match="of a RunSpec with more than"):
            check_elements(data, RunSpec.DESCRIPTOR)


def elements(message: Message) -> int:
    """The slow way: of a message that was parsed, what `check_elements` counts in its bytes."""
    count = 0
    for field, value in message.ListFields():
        whole = field.type == field.TYPE_MESSAGE
        parts = value if field.is_repeated else [value]
        if whole or (field.is_repeated and field.type in (field.TYPE_STRING, field.TYPE_BYTES)):
            count += len(parts)
        elif field.is_repeated:
            count += 1  # packed: numbers cost what they weigh
        if whole:
            count += sum(map(elements, parts))
    return count


VISITS = st.builds(Visit, stage=st.integers(0, 2**32 - 1), peer=st.text(max_size=200))
STAGES = st.builds(
    StageSlot,
    start=st.integers(0, 300),
    stop=st.integers(0, 2**32 - 1),
    holders=st.lists(st.text(max_size=9), max_size=4),
    recompute=st.booleans(),
    rows=st.integers(0, 3),
    ahead=st.booleans(),
)
FILES = st.builds(
    WeightFile, blob=st.builds(BlobRef, hash=st.text(), size_bytes=st.integers(0, 2**63))
)


@settings(max_examples=10)
@given(
    routes=st.lists(st.lists(VISITS, max_size=5), max_size=5),
    stages=st.lists(STAGES, max_size=5),
    files=st.lists(FILES, max_size=5),
    reasons=st.lists(st.text(max_size=300), max_size=5),
)
def test_a_message_is_refused_for_one_element_more_than_its_bytes_are_worth(
    routes: list[list[Visit]], stages: list[StageSlot], files: list[WeightFile], reasons: list[str]
):
    plan = Plan(stages=stages, routes=[Route(visits=v) for v in routes], reasons=reasons)
    plan.routes.append(Route(visits=[Visit()] * 12_000))
    spec = RunSpec(plan=plan, weights=files, microbatches=7)
    count = elements(spec)
    for worth, refused in ((count, False), (count - 1, True)):
        spec.job = ""
        spec.job = "j" * (LEAST_BYTES * worth - PLAIN_BYTES - spec.ByteSize() - 8)
        data = spec.SerializeToString()
        data += b"\x98\x7f\x01" * ((LEAST_BYTES * worth - PLAIN_BYTES + 7 - len(data)) // 3)
        assert (len(data) + PLAIN_BYTES) // LEAST_BYTES == worth
        with pytest.raises(CrowdedError) if refused else nullcontext():
            check_elements(data, RunSpec.DESCRIPTOR)


@pytest.mark.parametrize("field", [b"\x08\x01", b"\x12\x00", b"\xf8\x7f\x01", b"\xfa\x7f\x00"])
def test_few_fields_are_looked_at_whatever_they_are(field: bytes):
    """Numbers and texts that come again cost no memory, and time: so many are no message."""
    with pytest.raises(CrowdedError, match="or 500000 fields"):
        check_elements(field * 600_000, RunSpec.DESCRIPTOR)


def test_numbers_that_come_one_by_one_are_elements():
    number = RunSpec.DESCRIPTOR.fields_by_name["microbatch_sizes"].number
    for wire, value in ((0, b"\x01"), (5, bytes(4))):
        tag = (number << 3 | wire).to_bytes()
        with pytest.raises(CrowdedError, match="of a RunSpec with more than"):
            check_elements((tag + value) * 60_000, RunSpec.DESCRIPTOR)


def test_what_hides_in_a_group_is_no_message():
    with pytest.raises(CrowdedError, match="a group"):
        check_elements(b"\x0b" + crowd(MIB), RunSpec.DESCRIPTOR)


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
        opened, mallory = heard_of(broker, StreamOpened), made(broker, Role.PEER, "mallory")
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
        async with channel(broker, made(broker, Role.PEER, "honest")) as stubs:
            await welcomed(stubs, "honest")
        await streams[0].write(hello("mallory"))
        assert (await streams[0].read()).HasField("welcome")


async def test_a_share_comes_back_when_a_call_ends():
    async with running() as broker:
        closed, mallory = heard_of(broker, StreamClosed), made(broker, Role.PEER, "mallory")
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
            await broker.shell.ask(lambda request, who=who: RunSubmitted(request, make_spec(), who))
        run, bobs = broker.shell.machine.runs
        async with (
            channel(broker, made(broker, Role.SUBMITTER, "ann")) as stubs,
            channel(broker, made(broker, Role.SUBMITTER, "bob")) as others,
        ):
            calls = [RunsStub(stubs).Watch(WatchRequest(run=run)) for _ in range(3)]
            for call in calls:
                assert (await call.read()).state.run == run
            code, why = await status(RunsStub(stubs).Watch(WatchRequest(run=run)).read())
            assert (code, "ann has 3 calls" in why) == ("RESOURCE_EXHAUSTED", True), why
            assert (await RunsStub(others).Watch(WatchRequest(run=bobs)).read()).state.run == bobs


def test_calls_too_often_are_refused_until_time_has_passed():
    shares = Shares({"Runs.Preview": CallLimit(in_a_row=2, per_s=0.5)})
    ann = Party(Role.SUBMITTER, "ann")

    def call(now: float, who: Party | None = ann) -> None:
        with shares.taken("Runs.Preview", who, now):
            pass

    call(0.0)
    call(0.0)
    with pytest.raises(AdmissionError, match=r"ann calls Runs[.]Preview too often"):
        call(1.0)
    call(3.0)
    call(3.0, Party(Role.SUBMITTER, "bob"))
    for who in (None, Party(Role.OPERATOR, OWNER)):
        for _ in range(5):
            call(3.0, who)


def test_what_all_together_may_do_is_bounded_too():
    shares = Shares({"Runs.Watch": CallLimit(of_one=2, of_all=3)})
    with ExitStack() as open_calls:
        for who in ("a", "a", "b"):
            open_calls.enter_context(shares.taken("Runs.Watch", Party(Role.PEER, who), 0.0))
        with (
            pytest.raises(AdmissionError, match=r"3 calls of Runs[.]Watch are open"),
            shares.taken("Runs.Watch", Party(Role.PEER, "c"), 0.0),
        ):
            pass


async def test_messages_of_one_subject_are_read_in_turns():
    shares, ann = Shares(), Party(Role.SUBMITTER, "ann")
    async with shares.reading(ann), shares.reading(ann):
        third = asyncio.create_task(shares.reading(ann).__aenter__())
        async with shares.reading(Party(Role.SUBMITTER, "bob")):
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
        token = admission.invite(Role.PEER, 2, timedelta(hours=1), "test", time.time())
        parts = {}
        for name in ("late", "honest"):
            key = new_key()
            admitted = admission.join(joining(token, request_of(key), name=name), time.time())
            short = admission.authority.sign(
                request_of(key),
                Party(Role.PEER, admitted.subject),
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
