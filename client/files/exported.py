"""The weights of a run that is over, brought here part by part and read tensor by tensor.

Parts lie in a folder under their hashes: what is there is not fetched again, and one that was cut
off is gone on from. What no part has, since it was frozen, comes from the weights that the run
began with, of which only those shards are fetched that have some of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, get_num_threads

from ...dag.ir.convert import graph_from_bytes
from ...dag.ir.graph import Graph
from ...dag.ir.recipe import Initial, Recipe, make
from ...net.blobs.client import BlobClient
from ...net.web.places import Origin, origin_of, reachable
from ...net.web.web import Web
from ...peer.blobs.weight_shards import WeightError, WeightManifest, WeightShard
from ...peer.blobs.weights import (
    ByteRange,
    Lazy,
    ShapeDtype,
    TensorLocation,
    WeightsFile,
    entry_of,
    merged_entries,
)
from ...proto.broker_pb2 import WeightFile, Weights
from ...proto.common_pb2 import BlobRef
from .records import replacing
from .sending import several
from .weight_files import File, Stored, WeightFilesError, open_file, open_url
from .weight_writer import Item, cast, item_of, items_of

__all__ = ["ExportedTensors", "aliases", "bring", "bring_state", "opened", "state_of"]

_MADE_BYTES = 32 << 20
"""Of a tensor that is made while it is written."""
PUBLIC = Web(reachable=reachable(()))
"""For URLs of somebody's run, which this machine may be the first to read for him."""
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ExportedTensors(Lazy):
    """Tensors that are read when they are asked for. `entries`: where they lie; `recipe`: what
    makes others; `dtypes`: what some are given as. They live as long as the folder."""

    stored: Stored
    entries: Mapping[str, TensorLocation]
    recipe: Recipe
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of_state(self, graph: Graph) -> ExportedTensors:
        """The tensors of the module's state_dict, by its names, in its order and its dtypes; of
        these by the graph's names, of which it needs one. Raises WeightFilesError for one that is
        not here."""
        entries: dict[str, TensorLocation] = {}
        made: dict[str, Initial] = {}
        state = state_of(graph)
        for name, tensor, _ in state:
            if tensor in self.entries:
                entries[name] = self.entries[tensor]
            elif tensor in self.recipe.tensors:
                made[name] = self.recipe.tensors[tensor]
            else:
                raise WeightFilesError(f'"{name}" of the module is in no part of the export')
        dtypes = {name: getattr(torch, dtype) for name, _, dtype in state}
        return ExportedTensors(self.stored, entries, Recipe(self.recipe.seed, made), dtypes)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.entries:
            found = self.stored.weights.read(self.entries[name])
        else:
            found = make(self.recipe.tensors[name], self.recipe.seed, threads=get_num_threads())
        return found.to(self.dtypes.get(name, found.dtype))

    def __contains__(self, name: object) -> bool:
        return name in self.entries or name in self.recipe.tensors

    def __iter__(self) -> Iterator[str]:
        return iter({**self.entries, **self.recipe.tensors})

    def __len__(self) -> int:
        return len({*self.entries, *self.recipe.tensors})

    def spec(self, name: str) -> ShapeDtype:
        if name in self.entries:
            shape, dtype = self.entries[name].shape, self.entries[name].dtype
        else:
            made = self.recipe.tensors[name]
            shape, dtype = made.shape, getattr(torch, made.dtype)
        return ShapeDtype(shape, self.dtypes.get(name, dtype))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name in self.entries:
            found = self.stored.weights.read(self.entries[name].rows(start, stop))
        else:
            made, threads = self.recipe.tensors[name], get_num_threads()
            found = make(made, self.recipe.seed, (start, stop), threads=threads)
        return found.to(self.dtypes.get(name, found.dtype))

    def items_to_write(self) -> dict[str, Item]:
        """Return the items that `weight_writer.write_files` takes."""
        lying = items_of(self.stored, self.entries)
        found = {n: cast(item, self.dtypes.get(n, item.dtype)) for n, item in lying.items()}
        return found | {n: self._made(n) for n in self.recipe.tensors if n not in self.entries}

    def _made(self, name: str) -> Item:
        """A tensor that is made, some rows at a time, while it is written."""
        shape, dtype = self.spec(name)
        size = math.prod(shape) * dtype.itemsize

        def pieces() -> Iterator[bytes | memoryview]:
            if not shape or not size:
                yield from item_of(self[name]).pieces()
                return
            some = max(1, _MADE_BYTES * shape[0] // size)
            for start in range(0, shape[0], some):
                rows = self.rows(name, start, min(shape[0], start + some))
                yield from item_of(rows).pieces()

        return Item(dtype, shape, size, pieces)


async def bring(
    blobs: BlobClient,
    weights: Weights,
    folder: Path,
    but: Collection[str] = (),
    origins: Collection[Origin] = frozenset(),
) -> ExportedTensors:
    """Fetches what the folder lacks of an export; of what was frozen, not what is for the names
    `but`. Names are the graph's, with all that a tied tensor has; what of it is the module's own
    says `ExportedTensors.of_state`. `origins`: hosts on the web that this user named himself; of
    others, only public addresses are read. Raises BlobTransferError, OSError; WeightFilesError when
    two peers exported one name, a block of a split parameter is missing, or a part is no file of
    weights."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    paths = [folder / file.blob.hash for file in weights.files]
    await _fetched(blobs, [(f.blob.hash, f.blob.size_bytes) for f in weights.files], folder)
    entries: dict[str, TensorLocation] = {}
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
    recipe = Recipe(0)
    if weights.HasField("graph"):
        entries |= await _frozen(blobs, weights.starting, folder, {*entries, *but}, origins)
        if weights.HasField("recipe"):
            recipe = Recipe.from_bytes(await _small(blobs, weights.recipe))
        graph = graph_from_bytes(await _small(blobs, weights.graph))
        entries |= {n: entries[there] for n, there in aliases(graph, entries).items()}
        made = {n: initial for n, initial in recipe.tensors.items() if n not in entries}
        made |= {n: made[there] for n, there in aliases(graph, made).items()}
        recipe = Recipe(recipe.seed, made)
    files = {part.source.hash for e in entries.values() for part in e.parts}
    return ExportedTensors(opened([Path(name) for name in sorted(files)]), entries, recipe)


async def bring_state(
    blobs: BlobClient, weights: Weights, folder: Path, origins: Collection[Origin] = frozenset()
) -> ExportedTensors:
    """What the run's module has in its state_dict, by its names; of weights that come without a
    graph what the files have. Raises as `bring` does."""
    found = await bring(blobs, weights, folder, origins=origins)
    if not weights.HasField("graph"):
        return found
    return found.of_state(graph_from_bytes(await _small(blobs, weights.graph)))


def state_of(graph: Graph) -> Sequence[tuple[str, str, str]]:
    """`Graph.state`; of a graph that was made without one, what it says of names."""
    if graph.state:
        return graph.state
    found = [(n, p.name, p.spec.dtype) for p in graph.parameters for n in (p.name, *p.tied)]
    return found + [(b.name, b.name, b.spec.dtype) for b in graph.buffers if b.persistent]


async def _small(blobs: BlobClient, ref: BlobRef) -> bytes:
    return await blobs.fetch(ref.hash, most_bytes=ref.size_bytes)


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

    await several(work)


async def _frozen(
    blobs: BlobClient,
    starting: Sequence[WeightFile],
    folder: Path,
    but: Collection[str],
    own: Collection[Origin],
) -> dict[str, TensorLocation]:
    """Where the tensors lie that a run began with, but for those names; fetches what the folder
    lacks. Raises as `bring` does."""
    found: dict[str, TensorLocation] = {}
    for file in reversed(starting):  # a later one wins
        there = await _starting(blobs, file, folder, {*but, *found}, own)
        found |= {name: entry for name, entry in there.items() if name not in {*but, *found}}
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
    blobs: BlobClient,
    file: WeightFile,
    folder: Path,
    but: Collection[str],
    own: Collection[Origin],
) -> Mapping[str, TensorLocation]:
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
    await asyncio.to_thread(_from_web, own, [s for s in used if s.url], folder)
    await _fetched(blobs, [(s.hash, s.size_bytes) for s in used], folder)
    at = {shard: WeightsFile(str(folder / shard.hash), shard.size_bytes) for shard in used}

    def part(shard: WeightShard, begin: int, length: int) -> ByteRange:
        return ByteRange(at[shard], begin, length)

    try:
        return {
            n: entry_of(n, t, tuple(part(manifest.shards[i], b, size) for i, b, size in t.parts))
            for n, t in wanted.items()
        }
    except WeightError as error:
        raise WeightFilesError(str(error)) from None


def _from_web(own: Collection[Origin], shards: list[WeightShard], folder: Path) -> None:
    """Reads into the folder what it lacks of shards that no broker has. A manifest is its
    submitter's word: its URLs lead to public addresses, or to hosts that this user named too."""
    files: dict[str, File] = {}
    for shard in shards:
        if (folder / shard.hash).exists():
            continue
        web = Web() if origin_of(shard.url) in own else PUBLIC
        file = files.get(shard.url) or files.setdefault(shard.url, open_url(shard.url, web))
        data = file.read(shard.at, shard.size_bytes)
        if (found := hashlib.sha256(data).hexdigest()) != shard.hash:
            raise WeightFilesError(
                f"{shard.url} has another content from byte {shard.at} on than the run began with: "
                f"SHA-256 {found[:12]}, expected {shard.hash[:12]}"
            )
        with replacing(folder / shard.hash) as path:
            path.write_bytes(data)
