"""The weights of a finished run: fetched, merged, and written for other programs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import Tensor

from ...net.web.web import Web
from ...proto.broker_pb2 import Weights
from ..access import Access
from ..files.exported import PUBLIC, ExportedTensors, bring
from ..files.records import replacing
from ..files.weight_files import WeightFilesError
from ..files.weight_writer import item_of, write_files
from ..submission import transfer

__all__ = ["ExportError", "brought", "write"]

_PARTS = ".parts"
_FOLDERS = {
    "hf": ("config.json", "model", "model.safetensors"),
    "peft": ("adapter_config.json", "adapter", "adapter_model.safetensors"),
}
"""By format: the config that has to lie there, the folder's name, the file of weights."""


class ExportError(ValueError):
    """An export that is not possible as asked; the message says what is."""


@contextmanager
def brought(
    access: Access, weights: Weights, folder: Path, *, own: bool = False
) -> Iterator[ExportedTensors]:
    """The weights of a run whose output folder is `folder`, each part checked against its hash;
    read as they are asked for, inside the block. Parts lie in the folder until then: when bringing
    them was cut off, it goes on where it was. `own`: the URLs that the run began with were named
    by this user, and may lead anywhere.

    Raises BlobTransferError, OSError; ExportError when two peers exported one name, or a block is
    missing.
    """
    parts, there = folder / _PARTS, folder.exists()
    web = Web() if own else PUBLIC
    try:
        found = transfer(access, lambda blobs: bring(blobs, weights, parts, web=web))
    except WeightFilesError as error:
        raise ExportError(str(error)) from None
    yield found
    shutil.rmtree(parts)
    if not there and not any(folder.iterdir()):
        folder.rmdir()


def write(
    weights: ExportedTensors | Mapping[str, Tensor],
    folder: Path,
    path: Path | None,
    format: Literal["safetensors", "hf", "peft"],
) -> Path:
    """Writes the weights of the run whose output folder is `folder`; returns where.

    "safetensors": a file at `path` or FOLDER/model.safetensors, or several beside it and their
    index where one would be too large (`write_files`). "hf": a folder with the weights and the
    sidecars that were kept at submission, at `path` or FOLDER/model. "peft": a folder with an
    adapter's weights and config, at `path` or FOLDER/adapter. A file that was there is replaced as
    a whole. Raises ExportError when there are no sidecars, or where an index of other files is in
    the way.
    """
    if format == "safetensors":
        target = path or folder / "model.safetensors"
        if target.is_dir():
            target = target / "model.safetensors"
        return _save(weights, target)
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


def _save(weights: ExportedTensors | Mapping[str, Tensor], path: Path) -> Path:
    # Names of one tensor become two copies: the format knows no sharing, and the user's
    # load_state_dict wants every name.
    if isinstance(weights, ExportedTensors):
        items = weights.items_to_write()
    else:
        items = {name: item_of(tensor) for name, tensor in weights.items()}
    try:
        return write_files(items, path)
    except WeightFilesError as error:
        raise ExportError(str(error)) from None
