"""Checkpoints of a run, as files anywhere that fsspec reaches.

    RUN/checkpoint-000400/checkpoint.json       what it is of, and every other file with its SHA-256
                          model.safetensors     the weights, under the names of the user's module
                          state-1-of-4.safetensors  of one holder: parameters, optimizer, codecs
                          graph  core_graph  data.json   what the run was submitted with

`checkpoint.json` is written last: a folder without it is no checkpoint. All sizes are bytes.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..dag.convert import graph_from_bytes
from ..dag.recipe import Recipe, make
from ..net.blobs_client import BlobClient
from ..peer.weights import merge_blocks
from ..proto.broker_pb2 import Checkpoint, Recalled, RunSpec, WeightFile
from ..proto.common_pb2 import BlobRef
from .access import Access
from .submission import transfer

__all__ = ["CheckpointError", "Kept", "find", "forget_old", "is_folder", "keep", "read", "upload"]

VERSION = 1
_LISTED = "checkpoint.json"
_DIGITS = 6


class CheckpointError(ValueError):
    """A folder that is no checkpoint, or not a whole one."""


@dataclass(frozen=True)
class Kept:
    """A checkpoint on disk. `spec`: of the run that made it; `folder`: of its job."""

    url: str
    checkpoint: Checkpoint
    spec: RunSpec
    folder: str
    files: dict[str, BlobRef]
    """By name."""


def is_folder(name: str) -> bool:
    """Whether a person means a folder of checkpoints by it, and not the id of a run."""
    return "/" in name or Path(name).is_dir()


# ---------------------------------------------------------------- writing


def keep(access: Access, found: Recalled, to: str, folder: str) -> str:
    """Writes a checkpoint that lies with the broker into the run's folder `to` (a path, or any URL
    that fsspec knows); returns its own folder. One that is there already stays. `folder`: of the
    job's file.

    Raises BlobTransferError, OSError."""
    checkpoint, spec = found.checkpoint, found.spec
    url = f"{to.rstrip('/')}/checkpoint-{checkpoint.step:0{_DIGITS}}"
    files, root = url_to_fs(url)
    if files.exists(f"{root}/{_LISTED}"):
        return url
    count = len(checkpoint.files)
    wanted = {"graph": spec.graph, "data.json": spec.data}
    if spec.HasField("core_graph"):
        wanted["core_graph"] = spec.core_graph
    states = {
        f"state-{i}-of-{count}.safetensors": file.blob for i, file in enumerate(checkpoint.files, 1)
    }
    starting = {f"{i}": file.blob for i, file in enumerate(spec.weights)}
    recipe = {"recipe": spec.recipe} if spec.HasField("recipe") else {}
    with tempfile.TemporaryDirectory(prefix="shoal-checkpoint-") as name:
        here = Path(name)

        async def fetch(blobs: BlobClient) -> None:
            for part, blob in {**wanted, **states, **starting, **recipe}.items():
                await blobs.fetch_to(blob.hash, here / part, most_bytes=blob.size_bytes)

        transfer(access, fetch)
        weights = _weights(
            (here / "graph").read_bytes(),
            [here / p for p in starting],
            [here / p for p in states],
            Recipe.from_bytes((here / "recipe").read_bytes()) if recipe else None,
        )
        save_file(weights, here / "model.safetensors", metadata={"format": "pt"})
        for part in (*starting, *recipe):
            (here / part).unlink()
        listed = {p.name: _ref(p) for p in sorted(here.iterdir())}
        record = {
            "version": VERSION,
            "run": checkpoint.run,
            "step": checkpoint.step,
            "folder": folder,
            "checkpoint": MessageToDict(checkpoint),
            "spec": MessageToDict(spec),
            "files": {n: {"sha256": r.hash, "bytes": r.size_bytes} for n, r in listed.items()},
        }
        (here / _LISTED).write_text(json.dumps(record, indent=1) + "\n")
        files.makedirs(root, exist_ok=True)
        for part in (*listed, _LISTED):
            files.put_file(str(here / part), f"{root}/{part}")
    return url


def _weights(
    graph: bytes, starting: list[Path], states: list[Path], recipe: Recipe | None
) -> dict[str, Tensor]:
    """Under the names of the user's module, as an export has them."""
    found: dict[str, Tensor] = {}
    for path in starting:
        found |= load_file(path)
    own: dict[str, Tensor] = {}
    for path in states:
        for name, tensor in load_file(path).items():
            kind, _, plain = name.partition(":")
            if kind in ("param", "buffer"):
                own[plain] = tensor
    found |= merge_blocks(own)
    if recipe is not None:
        missing = {n: i for n, i in recipe.tensors.items() if n not in found}
        found |= {name: make(initial, recipe.seed) for name, initial in missing.items()}
    for parameter in graph_from_bytes(graph).parameters:
        for alias in parameter.tied:
            found[alias] = found[parameter.name].clone()
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _ref(path: Path) -> BlobRef:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return BlobRef(hash=digest, size_bytes=path.stat().st_size)


def forget_old(to: str, most: int) -> None:
    """Removes all but the newest whole checkpoints in a run's folder, and what is older than they:
    one that was cut off counts for nothing."""
    files, root = url_to_fs(to)
    whole = _whole(files, root)[-most:]
    for path in files.glob(f"{root.rstrip('/')}/checkpoint-*"):
        if whole and _step(str(path)) < _step(whole[0]):
            files.rm(str(path), recursive=True)


def _whole(files: Any, root: str) -> list[str]:
    """The folders of whole checkpoints in a run's, the newest last."""
    listed = files.glob(f"{root.rstrip('/')}/checkpoint-*/{_LISTED}")
    return sorted((str(path).rpartition("/")[0] for path in listed), key=_step)


def _step(folder: str) -> int:
    digits = folder.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


# ---------------------------------------------------------------- reading


def find(url: str) -> str:
    """The folder of a checkpoint: `url` itself or, of a run's folder, its newest one. Raises
    CheckpointError where there is none."""
    files, root = url_to_fs(url)
    root = root.rstrip("/")
    if files.exists(f"{root}/{_LISTED}"):
        return url
    found = _whole(files, root)
    if not found:
        raise CheckpointError(
            f"{url} has no {_LISTED}, and no checkpoint-*/{_LISTED}: expected the folder of a "
            "checkpoint, or of a run with some (`output.every` of its job)"
        )
    return str(files.unstrip_protocol(found[-1]))


def read(url: str) -> Kept:
    """What `keep` has written; its files' sizes are checked. Raises CheckpointError, OSError."""
    url = find(url)
    files, root = url_to_fs(url)
    root = root.rstrip("/")
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
            str(name): BlobRef(hash=entry["sha256"], size_bytes=entry["bytes"])
            for name, entry in record["files"].items()
        }
        kept = Kept(
            url=url,
            checkpoint=ParseDict(record["checkpoint"], Checkpoint()),
            spec=ParseDict(record["spec"], RunSpec()),
            folder=str(record["folder"]),
            files=listed,
        )
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ParseError) as error:
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__} {error}") from None
    for name, ref in listed.items():
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


def upload(access: Access, kept: Kept, say: Callable[[str], None]) -> RunSpec:
    """Brings a checkpoint to a broker; returns the spec of its run, with it to go on from. Raises
    BlobTransferError; CheckpointError for a file with another hash."""
    spec = RunSpec()
    spec.CopyFrom(kept.spec)
    spec.resumed.CopyFrom(kept.checkpoint)
    files, root = url_to_fs(kept.url)
    total = sum(ref.size_bytes for ref in kept.files.values())
    say(f"uploading what the broker lacks of {total / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory(prefix="shoal-checkpoint-") as name:
        here = Path(name)
        for part, ref in kept.files.items():
            files.get_file(f"{root.rstrip('/')}/{part}", str(here / part))
            if _ref(here / part).hash != ref.hash:
                raise CheckpointError(
                    f"{kept.url}/{part} has another hash than {_LISTED} says: it was changed"
                )

        async def store(blobs: BlobClient) -> BlobRef:
            for part in kept.files:
                if part != "model.safetensors":
                    await blobs.store(here / part)
            return await blobs.store(here / "model.safetensors")

        weights = transfer(access, store)
    del spec.weights[:]
    spec.ClearField("recipe")  # the file has everything
    spec.weights.append(WeightFile(blob=weights))
    return spec
