"""Hostile clients over real connections with TLS: with bad tokens, recorded joins, too large or
endless messages, graphs made to harm, and blobs that are not what they are called. None gets what
it wants, and who is in goes on (`test_secured.py` has certificates and roles,
`tests/broker/service/door/test_relay.py` and `tests/net/` what peers do to each other)."""

from __future__ import annotations

import asyncio
import hashlib
import resource
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from shoal.broker.options import BrokerOptions
from shoal.broker.service.door.front import MultiplexerLimits, RateLimiter
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.dag.ir.convert import MAX_OPERATORS
from shoal.net.blobs.client import BlobClient
from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.credential import Credential, new_key, request_of
from shoal.net.identity.enroll import enroll
from shoal.net.identity.names import DOOR_NAME, PartyRole
from shoal.net.identity.token import Token
from shoal.proto import common_pb2, graph_pb2
from shoal.proto.admission_pb2 import JoinRequest
from shoal.proto.admission_pb2_grpc import AdmissionStub
from shoal.proto.broker_pb2 import (
    FAILED,
    BlobPiece,
    BlobQuery,
    DescribeRequest,
    Hello,
    PeerMessage,
    Profile,
    RunSpec,
    WatchRequest,
)
from shoal.proto.broker_pb2_grpc import AttachStub, BlobsStub, RunsStub
from shoal.proto.common_pb2 import BlobRef

from ..conftest import make_spec
from .test_secured import NOT_CONNECTED, channel, made, running, status

HOUR = timedelta(hours=1)


def joining(token: Token, request: bytes, **changes: bytes | str) -> JoinRequest:
    found = JoinRequest(
        version=1, invitation=token.id, secret=token.secret, request=request, name="home"
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def invited(broker: Broker, ago_s: float = 0.0, uses: int = 1) -> Token:
    return broker.secured.admission.invite(PartyRole.PEER, uses, HOUR, "test", time.time() - ago_s)


def used(broker: Broker) -> Token:
    token = invited(broker)
    broker.secured.admission.join(joining(token, request_of(new_key())), time.time())
    return token


BAD_TOKENS: dict[str, tuple[Callable[[Broker], Token], dict[str, bytes], str]] = {
    "none": (invited, {"invitation": b"", "secret": b""}, "that is no token"),
    "forged": (invited, {"secret": bytes(16)}, "no such token"),
    "of_another_broker": (lambda _: Authority.new(utc(time.time())).token(), {}, "no such token"),
    "expired": (lambda broker: invited(broker, ago_s=2 * 3600.0), {}, "the token ended"),
    "used_up_or_stolen": (used, {}, "admits nobody any more"),
}


@pytest.mark.parametrize("what", BAD_TOKENS)
async def test_a_bad_token_admits_nobody_and_a_good_one_still_does(what: str, tmp_path: Path):
    make, changes, said = BAD_TOKENS[what]
    async with running() as broker:
        token = make(broker)
        key = new_key()
        async with channel(broker, None) as stubs:
            request = joining(token, request_of(key), **changes)
            code, why = await status(AdmissionStub(stubs).Join(request, timeout=10))
        assert code == "UNAUTHENTICATED"
        assert said in why
        good = await asyncio.to_thread(enroll, broker.address, invited(broker), tmp_path, "home")
        async with channel(broker, good) as stubs:
            assert await BlobsStub(stubs).Have(BlobQuery())


async def test_who_replays_a_recorded_join_has_a_certificate_without_its_key(tmp_path: Path):
    async with running() as broker:
        recorded = joining(invited(broker), request_of(new_key()))  # the key stays with its owner
        async with channel(broker, None) as stubs:
            first = await AdmissionStub(stubs).Join(recorded)
            again = await AdmissionStub(stubs).Join(recorded)
        assert again.subject == first.subject
        thief = made(broker, PartyRole.PEER)
        stolen = Credential(thief.key, again.certificate, thief.authority)
        async with channel(broker, stolen) as stubs:
            code, _ = await status(BlobsStub(stubs).Have(BlobQuery(), timeout=5))
            assert code in NOT_CONNECTED


async def test_a_message_over_the_limit_ends_its_call_and_nothing_else():
    async with running() as broker:
        async with channel(broker, None) as door:
            request = JoinRequest(version=1, name="x", secret=bytes(1 << 20))
            code, _ = await status(AdmissionStub(door).Join(request, timeout=10))
            assert code == "RESOURCE_EXHAUSTED"
        async with channel(broker, made(broker, PartyRole.SUBMITTER)) as stubs:
            code, _ = await status(
                RunsStub(stubs).Submit(RunSpec(job="x" * (64 << 20)), timeout=20)
            )
            assert code == "RESOURCE_EXHAUSTED"
        async with channel(broker, made(broker, PartyRole.PEER, "a")) as stubs:
            call = AttachStub(stubs).Attach()
            await call.write(PeerMessage(hello=Hello(version=3, boot="x" * (64 << 20))))
            code, _ = await status(call.read())
            assert code == "RESOURCE_EXHAUSTED"
        async with channel(broker, made(broker, PartyRole.OPERATOR)) as stubs:
            assert await RunsStub(stubs).Describe(DescribeRequest())


async def test_a_drip_inside_of_tls_ends_in_time(monkeypatch: pytest.MonkeyPatch):
    """Behind the door, a stranger who has shaken hands and then says next to nothing."""
    short = (("grpc.max_connection_age_ms", 300), ("grpc.max_connection_age_grace_ms", 100))
    monkeypatch.setattr("shoal.broker.service.admitting.DOOR_OPTIONS", short)
    monkeypatch.setattr("shoal.broker.service.server.DOOR_OPTIONS", short)
    async with running() as broker:
        context = ssl.create_default_context(cadata=broker.secured.authority.pem.decode())
        context.set_alpn_protocols(["h2"])
        host, _, port = broker.address.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=DOOR_NAME
        )
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")  # and settings
        while await asyncio.wait_for(reader.read(4096), 20):
            pass  # the server says goodbye, and hangs up
        writer.close()


async def test_a_flood_of_joins_over_tls_passes_as_often_as_the_limit_says():
    """The beginning of each is real; benchmarks/service/flood.py has ten thousand, with what they
    cost."""
    async with running() as broker:
        front = broker.secured._front
        front.limits, front._knocks = MultiplexerLimits(knocks=5), RateLimiter(5, 0.0, 100)
        context = ssl.create_default_context(cadata=broker.secured.authority.pem.decode())
        host, _, port = broker.address.rpartition(":")

        async def knock() -> bool:
            try:
                _, writer = await asyncio.open_connection(
                    host, int(port), ssl=context, server_hostname=DOOR_NAME
                )
            except (OSError, asyncio.IncompleteReadError):
                return False
            writer.close()
            return True

        assert sum(await asyncio.gather(*(knock() for _ in range(100)))) == 5
        assert front.refused["knocks"] == 95
        async with channel(broker, made(broker, PartyRole.OPERATOR)) as stubs:
            assert await RunsStub(stubs).Describe(DescribeRequest())


# ---------------------------------------------------------------- blobs and graphs


async def test_a_blob_that_is_not_what_it_is_called_is_nobodys():
    async with running() as broker:
        name = hashlib.sha256(b"what was promised").hexdigest()
        for role in (PartyRole.PEER, PartyRole.SUBMITTER):
            async with channel(broker, made(broker, role)) as stubs:
                pieces = [
                    BlobPiece(ref=BlobRef(hash=name, size_bytes=17)),
                    BlobPiece(data=b"what nobody wants"),
                ]
                code, why = await status(BlobsStub(stubs).Store(iter(pieces)))
                assert (code, name[:8] in why) == ("INVALID_ARGUMENT", True), why
        assert not broker.shell.blobs.whole(name)


def graph(*operators: graph_pb2.Operator, size: int = 4) -> graph_pb2.Graph:
    return graph_pb2.Graph(
        version=1,
        operator_set=graph_pb2.FULL,
        inputs=[graph_pb2.GraphInput(name="x", spec=spec(size))],
        operators=operators,
        loss="last",
    )


def spec(*sizes: int) -> common_pb2.TensorSpec:
    dims = [common_pb2.Size(plus=n) for n in sizes]
    return common_pb2.TensorSpec(shape=dims, dtype=common_pb2.FLOAT32)


def operator(
    name: str, reads: str, target: str = "aten.relu.default", *sizes: int
) -> graph_pb2.Operator:
    return graph_pb2.Operator(
        name=name,
        target=target,
        args=[graph_pb2.Argument(value=reads)],
        outputs=[graph_pb2.Output(spec=spec(*sizes), grad=True)],
    )


def many() -> bytes:
    head = graph().SerializeToString()
    name = graph_pb2.Graph.DESCRIPTOR.fields_by_name["operators"].number
    parts = [head]
    for i in range(1_000_000):
        body = b"\n\x07%07d\x12\x11aten.relu.default" % i
        parts.append(bytes([name << 3 | 2, len(body)]) + body)
    return b"".join(parts)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "noise": (lambda: b"\xff" * 1000, "no message"),
    "forbidden_operator": (
        lambda: graph(operator("last", "in:x", "os.system.default")).SerializeToString(),
        "os.system.default",
    ),
    "operator_that_reads_a_file": (
        lambda: graph(operator("last", "in:x", "aten.from_file.default")).SerializeToString(),
        "aten.from_file.default",
    ),
    "gigantic_shape": (
        lambda: graph(operator("last", "in:x"), size=1 << 60).SerializeToString(),
        str(1 << 60),
    ),
    "gigantic_result": (
        lambda: graph(
            operator("a", "in:x", "aten.relu.default", 1 << 40, 1 << 40), operator("last", "a")
        ).SerializeToString(),
        "elements",
    ),
    "cycle": (
        lambda: graph(operator("a", "last"), operator("last", "a")).SerializeToString(),
        "which nothing before it makes",
    ),
    "a_million_operators": (many, f"1000000 operators: expected at most {MAX_OPERATORS}"),
}


@asynccontextmanager
async def with_a_peer(broker: Broker) -> AsyncIterator[None]:
    """One that offers itself, so that there is somebody to plan for."""
    async with channel(broker, made(broker, PartyRole.PEER, "a")) as stubs:
        call = AttachStub(stubs).Attach()
        profile = Profile(
            name="a", operator_set=1, device_memory_bytes=1 << 30, flops_per_s=1e9, cores=1
        )
        hello = Hello(version=3, peer="a", boot="x", counter=1, profile=profile)
        await call.write(PeerMessage(hello=hello))
        assert (await call.read()).HasField("welcome")
        yield
        call.cancel()


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_graph_made_to_harm_fails_its_own_run_and_nothing_else(what: str):
    make, said = HOSTILE[what]
    data = make()
    options = BrokerOptions(probe_s=0.0, lease_s=600.0)  # its heartbeat is left out
    async with (
        Broker(BrokerConfig(port=0, options=options)) as broker,
        with_a_peer(broker),
    ):
        async with channel(broker, made(broker, PartyRole.SUBMITTER, "mallory")) as stubs:
            ask = make_spec()
            ask.graph.CopyFrom(await BlobClient(stubs).store(data))
            ask.data.CopyFrom(await BlobClient(stubs).store(b"no data"))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            run = (await RunsStub(stubs).Submit(ask)).run
            async for event in RunsStub(stubs).Watch(WatchRequest(run=run)):
                if event.state.phase == FAILED:
                    break
            assert said in event.state.reason.text
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 700 << 10, f"{grown} KiB for a graph of {len(data)} bytes"
        async with channel(broker, made(broker, PartyRole.OPERATOR)) as stubs:
            described = await RunsStub(stubs).Describe(DescribeRequest())
            assert [p.peer for p in described.peers] == ["a"]
