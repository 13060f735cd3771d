"""A broker with identities, and hostile clients over real connections: none gets in, and who is in
notices nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from shoal.broker.access import guard
from shoal.broker.options import BrokerOptions
from shoal.broker.service.door.front import MultiplexerLimits, RateLimiter, source_of
from shoal.broker.service.door.hello import ClientHello, HelloError, read_hello
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.identity import enroll as enrolling
from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.credential import Credential, new_key, request_of
from shoal.net.identity.enroll import (
    BrokerAwayError,
    NotAdmittedError,
    channel_options,
    enroll,
    renew,
    shown_by,
)
from shoal.net.identity.names import DOOR_NAME, Party, PartyRole
from shoal.net.identity.token import Token
from shoal.proto.admission_pb2 import (
    InviteRequest,
    JoinRequest,
    KickRequest,
    PageRequest,
    RenewRequest,
)
from shoal.proto.admission_pb2_grpc import AdmissionStub
from shoal.proto.broker_pb2 import (
    CANCELLED,
    BlobQuery,
    BlobRange,
    CohortChoice,
    DataRequest,
    DescribeRequest,
    Hello,
    PeerMessage,
    Profile,
    RunRequest,
    RunSpec,
    WatchRequest,
)
from shoal.proto.broker_pb2_grpc import AttachStub, BlobsStub, RunsStub

from ..conftest import make_spec
from .loopback import status, until

HOUR = timedelta(hours=1)
NOT_CONNECTED = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
"""A handshake that failed; on a busy machine the call gives up before gRPC says so."""


@asynccontextmanager
async def running(**config: Any) -> AsyncIterator[Broker]:
    options = BrokerOptions(probe_s=0.0)
    async with Broker(BrokerConfig(port=0, options=options, **config)) as broker:
        yield broker


@asynccontextmanager
async def channel(
    broker: Broker, credential: Credential | None, name: str | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """With a credential; None: as anybody, through the door."""
    assert broker.secured is not None
    if credential is None:
        credentials = grpc.ssl_channel_credentials(broker.secured.authority.pem)
        options = channel_options(broker.address, name or DOOR_NAME)
    else:
        credentials = credential.for_channel()
        options = (
            channel_options(broker.address)
            if name is None
            else [("grpc.ssl_target_name_override", name)]
        )
    async with grpc.aio.secure_channel(broker.address, credentials, options=options) as found:
        yield found


def made(broker: Broker, role: PartyRole, subject: str = "x", ago: timedelta = timedelta(0)):
    """A certificate that the broker's authority signed some time ago, for an hour."""
    assert broker.secured is not None
    party = Party(role, subject)
    return broker.secured.authority.credential(party, utc(time.time()) - ago, HOUR)


async def outcome(call: Any) -> tuple[str, str]:
    """The status of a call, whatever it is."""
    try:
        await asyncio.wait_for(call, 10)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def calls(stubs: grpc.aio.Channel) -> dict[str, Any]:
    """Every call but Join, by name."""
    runs, blobs, admission = RunsStub(stubs), BlobsStub(stubs), AdmissionStub(stubs)
    return {
        "Attach.Attach": lambda: AttachStub(stubs).Attach(iter([])).read(),
        "Runs.Submit": lambda: runs.Submit(RunSpec()),
        "Runs.Watch": lambda: runs.Watch(WatchRequest()).read(),
        "Runs.Cancel": lambda: runs.Cancel(RunRequest()),
        "Runs.Pause": lambda: runs.Pause(RunRequest()),
        "Runs.Resume": lambda: runs.Resume(RunRequest()),
        "Runs.Finish": lambda: runs.Finish(RunRequest()),
        "Runs.Choose": lambda: runs.Choose(CohortChoice()),
        "Runs.Recall": lambda: runs.Recall(RunRequest()),
        "Runs.Resolve": lambda: runs.Resolve(DataRequest()),
        "Runs.Describe": lambda: runs.Describe(DescribeRequest()),
        "Runs.Preview": lambda: runs.Preview(RunSpec()),
        "Blobs.Store": lambda: blobs.Store(iter([])),
        "Blobs.Fetch": lambda: blobs.Fetch(BlobRange()).read(),
        "Blobs.Have": lambda: blobs.Have(BlobQuery()),
        "Admission.Invite": lambda: admission.Invite(InviteRequest(role="peer", uses=1, lasts_s=9)),
        "Admission.Kick": lambda: admission.Kick(KickRequest(subject="nobody")),
        "Admission.Renew": lambda: admission.Renew(RenewRequest()),
        "Admission.Page": lambda: admission.Page(PageRequest(lasts_s=60.0)),
    }


MAY = {
    PartyRole.PEER: {
        "Admission.Renew",
        "Admission.Page",
        "Attach.Attach",
        "Runs.Describe",
        "Blobs.Store",
        "Blobs.Fetch",
        "Blobs.Have",
    },
    PartyRole.SUBMITTER: {
        *("Runs.Submit", "Runs.Watch", "Runs.Cancel", "Runs.Describe", "Runs.Preview"),
        *("Runs.Pause", "Runs.Resume", "Runs.Finish", "Runs.Recall", "Runs.Resolve"),
        "Runs.Choose",
        *("Admission.Renew", "Admission.Page"),
        *("Blobs.Store", "Blobs.Fetch", "Blobs.Have"),
    },
    PartyRole.BROKER: set(),
}
MAY[PartyRole.OPERATOR] = MAY[PartyRole.SUBMITTER] | {"Admission.Invite", "Admission.Kick"}


@pytest.mark.parametrize("role", list(PartyRole))
async def test_each_role_may_call_what_is_its_own_and_nothing_else(role):
    async with running() as broker, channel(broker, made(broker, role)) as stubs:
        assert set(calls(stubs)) == set(guard._MAY), "no method is left out here"
        for name, call in calls(stubs).items():
            code, why = await outcome(call())
            refused = "may not call" in why
            assert refused == (name not in MAY[role]), (name, code, why)
            assert not refused or code == "PERMISSION_DENIED", (name, code)


async def test_through_the_door_there_is_only_joining():
    async with running() as broker, channel(broker, None) as stubs:
        for name, call in calls(stubs).items():
            code, why = await status(asyncio.wait_for(call(), 10))
            assert (name, code) == (name, "UNIMPLEMENTED"), why


async def test_no_certificate_another_authority_and_an_expired_one_get_no_connection():
    other = Authority.new(utc(time.time()))
    party = Party(PartyRole.OPERATOR, "x")
    async with running() as broker:
        mine = broker.secured.authority.pem
        forged = other.credential(party, utc(time.time()), HOUR)
        hostile = {
            "expired": made(broker, PartyRole.OPERATOR, ago=timedelta(hours=2)),
            "forged": Credential(forged.key, forged.certificate, mine),
        }
        for name, credential in hostile.items():
            async with channel(broker, credential) as stubs:
                code, _ = await status(RunsStub(stubs).Describe(DescribeRequest(), timeout=5))
                assert code in NOT_CONNECTED, name
        async with channel(broker, None, "broker.shoal") as stubs:
            code, _ = await status(RunsStub(stubs).Describe(DescribeRequest(), timeout=5))
            assert code in NOT_CONNECTED
        async with channel(broker, made(broker, PartyRole.OPERATOR)) as stubs:
            assert await RunsStub(stubs).Describe(DescribeRequest())


async def test_a_certificate_without_its_key_is_nothing():
    async with running() as broker:
        stolen = made(broker, PartyRole.OPERATOR)
        thief = made(broker, PartyRole.PEER)
        wrong = Credential(thief.key, stolen.certificate, stolen.authority)
        async with channel(broker, wrong) as stubs:
            code, _ = await status(RunsStub(stubs).Describe(DescribeRequest(), timeout=5))
            assert code in NOT_CONNECTED


async def test_a_peer_says_hello_in_its_own_name_only():
    async with running() as broker, channel(broker, made(broker, PartyRole.PEER, "a")) as stubs:
        for claimed, kind in (("b", "refused"), ("a", "welcome")):
            call = AttachStub(stubs).Attach()
            profile = Profile(name=claimed, operator_set=1, device_memory_bytes=1 << 30)
            hello = Hello(version=3, peer=claimed, boot="x", counter=1, profile=profile)
            await call.write(PeerMessage(hello=hello))
            answer = await call.read()
            assert answer.WhichOneof("kind") == kind
            if kind == "refused":
                assert answer.refused.reason.code == "identity"
                assert answer.refused.reason.text == "the Hello is of b, the certificate of a"
            call.cancel()


async def test_who_is_kicked_is_out_at_once_and_everywhere(tmp_path: Path):
    async with running() as broker:
        token = broker.secured.printed_token()
        peer = await asyncio.to_thread(enroll, broker.address, token, tmp_path, "home")
        subject = peer.party.subject
        async with channel(broker, peer) as stubs:
            call = AttachStub(stubs).Attach()
            profile = Profile(name="home", operator_set=1, device_memory_bytes=1 << 30)
            hello = Hello(version=3, peer=subject, boot="x", counter=1, profile=profile)
            await call.write(PeerMessage(hello=hello))
            assert (await call.read()).HasField("welcome")
            async with channel(broker, broker.secured.operator()) as operator:
                await AdmissionStub(operator).Kick(KickRequest(subject=subject))
                code, why = await status(
                    AdmissionStub(operator).Kick(KickRequest(subject="nobody"))
                )
                assert (code, why[:29]) == ("NOT_FOUND", 'nobody ever joined as "nobody')
            refused = await call.read()
            assert refused.refused.reason.code == "kicked"
            for again in (AttachStub(stubs).Attach().read(), BlobsStub(stubs).Have(BlobQuery())):
                code, why = await status(again)
                assert (code, why) == ("PERMISSION_DENIED", f"{subject} was kicked")
        with pytest.raises(NotAdmittedError, match="was kicked"):
            await asyncio.to_thread(renew, broker.address, peer)


async def test_a_submitter_cancels_only_runs_of_their_own():
    async with running() as broker:
        spec = make_spec()
        broker.shell.blobs.whole = lambda _: True  # what is in them does not matter here
        async with channel(broker, made(broker, PartyRole.SUBMITTER, "ann")) as stubs:
            run = (await RunsStub(stubs).Submit(spec)).run
        async with channel(broker, made(broker, PartyRole.SUBMITTER, "bob")) as stubs:
            code, why = await status(RunsStub(stubs).Cancel(RunRequest(run=run)))
            assert (code, why) == (
                "PERMISSION_DENIED",
                f"run {run} is ann's: only they or an operator may cancel it",
            )
        async with channel(broker, made(broker, PartyRole.SUBMITTER, "ann")) as stubs:
            assert (await RunsStub(stubs).Cancel(RunRequest(run=run))).phase == CANCELLED


# ---------------------------------------------------------------- first contact


async def test_a_token_of_another_broker_is_found_out_before_anything_is_said(tmp_path: Path):
    async with running() as broker, running() as other:
        token = other.secured.printed_token()
        with pytest.raises(NotAdmittedError, match="is not the broker that gave out this token"):
            await asyncio.to_thread(enroll, broker.address, token, tmp_path, "home")
        assert not (tmp_path / "key.pem").exists()


async def test_clocks_that_differ_are_said_with_how_much(tmp_path: Path, monkeypatch):
    async with running() as broker:
        token = broker.secured.printed_token()
        shown = await asyncio.to_thread(shown_by, broker.address)
        assert abs(shown.ahead_s) < 60
        monkeypatch.setattr(enrolling, "shown_by", lambda _: shown._replace(ahead_s=-3 * 3600.0))
        with pytest.raises(NotAdmittedError, match="clock is 3 h behind the broker's"):
            await asyncio.to_thread(enroll, broker.address, token, tmp_path, "home")


async def test_who_is_not_there_is_said_in_one_line(tmp_path: Path):
    token = Authority.new(utc(time.time())).token()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    for address, said in (
        (f"127.0.0.1:{port}", "nobody listens at"),
        ("nowhere.invalid:7077", "the name in nowhere.invalid:7077 is not known"),
    ):
        with pytest.raises(BrokerAwayError, match=said):
            enroll(address, token, tmp_path, "home")
    async with Broker(BrokerConfig(port=0, insecure=True)) as broker:
        with pytest.raises(BrokerAwayError, match="is joined with --insecure"):
            await asyncio.to_thread(enroll, broker.address, token, tmp_path, "home")


async def test_the_same_state_gives_the_same_line_and_the_same_authority(tmp_path: Path):
    async with running(state=tmp_path) as broker:
        first = broker.join_line().split()[-1]
        peer = await asyncio.to_thread(
            enroll, broker.address, Token.parse(first), tmp_path / "p", "home"
        )
    async with running(state=tmp_path) as broker:
        assert broker.join_line().split()[-1] == first
        await asyncio.to_thread(renew, broker.address, peer)
        # A token that nobody can use any more is replaced.
        token = Token.parse(first)
        broker.secured.admission._db.execute("UPDATE invitations SET used = uses")
        assert broker.secured.admission.open_for(token, time.time()) == 0
        assert broker.join_line().split()[-1] != first


# ---------------------------------------------------------------- the port


async def raw(broker: Broker, *said: bytes) -> bytes:
    host, _, port = broker.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for part in said:
        writer.write(part)
        await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:  # closed before what was said had been read
        return b""
    finally:
        writer.close()


async def test_anybody_may_read_the_authority_and_nothing_else():
    async with running() as broker:
        answer = await raw(broker, b"GET /authority.pem HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert body == broker.secured.authority.pem
        other = await raw(broker, b"GET /authority", b".key HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.startswith(b"HTTP/1.1 404")
        assert b"PRIVATE" not in other


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\xff\xff" + bytes(100),  # a hello that is announced too large
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",  # a handshake that is no hello
        b"\x16\x03\x01\x00\x05\x01\xff\xff\xff\x00",  # lengths that lie
        bytes(5000),
    ],
)
async def test_noise_is_closed_and_costs_nobody_anything(said):
    async with running() as broker:
        assert await raw(broker, said) == b""
        assert await raw(broker, b"GET /authority.pem HTTP/1.1\r\n\r\n")


async def test_one_who_ignores_the_end_is_not_kept_half_open(monkeypatch):
    """A bad handshake: the server hangs up, and the stranger does not."""
    monkeypatch.setattr("shoal.net.web.pump.LINGER_S", 0.1)
    async with running() as broker:
        host, _, port = broker.address.rpartition(":")
        for name in (b"broker.shoal", b"door.shoal"):
            reader, writer = await asyncio.open_connection(host, int(port))
            alert = b"\x15\x03\x03\x00\x02\x02\x28"
            writer.write(hello_for(name.decode()) + alert)
            while await asyncio.wait_for(reader.read(1024), 10):
                pass  # what the server says, to its end
            await until(lambda: not broker.secured._front._open)
            writer.close()


async def test_a_hello_that_is_announced_too_large_is_not_waited_for():
    async with running() as broker:
        assert await raw(broker, b"\x16\x03\x01\xff\xff" + bytes(100)) == b""
        assert dict(broker.secured.refused) == {"hello": 1}


@pytest.mark.parametrize(
    "limits", [MultiplexerLimits(of_an_address=2), MultiplexerLimits(most_connections=2)]
)
async def test_one_address_and_all_have_only_so_many_connections(limits):
    async with running() as broker:
        front = broker.secured._front
        front.limits = limits
        host, _, port = broker.address.rpartition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        await until(lambda: front._open.total() == 2)
        assert await raw(broker, b"GET /authority.pem HTTP/1.1\r\n\r\n") == b""
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("?", "?"),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address(address, source):
    assert source_of(address) == source


async def test_a_name_that_is_none_and_an_old_tls_are_closed():
    async with running() as broker:
        whole = hello_for("broker.shoal")
        too_old = b"\x15\x03\x03\x00\x02\x02\x46"  # the alert that says so
        for hello, said in (
            (whole.replace(b"broker.shoal", b"broker\n\x1b[3m\x00"), b""),
            (whole.replace(b"\x03\x04", b"\x03\x03"), too_old),  # no TLS 1.3
        ):
            assert hello != whole
            with pytest.raises(HelloError):
                read_hello(hello)
            assert await raw(broker, hello) == said


async def test_a_slow_drip_ends_in_time():
    async with running() as broker:
        broker.secured._front.limits = MultiplexerLimits(hello_s=0.2)
        for beginning in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"GET / HTT"):
            assert await raw(broker, beginning) == b""


async def test_ten_thousand_joins_from_one_address_are_turned_away_cheaply():
    limits = MultiplexerLimits()
    knocks = RateLimiter(limits.knocks, limits.knocks_per_s, limits.most_addresses)
    passed = sum(knocks.allowed("10.0.0.1", 0.001 * i) for i in range(10_000))
    assert passed <= limits.knocks + 10 * limits.knocks_per_s + 1
    assert knocks.allowed("10.0.0.2", 10.0)  # another address is another
    assert knocks.allowed("10.0.0.1", 100.0)  # and this one comes again later
    for i in range(3 * limits.most_addresses):
        knocks.allowed(f"host {i}", 200.0)
    assert len(knocks._left) == limits.most_addresses


async def test_an_address_that_knocks_too_often_waits_and_those_inside_do_not():
    async with running() as broker:
        broker.secured._front._knocks = RateLimiter(3, 0.0, 100)
        request = JoinRequest(version=1, name="x", request=request_of(new_key()))
        codes = []
        for _ in range(6):
            async with channel(broker, None) as stubs:
                code, _ = await status(AdmissionStub(stubs).Join(request, timeout=2))
                codes.append(code)
        assert codes[:3] == ["UNAUTHENTICATED"] * 3
        assert "UNAUTHENTICATED" not in codes[3:]
        async with channel(broker, made(broker, PartyRole.OPERATOR)) as stubs:
            assert await RunsStub(stubs).Describe(DescribeRequest())


def hello_for(name: str) -> bytes:
    """The first message of a real client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_the_name_of_a_real_hello_is_read_and_no_cut_one_is():
    hello = hello_for("door.shoal")
    assert read_hello(hello) == ClientHello("door.shoal", http=False)
    for size in range(len(hello)):
        with pytest.raises(HelloError):
            read_hello(hello[:size])
