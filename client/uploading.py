"""What a run needs of a prepared job, uploaded by content hash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..dag.ir.convert import graph_to_bytes, lowered_to_bytes
from ..net.blobs.client import BlobClient, Sent
from ..proto.broker_pb2 import RunSpec, WeightFile
from .access import Access
from .files.sending import send
from .files.shards import LARGE_BYTES, Pretrained
from .files.uplink import Uplink, takes
from .files.weight_files import find
from .prepared import Prepared
from .submission import Say, spec_of

__all__ = ["transfer", "upload"]

T = TypeVar("T")


def upload(access: Access, prepared: Prepared, say: Say = lambda line: None) -> RunSpec:
    """Stores what the broker does not have yet; returns the spec to submit.

    Raises BlobTransferError; WeightFilesError for weights that are not what they were.
    """
    spec = spec_of(prepared.job, prepared.graph, prepared.microbatch_sizes, prepared.client_sizes)
    pretrained, urls = prepared.pretrained, prepared.job.model.where == "url"
    spec.local.extend(prepared.local)

    uplink = Uplink()

    async def store(blobs: BlobClient) -> None:
        spec.graph.CopyFrom(await blobs.store(graph_to_bytes(prepared.graph)))
        if prepared.core is not None:
            spec.core_graph.CopyFrom(await blobs.store(lowered_to_bytes(prepared.core)))
        spec.data.CopyFrom(await blobs.store(prepared.manifest.to_json().encode()))
        for manifest in prepared.client_data:
            spec.client_data.append(await blobs.store(manifest.to_json().encode()))
        if prepared.recipe is not None:
            spec.recipe.CopyFrom(await blobs.store(prepared.recipe.to_bytes()))
        if words := takes(size + stored_bytes, uplink.rate):
            say(words)
        spec.weights.append(await _own_weights(blobs, prepared, say))
        for path in prepared.shards.values():
            await blobs.store(path)
        if pretrained is not None:
            spec.weights.append(await send(blobs, pretrained, say, urls=urls))

    size = sum(p.stat().st_size for p in (prepared.weights, *prepared.shards.values()))
    stored_bytes = 0 if pretrained is None or urls else pretrained.size_bytes
    if pretrained is not None:
        of = f"{pretrained.size_bytes / 1e9:.2f} GB of weights"
        say(f"reading {of}, which peers read from the web" if urls else f"reading and sending {of}")
    say(f"uploading what the broker lacks of {size / 1e6:.1f} MB")
    transfer(access, store, uplink.sent)
    return spec


async def _own_weights(blobs: BlobClient, prepared: Prepared, say: Say) -> WeightFile:
    """Store the weights that the submitter has in memory: in shards, which peers keep by their
    hashes and give each other, where a file has enough for one."""
    file = prepared.weights
    if file.stat().st_size <= LARGE_BYTES:
        return WeightFile(blob=await blobs.store(file))
    stored = find((str(file),))  # its hashes go with it, for it is in a folder of this submission
    return await send(blobs, Pretrained(stored, stored.entries), say, cache=file.parent / "hashes")


def transfer(
    access: Access,
    work: Callable[[BlobClient], Coroutine[Any, Any, T]],
    sent: Sent = lambda size_bytes, seconds: None,
) -> T:
    """Runs transfers with a broker's blobs to their end, also from code that has an event loop of
    its own (a notebook). `sent`: hears of each upload."""

    async def run() -> T:
        async with access.aio_channel() as channel:
            return await work(BlobClient(channel, sent=sent))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(run())).result()
