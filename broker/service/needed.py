"""Which blobs the broker must keep, and removing the others.

An open run needs what it was submitted with: graphs, starting weights, data. A run that has ended
and is still kept needs its exports (with the starting weights of what was frozen), and its
checkpoints with what it takes to go on from them.
Everything else goes once nobody has used it for a while (`BlobLimits.grace_s`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import NamedTuple

from ...job import MOST_MANIFEST_BYTES
from ...net.web.places import origin_of
from ...planner.requests.requirements import read_spec
from ...planner.requests.run_spec import HASH, RunSpecError
from ...proto.broker_pb2 import RunSpec
from ...proto.common_pb2 import BlobRef
from ..records.run import RunRecord
from .blobs import BlobStore, BlobStoreError

__all__ = ["SWEEP_S", "Listing", "Sweeper", "lacking_shards", "listed", "needed"]

log = logging.getLogger(__name__)

SWEEP_S = 600.0
"""Between two looks at what may go."""


def needed(runs: Iterable[RunRecord]) -> tuple[set[str], set[str]]:
    """(blobs, and which of them are manifests, of data or weights, whose shards are needed
    too)."""
    blobs: set[str] = set()
    manifests: set[str] = set()
    for run in runs:
        spec = run.run.spec
        kept = [c for replica in run.replicas for c in replica.checkpoints.kept]
        manifests.update(ref.hash for ref in (spec.data, *spec.client_data))
        if not run.ended or kept:
            blobs.update(ref.hash for ref in blobs_of(spec))
            manifests.update(file.blob.hash for file in spec.weights if file.sharded)
        for checkpoint in kept:
            blobs.update(file.blob.hash for file in checkpoint.files)
        for event in run.history.recent:  # an export is among the last things that happen
            found = event.weights
            blobs.update(file.blob.hash for file in (*found.files, *found.starting))
            manifests.update(file.blob.hash for file in found.starting if file.sharded)
            blobs |= {ref.hash for ref in (found.graph, found.recipe) if ref.hash}
    return blobs | manifests, manifests


def blobs_of(spec: RunSpec) -> Iterator[BlobRef]:
    """Yields what a run is submitted with."""
    yield spec.graph
    if spec.HasField("core_graph"):
        yield spec.core_graph
    if spec.HasField("data"):
        yield spec.data
    yield from spec.client_data
    if spec.HasField("recipe"):
        yield spec.recipe
    for file in spec.weights:
        yield file.blob
    for saved in spec.resumed.files:
        yield saved.blob


class Listing(NamedTuple):
    """Blobs and URLs that a manifest names. shards: whether peers find each on the web, by
    hash; urls: where."""

    shards: Mapping[str, bool]
    urls: tuple[str, ...]


def listed(store: BlobStore, manifest: str) -> Listing:
    """Read which shards a manifest of data or weights names. Raises BlobStoreError."""
    try:
        table = json.loads(store.get(manifest, MOST_MANIFEST_BYTES))
        shards = {s["hash"]: "url" in s for s in table["shards"] if HASH.fullmatch(s["hash"])}
        return Listing(shards, tuple(map(str, table.get("urls", ()))))
    except BlobStoreError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BlobStoreError(
            "INVALID_ARGUMENT", f"blob {manifest} is no manifest: expected JSON with its shards"
        ) from None


def lacking_shards(store: BlobStore, spec: RunSpec) -> list[str]:
    """Find the shards of a run's weights that neither lie here nor on the web. Raises
    BlobStoreError, also for a URL on a host that the run's job does not name: peers are chosen by
    these alone."""
    missing = list[str]()
    for file in spec.weights:
        if not file.sharded:
            continue
        there = listed(store, file.blob.hash)
        if there.urls:
            _check_urls(there.urls, spec)
        missing += store.lacks(name for name, on_web in there.shards.items() if not on_web)
    return missing


def _check_urls(urls: Iterable[str], spec: RunSpec) -> None:
    try:
        origins = read_spec(spec).origins
    except RunSpecError as error:
        raise BlobStoreError("INVALID_ARGUMENT", str(error)) from None
    for url in urls:
        if (origin := origin_of(url)) is None:
            raise BlobStoreError(
                "INVALID_ARGUMENT",
                f"the weights of the run name the URL {url[:200]!r}: expected http(s)://HOST/…, "
                "without a user in it",
            )
        if str(origin) not in origins:
            raise BlobStoreError(
                "INVALID_ARGUMENT",
                f"the weights of the run name a URL at {origin}, and its job names "
                f"{', '.join(origins) or 'no host'}: expected model.weights with all of them, and "
                'model.where = "url"',
            )


class Sweeper:
    """Removes from a store what the runs do not need. Used in one event loop; the disk is in
    `disk`'s threads."""

    def __init__(
        self, store: BlobStore, runs: Callable[[], Iterable[RunRecord]], disk: Executor
    ) -> None:
        self._store, self._runs, self._disk = store, runs, disk
        self._shards: dict[str, frozenset[str]] = {}  # by manifest
        self._lock = asyncio.Lock()

    async def keep(self) -> None:
        """Sweeps now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except OSError as error:  # of the disk; uploads say what is wrong with it
                log.warning("blobs_not_removed why=%s", error)

    async def sweep(self) -> int:
        """Bytes that were freed."""
        async with self._lock:
            blobs, manifests = needed(self._runs())
            run = asyncio.get_running_loop().run_in_executor
            count, size = await run(self._disk, self._collect, blobs, manifests)
        if count:
            log.info("blobs_removed count=%d bytes=%d", count, size)
        return size

    def _collect(self, blobs: set[str], manifests: set[str]) -> tuple[int, int]:
        self._shards = {m: self._shards.get(m) or self._shards_of(m) for m in sorted(manifests)}
        return self._store.collect(blobs.union(*self._shards.values()))

    def _shards_of(self, manifest: str) -> frozenset[str]:
        """None where it is not here, or is no manifest."""
        try:
            return frozenset(listed(self._store, manifest).shards)
        except BlobStoreError:
            return frozenset()
