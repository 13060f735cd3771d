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
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from ...job import MOST_MANIFEST_BYTES
from ..records.run import RunRecord
from ..run_spec import HASH
from .blobs import BlobStore, BlobStoreError

__all__ = ["SWEEP_S", "Sweeper", "listed", "needed"]

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
        manifests.add(spec.data.hash)
        if not run.ended or kept:
            blobs |= {spec.graph.hash, spec.core_graph.hash}
            blobs |= {spec.recipe.hash} if spec.HasField("recipe") else set()
            blobs.update(file.blob.hash for file in spec.weights)
            manifests.update(file.blob.hash for file in spec.weights if file.sharded)
            blobs.update(file.blob.hash for file in spec.resumed.files)
        for checkpoint in kept:
            blobs.update(file.blob.hash for file in checkpoint.files)
        for event in run.history.recent:  # an export is among the last things that happen
            found = event.weights
            blobs.update(file.blob.hash for file in (*found.files, *found.starting))
            manifests.update(file.blob.hash for file in found.starting if file.sharded)
            blobs |= {ref.hash for ref in (found.graph, found.recipe) if ref.hash}
    return blobs | manifests, manifests


def listed(store: BlobStore, manifest: str) -> dict[str, bool]:
    """The shards that a manifest names, and whether peers find each on the web. Raises
    BlobStoreError."""
    try:
        shards = json.loads(store.get(manifest, MOST_MANIFEST_BYTES))["shards"]
        return {s["hash"]: "url" in s for s in shards if HASH.fullmatch(s["hash"])}
    except BlobStoreError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BlobStoreError(
            "INVALID_ARGUMENT", f"blob {manifest} is no manifest: expected JSON with its shards"
        ) from None


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
            return frozenset(listed(self._store, manifest))
        except BlobStoreError:
            return frozenset()
