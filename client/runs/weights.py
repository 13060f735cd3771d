"""The weights of a finished run: fetched, merged, and written for other programs."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Self

from torch import Tensor

from ...job import Job
from ...net.surroundings import user_path
from ...net.web.places import Origin
from ...proto.broker_pb2 import RunEvent, Weights
from ..access import Access
from ..files.exported import ExportedTensors, bring_state
from ..files.records import replacing
from ..files.weight_files import WeightFilesError
from ..files.weight_writer import item_of, write_files
from ..uploading import transfer

__all__ = ["CheckpointWriter", "ExportError", "brought", "check_beside", "write"]

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
    access: Access, weights: Weights, folder: Path, own: Collection[Origin] = frozenset()
) -> Iterator[ExportedTensors]:
    """The weights of a run whose output folder is `folder`, by the names of its module's
    state_dict; each part is checked against its hash, and read as it is asked for, inside the
    block. Parts lie in the folder until then: when bringing them was cut off, it goes on where it
    was. `own`: hosts that this user named himself for the weights that the run began with, which
    may be anywhere.

    Raises BlobTransferError, OSError; ExportError when two peers exported one name, or a block is
    missing.
    """
    there = folder.exists()
    with _parts_of(folder) as parts:
        try:
            found = transfer(access, lambda blobs: bring_state(blobs, weights, parts, own))
        except WeightFilesError as error:
            raise ExportError(str(error)) from None
        yield found
        shutil.rmtree(parts)
    if not there:
        with suppress(OSError):  # there is something in it
            folder.rmdir()


@contextmanager
def _parts_of(folder: Path) -> Iterator[Path]:
    """A folder for parts in an output folder: the one where a call that was cut off goes on, or,
    while another call has that one (`shoal train` and `shoal resume` of one run export at the same
    time), a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except OSError:  # somebody has it, or a file system without locks does not tell
        alone = False
    try:
        if alone:
            yield folder / _PARTS
        else:
            with TemporaryDirectory(prefix=f"{_PARTS}-", dir=folder) as name:
                yield Path(name) / "files"
    finally:
        os.close(held)


def check_beside(base: Job | None, path: Path) -> None:
    """Raise ExportError where an export at `path` would lie among the files that a job begins with,
    in whose place it would come."""
    if base is None:
        return
    named = [n for n in base.model.weight_names if n != "init" and "://" not in n]
    if base.model.factory.startswith("hf:"):
        named.append(base.model.factory.removeprefix("hf:"))
    for begun in (home / user_path(n) for n in named for home in (base.folder, Path())):
        into = {path.resolve(), (path / begun.name).resolve()}
        if begun.exists() and any(p.is_relative_to(begun.resolve()) for p in into):
            raise ExportError(
                f"{path} is in {begun.resolve()}, which the run began with, and an export would "
                "take the place of its files: expected another folder"
            )


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
    a whole. Raises ExportError when there are no sidecars, or where an index of other files, or a
    file of another kind, is in the way.
    """
    if format == "safetensors":
        target = path or folder / "model.safetensors"
        if target.is_dir():
            target = target / "model.safetensors"
        if target.exists() and target.suffix != ".safetensors":
            raise ExportError(
                f"{target} is there, and by its name no weights: expected a folder, a new file, or "
                "one that ends in .safetensors"
            )
        return _save(weights, target)
    sidecars = sorted((folder / "sidecars").glob("*"))
    config, name, file = _FOLDERS[format]
    if not any(s.name == config for s in sidecars):
        raise ExportError(
            f"format {format} needs the {config} that was kept at submission in {folder}/sidecars: "
            'export where the run was submitted from, or with format "safetensors"'
        )
    of_adapter = ("adapter_config.json", "adapter_names.json")
    if format == "peft":
        sidecars = [s for s in sidecars if s.name == config]
    else:  # with an adapter's config beside it a loader would look for the adapter
        sidecars = [s for s in sidecars if s.name not in of_adapter]
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


# Checkpoints come home while a run is followed where it was submitted, beside the following.

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the newest checkpoint of a run whenever there is one, one at a time; those that were
    replaced meanwhile are left out. Leaving the block waits for the last one. `keep`: writes it;
    None: nobody here wants any.

    problems: what could not be written, one sentence each; the run itself goes on."""

    def __init__(self, keep: Callable[[], object] | None) -> None:
        self.problems: list[str] = []
        self._keep = keep
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        # Whoever detaches does not wait for one that has not begun.
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def see(self, event: RunEvent) -> None:
        """One event of the run."""
        if event.HasField("checkpoint") and self._keep is not None:
            if self._last is not None:
                self._last.cancel()
            self._last = self._pool.submit(self._try, self._keep, event.checkpoint.step)

    def _try(self, keep: Callable[[], object], step: int) -> None:
        try:
            keep()
        except Exception as error:  # whatever the place of the files raises: the run goes on
            text = f"the checkpoint after step {step} was not written: {error}"
            self.problems.append(text)
            log.warning("%s", text)
