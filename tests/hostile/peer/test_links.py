"""What strangers and members may cost a peer over its links: handshakes that never end, streams
without a word, probe frames that nobody ordered, and certificates that have ended."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc.aio
import pytest

from shoal.broker.options import BrokerOptions
from shoal.broker.service.door.relay import RelayLimits
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.broker.service.services import server_options
from shoal.dag.schedule.flow import Role
from shoal.net.identity.authority import utc
from shoal.net.identity.credential import Credential
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole, dns_name
from shoal.net.links.frame import FrameKey
from shoal.net.links.transport import FrameAcknowledged, LinkDown, LinkRefused, LinkUp
from shoal.net.transports.grpc_transport import SERVER_OPTIONS, GrpcTransport
from shoal.peer.core.rates.probe import MOST_FRAME_BYTES, probe_payload
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.shell import relayed
from shoal.peer.shell.daemon import Worker
from shoal.proto.broker_pb2 import BrokerMessage, Hello, PeerMessage, Profile
from shoal.proto.broker_pb2_grpc import AttachStub
from shoal.tests.broker.service.door.test_relay import Member, network

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def client_hello(name: str) -> bytes:
    """How a TLS connection to that name begins."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


async def silent(address: str, said: bytes = b"", source: str = "127.0.0.1") -> Streams:
    """A stranger's connection on which nothing more comes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    writer.write(said)
    return reader, writer


async def ended(stream: Streams, within_s: float = 20.0) -> bool:
    """Whether the other side closes it in time."""
    try:
        async with asyncio.timeout(within_s):
            while await stream[0].read(4096):
                pass
    except TimeoutError:
        return False
    except OSError:
        pass
    stream[1].close()
    return True


async def gone(streams: list[Streams]) -> None:
    """Closes them, and waits until the other side has noticed."""
    for _, writer in streams:
        if not writer.is_closing():
            writer.write_eof()
    await asyncio.gather(*map(ended, streams))


# ---------------------------------------------------------------- handshakes


async def test_strangers_at_the_relay_keep_no_partner_out():
    """From three addresses, more than a peer may have, none of which ends its handshake."""
    async with network("a", "b") as (broker, (a, b)):
        broker.secured.relay.limits = RelayLimits(of_a_peer=8, young_of_a_peer=8)
        b.expect("a")
        said, strangers = client_hello(dns_name(PartyRole.PEER, "b")), []
        for i in range(24):
            source = f"127.0.0.{2 + i % 3}"
            strangers.append(await silent(broker.address, said, source))
            await b.told(i + 1)
            assert len(broker.secured.relay._young) <= 8
        a.transport.dial("b", broker.address, 1)
        a.transport.allow("b", Role.ACTIVATION, 10)
        await a.heard(LinkUp)
        a.send("b", 1 << 20)
        await a.heard(FrameAcknowledged)
        assert not any(isinstance(e, LinkDown) for e in a.events), "it came in at once"
        assert await ended(strangers[0]), "the oldest made room"
        await gone(strangers[1:])


async def test_a_link_that_has_proven_itself_gives_way_to_no_stranger():
    async with network("a", "b") as (broker, (a, b)):
        broker.secured.relay.limits = RelayLimits(young_of_a_peer=4, young_s=0.0)
        b.expect("a")
        a.transport.dial("b", broker.address, 1)
        a.transport.allow("b", Role.ACTIVATION, 10)
        await a.heard(LinkUp)
        broker.secured.relay.limits = RelayLimits(young_of_a_peer=4)
        said = client_hello(dns_name(PartyRole.PEER, "b"))
        strangers = []
        for i in range(12):
            strangers.append(await silent(broker.address, said))
            await b.told(2 + i)
        a.send("b", 1 << 20)
        await a.heard(FrameAcknowledged)
        assert not any(isinstance(e, LinkDown) for e in a.events)
        await gone(strangers)


def test_a_handshake_has_a_limit_and_so_have_connections_at_a_peer():
    options = dict(SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] <= 1000 * RelayLimits().young_s - 1000
    assert RelayLimits().young_s - 1 >= relayed._UNUSED_S, "what no link uses never grows old"
    assert options["grpc.max_allowed_incoming_connections"] <= 1024
    assert options["grpc.max_concurrent_streams"] <= 128
    assert dict(server_options())["grpc.server_handshake_timeout_ms"] <= 10_000


@asynccontextmanager
async def joined(broker: Broker, folder: Path, name: str) -> AsyncIterator[Worker]:
    """A real peer of the broker, in this loop."""
    hour = timedelta(hours=1)
    token = broker.secured.admission.invite(PartyRole.PEER, 1, hour, "test", time.time())
    config = PeerConfig(
        broker=broker.address, state=folder / name, name=name, token=str(token), threads=1
    )
    workers: list[Worker] = []
    end = asyncio.create_task(work(config, workers.append))
    members = broker.shell.machine.members.members
    while not any(m.profile.name == name for m in members.values()):
        await asyncio.to_thread(lambda: None)  # a turn of the loop, and no more
    yield workers[0]
    workers[0].stop(now=True)
    assert await end == 0


def changed(**options: int) -> tuple[tuple[str, int], ...]:
    own = {f"grpc.{name}": value for name, value in options.items()}
    return tuple((dict(SERVER_OPTIONS) | own).items())


async def test_strangers_who_fill_a_peers_port_do_not_close_its_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    few = changed(max_allowed_incoming_connections=4, server_handshake_timeout_ms=60_000)
    monkeypatch.setattr("shoal.peer.shell.opening.SERVER_OPTIONS", few)
    async with network("a") as (broker, (a,)), joined(broker, tmp_path, "b") as b:
        strangers = [await silent(b.listens) for _ in range(12)]
        closed = await asyncio.gather(*(ended(s, 1.0) for s in strangers))
        assert closed.count(True) >= 8, "those over the limit"
        a.transport.dial(b.me.peer, b.listens, 1, broker.address)
        await a.heard(LinkRefused)  # it got as far as its hello, which nobody ordered
        assert "does not expect a dial of a" in next(
            e.why for e in a.events if isinstance(e, LinkRefused)
        )
        a.transport.hang_up(b.me.peer)
        await gone(strangers)


async def test_a_strangers_handshake_at_a_peer_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a shorter limit than the real one: that gRPC keeps it is what counts here."""
    short = changed(server_handshake_timeout_ms=200)
    monkeypatch.setattr("shoal.peer.shell.opening.SERVER_OPTIONS", short)
    async with network() as (broker, _), joined(broker, tmp_path, "b") as b:
        said = client_hello(dns_name(PartyRole.PEER, b.me.peer))
        strangers = [await silent(b.listens), await silent(broker.address, said)]
        assert all(await asyncio.gather(*map(ended, strangers)))


# ---------------------------------------------------------------- streams


async def test_one_peers_silent_streams_are_few_and_others_come_in():
    async with network("a", "b", "c") as (broker, (a, b, c)):
        b.expect("a")
        options = channel_options(broker.address, dns_name(PartyRole.PEER, "b"))
        async with AsyncExitStack() as stack:
            answers = []
            for _ in range(12):
                credentials = c.credential.for_channel()
                found = grpc.aio.secure_channel(broker.address, credentials, options=options)
                stubs = await stack.enter_async_context(found)
                call = stubs.stream_stream("/shoal.v1.Peer/Frames")()
                answers.append(asyncio.create_task(call.code()))
            ends = asyncio.as_completed(answers)
            refused = [(await next(ends)).name for _ in range(4)]
            assert refused == ["RESOURCE_EXHAUSTED"] * 4
            a.transport.dial("b", broker.address, 1)
            await a.heard(LinkUp)
        for end in ends:  # those that were let in end with their channels
            await end


# ---------------------------------------------------------------- probes


_NOT_YET = "does not expect a dial"


async def test_probe_frames_beyond_what_was_ordered_are_refused(tmp_path: Path):
    """The broker has a link measured; the other end sends what it likes."""
    options = BrokerOptions(lease_s=600.0)  # the hand-made member sends no heartbeats
    async with (
        Broker(BrokerConfig(port=0, options=options)) as broker,
        joined(broker, tmp_path, "b") as b,
    ):
        now = utc(time.time())
        party = Party(PartyRole.PEER, "mallory")
        credential = broker.secured.authority.credential(party, now, timedelta(hours=1))
        mallory = Member("mallory", credential)
        refused: dict[str, str] = {}
        async with (
            mallory.transport,
            grpc.aio.secure_channel(
                broker.address, credential.for_channel(), options=channel_options(broker.address)
            ) as channel,
        ):
            call = AttachStub(channel).Attach()
            profile = Profile(name="m", operator_set=1, device_memory_bytes=1 << 30)
            hello = Hello(version=3, peer="mallory", boot="x", counter=1, profile=profile)
            await call.write(PeerMessage(hello=hello))
            while not (order := await call.read()).HasField("probe"):
                assert isinstance(order, BrokerMessage)
            probe = order.probe
            assert probe.address, "b can be dialled, mallory cannot"
            for what, number, size in (
                ("unasked", probe.number + 5, 1),
                ("too_large", probe.number, MOST_FRAME_BYTES + 1),
            ):
                to, why = probe.peer, _NOT_YET
                while _NOT_YET in why:  # the broker tells the two ends one after the other
                    mallory.events.clear()
                    mallory.transport.dial(to, b.listens, probe.generation)
                    mallory.transport.allow(to, Role.PROBE, 2)
                    await mallory.heard(LinkUp)
                    key = FrameKey("probe", number, 0, Role.PROBE, 0, 0, "probe", "mallory", to)
                    mallory.transport.send(to, key, probe_payload(size))
                    await mallory.heard(LinkRefused)
                    why = next(e.why for e in mallory.events if isinstance(e, LinkRefused))
                    assert not any(isinstance(e, FrameAcknowledged) for e in mallory.events)
                    mallory.transport.hang_up(to)
                refused[what] = why
        assert "allow 0" in refused["unasked"]
        assert f"allow {MOST_FRAME_BYTES}" in refused["too_large"]


# ---------------------------------------------------------------- certificates that end


async def test_a_link_ends_with_its_certificate_and_goes_on_with_a_newer_one():
    """The listener's clock runs to half a second before the end of the dialler's certificate."""
    async with network("b") as (broker, (b,)):
        now, party = utc(time.time()), Party(PartyRole.PEER, "a")
        lasting = [
            broker.secured.authority.credential(party, now, timedelta(hours=hours))
            for hours in (1, 2)
        ]
        shown: list[Credential] = [lasting[0]]
        a = Member("a", lasting[0])
        a.transport = GrpcTransport("a", "1", a._on_event, credential=lambda: shown[0])
        b.expect("a")
        b.transport._clock = lambda: lasting[0].ends.timestamp() - 0.5
        async with a.transport:
            a.transport.dial("b", broker.address, 1)
            a.transport.allow("b", Role.ACTIVATION, 10)
            await a.heard(LinkUp)
            a.send("b", 1 << 20, 0)
            shown[0] = lasting[1]  # as `Credentials.keep` does at the half of its life
            await a.heard(LinkUp, 2)
            (why,) = [e.why for e in a.events if isinstance(e, LinkRefused)]
            assert "the certificate of a has ended: dial with a newer one" in why
            a.send("b", 1 << 20, 1)
            await a.heard(FrameAcknowledged, 2)


async def test_who_has_no_newer_certificate_is_not_let_in_again():
    async with network("a", "b") as (broker, (a, b)):
        b.expect("a")
        b.transport._clock = lambda: a.credential.ends.timestamp() + 1.0
        a.transport.dial("b", broker.address, 1)
        await a.heard(LinkRefused, 2)
        assert not any(isinstance(e, FrameAcknowledged) for e in a.events)
