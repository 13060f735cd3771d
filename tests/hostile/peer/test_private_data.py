"""A submitter who wants data that stays with its peer: whatever [data] table is asked for, no byte
of it can be fetched; in one loop, and over real connections with TLS."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.broker.options import BrokerOptions
from shoal.broker.service.blobs import BlobStore
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.blobs.client import BlobClient, BlobTransferError
from shoal.net.identity.authority import utc
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole
from shoal.peer.blobs.cache import BlobCache
from shoal.peer.data.manifest import Manifest
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.host.own_data import Catalogue, Made, answer
from shoal.peer.shell.daemon import Worker
from shoal.proto.broker_pb2 import DataRequest, Resolve
from shoal.proto.broker_pb2_grpc import RunsStub
from shoal.proto.common_pb2 import BlobRef

SECRET = b"a name that is in the notes of a patient; "
WINDOW = 12
"""So many bytes of private content in a row are never there by chance."""


@dataclass
class Owned:
    """What an owner has: private arrays, one that may leave, a private text, private tokens, and a
    file of which the array called `tokens` may leave."""

    folder: Path
    tables: dict[str, dict[str, Any]]
    private: dict[str, bytes]
    public: bytes

    def leak(self, data: bytes) -> str:
        """What of the private content is in these bytes."""
        for name, content in self.private.items():
            pieces = (content[i : i + WINDOW] for i in range(0, len(content) - WINDOW, WINDOW))
            if any(piece in data for piece in pieces):
                return name
        return ""


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Owned:
    folder = tmp_path_factory.mktemp("owned")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 3))
    y = rng.integers(2**40, 2**41, 12)
    z = rng.normal(size=(12, 2))
    ids = rng.integers(2**17, 2**20, 60).astype(np.int32)
    empty = np.zeros((12, 0))
    np.savez(folder / "d.npz", x=x, y=y, z=z, empty=empty, **{" y": y, "x,y": x, "": y})
    np.savez(folder / "both.npz", x=x, tokens=z)
    np.save(folder / "ids.npy", ids)
    np.save(folder / "broken.npy", ids)
    (folder / "broken.npy").write_bytes(b"\x93NUMPY\x01\x00\x20\x00" + SECRET * 9)
    (folder / "t.txt").write_bytes(SECRET * 9)
    (folder / "t-gone.txt").symlink_to(folder / "nowhere")
    tables = {
        "arrays": {"path": str(folder / "d.npz"), "leaves": ["z"]},
        "both": {"path": str(folder / "both.npz"), "leaves": ["tokens"]},
        "text": {"path": str(folder / "t.txt")},
        "texts": {"path": str(folder / "t*.txt"), "leaves": ["x", "y", "", " "]},
        "ids": {"path": str(folder / "ids.npy"), "leaves": ["ids"]},
        "broken": {"path": str(folder / "broken.npy")},
        "all": {"path": str(folder / "*")},
    }
    private = {"x": x.tobytes(), "y": y.tobytes(), "ids": ids.tobytes(), "text": SECRET * 9}
    return Owned(folder, tables, private, z.tobytes())


class Stored:
    """The broker's store, as a peer's client of it: what is in it can be fetched by its name."""

    def __init__(self, store: BlobStore) -> None:
        self.blobs = store

    async def store(self, source: Path | bytes) -> BlobRef:
        data = source if isinstance(source, bytes) else await asyncio.to_thread(source.read_bytes)
        return BlobRef(hash=self.blobs.put(data), size_bytes=len(data))


ODD = ["x", "y", "z", "tokens", "ids", "empty", "", " ", ",", "\t", "\u00a0", "\uff59", "X", "\0"]
NAMES = st.one_of(
    st.lists(st.sampled_from(ODD), max_size=5).map("".join),
    st.lists(st.sampled_from(ODD), max_size=5).map(",".join),
    st.lists(st.sampled_from(ODD), max_size=3).map(" , ".join),
    st.text(max_size=8),
    st.none(),
)
TABLES = st.fixed_dictionaries(
    {"kind": st.sampled_from(["text", "tokens", "arrays", "module", "raw"])},
    optional={
        "inputs": NAMES,
        "targets": NAMES,
        "where": st.sampled_from(["peer", "submitter", "url"]),
        "source": st.sampled_from(["arrays", "/etc/passwd", ""]),
        "keep_local": st.sampled_from(["none", "inputs", "labels"]),
        "holdout": st.sampled_from([0.0, 0.1, 0.5, 0.999, -1.0, float("nan")]),
        "length": st.sampled_from([1, 4, 10**18, 0]),
        "leaves": st.just(["x", "y"]),
    },
)


SETS = ["arrays", "both", "text", "texts", "ids", "broken", "all"]


@given(name=st.sampled_from(SETS), table=TABLES)
@example(name="arrays", table={"kind": "arrays", "inputs": "z", "targets": " y"})
@example(name="arrays", table={"kind": "arrays", "inputs": "z", "targets": "y "})
@example(name="arrays", table={"kind": "arrays", "inputs": "x,", "targets": ""})
@example(name="text", table={"kind": "text", "inputs": ",", "targets": "", "length": 4})
@example(name="ids", table={"kind": "tokens", "inputs": ",", "targets": "", "length": 4})
@example(name="both", table={"kind": "text", "length": 4})
@example(name="arrays", table={"kind": "arrays", "inputs": "empty", "targets": ""})
def test_no_table_makes_private_data_leave(
    owned: Owned, tmp_path_factory: pytest.TempPathFactory, name: str, table: dict[str, Any]
) -> None:
    scratch = tmp_path_factory.mktemp("peer")
    mine = Catalogue(scratch / "own", owned.tables, b"s" * 32)
    ask = Resolve(number=1, data=name, options=json.dumps(table), submitter="mallory")
    with BlobStore() as blobs:
        found = asyncio.run(answer(mine, ask, Stored(blobs))).resolved  # type: ignore[arg-type]
        stored = {p.name: p.read_bytes() for p in (blobs.folder / "whole").iterdir()}
    for data in (*stored.values(), found.SerializeToString()):
        assert not owned.leak(data), "private content can be fetched"
    said = found.problem.text
    assert str(owned.folder) not in said
    assert "nowhere" not in said
    if said:
        assert not stored, "nothing is handed over where there is nothing to run"
        return
    manifest = Manifest.from_json(stored[found.manifest.hash])
    served = BlobCache(scratch, lambda *_: iter(()))
    for shard in manifest.shards:
        there = mine.path(found.manifest.hash, shard.hash)
        assert there is not None
        stays = bool(owned.leak(there.read_bytes()))
        assert stays != (shard.hash in stored)
        assert served.size_of(shard.hash) is None, "other peers of the run get it"
        if stays:  # whatever reads it must run here
            reads = {n for n in manifest.fields if manifest.sources(n) == shard.column}
            assert reads
            assert reads <= set(found.local)


def test_what_its_owner_lets_go_is_there(owned: Owned, tmp_path: Path) -> None:
    """That the test above sees what leaves."""
    mine = Catalogue(tmp_path / "own", owned.tables, b"s" * 32)
    table = {"kind": "arrays", "inputs": " z", "targets": "y"}
    ask = Resolve(number=1, data="arrays", options=json.dumps(table))
    with BlobStore() as blobs:
        found = asyncio.run(answer(mine, ask, Stored(blobs))).resolved  # type: ignore[arg-type]
        stored = [p.read_bytes() for p in (blobs.folder / "whole").iterdir()]
    assert list(found.local) == ["y"]
    assert owned.public in stored


def test_the_owners_list_is_asked_right_before_an_upload(owned: Owned, tmp_path: Path) -> None:
    """Though the copies that were to leave lie there already."""
    mine = Catalogue(tmp_path / "own", owned.tables, b"s" * 32)
    options = json.dumps({"kind": "arrays", "inputs": " z", "targets": "y"})
    assert mine.make("arrays", options, "").leaving
    mine.may_leave = lambda name, column: False  # type: ignore[method-assign]
    with BlobStore() as blobs:
        ask = Resolve(number=1, data="arrays", options=options)
        found = asyncio.run(answer(mine, ask, Stored(blobs))).resolved  # type: ignore[arg-type]
        assert found.problem.text
        assert [*(blobs.folder / "whole").iterdir()] == []


def test_who_asks_for_many_ways_forgets_their_own(owned: Owned, tmp_path: Path) -> None:
    mine = Catalogue(tmp_path / "own", owned.tables, b"s" * 32)

    def way(length: int) -> str:
        return json.dumps({"kind": "text", "length": length})

    made = mine.make("text", way(4), "ann")
    for length in range(5, 75):
        last = mine.make("text", way(length), "mallory")
    assert len(mine._made) <= 1 + 64
    for kept in (made, last):
        assert mine.path(kept.hash, kept.manifest.shards[0].hash) is not None


async def test_who_asks_for_everything_at_once_takes_one_thread_and_nobodys_turn(
    owned: Owned, tmp_path: Path
) -> None:
    class Counting(Catalogue):
        inside = most = 0

        def make(self, *way: str) -> Made:
            self.inside += 1
            self.most = max(self.most, self.inside)
            try:
                return super().make(*way)
            finally:
                self.inside -= 1

    mine = Counting(tmp_path / "own", owned.tables, b"s" * 32)
    asks = [
        Resolve(data="text", options=json.dumps({"kind": "text", "length": n}), submitter=who)
        for n, who in [*((n, "mallory") for n in range(4, 104)), (4, "ann")]
    ]
    with BlobStore() as blobs:
        stored: Any = Stored(blobs)
        found = await asyncio.gather(*(answer(mine, ask, stored) for ask in asks))
    *hers, anns = [m.resolved.problem.text for m in found]
    assert not anns
    assert sum("wait here already" in text for text in hers) == 100 - 64
    assert mine.most == 1


# ---------------------------------------------------------------- over real connections


@dataclass
class Lab:
    """A broker with identities, and a peer with data of its owner's."""

    broker: Broker
    workers: list[Worker] = field(default_factory=list)


@pytest.fixture
async def lab(owned: Owned, tmp_path: Path) -> AsyncIterator[Lab]:
    options = BrokerOptions(probe_s=0.0)
    async with Broker(BrokerConfig(port=0, options=options)) as broker:
        made = Lab(broker)
        assert broker.secured is not None
        hour = timedelta(hours=1)
        token = broker.secured.admission.invite(PartyRole.PEER, 1, hour, "test", time.time())
        config = PeerConfig(
            broker=broker.address,
            state=tmp_path / "clinic",
            name="clinic",
            token=str(token),
            threads=1,
            data=owned.tables,
        )
        end = asyncio.create_task(work(config, made.workers.append))
        while not broker.shell.machine.members.members:
            await asyncio.to_thread(lambda: None)  # a turn of the loop, and no more
        yield made
        for worker in made.workers:
            worker.stop(now=True)
        assert await end == 0


async def test_a_hostile_submitter_gets_no_byte_over_tls(lab: Lab, owned: Owned) -> None:
    broker = lab.broker
    assert broker.secured is not None
    party = Party(PartyRole.SUBMITTER, "mallory")
    authority = broker.secured.authority
    credential = authority.credential(party, utc(time.time()), timedelta(hours=1))
    tables: list[tuple[str, dict[str, Any]]] = [
        ("arrays", {"kind": "arrays", "inputs": "x", "targets": " y"}),
        ("arrays", {"kind": "arrays", "inputs": ",", "targets": "x"}),
        ("arrays", {"kind": "arrays", "inputs": "empty", "targets": ""}),
        ("arrays", {"kind": "text", "inputs": ",", "targets": "", "length": 4}),
        ("text", {"kind": "text", "inputs": ",", "targets": "", "length": 4}),
        ("text", {"kind": "text", "inputs": "a,b", "targets": "", "length": 4}),
        ("text", {"kind": "text", "length": 4}),
        ("broken", {"kind": "tokens", "length": 4}),
        ("all", {"kind": "text", "length": 4}),
        ("arrays", {"kind": "arrays", "inputs": "x", "targets": "y"}),
    ]
    answered = 0
    options = channel_options(broker.address)
    async with grpc.aio.secure_channel(
        broker.address, credential.for_channel(), options=options
    ) as stubs:
        runs, blobs = RunsStub(stubs), BlobClient(stubs, attempts=0)
        for name, table in tables:
            call = runs.Resolve(DataRequest(name=name, options=json.dumps(table)), timeout=30)
            code, said = await call.code(), await call.details() or ""
            assert code.name in ("OK", "INVALID_ARGUMENT"), said
            assert str(owned.folder) not in said
            assert not owned.leak(said.encode())
            if said:
                continue
            found = await call
            answered += 1
            text = await blobs.fetch(found.manifest.hash)
            assert not owned.leak(text)
            for shard in Manifest.from_json(text).shards:
                with pytest.raises(BlobTransferError, match="there is no blob"):
                    await blobs.fetch(shard.hash)
    assert answered == 3, "honest requests are answered, and the peer lives"
    for path in broker.blobs.folder.rglob("*"):
        assert not path.is_file() or not owned.leak(path.read_bytes())
