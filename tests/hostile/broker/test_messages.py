"""What the memory of messages costs a broker, whoever sends them: strangers, the kicked, members;
and how the elements of a message are counted before it is parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.service.calls import (
    LEAST_BYTES,
    PLAIN_BYTES,
    TooManyElementsError,
    check_elements,
)
from shoal.net.identity.names import PartyRole
from shoal.proto.broker_pb2 import (
    BlobQuery,
    DescribeRequest,
    PeerGroup,
    Plan,
    Route,
    RunSpec,
    StageExchange,
    StageSlot,
    Visit,
    WeightFile,
)
from shoal.proto.broker_pb2_grpc import BlobsStub, RunsStub
from shoal.proto.common_pb2 import BlobRef
from shoal.tests.broker.conftest import make_spec
from shoal.tests.broker.service.test_secured import channel, made, outcome, running, status

from ..conftest import MIB, BrokerProcess
from .test_limits import welcomed

GROWN = 256 * MIB
"""What an attack may add to a broker's memory: gRPC takes up to 4 MiB of each connection before
anybody is asked, as its windows grow with the line, and two messages are read at once. Without
these limits 24 messages of 15 MiB took 5 GiB."""


def crowd(size: int) -> bytes:
    """A RunSpec of so many bytes that takes two dozen times as many in memory."""
    empty = b"\x32\x00"  # an element of `weights`
    return empty * (size // len(empty))


async def still_serves(broker: BrokerProcess) -> None:
    """It answers an honest operator, and lets an honest peer in."""
    async with broker.channel(broker.made(PartyRole.OPERATOR, "honest")) as stubs:
        assert await RunsStub(stubs).Describe(DescribeRequest(), timeout=20)
    async with broker.channel(broker.made(PartyRole.PEER, "honest-1")) as stubs:
        await welcomed(stubs, "honest-1")


@asynccontextmanager
async def attackers(broker: BrokerProcess, credential, count: int):
    """So many connections of one member."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(broker.channel(credential)) for _ in range(count)]


@pytest.mark.process
@pytest.mark.parametrize("size", [pytest.param(15 * MIB, marks=pytest.mark.slow), 4 * MIB - 1024])
async def test_messages_made_to_fill_memory_cost_the_broker_little(
    size: int, start_broker: Callable[..., BrokerProcess]
):
    """24 of them at once, of one submitter, over connections of their own."""
    broker = start_broker("--no-page")
    await still_serves(broker)
    before = broker.memory_bytes()
    async with attackers(broker, broker.made(PartyRole.SUBMITTER, "mallory"), 24) as stubs:
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
    async with attackers(broker, broker.made(PartyRole.PEER, "mallory"), 8) as stubs:
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
        "shoal.broker.service.calls.check_elements", lambda data, kind: looked_at.append(len(data))
    )
    async with running() as broker:
        mallory = made(broker, PartyRole.SUBMITTER, "mallory")
        broker.secured.admission._kicked.add("mallory")
        async with channel(broker, mallory) as stubs:
            send = stubs.unary_unary("/shoal.v1.Runs/Submit")
            assert await status(send(crowd(MIB))) == ("PERMISSION_DENIED", "mallory was kicked")
        assert looked_at == []
        async with channel(broker, made(broker, PartyRole.SUBMITTER, "ann")) as stubs:
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
    async with running() as broker, channel(broker, made(broker, PartyRole.SUBMITTER)) as stubs:
        code, why = await outcome(RunsStub(stubs).Submit(spec))
        assert (code, "blobs of the run are not here" in why) == ("NOT_FOUND", True), why
        names = [BlobRef(hash=f"{i:064x}", size_bytes=1 << 40) for i in range(10_000)]
        assert len((await BlobsStub(stubs).Have(BlobQuery(blobs=names))).blobs) == 10_000


def test_elements_are_counted_along_the_description():
    plan = Plan(routes=[Route(visits=[Visit()] * 1000)] * 50)
    much = RunSpec(plan=plan, job="j" * (LEAST_BYTES * 60_000)).SerializeToString()
    check_elements(much, RunSpec.DESCRIPTOR)  # a long text weighs what it weighs
    for data in (RunSpec(plan=plan).SerializeToString(), crowd(MIB)):
        with pytest.raises(TooManyElementsError, match="of a RunSpec with more than"):
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
)
GROUPS = st.builds(PeerGroup, peers=st.lists(st.text(max_size=9), max_size=4))
EXCHANGES = st.builds(
    StageExchange,
    stage=st.integers(0, 2**32 - 1),
    collective=st.text(max_size=20),
    groups=st.lists(GROUPS, max_size=3),
    weights=st.lists(st.integers(0, 2**32 - 1), max_size=4),
    strategy=st.text(max_size=20),
)
FILES = st.builds(
    WeightFile, blob=st.builds(BlobRef, hash=st.text(), size_bytes=st.integers(0, 2**63))
)


@settings(max_examples=10)
@given(
    routes=st.lists(st.lists(VISITS, max_size=5), max_size=5),
    stages=st.lists(STAGES, max_size=5),
    exchanges=st.lists(EXCHANGES, max_size=3),
    files=st.lists(FILES, max_size=5),
    local=st.lists(st.text(max_size=300), max_size=5),
)
def test_a_message_is_refused_for_one_element_more_than_its_bytes_are_worth(
    routes: list[list[Visit]],
    stages: list[StageSlot],
    exchanges: list[StageExchange],
    files: list[WeightFile],
    local: list[str],
):
    plan = Plan(
        stages=stages,
        routes=[Route(visits=v) for v in routes],
        exchanges=exchanges,
    )
    plan.routes.append(Route(visits=[Visit()] * 12_000))
    spec = RunSpec(plan=plan, weights=files, microbatches=7, local=local)
    count = elements(spec)
    for worth, refused in ((count, False), (count - 1, True)):
        spec.job = ""
        spec.job = "j" * (LEAST_BYTES * worth - PLAIN_BYTES - spec.ByteSize() - 8)
        data = spec.SerializeToString()
        data += b"\x98\x7f\x01" * ((LEAST_BYTES * worth - PLAIN_BYTES + 7 - len(data)) // 3)
        assert (len(data) + PLAIN_BYTES) // LEAST_BYTES == worth
        with pytest.raises(TooManyElementsError) if refused else nullcontext():
            check_elements(data, RunSpec.DESCRIPTOR)


@pytest.mark.parametrize("field", [b"\x08\x01", b"\x12\x00", b"\xf8\x7f\x01", b"\xfa\x7f\x00"])
def test_few_fields_are_looked_at_whatever_they_are(field: bytes):
    """Numbers and texts that come again cost no memory, and time: so many are no message."""
    with pytest.raises(TooManyElementsError, match="or 500000 fields"):
        check_elements(field * 600_000, RunSpec.DESCRIPTOR)


def test_numbers_that_come_one_by_one_are_elements():
    number = RunSpec.DESCRIPTOR.fields_by_name["microbatch_sizes"].number
    for wire, value in ((0, b"\x01"), (5, bytes(4))):
        tag = (number << 3 | wire).to_bytes()
        with pytest.raises(TooManyElementsError, match="of a RunSpec with more than"):
            check_elements((tag + value) * 60_000, RunSpec.DESCRIPTOR)


def test_what_hides_in_a_group_is_no_message():
    with pytest.raises(TooManyElementsError, match="a group"):
        check_elements(b"\x0b" + crowd(MIB), RunSpec.DESCRIPTOR)
