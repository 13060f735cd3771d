"""The submitter's side: any source of data becomes a manifest and content-hashed shards.

The source is read once, item after item, through fsspec; nothing but shards ever leaves this
machine, and peers never see a path. What comes over HTTP comes through the same proxy as all that
Shoal dials (net/web/proxy.py).
"""

from __future__ import annotations

import os
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from fsspec.core import url_to_fs
from safetensors import SafetensorError, safe_open

from ...dag.ir.graph import ITEM_BYTES
from ...net.local import joined
from ...net.web.proxy import proxy_for
from .columns_of_files import columns_of
from .file_types import HEAD_BYTES, check_ids, check_text
from .manifest import STORED_BYTES, Column, DataError, Kind, Manifest
from .sample_keys import stored
from .shard_writer import ARRAY_SHARD_BYTES, ShardWriter

__all__ = ["each_once", "matching", "resolve", "text_of", "windows_of"]

TEXT_SHARD_BYTES = 4 * 2**20
"""Small enough that the first step starts soon over a home uplink."""

_TABLES = (".csv", ".parquet")

_Array = npt.NDArray[Any]
_Read = TypeVar("_Read")


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
    named: Callable[[str, memoryview], str] | None = None,
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest of a job's data, and the shard files by hash, written into `folder`. `named`
    gives the hash of a shard from its column and content; None: SHA-256 of the content.

    `inputs` and `targets` name the tensors of a batch, which are argument names of the module's
    forward, as the checks of [data] leave them (`job/tables.py`); for arrays these are also the
    names in the file, and `inputs` may list several, separated by commas. `holdout` is a share of
    the items, taken from their end. `key`: of arrays, the one that says whose a sample is.

    Raises DataError for data that cannot be used; with a cause where its text has words of another
    library, which may tell of the content.
    """
    if not 0 <= holdout < 1:
        raise DataError(f"holdout is {holdout}, expected a share in [0, 1), such as 0.05")
    writer = ShardWriter(folder, named)
    if kind in ("text", "tokens"):
        of_text = kind == "text"
        ids = np.frombuffer(text_of(source), np.uint8) if of_text else _tokens(source)
        return windows_of(
            writer, ids, source, holdout, length, inputs, targets, "text" if of_text else "tokens"
        )
    if kind == "arrays":
        return _arrays(writer, source, holdout, inputs, targets, key)
    raise DataError(f"data kind {kind!r} is not supported: expected text, tokens or arrays")


def windows_of(
    writer: ShardWriter,
    ids: _Array,
    source: str,
    holdout: float,
    length: int,
    inputs: str,
    targets: str,
    kind: Kind = "tokens",
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest and shards of ids in one row, as `resolve` gives them. Raises DataError."""
    if length < 1:
        raise DataError(f"length is {length}, expected at least 1 token per window")
    column = Column("tokens", str(ids.dtype))
    # At least one window where something is to be held out; validate() refuses what is too short.
    held_out = max(int(len(ids) * holdout), length + 1) if holdout else 0
    if len(ids) - held_out < length + 1:
        raise DataError(
            f"{source or 'the standard library'} has {len(ids)} tokens: training and evaluation "
            f"need a window of length + 1 = {length + 1} each; give more data or a smaller length"
        )
    writer.add(column, ids, TEXT_SHARD_BYTES)
    manifest = Manifest(
        kind, (column,), tuple(writer.shards), len(ids), held_out, length, inputs, targets
    )
    return manifest.validate(), writer.paths


def _arrays(
    writer: ShardWriter, source: str, holdout: float, inputs: str, targets: str, key: str
) -> tuple[Manifest, dict[str, Path]]:
    if not source:
        raise DataError("data of kind arrays needs a source: an .npz or .safetensors file")
    names = [*inputs.split(","), *([targets] if targets else [])]
    if key in names:
        raise DataError(
            f"{key!r} is an input or target of the model: expected as key an array of its own"
        )
    found = _read_arrays(source, [*names, *([key] if key else [])], key)
    total = len(found[names[0]])
    for name, array in found.items():
        if len(array) != total:
            raise DataError(
                f"{source}: {name!r} has {len(array)} samples, {names[0]!r} has {total}: "
                "expected the same number along the first dimension"
            )
    held_out = max(int(total * holdout), 1) if holdout else 0
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


def text_of(source: str) -> bytes:
    """The bytes of all files of a source of text, one after the other. Raises DataError."""
    if not source:
        return b"".join(p.read_bytes() for p in _standard_library())
    with _reading(source):
        options = _http_options(source)
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


def each_once(paths: Iterable[Path]) -> list[Path]:
    """The files among paths, each once however many links lead to it."""
    files: dict[Path, Path] = {}
    for path in paths:
        if path.is_file():
            files.setdefault(path.resolve(), path)
    return [*files.values()]


def matching(source: str) -> list[Path]:
    """What a path or glob on this machine names, in order. A folder or file that is there is meant
    as it is called, whatever its name has of "[", "?" and "*": only what is behind it is a pattern.
    """
    there, parts = Path(), Path(source).parts
    while parts and (there / parts[0]).exists():
        there, parts = there / parts[0], parts[1:]
    if not parts:
        return [there]
    pattern = os.path.join(*(escape(part) for part in there.parts), *parts)
    return [Path(p) for p in sorted(glob(pattern, recursive=True, include_hidden=True))]


def _checked(name: str, content: bytes) -> bytes:
    """The bytes of a file of text. Raises DataError for one of another kind."""
    check_text(name, content[:HEAD_BYTES])
    return content


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Whatever goes wrong is an error of the source: each filesystem has exceptions of its own."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{source} cannot be read: nothing is there") from None
    except Exception as error:
        raise DataError(f"{source} cannot be read: {str(error) or type(error).__name__}") from error


def _http_options(source: str) -> dict[str, Any]:
    """What fsspec needs to know of a source over HTTP; empty for any other. Raises ProxyError."""
    scheme, _, rest = source.rpartition("::")[2].partition("://")
    if scheme not in ("http", "https"):
        return {}
    from .paced import client_options  # takes a while, and few need it

    at = urlsplit(f"//{rest}")
    proxy = proxy_for(joined(at.hostname or "", at.port or (443 if scheme == "https" else 80)))
    url = None if proxy is None else proxy.url
    return {scheme: {"client_kwargs": client_options(), "proxy": url}}


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
        path, dtype = _local(source), "<i4" if source.endswith(".int32.bin") else "<u2"
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
        ids = _load(source)
    else:
        ids = next(iter(_read_arrays(source, []).values()))
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


def _read_arrays(source: str, names: Sequence[str], key: str = "") -> dict[str, _Array]:
    """Arrays of an .npz or .safetensors file; no names: the only one that it has. `key`: one of
    them, which may be text."""
    if (paths := _several(source)) or source.endswith(".npy"):
        if key:
            raise DataError(f"{source}: with {key!r}, whose a sample is: expected one .npz")
        found = _joined(source, paths or [_local(source)], names)
    elif names and source.endswith(_TABLES):
        found = columns_of(_local(source), names)
    elif source.endswith(".npz"):
        with _of_numpy(source), _load(source) as loaded:
            found = {n: np.asarray(loaded[n]) for n in _choose(source, names, loaded.files)}
    elif source.endswith(".safetensors"):
        try:
            with safe_open(_local(source), framework="numpy") as file:
                found = {n: file.get_tensor(n) for n in _choose(source, names, list(file.keys()))}
        except (SafetensorError, TypeError) as error:  # TypeError: a dtype that numpy lacks
            raise DataError(f"{source} has no arrays that numpy can read: {error}") from error
    else:
        raise DataError(
            f"{source}: expected a file that ends in .npz, .safetensors, .csv or .parquet, or "
            "several .npy, each called as its array"
        )
    if key:
        found[key] = _keys(source, key, found[key])
    for name, array in found.items():
        if not array.ndim or 0 in array.shape:
            raise DataError(f"{source}: {name!r} has shape {array.shape}: samples expected")
        if names and (str(array.dtype) not in ITEM_BYTES):
            known = [d for d in ITEM_BYTES if d in STORED_BYTES]
            raise DataError(f"{source}: {name!r} has dtype {array.dtype}, expected one of {known}")
    return found


def _several(source: str) -> list[Path]:
    """The files of a glob on this machine; none where the source is no glob."""
    is_glob = "://" not in source and set("*?[") & set(source) and not Path(source).exists()
    return each_once(matching(source)) if is_glob else []


def _joined(source: str, paths: Sequence[Path], names: Sequence[str]) -> dict[str, _Array]:
    """The arrays of several files: each .npy is one, called as its file is; of others, the samples
    of each file behind those of the one before it."""
    if all(path.suffix == ".npy" for path in paths):
        named = {path.stem: path for path in paths}
        chosen = _choose(source, names, [*named])
        for place, path in enumerate(paths, 1):
            if path.stem in chosen and (last := named[path.stem]) != path:
                raise DataError(
                    f"files {place} and {paths.index(last) + 1} of {source} have one name, and a "
                    ".npy is the array that is called so: expected each name once, or .npz"
                )
        return {n: _of_several(source, named[n], paths, _load) for n in chosen}
    parts = [_of_several(source, p, paths, lambda at: _read_arrays(at, names)) for p in paths]
    if all(path.suffix in _TABLES for path in paths):  # where a column of one file is whole
        for name in names:
            if any(part[name].dtype == np.float32 for part in parts):
                for part in parts:
                    part[name] = part[name].astype(np.float32)
    for place, part in enumerate(parts, 1):
        for name, array in part.items():
            one = parts[0][name]
            if (array.dtype, array.shape[1:]) != (one.dtype, one.shape[1:]):
                raise DataError(
                    f"file {place} of {source}: {name!r} is {array.dtype}{list(array.shape[1:])}, "
                    f"and in file 1 {one.dtype}{list(one.shape[1:])}: expected the same in all"
                )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _of_several(
    source: str, path: Path, paths: Sequence[Path], read: Callable[[str], _Read]
) -> _Read:
    """Return what one of several files has. Raises DataError that names it by its place in the
    order of their names: these may be private, and the source's name is replaced for others."""
    try:
        return read(str(path))
    except DataError as error:
        place = f"file {1 + list(paths).index(path)} of {source}" if len(paths) > 1 else source
        raise DataError(str(error).replace(str(path), place)) from error.__cause__


def _keys(source: str, name: str, keys: _Array) -> _Array:
    if keys.ndim != 1 or keys.dtype.kind not in "iuU":
        raise DataError(
            f"{source}: {name!r} has shape {keys.shape} and dtype {keys.dtype}: expected a key for "
            "each sample, integers or text"
        )
    return stored(keys)


def _choose(source: str, names: Sequence[str], there: list[str]) -> Sequence[str]:
    if not names and len(there) != 1:
        raise DataError(f"{source} has the arrays {sorted(there)}: expected exactly one, of ids")
    for name in names:
        if name not in there:
            raise DataError(
                f"{source} has no array {name!r}, it has {sorted(there)}: set inputs and targets"
            )
    return names or there


def _load(source: str) -> Any:
    path = _local(source)
    with _of_numpy(source):
        with path.open("rb") as file:
            packed = file.read(2) == b"PK"
        if packed and not zipfile.is_zipfile(path):  # numpy would leave it open
            raise DataError(f"{source} is no numpy file of plain arrays: it is cut off")
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray) != source.endswith(".npy"):
            raise DataError(
                f"{source} is not what its name says: a .npy has one array, .npz several"
            )
        return found


@contextmanager
def _of_numpy(source: str) -> Iterator[None]:
    """Numpy's errors about a file, some of which quote its content."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DataError(f"{source} is no numpy file of plain arrays: {error}") from error


def _local(source: str) -> Path:
    """The file on this machine; a remote one is fetched for as long as this process lives."""
    path = Path(source)
    if "://" in source:
        with _reading(source):
            files, there = url_to_fs(f"simplecache::{source}", **_http_options(source))
            with files.open(there) as file:
                path = Path(file.name)
    if not path.is_file():
        raise DataError(f"there is no file {source}")
    return path
