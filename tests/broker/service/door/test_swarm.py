"""What a broker says of its whereabouts, and the way into its swarm through its own port. The
directory is the twin in memory; tests/net/discovery/test_discovery_dht.py has the real one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.broker.service.door.swarm import GREETING, Beacon
from shoal.broker.service.secured import Secured
from shoal.broker.service.server import Broker, BrokerConfig, BrokerConfigError
from shoal.net.discovery import process
from shoal.net.discovery.record import (
    LASTS_S,
    MOST_NODES,
    YOUNG_S,
    Claim,
    DirectoryError,
    newest,
    sign,
)
from shoal.net.identity.authority import Authority, utc
from shoal.proto.discovery_pb2 import Whereabouts
from shoal.tests.net.discovery.nodes import MemoryDirectory

NODE = "QmduvmWovF5kFgVztCq1dXBspXNJpvBFpxbSCech8VqWLC"
OURS = f"/dns/shoal.example.org/tcp/7077/p2p/{NODE}"


class Counting(MemoryDirectory):
    """Counts what is left there, and may be out of order."""

    published = 0
    broken = False

    async def publish(self, record: bytes) -> None:
        self.published += 1
        await super().publish(record)

    async def find(self) -> list[bytes]:
        if self.broken:
            raise DirectoryError("out of order")
        return await super().find()


class Sea:
    """A directory, an authority, and what stands there."""

    def __init__(self) -> None:
        self.directory, self.authority = Counting(), Authority.new(utc(time.time()))
        self.neighbours = 0

    def beacon(self, boot: str, address: str = "a.example:7077") -> Beacon:
        return Beacon(
            *(self.directory, Claim("fish", boot), self.authority),
            address=address,
            way=OURS,
            neighbours=lambda: self.neighbours,
        )

    async def said(self) -> Whereabouts | None:
        found = await self.directory.find()
        return newest(found, "fish", self.authority.fingerprint, time.time())


@asynccontextmanager
async def listening(says: bytes) -> AsyncIterator[str]:
    """The multiaddr of something that answers everybody so."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    try:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}/p2p/{NODE}"
    finally:
        server.close()


async def test_it_is_said_again_when_something_changed_and_not_otherwise() -> None:
    sea = Sea()
    beacon = sea.beacon("one")
    async with listening(GREETING) as node, listening(b"SSH-2.0-no libp2p here\r\n") as other:
        for _ in range(3):
            await beacon.look()
        assert sea.directory.published == 1
        said = await sea.said()
        assert said is not None
        assert (said.address, list(said.nodes)) == ("a.example:7077", [OURS])
        for way in (node, other, "nonsense", OURS, f"/ip4/127.0.0.1/tcp/9/p2p/{NODE}"):
            beacon.offered(way, "127.0.0.1", by=way)
        await beacon.look()
        said = await sea.said()
        assert said is not None
        assert list(said.nodes) == beacon.ways == [OURS, node]
        assert sea.directory.published == 2
        sea.neighbours = 1  # who has just come may not have the record
        await beacon.look()
        assert sea.directory.published == 3
        # A broker that starts again elsewhere takes over what the last one knew.
        heir = sea.beacon("two", "b.example:1")
        await heir.look()
        said = await sea.said()
        assert said is not None
        assert (said.address, list(said.nodes)) == ("b.example:1", [OURS, node])
        heir._tried_at = float("-inf")
    await heir.look()  # nobody is at that node any more
    assert heir.ways == [OURS]
    for port in range(1, 1000):
        heir.offered(f"/ip4/127.0.0.1/tcp/{port}/p2p/{NODE}", "127.0.0.1", by=f"peer-{port}")
    assert len(heir._offers) < 100
    for offer in heir._offers.values():
        offer.reached = True
    assert len(heir.ways) == MOST_NODES


async def test_one_peer_offers_two_ways_and_does_not_keep_the_broker_dialling() -> None:
    beacon = Sea().beacon("one")
    for port in range(1, 200):
        beacon.offered(f"/ip4/9.9.9.9/tcp/{port}/p2p/{NODE}", "9.9.9.9", by="eve")
    assert len(beacon._offers) == 2
    beacon.offered(f"/ip4/9.9.9.8/tcp/4001/p2p/{NODE}", "9.9.9.8", by="ann")
    assert [offer.by for offer in beacon._offers.values()] == ["eve", "eve", "ann"]
    tried = 0
    while tried < 1000 and beacon._offers:  # each is tried and found to lead nowhere
        beacon._offers.clear()
        beacon.offered(f"/ip4/9.9.9.9/tcp/4001/p2p/{NODE}", "9.9.9.9", by="eve")
        tried += 1
    assert tried < 40


async def test_a_record_is_renewed_before_it_ends() -> None:
    sea = Sea()
    beacon = sea.beacon("one")
    await beacon.look()
    beacon._published_at -= LASTS_S / 2
    await beacon.look()
    assert sea.directory.published == 2


async def test_a_later_start_elsewhere_takes_over_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sea = Sea()
    old, young = sea.beacon("old"), sea.beacon("young", "b.example:1")
    old._began -= 2 * YOUNG_S
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            await old.look()
            await young.look()
    said = await sea.said()
    assert said is not None
    assert said.boot == "young"
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("swarm_taken_over swarm=fish address=b.example:1: a broker with this")


async def test_what_others_leave_there_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sea = Sea()
    beacon = sea.beacon("one")
    theirs = Authority.new(utc(time.time()))
    forged = Claim("fish", "x").next(None, "evil:1", [], now_s=time.time() + 60, age_s=0.0)
    assert forged is not None
    await beacon.look()
    for data in (b"garbage", sign(forged, theirs)):
        await sea.directory.publish(data)
    sea.directory.published = 0
    caplog.clear()
    await beacon.look()
    assert sea.directory.published == 0
    assert not caplog.records


async def test_a_directory_that_is_out_of_order_is_told_of_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sea = Sea()
    beacon = sea.beacon("one")
    sea.directory.broken = True
    for _ in range(3):
        await beacon.turn(wait_s=0.0)
    assert [r.getMessage() for r in caplog.records] == [
        "swarm_not_published swarm=fish why=out of order"
    ]
    sea.directory.broken = False
    await beacon.turn(wait_s=0.0)
    assert sea.directory.published == 1


async def test_the_node_is_reached_through_the_brokers_port_if_there_is_one() -> None:
    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"node: " + await reader.readexactly(len(GREETING)))
        writer.close()

    server = await asyncio.start_server(node, "127.0.0.1", 0)
    behind = server.sockets[0].getsockname()[1]
    for swarm, expected in ((behind, b"node: " + GREETING), (0, b"")):
        async with Secured(None) as secured:
            port = await secured.open_port("127.0.0.1", 0, swarm=swarm)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GREETING)
            assert await asyncio.wait_for(reader.read(), 10) == expected
            writer.close()
            if swarm:  # and everything else goes where it went
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /authority.pem HTTP/1.0\r\n\r\n")
                assert b"CERTIFICATE" in await asyncio.wait_for(reader.read(), 10)
                writer.close()
    server.close()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"bootstrap": (OURS,)}, "expected --swarm, too"),
        ({"swarm": "a b", "state": Path("x")}, "no name of a swarm"),
        ({"swarm": "fish", "state": Path("x"), "bootstrap": ("a:1",)}, "no way into a swarm"),
        ({"swarm": "fish"}, "expected a state folder"),
        ({"swarm": "fish", "state": Path("x"), "insecure": True}, "no --insecure"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(BrokerConfigError, match=expected):
        BrokerConfig(**fields)  # type: ignore[arg-type]


async def test_without_hivemind_it_says_what_to_do_and_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    config = BrokerConfig(port=0, swarm="fish", state=tmp_path / "state")
    with pytest.raises(BrokerConfigError, match=r"pip install 'shoal\[swarm\]'"):
        async with Broker(config):
            pass
    assert not (tmp_path / "state").exists()
