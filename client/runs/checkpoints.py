"""Checkpoints of a run, as files anywhere that fsspec reaches.

    RUN/checkpoint-000400/checkpoint.json       what it is of, and every other file with its SHA-256
                          model.safetensors     the state_dict of the user's module; a large one as
                                                model-00001-of-00003.safetensors, …, and
                                                model.safetensors.index.json
                          beside.safetensors    what the graph has and no state_dict: buffers that
                                                are not persistent, and constants
                          state-1-of-4.safetensors  of one holder: parameters, optimizer, codecs
                          graph  core_graph  data.json   what the run was submitted with

`checkpoint.json` is written last: a folder without it is no checkpoint. All sizes are bytes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from ...dag.ir.convert import graph_from_bytes
from ...dag.transforms.split_weights import grouped, weight_of
from ...net.blobs.client import BlobClient
from ...net.file_names import is_file_name
from ...net.web.places import Origin
from ...net.web.web import is_web
from ...peer.blobs.weights import ShapeDtype, split_names
from ...peer.compute.records import coded_specs, decoded
from ...proto.broker_pb2 import Checkpoint, Recalled, RunSpec, WeightFile, Weights
from ...proto.common_pb2 import BlobRef
from ..access import Access
from ..files import weight_files
from ..files.exported import aliases, bring, opened, state_of
from ..files.records import replacing
from ..files.sending import send
from ..files.shards import Pretrained
from ..files.web_folder import WebFolder
from ..files.weight_files import Stored
from ..files.weight_writer import Item, cast, files_of, item_of, items_of, write_files
from ..uploading import transfer

__all__ = [
    "CheckpointError",
    "StoredCheckpoint",
    "find",
    "forget_old",
    "is_folder",
    "keep",
    "read",
    "upload",
]

VERSION = 1
_LISTED = "checkpoint.json"
_STARTING = ".starting"
_BESIDE = "beside.safetensors"
_DIGITS = 6
_PIECE = 1 << 20


class CheckpointError(ValueError):
    """A folder that is no checkpoint, or not a whole one."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk, of anybody's. `spec`: of the run that made it."""

    url: str
    checkpoint: Checkpoint
    spec: RunSpec
    files: dict[str, BlobRef]
    """By name."""


def is_folder(name: str) -> bool:
    """Whether a person means a folder of checkpoints by it, and not the id of a run."""
    return "/" in name or Path(name).is_dir()


# ---------------------------------------------------------------- writing


def keep(access: Access, found: Recalled, to: str, own: Collection[Origin] = frozenset()) -> str:
    """Writes a checkpoint that lies with the broker into the run's folder `to` (a path, or any URL
    that fsspec knows); returns its own folder. One that is there already stays. `own`: hosts that
    this user named for weights.

    Raises BlobTransferError, OSError."""
    checkpoint, spec = found.checkpoint, found.spec
    url = f"{to.rstrip('/')}/checkpoint-{checkpoint.step:0{_DIGITS}}"
    files, root = url_to_fs(url)
    if files.exists(f"{root}/{_LISTED}"):
        return url
    with _beside(files, root) as here:
        listed = _brought(access, found, here, own)
        record = {
            "version": VERSION,
            "run": checkpoint.run,
            "step": checkpoint.step,
            "checkpoint": MessageToDict(checkpoint),
            "spec": MessageToDict(spec),
            "files": {n: {"sha256": r.hash, "bytes": r.size_bytes} for n, r in listed.items()},
        }
        with replacing(here / _LISTED) as listing:
            listing.write_text(json.dumps(record, indent=1) + "\n")
        if str(here) != root:
            files.makedirs(root, exist_ok=True)
            for part in (*listed, _LISTED):
                files.put_file(str(here / part), f"{root}/{part}")
                (here / part).unlink()
    return url


@contextmanager
def _beside(files: Any, root: str) -> Iterator[Path]:
    """Where a checkpoint is made that belongs to `root`: there, where that is on this machine, so
    that one that was cut off is gone on from; else a temporary folder."""
    if isinstance(files, LocalFileSystem):
        Path(root).mkdir(parents=True, exist_ok=True)
        yield Path(root)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-checkpoint-") as name:
        yield Path(name)


def _brought(
    access: Access, found: Recalled, here: Path, own: Collection[Origin]
) -> dict[str, BlobRef]:
    """Fetches and makes all files of a checkpoint but the list."""
    checkpoint, spec = found.checkpoint, found.spec
    count = len(checkpoint.files)
    states = {
        f"state-{i}-of-{count}.safetensors": file.blob for i, file in enumerate(checkpoint.files, 1)
    }
    wanted = {"graph": spec.graph, "data.json": spec.data, **states}
    if spec.HasField("core_graph"):
        wanted["core_graph"] = spec.core_graph
    starting = here / _STARTING

    async def fetch(blobs: BlobClient) -> tuple[Items, Items]:
        for part, blob in wanted.items():
            if not (here / part).exists():
                await blobs.fetch_to(blob.hash, here / part, most_bytes=blob.size_bytes)
        graph = graph_from_bytes((here / "graph").read_bytes())
        items = _trained([here / part for part in states])
        tensors = [p.name for p in graph.parameters if weight_of(p.name) == p.name]
        tensors += [b.name for b in graph.buffers]
        if {*tensors} - {*items, *aliases(graph, items)}:  # frozen, or in no stage
            begun = Weights(starting=spec.weights, graph=spec.graph)
            if spec.HasField("recipe"):
                begun.recipe.CopyFrom(spec.recipe)
            but = {*items, *aliases(graph, items)}
            rest = await bring(blobs, begun, starting, but, own)
            items = rest.items_to_write() | items
        items |= {name: items[there] for name, there in aliases(graph, items).items()}
        state = state_of(graph)
        saved = {tensor for _, tensor, _ in state}
        return (
            {n: cast(items[t], getattr(torch, dtype)) for n, t, dtype in state},
            {n: items[n] for n in tensors if n not in saved},
        )

    state, beside = transfer(access, fetch)
    made = files_of(write_files(state, here / "model.safetensors"))
    made += files_of(write_files(beside, here / _BESIDE)) if beside else []
    shutil.rmtree(starting, ignore_errors=True)
    return wanted | {path.name: _ref(path) for path in made}


Items = dict[str, Item]


def _trained(states: list[Path]) -> Items:
    """Tensors that states have of a model, by the graph's names; each is read as it is written."""
    found: Items = {}
    for path in states:
        stored = opened([path])
        whole = grouped(stored.entries)  # of these the file has blocks, which are merged below
        own = {n: e for n, e in stored.entries.items() if n.startswith(("param:", "buffer:"))}
        own = {n: e for n, e in own.items() if n not in whole}
        coded = coded_specs(stored.weights)
        for name, item in items_of(stored, own).items():
            plain = name.partition(":")[2]
            found[plain] = _decoded(stored, name, coded[name]) if name in coded else item
    for name, blocks in list(
        split_names({n: ShapeDtype(i.shape, i.dtype) for n, i in found.items()})
    ):
        found[name] = _joined([found.pop(block) for block in blocks])
    return found


def _decoded(stored: Stored, name: str, spec: ShapeDtype) -> Item:
    """A tensor that is losslessly coded."""

    def pieces() -> Iterator[memoryview]:
        yield from item_of(decoded(stored.weights, name)).pieces()  # type: ignore[misc]

    size = math.prod(spec.shape) * spec.dtype.itemsize
    return Item(spec.dtype, spec.shape, size, pieces)


def _joined(blocks: list[Item]) -> Item:
    rows = sum(item.shape[0] for item in blocks)
    return Item(
        blocks[0].dtype,
        (rows, *blocks[0].shape[1:]),
        sum(item.size_bytes for item in blocks),
        lambda: (piece for item in blocks for piece in item.pieces()),
    )


def _copy(files: Any, path: str, to: Path, most_bytes: int) -> None:
    """Copies a file, and at most one byte beyond `most_bytes`: of another size, another hash."""
    with to.open("wb") as file:
        if isinstance(files, WebFolder):
            file.writelines(files.pieces(path, most_bytes))
            return
        with files.open(path, "rb") as source:
            while data := source.read(min(_PIECE, most_bytes + 1 - file.tell())):
                file.write(data)


def _ref(path: Path) -> BlobRef:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return BlobRef(hash=digest, size_bytes=path.stat().st_size)


def forget_old(to: str, most: int) -> None:
    """Removes all but the newest whole checkpoints in a run's folder, and what is older than they:
    one that was cut off counts for nothing."""
    files, root = url_to_fs(to)
    whole = _whole(files, root)[-most:]
    for path in files.glob(f"{escape(root.rstrip('/'))}/checkpoint-*"):
        if whole and _step(str(path)) < _step(whole[0]):
            files.rm(str(path), recursive=True)


def _whole(files: Any, root: str) -> list[str]:
    """The folders of whole checkpoints in a run's, the newest last."""
    there = root.rstrip("/")
    there = there if isinstance(files, WebFolder) else escape(there)  # a folder's own name
    listed = files.glob(f"{there}/checkpoint-*/{_LISTED}")
    return sorted((str(path).rpartition("/")[0] for path in listed), key=_step)


def _step(folder: str) -> int:
    digits = folder.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


# ---------------------------------------------------------------- reading


def _opened(url: str) -> tuple[Any, str]:
    """Return what reads at a path or URL, and the folder there by its own name. Raises
    WebError."""
    if is_web(url):
        return WebFolder(url), url.rstrip("/")
    files, root = url_to_fs(url)
    return files, root.rstrip("/")


def find(url: str) -> str:
    """The folder of a checkpoint: `url` itself or, of a run's folder, its newest one. Raises
    CheckpointError where there is none, WebError."""
    files, root = _opened(url)
    if files.exists(f"{root}/{_LISTED}"):
        return url
    found = _whole(files, root)
    if not found:
        raise CheckpointError(
            f"{url} has no {_LISTED}, and no checkpoint-*/{_LISTED}: expected the folder of a "
            "checkpoint, or of a run with some (`output.every` of its job)"
        )
    return str(files.unstrip_protocol(found[-1]))


def read(url: str) -> StoredCheckpoint:
    """What `keep` has written; its files' sizes are checked where they are told. Raises
    CheckpointError, OSError, WebError."""
    url = find(url)
    files, root = _opened(url)
    where = f"{url}/{_LISTED}"
    try:
        record = json.loads(files.cat_file(f"{root}/{_LISTED}"))
        version = record["version"]
        if version != VERSION:
            raise CheckpointError(
                f"{where} is of version {version}: this shoal reads version {VERSION}, get a newer "
                "one"
            )
        listed = {
            _part(name): BlobRef(hash=entry["sha256"], size_bytes=entry["bytes"])
            for name, entry in record["files"].items()
        }
        kept = StoredCheckpoint(
            url=url,
            checkpoint=ParseDict(record["checkpoint"], Checkpoint()),
            spec=ParseDict(record["spec"], RunSpec()),
            files=listed,
        )
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ParseError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__} {error}") from None
    for name, ref in listed.items() if not isinstance(files, WebFolder) else ():
        try:
            size = files.size(f"{root}/{name}")
        except FileNotFoundError:
            raise CheckpointError(f"{url} lacks {name}, which its {_LISTED} names") from None
        if size != ref.size_bytes:
            raise CheckpointError(
                f"{url}/{name} has {size} bytes: expected {ref.size_bytes}. It was cut off or "
                "changed"
            )
    return kept


def _part(name: str) -> str:
    """The name of a file of a checkpoint, which whoever made it has chosen. Raises ValueError."""
    if not is_file_name(name):
        raise ValueError(f"it names the file {name!r:.80}: expected plain names of files beside it")
    return name


def upload(access: Access, kept: StoredCheckpoint, say: Callable[[str], None]) -> RunSpec:
    """Brings a checkpoint to a broker; returns the spec of its run, with it to go on from. Raises
    BlobTransferError; CheckpointError for a file with another hash."""
    spec = copy.deepcopy(kept.spec)
    spec.resumed.CopyFrom(kept.checkpoint)
    files, root = _opened(kept.url)
    if "graph" not in kept.files:
        raise CheckpointError(f"{kept.url} has no graph among its files: it was changed")
    total = sum(ref.size_bytes for ref in kept.files.values())
    say(f"uploading what the broker lacks of {total / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory(prefix="shoal-checkpoint-") as name:

        def here(part: str) -> Path:
            """A file of the checkpoint on this machine, checked; one that comes from elsewhere has
            its name once its hash is right."""
            wanted = kept.files[part]
            if isinstance(files, LocalFileSystem):
                path = coming = Path(root) / part
            else:
                path, coming = Path(name) / part, Path(name) / ".coming"
                _copy(files, f"{root}/{part}", coming, wanted.size_bytes)
            if _ref(coming) != wanted:
                raise CheckpointError(
                    f"{kept.url}/{part} has another hash than {_LISTED} says: it was changed"
                )
            return path if path == coming else coming.replace(path)

        async def store(blobs: BlobClient) -> WeightFile:
            model = [part for part in kept.files if part.startswith("model") or part == _BESIDE]
            for part in kept.files:
                if part not in model:
                    path = here(part)
                    await blobs.store(path)
                    if path.parent == Path(name):
                        path.unlink()
            stored = weight_files.find(
                [str(p) for p in map(here, model) if p.suffix == ".safetensors"]
            )
            graph = graph_from_bytes(here("graph").read_bytes())
            names = {name: tensor for name, tensor, _ in graph.state}
            entries = {names.get(name, name): e for name, e in stored.entries.items()}
            return await send(blobs, Pretrained(stored, entries), say)

        weights = transfer(access, store)
    del spec.weights[:]
    spec.ClearField("recipe")  # the files have everything
    spec.weights.append(weights)
    return spec
