"""The weights of a finished run: fetched, merged, and written for other programs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from safetensors.torch import load, save_file
from torch import Tensor

from ..dag.convert import graph_from_bytes
from ..dag.recipe import Recipe
from ..net.blobs_client import BlobClient
from ..peer.starting import Starting
from ..peer.weight_shards import WeightShard
from ..peer.weights import Lazy, WeightError, WeightsFile, merge_blocks
from ..peer.weights import Weights as StartingWeights
from ..proto.broker_pb2 import WeightFile, Weights
from ..proto.common_pb2 import BlobRef
from .access import Access
from .records import replacing
from .submission import transfer

__all__ = ["ExportError", "fetch", "fetch_changed", "write"]


_FOLDERS = {
    "hf": ("config.json", "model", "model.safetensors"),
    "peft": ("adapter_config.json", "adapter", "adapter_model.safetensors"),
}
"""By format: the config that has to lie there, the folder's name, the file of weights."""


class ExportError(ValueError):
    """An export that is not possible as asked; the message says what is."""


def fetch(access: Access, exported: Weights) -> dict[str, Tensor]:
    """All weights of a run under the user's names: its export and, of what was frozen, the weights
    that it began with. Raises as `fetch_changed` does."""
    merged = fetch_changed(access, exported.files)
    if not exported.HasField("graph"):
        return merged

    def read(name: str, offset: int, length: int) -> bytes:
        return transfer(access, lambda blobs: blobs.fetch(name, offset, length))

    def whole(shard: WeightShard) -> bytes:
        return transfer(access, lambda blobs: blobs.fetch(shard.hash, most_bytes=shard.size_bytes))

    starting: Lazy = StartingWeights(
        [WeightsFile(f.blob.hash, f.blob.size_bytes, f.sharded) for f in exported.starting],
        read,
        whole,
    )
    graph = graph_from_bytes(read(exported.graph.hash, 0, exported.graph.size_bytes))
    if exported.HasField("recipe"):
        text = read(exported.recipe.hash, 0, exported.recipe.size_bytes)
        starting = Starting(starting, Recipe.from_bytes(text))
    merged |= {name: starting[name] for name in starting if name not in merged}
    for parameter in graph.parameters:
        names = (parameter.name, *parameter.tied)
        there = next((n for n in names if n in merged), None)
        if there is not None:
            merged |= {n: merged[there] for n in names if n not in merged}
    return merged


def fetch_changed(access: Access, files: Sequence[WeightFile]) -> dict[str, Tensor]:
    """The tensors of every part of an export under the user's names, each part checked against its
    hash; blocks of a split head are put together. What was frozen may not be among them.

    Raises BlobTransferError; ExportError when two peers exported one name, or a block is missing.
    """

    async def get(blobs: BlobClient) -> list[bytes]:
        return [await _part(blobs, file.blob) for file in files]

    merged: dict[str, Tensor] = {}
    for part in transfer(access, get):
        tensors = load(part)
        if twice := sorted(merged.keys() & tensors.keys()):
            raise ExportError(f"{twice[0]!r} was exported by two peers: expected one for each name")
        merged |= tensors
    try:
        return merge_blocks(merged)
    except WeightError as error:
        raise ExportError(str(error)) from None


async def _part(blobs: BlobClient, part: BlobRef) -> bytes:
    return await blobs.fetch(part.hash, most_bytes=part.size_bytes)


def write(
    weights: Mapping[str, Tensor],
    folder: Path,
    path: Path | None,
    format: Literal["safetensors", "hf", "peft"],
) -> Path:
    """Writes the weights of the run whose output folder is `folder`; returns where.

    "safetensors": one file, at `path` or FOLDER/model.safetensors. "hf": a folder with the weights
    and the sidecars that were kept at submission, at `path` or FOLDER/model. "peft": a folder with
    an adapter's weights and config, at `path` or FOLDER/adapter. A file that was there is replaced
    as a whole. Raises ExportError when there are no sidecars.
    """
    if format == "safetensors":
        target = path or folder / "model.safetensors"
        if target.is_dir():
            target = target / "model.safetensors"
        _save(weights, target)
        return target
    sidecars = sorted((folder / "sidecars").glob("*"))
    config, name, file = _FOLDERS[format]
    if not any(s.name == config for s in sidecars):
        raise ExportError(
            f"format {format} needs the {config} that was kept at submission in {folder}/sidecars: "
            'export where the run was submitted from, or with format "safetensors"'
        )
    if format == "peft":
        sidecars = [s for s in sidecars if s.name == config]
    target = path or folder / name
    target.mkdir(parents=True, exist_ok=True)
    for sidecar in sidecars:
        with replacing(target / sidecar.name) as temporary:
            shutil.copyfile(sidecar, temporary)
    _save(weights, target / file)
    return target


def _save(weights: Mapping[str, Tensor], path: Path) -> None:
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        # Names of one tensor become two copies: the format knows no sharing, and the user's
        # load_state_dict wants every name.
        own[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    with replacing(path) as temporary:
        save_file(own, temporary, metadata={"format": "pt"})
