"""Blobs that are not what a run calls them, and far too large for it, over real connections: their
size is looked at before anything of them is read."""

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.broker.service.blobs import BlobStore, BlobStoreError
from shoal.dag.ir.convert import MAX_GRAPH_BYTES
from shoal.net.blobs.client import BlobClient, BlobTransferError
from shoal.net.identity.names import PartyRole
from shoal.peer.blobs import cache as caches
from shoal.peer.blobs.cache import BlobCache
from shoal.proto.broker_pb2 import RunSpec, WeightFile
from shoal.proto.broker_pb2_grpc import RunsStub
from shoal.proto.common_pb2 import BlobRef

from ...broker.conftest import make_spec
from ...broker.service.test_secured import channel, made, running, status

MIB = 1 << 20


def spec(graph: BlobRef, data: BlobRef) -> RunSpec:
    found = make_spec()
    found.graph.CopyFrom(graph)
    found.data.CopyFrom(data)
    return found


def sparse(folder: Path, size: int) -> Path:
    """A file of zeros that takes no place."""
    path = folder / "zeros"
    with path.open("wb") as file:
        file.truncate(size)
    return path


async def test_a_run_whose_graph_or_manifest_is_too_large_is_refused_unread(tmp_path: Path):
    async with running() as broker, channel(broker, made(broker, PartyRole.SUBMITTER)) as stubs:
        blobs, runs = BlobClient(stubs), RunsStub(stubs)
        small = await blobs.store(b"small")
        large = await blobs.store(await asyncio.to_thread(sparse, tmp_path, MAX_GRAPH_BYTES + 1))
        for what, graph, data in (("graph", large, small), ("data", small, large)):
            code, why = await status(runs.Submit(spec(graph, data)))
            assert code == "INVALID_ARGUMENT"
            assert f"{what} of the run is a blob of {large.size_bytes} bytes" in why
        for what, part in (
            ("core_graph", RunSpec(core_graph=large)),
            ("recipe", RunSpec(recipe=large)),
            ("weights", RunSpec(weights=[WeightFile(blob=large, sharded=True)])),
        ):
            wanted = spec(small, small)
            wanted.MergeFrom(part)
            code, why = await status(runs.Submit(wanted))
            assert code == "INVALID_ARGUMENT"
            assert f"{what} of the run is a blob of {large.size_bytes} bytes" in why
        lie = BlobRef(hash=large.hash, size_bytes=5)
        for graph, data in ((lie, small), (small, lie)):
            code, why = await status(runs.Submit(spec(graph, data)))
            assert code == "INVALID_ARGUMENT"
            assert f"has {large.size_bytes} bytes, and the run's spec says 5" in why
        # A preview goes by the name alone.
        answer = await runs.Preview(spec(lie, small))
        assert f"has {large.size_bytes} bytes: expected at most {MAX_GRAPH_BYTES}" in (
            answer.reason.text
        )
        with pytest.raises(BlobTransferError, match="more than the 1048576 bytes expected"):
            await blobs.fetch(large.hash, most_bytes=MIB)
        with pytest.raises(BlobTransferError, match="more than the 1048576 bytes expected"):
            await blobs.fetch_to(large.hash, tmp_path / "down", most_bytes=MIB)


def test_what_the_store_reads_whole_is_looked_at_first(tmp_path: Path):
    with BlobStore(tmp_path) as store:
        name = store.put(bytes(8 * MIB))
        tracemalloc.start()
        try:
            with pytest.raises(BlobStoreError, match="expected at most 1048576"):
                store.get(name, MIB)
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()
        assert len(store.get(name, 8 * MIB)) == 8 * MIB


def test_a_peer_takes_no_more_of_a_blob_than_was_said_of_it(tmp_path: Path):
    data = bytes(8 * MIB)
    name = hashlib.sha256(data).hexdigest()
    given: list[int] = []

    def fetch(_: str, offset: int, length: int) -> Iterator[bytes]:
        for at in range(offset, len(data), MIB):
            given.append(at)
            yield data[at : at + MIB]

    cache = BlobCache(tmp_path, fetch)
    with pytest.raises(caches.BlobMismatchError, match="sends more than 2097152 bytes"):
        cache.whole(BlobRef(hash=name, size_bytes=2 * MIB))
    assert len(given) == 3  # the one that was too much
    assert cache.whole(BlobRef(hash=name, size_bytes=len(data))) == data
    for read in (cache.whole, cache.mapped):  # it is here by now, and not read
        with pytest.raises(caches.BlobMismatchError, match="has 8388608 bytes, not 5"):
            read(BlobRef(hash=name, size_bytes=5))
    tracemalloc.start()
    try:
        mapped = cache.mapped(BlobRef(hash=name, size_bytes=len(data)))
        assert (len(mapped), bytes(mapped[-3:])) == (len(data), bytes(3))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
