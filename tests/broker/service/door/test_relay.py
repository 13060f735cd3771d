"""Two peers of which neither can be dialled meet through the broker's port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import grpc
import grpc.aio
import pytest
import torch

from shoal.broker.options import BrokerOptions
from shoal.broker.service.door.relay import RelayLimits
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.compression.codec import RAW
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.credential import Credential
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole, dns_name
from shoal.net.links.frame import FrameKey, Payload
from shoal.net.links.transport import (
    FrameAcknowledged,
    FrameArrived,
    LinkDown,
    LinkRefused,
    LinkUp,
    TransportEvent,
)
from shoal.net.transports.grpc_transport import SERVER_OPTIONS, GrpcTransport
from shoal.peer.shell.relayed import answer
from shoal.proto.broker_pb2 import Hello, PeerMessage, Profile
from shoal.proto.broker_pb2_grpc import AttachStub
from shoal.tests.net.web.proxies import ConnectProxy

FAR = "broker.invalid:7077"


class Member:
    """A peer behind a router: its transport listens where nobody else comes, and it is attached."""

    def __init__(self, name: str, credential: Credential) -> None:
        self.name, self.credential = name, credential
        self.events: list[TransportEvent] = []
        self._news = asyncio.Event()
        self.transport = GrpcTransport(name, "1", self._on_event, credential=lambda: credential)
        self.relayed: list[str] = []
        self.answers = True

    def _on_event(self, event: TransportEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def heard(self, kind: type[TransportEvent], count: int = 1) -> None:
        while sum(isinstance(e, kind) for e in self.events) < count:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 20)

    async def told(self, count: int) -> None:
        """So many dials through the relay were announced to it."""
        while len(self.relayed) < count:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 20)

    def send(self, to: str, size: int, number: int = 0) -> bytes:
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
        encoded = RAW.encode(tensor)
        key = FrameKey("run", 1, 0, Role.ACTIVATION, number, 1, "x", self.name, to)
        spec = TensorSpec((size,), "uint8")
        self.transport.send(to, key, Payload("raw/1", encoded.header, spec, encoded.buffers))
        return bytes(tensor.numpy())

    def expect(self, peer: str) -> None:
        self.transport.expect(peer)
        self.transport.allow(peer, Role.ACTIVATION, 10)

    @asynccontextmanager
    async def attached(self, address: str) -> AsyncIterator[None]:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        self.transport.attach(server)
        shown = self.credential.for_server()
        credentials = grpc.dynamic_ssl_server_credentials(shown, lambda: None, True)
        frames = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
        async with (
            self.transport,
            grpc.aio.secure_channel(
                address, self.credential.for_channel(), options=channel_options(address)
            ) as channel,
            asyncio.TaskGroup() as tasks,
        ):
            await server.start()
            call = AttachStub(channel).Attach()
            profile = Profile(name=self.name, operator_set=1, device_memory_bytes=1 << 30)
            hello = Hello(version=3, peer=self.name, boot="x", counter=1, profile=profile)
            await call.write(PeerMessage(hello=hello))
            assert (await call.read()).HasField("welcome")

            async def listen() -> None:
                while (message := await call.read()) is not grpc.aio.EOF:
                    if message.HasField("relayed"):
                        self.relayed.append(message.relayed.ticket)
                        self._news.set()
                        if self.answers:
                            ticket, carries = message.relayed.ticket, self.transport.carries
                            tasks.create_task(answer(ticket, address, frames, carries))

            listening = tasks.create_task(listen())
            try:
                yield
            finally:
                listening.cancel()
                call.cancel()
                await server.stop(None)


@asynccontextmanager
async def network(
    *names: str, proxy: ConnectProxy | None = None
) -> AsyncIterator[tuple[Broker, list[Member]]]:
    """With a proxy, the peers know the broker as FAR, which only the proxy knows."""
    options = BrokerOptions(probe_s=0.0)
    async with Broker(BrokerConfig(port=0, options=options)) as broker, AsyncExitStack() as stack:
        assert broker.secured is not None
        now = utc(time.time())
        members = []
        for name in names:
            party = Party(PartyRole.PEER, name)
            credential = broker.secured.authority.credential(party, now, timedelta(hours=1))
            members.append(Member(name, credential))
            if proxy is not None:
                proxy.targets[FAR] = broker.address
            address = broker.address if proxy is None else FAR
            await stack.enter_async_context(members[-1].attached(address))
        yield broker, members


async def test_frames_go_both_ways_and_the_broker_reads_none():
    async with network("a", "b") as (broker, (a, b)):
        b.expect("a")
        a.transport.dial("b", broker.address, 1)
        a.transport.allow("b", Role.ACTIVATION, 10)
        await a.heard(LinkUp)
        sent = [a.send("b", 3 << 20, i) for i in range(3)]
        back = b.send("a", 1 << 20)
        await a.heard(FrameAcknowledged, 3)
        await b.heard(FrameArrived, 3)
        await a.heard(FrameArrived)
        arrived = [e.arrived for e in b.events if isinstance(e, FrameArrived)]
        assert [bytes(x.data) for x in sorted(arrived, key=lambda x: x.key.microbatch)] == sent
        assert [bytes(e.arrived.data) for e in a.events if isinstance(e, FrameArrived)] == [back]
        assert len(b.relayed) == 1


async def test_everything_takes_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    """Control, the dial through the relay and its answer: two that reach only their proxy."""
    async with ConnectProxy({}) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        async with network("a", "b", proxy=proxy) as (_, (a, b)):
            assert proxy.asked == [FAR] * 2
            b.expect("a")
            a.transport.dial("b", FAR, 1)
            a.transport.allow("b", Role.ACTIVATION, 10)
            await a.heard(LinkUp)
            a.send("b", 1 << 20)
            await a.heard(FrameAcknowledged)
            assert proxy.asked == [FAR] * 4


async def test_one_who_dials_through_the_relay_is_checked_as_anybody():
    """Of another authority, or in another's name: it gets as far as the peer, and no further."""
    async with network("a", "b", "c") as (broker, (a, b, c)):
        b.expect("a")
        stranger = Authority.new(utc(time.time())).credential(
            Party(PartyRole.PEER, "a"), utc(time.time()), timedelta(hours=1)
        )
        forged = Credential(stranger.key, stranger.certificate, a.credential.authority)
        outsider = Member("a", forged)
        liar = Member("a", c.credential)  # c, who says that it is a
        for hostile in (outsider, liar):
            async with hostile.transport:
                before = len(b.relayed)
                hostile.transport.dial("b", broker.address, 1)
                await b.told(before + 1)
                await hostile.heard(LinkRefused if hostile is liar else LinkDown)
                assert not any(isinstance(e, LinkUp) for e in hostile.events)
        assert not any(isinstance(e, LinkUp) for e in b.events)
        refusals = [e.why for e in b.events if isinstance(e, LinkRefused)]
        assert refusals == ["a hello of a by the certificate of c"]
        a.transport.dial("b", broker.address, 2)
        await a.heard(LinkUp)


async def test_who_answers_in_anothers_place_is_found_out():
    """The relay itself could lead a dial to the wrong peer: TLS asks for the name."""
    async with network("a", "b", "c") as (broker, (a, b, c)):
        b.answers = False
        c.expect("a")
        assert broker.secured is not None
        relay = broker.secured.relay
        name_of_b, name_of_c = (dns_name(PartyRole.PEER, name) for name in "bc")
        relay._told[name_of_b] = relay._told[name_of_c]
        a.transport.dial("b", broker.address, 1)
        await c.told(1)
        await a.heard(LinkDown)
        a.transport.hang_up("b")
        assert not any(isinstance(e, LinkUp) for e in a.events)
        assert c.events == []  # TLS ended it before a hello was said


async def test_a_connection_that_breaks_is_dialled_again_through_the_relay():
    async with network("a", "b") as (broker, (a, b)):
        b.expect("a")
        a.transport.dial("b", broker.address, 1)
        a.transport.allow("b", Role.ACTIVATION, 10)
        await a.heard(LinkUp)
        assert broker.secured is not None
        assert broker.secured._front is not None
        [task] = [t for t in broker.secured._front._tasks if t.get_name().startswith("relay ")]
        task.cancel()
        a.send("b", 1 << 20)
        await a.heard(FrameAcknowledged)


async def test_a_ticket_is_good_once_and_only_a_real_one():
    async with network("a", "b") as (broker, (a, b)):
        b.answers = False
        assert broker.secured is not None
        a.transport.dial("b", broker.address, 1)
        await b.told(1)
        host, _, port = broker.address.rpartition(":")
        real = b"SHOAL-RELAY " + b.relayed[0].encode() + b"\n"
        for ticket in (b"0" * 32, b"", b"\xff" * 40, b.relayed[0].encode()[:-1]):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"SHOAL-RELAY " + ticket + b"\n")
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        first, one = await asyncio.open_connection(host, int(port))
        one.write(real)
        assert (await asyncio.wait_for(first.readexactly(1), 10)) == b"\x16"  # the dialler's hello
        second, other = await asyncio.open_connection(host, int(port))
        other.write(real)
        assert await asyncio.wait_for(second.read(), 10) == b""
        a.transport.hang_up("b")
        one.close()
        other.close()


async def test_a_dial_that_nobody_answers_ends():
    async with network("a", "b") as (broker, (a, b)):
        b.answers = False
        assert broker.secured is not None
        broker.secured.relay.limits = RelayLimits(answer_s=0.1)
        a.transport.dial("b", broker.address, 1)
        await a.heard(LinkDown)
        a.transport.hang_up("b")
        assert b.relayed


@pytest.mark.parametrize(
    "limits", [RelayLimits(of_a_peer=1, young_s=0), RelayLimits(at_once=1, young_s=0)]
)
async def test_relayed_connections_are_bounded(limits):
    async with network("a", "b", "c") as (broker, (a, b, c)):
        assert broker.secured is not None
        broker.secured.relay.limits = limits
        for peer in ("a", "c"):
            b.expect(peer)
        a.transport.dial("b", broker.address, 1)
        await a.heard(LinkUp)
        c.transport.dial("b", broker.address, 2)
        while len(c.events) < 2:  # its dials fail
            await asyncio.wait_for(c._news.wait(), 20)
            c._news.clear()
        assert not any(isinstance(e, LinkUp) for e in c.events)
        assert len(b.relayed) == 1
        a.send("b", 1000)
