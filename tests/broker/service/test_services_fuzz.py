"""Bytes of any kind at every door of the daemon: a readable status, and everything else goes on."""

from __future__ import annotations

import random
from contextlib import suppress

import grpc
import grpc.aio
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shoal.broker.service.calls import MalformedError, TooManyElementsError, check_elements, parsed
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.proto.broker_pb2 import (
    BlobPiece,
    BlobQuery,
    BlobRange,
    DescribeRequest,
    PeerMessage,
    RunRequest,
    RunSpec,
    WatchRequest,
)
from shoal.proto.broker_pb2_grpc import RunsStub

KINDS = [
    BlobPiece,
    BlobQuery,
    BlobRange,
    DescribeRequest,
    PeerMessage,
    RunRequest,
    RunSpec,
    WatchRequest,
]
VALID = PeerMessage(hello={"version": 2, "peer": "a", "boot": "b", "profile": {"name": "a"}})

UNARY = ["Runs/Submit", "Runs/Cancel", "Runs/Describe", "Blobs/Have"]
STREAMED = ["Runs/Watch", "Blobs/Fetch"]


@settings(max_examples=150)
@given(
    data=st.binary(max_size=120) | st.just(VALID.SerializeToString()),
    changes=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), max_size=4),
)
def test_every_decoder_gives_a_message_or_says_why_not(data, changes) -> None:
    mutated = bytearray(data)
    for at, value in changes:
        if mutated:
            mutated[at % len(mutated)] = value
    for kind in KINDS:
        data = bytes(mutated)
        with suppress(TooManyElementsError):
            check_elements(data, kind.DESCRIPTOR)
        try:
            found = parsed(data, kind)
        except MalformedError as error:
            assert f"{len(mutated)} bytes are no {kind.DESCRIPTOR.name}" in str(error)  # noqa: PT017
        else:
            assert parsed(found.SerializeToString(), kind) == found


async def test_garbage_at_every_door_harms_nobody() -> None:
    rng = random.Random(1)
    async with (
        Broker(BrokerConfig(insecure=True, port=0)) as broker,
        grpc.aio.insecure_channel(broker.address) as channel,
    ):
        for _ in range(6):
            data = rng.randbytes(rng.randrange(1, 60))
            for method in UNARY:
                await refused(channel.unary_unary(f"/shoal.v1.{method}")(data), data)
            for method in STREAMED:
                await refused(channel.unary_stream(f"/shoal.v1.{method}")(data).read(), data)
            store = channel.stream_unary("/shoal.v1.Blobs/Store")(iter([data, data]))
            await refused(store, data)
            attach = channel.stream_stream("/shoal.v1.Attach/Attach")()
            await attach.write(data)
            assert b"kind" in await attach.read()
            assert await attach.read() == grpc.aio.EOF
        described = await RunsStub(channel).Describe(DescribeRequest())
        assert (len(described.peers), len(described.runs)) == (0, 0)
        assert not broker.shell.outboxes


async def refused(call, data: bytes) -> None:
    """The call ends with a status that is the caller's fault, or by luck with an answer."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        fault = ("INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE")
        assert error.code().name in fault, f"{data!r}: {error}"  # noqa: PT017
        assert error.details()  # noqa: PT017


def test_the_errors_of_the_shell_are_not_the_users() -> None:
    assert not issubclass(MalformedError, ValueError)
    with pytest.raises(MalformedError, match="1 bytes are no RunSpec"):
        parsed(b"\xff", RunSpec)
