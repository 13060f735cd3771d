"""The submitter's side: any source of data becomes a manifest and content-hashed shards.

The source is read once, item after item, through fsspec; nothing but shards ever leaves this
machine, and peers never see a path. What comes over HTTP comes through the same proxy as all that
Shoal dials (net/web/proxy.py).
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from filecmp import cmp
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fsspec.core import url_to_fs

from .array_files import (
    TABLES,
    array_of,
    arrays_of,
    each_once,
    http_options,
    local,
    matching,
    reading,
    together,
)
from .file_types import HEAD_BYTES, check_ids, check_text
from .manifest import Column, DataError, Kind, Manifest
from .shard_writer import ARRAY_SHARD_BYTES, ShardWriter

__all__ = ["check_apart", "resolve", "text_of", "windows_of"]

TEXT_SHARD_BYTES = 4 * 2**20
"""Small enough that the first step starts soon over a home uplink."""

_Array = npt.NDArray[Any]


def resolve(
    folder: Path,
    *,
    kind: str = "text",
    source: str = "",
    holdout: float = 0.05,
    length: int = 128,
    inputs: str = "x",
    targets: str = "y",
    key: str = "",
    validation: str = "",
    named: Callable[[str, memoryview], str] | None = None,
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest of a job's data, and the shard files by hash, written into `folder`. `named`
    gives the hash of a shard from its column and content; None: SHA-256 of the content.

    `inputs` and `targets` name the tensors of a batch, which are argument names of the module's
    forward, as the checks of [data] leave them (`job/tables.py`); for arrays these are also the
    names in the file, and `inputs` may list several, separated by commas. `holdout` is a share of
    the items, taken from their end; `validation` the source of those that are held out in its
    place. `key`: of arrays, the one that says whose a sample is.

    Raises DataError for data that cannot be used; with a cause where its text has words of another
    library, which may tell of the content.
    """
    if not 0 <= holdout < 1:
        raise DataError(f"holdout is {holdout}, expected a share in [0, 1), such as 0.05")
    check_apart(source, validation)
    writer = ShardWriter(folder, named)
    if kind in ("text", "tokens"):
        read = _bytes if kind == "text" else _tokens
        held = read(validation) if validation else None
        return windows_of(
            writer, read(source), source, holdout, length, inputs, targets,
            "text" if kind == "text" else "tokens", held,
        )  # fmt: skip
    if kind == "arrays":
        return _arrays(writer, source, holdout, inputs, targets, key, validation)
    raise DataError(f"data kind {kind!r} is not supported: expected text, tokens or arrays")


def check_apart(source: str, validation: str) -> None:
    """Raise DataError for a file that is trained on and held out, by whichever name, or as a copy;
    of URLs for the same one."""
    if not validation:
        return
    shared: Path | str | None = source if source == validation else None
    if source and "://" not in source + validation:
        there: dict[int, list[Path]] = {}
        for path in each_once(matching(source)):
            if size := path.stat().st_size:
                there.setdefault(size, []).append(path)
        held = each_once(matching(validation))
        alike = ((path, one) for path in held for one in there.get(path.stat().st_size, ()))
        shared = next((path for path, one in alike if cmp(path, one, shallow=False)), None)
    if shared:
        raise DataError(
            f"{shared} of data.validation ({validation}) is among the files of data.source "
            f"({source}), or a copy of one, so it would be trained on: expected others"
        )


def windows_of(
    writer: ShardWriter,
    ids: _Array,
    source: str,
    holdout: float,
    length: int,
    inputs: str,
    targets: str,
    kind: Kind = "tokens",
    held: _Array | None = None,
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest and shards of ids in one row, as `resolve` gives them. held: those that are
    held out, in place of a share. Raises DataError."""
    if length < 1:
        raise DataError(f"length is {length}, expected at least 1 token per window")
    # At least one window where something is to be held out; validate() refuses what is too short.
    held_out = max(int(len(ids) * holdout), length + 1) if holdout and held is None else 0
    if min(len(ids) - held_out, length + 1 if held is None else len(held)) < length + 1:
        beside = "" if held is None else f", and data.validation {len(held)}"
        raise DataError(
            f"{source or 'the standard library'} has {len(ids)} tokens{beside}: training and "
            f"evaluation need a window of length + 1 = {length + 1} each; give more data or a "
            "smaller length"
        )
    if held is not None:
        held_out = len(held)
        ids = np.concatenate([ids, held])  # of the wider type, where they differ
    column = Column("tokens", str(ids.dtype))
    writer.add(column, ids, TEXT_SHARD_BYTES)
    manifest = Manifest(
        kind, (column,), tuple(writer.shards), len(ids), held_out, length, inputs, targets
    )
    return manifest.validate(), writer.paths


def _arrays(
    writer: ShardWriter,
    source: str,
    holdout: float,
    inputs: str,
    targets: str,
    key: str,
    validation: str,
) -> tuple[Manifest, dict[str, Path]]:
    if not source:
        raise DataError("data of kind arrays needs a source: an .npz or .safetensors file")
    names = [*inputs.split(","), *([targets] if targets else [])]
    if key in names:
        raise DataError(
            f"{key!r} is an input or target of the model: expected as key an array of its own"
        )
    found = _samples(source, names, key)
    total = len(found[names[0]])
    held_out = max(int(total * holdout), 1) if holdout else 0
    if validation:
        held = _samples(validation, names, "")
        held_out = len(held[names[0]])
        if key:  # nobody asks whose a sample is that is held out for all
            held[key] = np.zeros((held_out, *found[key].shape[1:]), found[key].dtype)
        is_table = all(name.endswith(TABLES) for name in (source, validation))
        found = together([found, held], [source, validation], is_table=is_table)
        total += held_out
    if held_out >= total:
        raise DataError(f"{source} has {total} samples and {held_out} are held out: none is left")
    columns = []
    for name, array in found.items():
        column = Column(name, str(array.dtype), tuple(array.shape[1:]))
        writer.add(column, array, ARRAY_SHARD_BYTES)
        columns.append(column)
    manifest = Manifest(
        "arrays", tuple(columns), tuple(writer.shards), total, held_out, 0, inputs, targets, key
    )
    return manifest.validate(), writer.paths


def _samples(source: str, names: Sequence[str], key: str) -> dict[str, _Array]:
    """The arrays of a source, each with as many samples. Raises DataError."""
    found = arrays_of(source, [*names, *([key] if key else [])], key)
    total = len(found[names[0]])
    for name, array in found.items():
        if len(array) != total:
            raise DataError(
                f"{source}: {name!r} has {len(array)} samples, {names[0]!r} has {total}: "
                "expected the same number along the first dimension"
            )
    return found


def _bytes(source: str) -> _Array:
    return np.frombuffer(text_of(source), np.uint8)


def text_of(source: str) -> bytes:
    """The bytes of all files of a source of text, one after the other. Raises DataError."""
    if not source:
        return b"".join(p.read_bytes() for p in _standard_library())
    with reading(source):
        options = http_options(source)
        if "://" not in source:
            return b"".join(_checked(str(p), p.read_bytes()) for p in _files(source))
        filesystem, path = url_to_fs(source, **options)
        if options:  # whatever lies there is a file, and may have a "?" in its name
            return _checked(source, bytes(filesystem.cat_file(path)))
        patterned = set("*?[") & set(path) and not filesystem.exists(path)
        paths = sorted(filesystem.glob(path)) if patterned else [path]
        if len(paths) == 1 and filesystem.isdir(paths[0]):
            raise DataError(f"{source} is a folder: give a glob such as {source}/**/*.txt")
        files = [p for p in paths if filesystem.isfile(p)]
        if not files:
            raise DataError(f"no file matches {source}: expected a path or a glob of text files")
        return b"".join(_checked(p, filesystem.cat_file(p)) for p in files)


def _files(source: str) -> list[Path]:
    """The files of a path or a glob on this machine, each once: a copy could be held out and
    trained on."""
    found = matching(source)
    if len(found) == 1 and found[0].is_dir():
        raise DataError(f"{source} is a folder: give a glob such as {source}/**/*.txt")
    if not (files := each_once(found)):
        raise DataError(f"no file matches {source}: expected a path or a glob of text files")
    return files


def _checked(name: str, content: bytes) -> bytes:
    """The bytes of a file of text. Raises DataError for one of another kind."""
    check_text(name, content[:HEAD_BYTES])
    return content


def _standard_library() -> list[Path]:
    """Sources of the running interpreter's own modules, without tests and installed packages,
    sorted by their path inside the library: the same bytes for the same interpreter."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise DataError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} has no library sources at "
            f"{root}: name a text file as the data's source"
        )
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def _tokens(source: str) -> _Array:
    """Return ids as uint16 or int32, in one dimension. A raw .bin holds little-endian uint16, one
    that ends in .int32.bin int32."""
    if not source:
        raise DataError("data of kind tokens needs a source: .npy, .npz, .safetensors or .bin")
    if source.endswith(".bin"):
        path, dtype = local(source), "<i4" if source.endswith(".int32.bin") else "<u2"
        item = np.dtype(dtype).itemsize
        if path.stat().st_size % item:
            raise DataError(
                f"{source} has {path.stat().st_size} bytes: ids of {item} bytes expected"
            )
        ids: _Array = np.fromfile(path, dtype)
        with path.open("rb") as file:
            sure = source.endswith((".uint16.bin", ".int32.bin"))
            check_ids(source, ids, file.read(HEAD_BYTES), sure=sure)
    elif source.endswith(".npy"):
        ids = array_of(source)
    else:
        ids = next(iter(arrays_of(source, []).values()))
    if ids.size != max(ids.shape, default=1):
        raise DataError(
            f"{source} has shape {ids.shape}: expected one row of token ids. A window would begin "
            "in one row and end in the next: write ids.reshape(-1) if that is meant; for rows that "
            'are samples take kind = "arrays", with inputs and targets of their own'
        )
    ids = ids.reshape(-1)
    if ids.dtype.kind not in "iu":
        raise DataError(f"{source} has dtype {ids.dtype}: expected token ids in [0, 2^31)")
    if len(ids) and (ids.min() < 0 or ids.max() >= 2**31):
        wrong = np.flatnonzero((ids < 0) | (ids >= 2**31))  # no value: the data may be private
        raise DataError(
            f"{source}: {len(wrong)} of {len(ids)} items are no ids, the first is item {wrong[0]}: "
            "expected token ids in [0, 2^31)"
        )
    small = not len(ids) or ids.max() < 2**16
    return ids.astype(np.uint16 if small else np.int32)
