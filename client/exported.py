"""The weights of a run that is over, brought here part by part and read tensor by tensor.

Parts lie in a folder under their hashes: what is there is not fetched again, and one that was cut
off is gone on from. What no part has, since it was frozen, comes from the weights that the run
began with, of which only those shards are fetched that have some of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..dag.convert import graph_from_bytes
from ..dag.graph import Graph
from ..net.blobs_client import BlobClient
from ..peer.weight_shards import WeightError, WeightManifest, WeightShard
from ..peer.weights import Entry, Lazy, Part, Spec, WeightsFile, entry_of, merged_entries
from ..proto.broker_pb2 import WeightFile, Weights
from .records import replacing
from .weight_files import File, Stored, WeightFilesError, open_file

__all__ = ["Exported", "aliases", "bring", "frozen", "opened"]

_AT_ONCE = 3
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Exported(Lazy):
    """The tensors by the user's names, each read when it is asked for. `entries`: where they lie.
    They live as long as the folder."""

    stored: Stored
    entries: Mapping[str, Entry]

    def __getitem__(self, name: str) -> Tensor:
        return self.stored.weights.read(self.entries[name])

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def spec(self, name: str) -> Spec:
        entry = self.entries[name]
        return Spec(entry.shape, entry.dtype)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.stored.weights.read(self.entries[name].rows(start, stop))


async def bring(blobs: BlobClient, weights: Weights, folder: Path) -> Exported:
    """Fetches what the folder lacks of an export. Raises BlobTransferError, OSError;
    WeightFilesError when two peers exported one name, a block of a split parameter is missing, or
    a part is no file of weights."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    paths = [folder / file.blob.hash for file in weights.files]
    await _fetched(blobs, [(f.blob.hash, f.blob.size_bytes) for f in weights.files], folder)
    entries: dict[str, Entry] = {}
    for path in dict.fromkeys(paths):
        own = opened([path]).entries
        if twice := sorted(entries.keys() & own.keys()):
            raise WeightFilesError(
                f"{twice[0]!r} was exported by two peers: expected one for each name"
            )
        entries |= own
    try:
        entries = merged_entries(entries)
    except WeightError as error:
        raise WeightFilesError(str(error)) from None
    if weights.starting:
        graph = await blobs.fetch(weights.graph.hash, most_bytes=weights.graph.size_bytes)
        entries |= await frozen(blobs, weights.starting, folder, entries)
        others = aliases(graph_from_bytes(graph), entries)
        entries |= {name: entries[there] for name, there in others.items()}
    files = {part.source.hash for e in entries.values() for part in e.parts}
    return Exported(opened([Path(name) for name in sorted(files)]), entries)


def opened(paths: Iterable[Path]) -> Stored:
    """Files on this machine."""
    return Stored({str(path): open_file(str(path)) for path in paths})


async def _fetched(blobs: BlobClient, wanted: list[tuple[str, int]], folder: Path) -> None:
    """Brings blobs into the folder, a few at a time."""
    for name, _ in wanted:
        if not _HASH.fullmatch(name):
            raise WeightFilesError(f"an export names the blob {name!r:.80}: expected a SHA-256")
    left = [(name, size) for name, size in dict(wanted).items() if not (folder / name).exists()]

    async def work() -> None:
        while left:
            name, size = left.pop()
            await blobs.fetch_to(name, folder / name, most_bytes=size)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def frozen(
    blobs: BlobClient, starting: Sequence[WeightFile], folder: Path, but: Collection[str]
) -> dict[str, Entry]:
    """Where the tensors lie that a run began with, but for those names; fetches what the folder
    lacks. Raises as `bring` does."""
    found: dict[str, Entry] = {}
    for file in reversed(starting):  # a later one wins
        own = await _starting(blobs, file, folder, {*but, *found})
        found |= {name: entry for name, entry in own.items() if name not in {*but, *found}}
    return found


def aliases(graph: Graph, names: Collection[str]) -> dict[str, str]:
    """The names that parameters have beside those that are there, each with one that is."""
    found: dict[str, str] = {}
    for parameter in graph.parameters:
        own = (parameter.name, *parameter.tied)
        there = next((n for n in own if n in names), None)
        if there is not None:
            found |= {n: there for n in own if n not in names}
    return found


async def _starting(
    blobs: BlobClient, file: WeightFile, folder: Path, but: Collection[str]
) -> Mapping[str, Entry]:
    """The tensors of one of the files that the run began with; of shards, but for those names."""
    await _fetched(blobs, [(file.blob.hash, file.blob.size_bytes)], folder)
    path = folder / file.blob.hash
    if not file.sharded:
        return opened([path]).entries
    try:
        manifest = WeightManifest.from_json(path.read_bytes())
    except WeightError as error:
        raise WeightFilesError(str(error)) from None
    wanted = {n: t for n, t in manifest.tensors.items() if n not in but}
    used = dict.fromkeys(manifest.shards[i] for t in wanted.values() for i, _, _ in t.parts)
    await asyncio.to_thread(_from_web, [s for s in used if s.url], folder)
    await _fetched(blobs, [(s.hash, s.size_bytes) for s in used], folder)
    at = {shard: WeightsFile(str(folder / shard.hash), shard.size_bytes) for shard in used}

    def part(shard: WeightShard, begin: int, length: int) -> Part:
        return Part(at[shard], begin, length)

    try:
        return {
            n: entry_of(n, t, tuple(part(manifest.shards[i], b, size) for i, b, size in t.parts))
            for n, t in wanted.items()
        }
    except WeightError as error:
        raise WeightFilesError(str(error)) from None


def _from_web(shards: list[WeightShard], folder: Path) -> None:
    """Reads into the folder what it lacks of shards that no broker has."""
    files: dict[str, File] = {}
    for shard in shards:
        if (folder / shard.hash).exists():
            continue
        file = files.get(shard.url) or files.setdefault(shard.url, open_file(shard.url))
        data = file.read(shard.at, shard.size_bytes)
        if (found := hashlib.sha256(data).hexdigest()) != shard.hash:
            raise WeightFilesError(
                f"{shard.url} has another content from byte {shard.at} on than the run began with: "
                f"SHA-256 {found[:12]}, expected {shard.hash[:12]}"
            )
        with replacing(folder / shard.hash) as path:
            path.write_bytes(data)
