"""Peers that give each other blobs: to those of their run, within their owner's cap, and right."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.blobs.client import BlobClient, BlobTransferError
from shoal.net.blobs.gather import RANGE_BYTES
from shoal.net.cap import Cap, Meter
from shoal.net.identity.authority import Authority
from shoal.net.identity.credential import Credential, server_credentials
from shoal.net.identity.names import Party, PartyRole
from shoal.peer.blobs.cache import BlobCache
from shoal.peer.blobs.fetching import Fetching
from shoal.peer.blobs.sharing import Fellows, serve_blobs

DATA = bytes(range(256)) * (3 * RANGE_BYTES // 256) + b"the end"
NAME = hashlib.sha256(DATA).hexdigest()


def nowhere(*_: Any) -> Any:
    raise AssertionError("nothing is fetched")


@asynccontextmanager
async def serving(
    folder: Path,
    may: Callable[[str | None], bool] = lambda who: True,
    credential: Credential | None = None,
    meter: Meter | None = None,
) -> AsyncIterator[str]:
    """A peer's port; its address."""
    server = grpc.aio.server()
    serve_blobs(server, BlobCache(folder, nowhere), may, Cap(None, meter=meter))
    if credential is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(lambda: credential))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def holding(folder: Path, data: bytes = DATA, name: str = NAME) -> Path:
    folder.mkdir()
    (folder / name).write_bytes(data)
    return folder


@asynccontextmanager
async def fellows(
    addresses: dict[str, str], credential: Credential | None = None
) -> AsyncIterator[Fellows]:
    made = Fellows(lambda: credential, Cap(None))
    assert made.become(addresses) == []
    try:
        yield made
    finally:
        for channel in made.become({}):
            await channel.close()


async def test_what_is_whole_here_is_given_and_counted(tmp_path: Path) -> None:
    meter = Meter()
    (tmp_path / "own").mkdir()
    async with (
        serving(holding(tmp_path / "a"), meter=meter) as address,
        fellows({"a": address}) as found,
    ):
        (client,) = found.clients
        assert await client.fetch(NAME, 5, 2_000_000) == DATA[5:2_000_005]
        assert meter.bytes == 2_000_000
        assert await client.fetch(NAME, len(DATA) - 5, 0) == b"e end"
        for offset, length in ((len(DATA), 1), (2**64 - 1, 0), (1, 2**64 - 1)):
            with pytest.raises(BlobTransferError, match=f"from {offset} of {len(DATA)}"):
                await client.fetch(NAME, offset, length)
        (tmp_path / "a" / f"{'ab' * 32}.part").write_bytes(b"half of it")
        for name in ("ab" * 32, "../own", ""):
            with pytest.raises(BlobTransferError, match="it is not here"):
                await client.fetch(name, 0, 10)


async def test_fetches_that_are_given_up_leave_no_file_open(tmp_path: Path) -> None:
    # Each of them at another moment: while the file is opened, read, sent.
    async with (
        serving(holding(tmp_path / "a")) as address,
        fellows({"a": address}) as found,
    ):
        (client,) = found.clients
        for turns in range(150):
            fetch = asyncio.create_task(client.fetch(NAME, 0, 2_000_000))
            for _ in range(turns % 50):
                await asyncio.sleep(0)
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
        assert await client.fetch(NAME, 5, 9) == DATA[5:14]
    gc.collect()  # what nobody closed would warn now, and a warning fails


def party(authority: Authority, subject: str, role: PartyRole = PartyRole.PEER) -> Credential:
    return authority.credential(Party(role, subject), datetime.now(UTC), timedelta(days=1))


async def test_only_peers_of_the_run_get_anything_and_only_from_the_very_peer(
    tmp_path: Path,
) -> None:
    authority = Authority.new(datetime.now(UTC))
    mine, may = party(authority, "a"), lambda who: who == "b"
    async with serving(holding(tmp_path / "a"), may, mine) as address:
        for who, role, says in (
            ("b", PartyRole.PEER, ""),
            ("c", PartyRole.PEER, "only peers of a run share blobs"),
            ("b", PartyRole.SUBMITTER, "only peers of a run share blobs"),
        ):
            credential = party(authority, who, role)
            async with fellows({"a": address}, credential) as found:
                if not says:
                    assert await found.clients[0].fetch(NAME, 0, 9) == DATA[:9]
                    continue
                with pytest.raises(BlobTransferError, match=says):
                    await found.clients[0].fetch(NAME, 0, 9)
        # Somebody else answers at the address of z.
        async with fellows({"z": address}, party(authority, "b")) as found:
            with pytest.raises(BlobTransferError):
                await found.clients[0].fetch(NAME, 0, 9)


@pytest.mark.parametrize("there", ["right", "wrong", "nothing"])
async def test_a_blob_comes_from_broker_and_peers_at_once_and_is_the_right_one(
    tmp_path: Path, there: str
) -> None:
    """`wrong`: a peer whose disk lies under the right name."""
    (tmp_path / "mine").mkdir()
    meter, wrong = Meter(), DATA[:-9] + b"not it..."
    folder = holding(tmp_path / "a", wrong if there == "wrong" else DATA)
    if there == "nothing":
        (folder / NAME).unlink()
    async with (
        Broker(BrokerConfig(port=0, insecure=True)) as broker,
        grpc.aio.insecure_channel(broker.address) as channel,
        serving(folder, meter=meter) as address,
        fellows({"a": address}) as found,
    ):
        client = BlobClient(channel)
        await client.store(DATA)
        fetching = Fetching(asyncio.get_running_loop(), lambda: client, found)
        cache = BlobCache(tmp_path / "mine", fetching.from_all, alone=fetching.from_broker)
        path = await asyncio.to_thread(cache.path, NAME)
        assert path.read_bytes() == DATA
        assert (meter.bytes > 0) == (there != "nothing"), "the peer gave a part"
