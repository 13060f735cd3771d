"""A peer whose broker moves: it looks it up again, and believes nobody but its own authority. The
node of the directory is a small one here; tests/net/discovery/test_discovery_dht.py has the real
one."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from shoal.broker.service import services
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.discovery import process
from shoal.net.discovery.record import Claim, sign
from shoal.net.identity.authority import Authority, utc
from shoal.net.local import split
from shoal.net.web.pump import close, join
from shoal.peer.core.options import PeerOptions
from shoal.peer.entry.swarm import in_swarm
from shoal.peer.entry.worker import work
from shoal.peer.host.config import JoinConfig, JoinError, PeerConfig
from shoal.peer.shell import attempt, credentials, daemon
from shoal.peer.shell.daemon import Worker
from shoal.tests.net.discovery.nodes import NODE, SmallNode

TOKEN = str(Authority.new(utc(0.0)).token())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


async def until(holds: Callable[[], object]) -> None:
    """Ends at the test's timeout."""
    while not holds():  # noqa: ASYNC110  # what is waited for tells nobody
        await asyncio.sleep(0.01)


@asynccontextmanager
async def joined(
    node: SmallNode, address: str, token: str, state: Path
) -> AsyncIterator[list[Worker]]:
    """A worker, which comes into the list once it has a certificate."""
    workers: list[Worker] = []
    settings = PeerConfig(
        broker=address,
        swarm="fish",
        directory=node.socket,
        state=state,
        name="home",
        threads=1,
        token=token,
    )
    end = asyncio.create_task(work(settings, workers.append))
    yield workers
    workers[0].stop(now=True)
    assert await end == 0


async def says(node: SmallNode, broker: Broker, claim: Claim, address: str) -> None:
    """What a broker's beacon would publish."""
    assert broker.secured is not None
    said = claim.next(None, address, [], now_s=time.time(), age_s=0.0)
    assert said is not None
    await node.directory.publish(sign(said, broker.secured.authority))


def is_member(worker: Worker) -> bool:
    """As it knows itself: it was welcomed."""
    return not worker.machine.attachment.away


def members(broker: Broker) -> list[str]:
    return list(broker.shell.machine.members.members)


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are for others' sake; here they only take time."""
    monkeypatch.setattr(credentials, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(attempt, "_HEAD_START_S", 0.2)
    monkeypatch.setattr(attempt, "_SEEK_S", 0.5)
    monkeypatch.setattr(daemon, "PeerOptions", partial(PeerOptions, backoff_max_s=0.2))


@asynccontextmanager
async def at_port(broker: Broker, port: int = 0) -> AsyncIterator[str]:
    """An address of the broker, for as long as the block lasts; connections end with it."""
    tasks: set[asyncio.Task[None]] = set()

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            inner = await asyncio.open_connection(*split(broker.address))
            try:
                await join((reader, writer), inner)
            finally:
                close(inner)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            close((reader, writer))

    server = await asyncio.start_server(passed_on, "127.0.0.1", port)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.usefixtures("_hasty")
async def test_a_peer_follows_its_broker_and_nobody_else(tmp_path: Path) -> None:
    claim = Claim("fish", "one")
    async with (
        SmallNode(tmp_path / "node") as node,
        Broker(BrokerConfig(port=0)) as other,
        Broker(BrokerConfig(port=0)) as broker,
    ):
        await node.directory.publish(b"garbage")
        assert broker.secured is not None
        token = str(broker.secured.printed_token())
        line = f"127.0.0.1:{free_port()}"
        # Nobody is at the address of the line by now: joining looks the broker up, too.
        async with at_port(broker) as first:
            await says(node, broker, claim, first)
            joining = joined(node, line, token, tmp_path / "peer")
            workers = await joining.__aenter__()
            await until(lambda: workers and is_member(workers[0]))
            [peer] = members(broker)
            assert workers[0]._upstream._named == first
        await until(lambda: not is_member(workers[0]))
        await says(node, other, Claim("fish", "other"), other.address)  # which is somebody else's
        async with at_port(broker) as second:
            await says(node, broker, claim, second)
            await until(lambda: is_member(workers[0]))
            assert members(broker) == [peer]
            assert workers[0]._upstream._named == second
        # Back where it was at first, and it has not said so.
        async with at_port(broker, split(line)[1]):
            await until(lambda: is_member(workers[0]) and workers[0]._upstream._named == line)
            assert members(broker) == [peer]
            await joining.__aexit__(None, None, None)
        assert members(other) == []


async def test_what_was_found_does_not_stand_in_the_way_of_what_was_given(tmp_path: Path) -> None:
    """A record that has not ended yet, of a broker that is back at its first address."""
    async with (
        SmallNode(tmp_path / "node") as node,
        Broker(BrokerConfig(port=0)) as broker,
    ):
        assert broker.secured is not None
        await says(node, broker, Claim("fish", "one"), f"127.0.0.1:{free_port()}")
        token = str(broker.secured.printed_token())
        async with joined(node, broker.address, token, tmp_path / "peer"):
            await until(lambda: members(broker))


async def test_a_peer_offers_the_node_of_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[tuple[str, str, str]] = []
    real = services.AttachService.__init__

    def took(*way: str) -> None:
        offered.append(way)

    def listening(self: services.AttachService, *arguments: object) -> None:
        real(self, *arguments[:-1], took)  # type: ignore[arg-type]

    monkeypatch.setattr(services.AttachService, "__init__", listening)
    async with (
        SmallNode(tmp_path / "node") as node,
        Broker(BrokerConfig(port=0)) as broker,
    ):
        assert broker.secured is not None
        token = str(broker.secured.printed_token())
        async with joined(node, broker.address, token, tmp_path / "peer"):
            await until(lambda: offered)
        [(way, came, by)] = offered
        assert (way, came, by[:5]) == (NODE, "127.0.0.1", "home-"), "it is known who offers it"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "expected HOST:PORT or --swarm NAME"),
        ({"broker": "no where"}, "expected HOST:PORT"),
        ({"broker": "a:1", "bootstrap": (NODE,)}, "expected --swarm, too"),
        ({"swarm": "a b"}, "no name of a swarm"),
        ({"swarm": "fish", "bootstrap": ("a:1",)}, "no way into a swarm"),
        ({"swarm": "fish", "bootstrap": (NODE,), "insecure": True}, "expected one of them"),
        ({"swarm": "fish", "swarm_port": 70_000}, "swarm_port is 70000"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        JoinConfig(**fields)  # type: ignore[arg-type]


def test_a_host_that_cannot_look_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"swarm": "fish", "state": tmp_path}
    with pytest.raises(JoinError, match=r"no certificate, and no token"):
        in_swarm(JoinConfig(**table, bootstrap=(NODE,))).__enter__()
    with pytest.raises(JoinError, match=r"expected --bootstrap"):
        in_swarm(JoinConfig(**table, token=TOKEN)).__enter__()
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JoinError, match=r"pip install 'shoal\[swarm\]'.*HOST:PORT in place"):
        in_swarm(JoinConfig(**table, token=TOKEN, bootstrap=(NODE,))).__enter__()
