"""Peers that name addresses of others, over real connections: the broker dials nothing that they
could not reach themselves, believes certificates and no Hello, and victims stay as they are."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest

from shoal.broker.service import server as servers
from shoal.broker.service import services
from shoal.broker.service.door import reach as reaching
from shoal.net.identity.credential import server_credentials
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import PartyRole
from shoal.net.local import joined
from shoal.net.web.pump import close, join
from shoal.proto.broker_pb2 import BrokerMessage, Hello, PeerMessage, Profile, Way
from shoal.proto.broker_pb2_grpc import AttachStub
from shoal.proto.graph_pb2 import FULL

from ...broker.service.door.test_swarm import NODE, OURS, Sea
from ...broker.service.test_secured import channel, made, running


@asynccontextmanager
async def listening(host: str = "127.0.0.1") -> AsyncIterator[tuple[int, list[str]]]:
    """A service of somebody's: its port, and who has dialled it. It answers nothing."""
    dialled: list[str] = []

    async def came(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(str(writer.get_extra_info("peername")))
        writer.close()

    async with await asyncio.start_server(came, host, 0) as server:
        yield int(server.sockets[0].getsockname()[1]), dialled


async def says(stubs: object, peer: str, address: str, boot: str = "b") -> BrokerMessage:
    """What the broker answers to a Hello."""
    call = AttachStub(stubs).Attach()  # type: ignore[no-untyped-call]
    profile = Profile(name=peer, device_memory_bytes=1, operator_set=FULL)
    hello = Hello(version=3, peer=peer, boot=boot, counter=1, profile=profile, address=address)
    await call.write(PeerMessage(hello=hello))
    found: BrokerMessage = await asyncio.wait_for(call.read(), 10)
    call.cancel()
    return found


def looked_up(monkeypatch: pytest.MonkeyPatch, evil: str = "127.0.0.1") -> list[str]:
    """Names that are looked up in this loop from here on; evil.example is what the test says."""
    asked: list[str] = []

    async def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if host != "evil.example":
            raise OSError("there is no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (evil, port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    return asked


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "[::1]"])
async def test_a_peer_from_elsewhere_has_nothing_on_the_brokers_host_dialled(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """All tests are on one host: who calls is said to have come from another one."""
    monkeypatch.setattr(services, "came_from", lambda peer: "9.9.9.9")
    async with (
        listening("::1" if host == "[::1]" else "127.0.0.1") as (port, dialled),
        running() as broker,
        channel(broker, made(broker, PartyRole.PEER, "eve")) as stubs,
    ):
        with caplog.at_level(logging.WARNING):
            said = await says(stubs, "eve", f"{host}:{port}")
        assert said.HasField("welcome")
        assert not dialled
        assert "peer_not_dialled peer=eve" in caplog.text


async def test_a_peer_from_here_is_dialled_here_and_known_by_the_front():
    async with (
        listening() as (port, dialled),
        running() as broker,
        channel(broker, made(broker, PartyRole.PEER, "ann")) as stubs,
    ):
        assert (await says(stubs, "ann", f"127.0.0.1:{port}")).HasField("welcome")
        assert dialled


async def test_a_name_is_looked_up_once_and_what_was_checked_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
):
    """A name that leads somewhere else each time it is asked for."""
    asked: list[str] = []
    async with listening() as (port, dialled):
        answers = iter(["127.0.0.1", "169.254.169.254"])

        async def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            asked.append(host)
            there = (next(answers), port)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", there)]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
        assert await reaching.resolved("eve", f"evil.example:{port}", "127.0.0.1") == joined(
            "127.0.0.1", port
        )
        assert await reaching.resolved("eve", f"evil.example:{port}", "127.0.0.1") == ""
        assert asked == ["evil.example"] * 2
        assert not dialled


async def test_a_hello_in_anothers_name_is_refused_and_the_other_is_still_dialled():
    async with (
        listening() as (port, dialled),
        running() as broker,
        channel(broker, made(broker, PartyRole.PEER, "eve")) as evil,
        channel(broker, made(broker, PartyRole.PEER, "victim")) as stubs,
    ):
        said = await says(evil, "victim", f"127.0.0.1:{port}")
        assert said.HasField("refused")
        assert not dialled
        assert (await says(stubs, "victim", f"127.0.0.1:{port}")).HasField("welcome")
        assert dialled


async def test_one_peer_has_the_broker_dial_so_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reaching, "_IN_A_ROW", 3)
    async with listening() as (port, dialled), running() as broker:
        async with channel(broker, made(broker, PartyRole.PEER, "eve")) as stubs:
            for i in range(6):
                await says(stubs, "eve", f"127.0.0.1:{port}", boot=f"b{i}")
        assert 1 <= len(dialled) <= 3


@pytest.mark.parametrize("came", ["9.9.9.9", "127.0.0.1"])
async def test_a_way_into_the_swarm_is_no_other_way_to_have_something_dialled(
    came: str, monkeypatch: pytest.MonkeyPatch
):
    """A peer offers as a node of the directory what is a service of the broker's own host."""
    monkeypatch.setattr(services, "came_from", lambda peer: came)
    beacon = Sea().beacon("one")
    honest = servers.add_services
    monkeypatch.setattr(servers, "add_services", lambda *a, ways: honest(*a, ways=beacon.offered))
    async with (
        listening() as (port, dialled),
        running() as broker,
        channel(broker, made(broker, PartyRole.PEER, "eve")) as stubs,
    ):
        call = AttachStub(stubs).Attach()
        way = f"/ip4/127.0.0.1/tcp/{port}/p2p/{NODE}"
        await call.write(PeerMessage(way=Way(multiaddr=way)))
        await asyncio.wait_for(beacon._news.wait(), 10)
        await beacon.look()
        assert bool(dialled) == (came == "127.0.0.1")
        assert beacon.ways == [OURS], "what answers there is no node"
        call.cancel()


async def test_the_address_that_was_found_is_dialled_and_not_the_name(
    monkeypatch: pytest.MonkeyPatch,
):
    """Nobody but this test knows the name."""
    async with (
        listening() as (port, dialled),
        running() as broker,
        channel(broker, made(broker, PartyRole.PEER, "eve")) as stubs,
    ):
        asked = looked_up(monkeypatch)
        assert (await says(stubs, "eve", f"evil.example:{port}")).HasField("welcome")
        assert asked == ["evil.example"]
        assert dialled


@pytest.mark.parametrize(
    "address", ["unix:/run/broker:7077", "dns://8.8.8.8/a:7077", "ipv4:1.2.3.4:7077", "a\x00b:7077"]
)
async def test_what_is_no_name_is_not_even_looked_up(address: str, monkeypatch: pytest.MonkeyPatch):
    async with running() as broker, channel(broker, made(broker, PartyRole.PEER, "eve")) as stubs:
        asked = looked_up(monkeypatch)
        await says(stubs, "eve", address)
        assert asked == []


async def test_a_peer_is_tried_once_at_a_time_and_few_are_tried_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    """One that is not tried is let in all the same; the relay serves."""
    monkeypatch.setattr(reaching, "_QUEUE_S", 0.1)
    async with listening() as (port, dialled), running() as broker:
        reach = broker.secured.reach
        for name, tried, slots in (("eve", {"eve"}, 1), ("ann", set(), 0), ("bob", {"eve"}, 1)):
            reach._checking, reach._slots = set(tried), asyncio.Semaphore(slots)
            async with channel(broker, made(broker, PartyRole.PEER, name)) as stubs:
                assert (await says(stubs, name, f"127.0.0.1:{port}")).HasField("welcome")
            assert bool(dialled) == (name == "bob")


async def test_an_address_where_another_peer_answers_leads_to_that_one_alone():
    async with running() as broker:
        server = grpc.aio.server()
        victim = made(broker, PartyRole.PEER, "victim")
        shown = server_credentials(lambda: victim)
        address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', shown)}"
        await server.start()
        checked = broker.secured.reach.checked
        assert await checked("eve", address, "127.0.0.1") == ""
        assert await checked("victim", address, "127.0.0.1") == address
        await server.stop(None)


async def test_who_answers_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    class Silent:
        async def __aenter__(self) -> Silent:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
            return grpc.ChannelConnectivity.CONNECTING

        async def wait_for_state_change(self, _: object) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(reaching, "_PATIENCE_S", 0.1)
    async with running() as broker:
        monkeypatch.setattr(grpc.aio, "secure_channel", lambda *_, **__: Silent())
        checking = broker.secured.reach.checked("eve", "127.0.0.1:7077", "127.0.0.1")
        assert await asyncio.wait_for(checking, 20) == ""


async def test_the_broker_knows_where_a_call_behind_its_front_came_from(
    monkeypatch: pytest.MonkeyPatch,
):
    """Everything is on one host here, so it comes from another address of it."""
    known: list[str] = []
    real = services.came_from
    monkeypatch.setattr(services, "came_from", lambda p: known.append(real(p)) or known[-1])
    async with running() as broker:
        port = int(broker.address.rpartition(":")[2])

        async def passed_on(*near: asyncio.StreamReader | asyncio.StreamWriter) -> None:
            far = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.9", 0))
            with suppress(OSError):  # it is over, whoever ended it
                await join(near, far)
            close(far)
            close(near)

        async with await asyncio.start_server(passed_on, "127.0.0.1", 0) as server:
            eve = made(broker, PartyRole.PEER, "eve")
            there = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            options = channel_options(there)
            async with grpc.aio.secure_channel(there, eve.for_channel(), options=options) as stubs:
                assert (await says(stubs, "eve", "")).HasField("welcome")
        assert known == ["127.0.0.9"]
