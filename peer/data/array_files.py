"""Arrays of files, and how a source is looked up: a path, a glob or a URL."""

from __future__ import annotations

import os
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
from .manifest import STORED_BYTES, DataError
from .sample_keys import stored

__all__ = [
    "TABLES",
    "array_of",
    "arrays_of",
    "each_once",
    "http_options",
    "local",
    "matching",
    "reading",
    "together",
]

TABLES = (".csv", ".parquet")

_Array = npt.NDArray[Any]
_Read = TypeVar("_Read")


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


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Whatever goes wrong is an error of the source: each filesystem has exceptions of its own."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{source} cannot be read: nothing is there") from None
    except Exception as error:
        raise DataError(f"{source} cannot be read: {str(error) or type(error).__name__}") from error


def http_options(source: str) -> dict[str, Any]:
    """What fsspec needs to know of a source over HTTP; empty for any other. Raises ProxyError."""
    scheme, _, rest = source.rpartition("::")[2].partition("://")
    if scheme not in ("http", "https"):
        return {}
    from .paced import client_options  # takes a while, and few need it

    at = urlsplit(f"//{rest}")
    proxy = proxy_for(joined(at.hostname or "", at.port or (443 if scheme == "https" else 80)))
    url = None if proxy is None else proxy.url
    return {scheme: {"client_kwargs": client_options(), "proxy": url}}


def arrays_of(source: str, names: Sequence[str], key: str = "") -> dict[str, _Array]:
    """Arrays of an .npz or .safetensors file; no names: the only one that it has. `key`: one of
    them, which may be text."""
    if (paths := _several(source)) or source.endswith(".npy"):
        if key:
            raise DataError(f"{source}: with {key!r}, whose a sample is: expected one .npz")
        found = _joined(source, paths or [local(source)], names)
    elif names and source.endswith(TABLES):
        found = columns_of(local(source), names)
    elif source.endswith(".npz"):
        with _of_numpy(source), array_of(source) as loaded:
            found = {n: np.asarray(loaded[n]) for n in _choose(source, names, loaded.files)}
    elif source.endswith(".safetensors"):
        try:
            with safe_open(local(source), framework="numpy") as file:
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
        return {n: _of_several(source, named[n], paths, array_of) for n in chosen}
    parts = [_of_several(source, p, paths, lambda at: arrays_of(at, names)) for p in paths]
    called = [f"file {place} of {source}" for place in range(1, len(parts) + 1)]
    return together(parts, called, is_table=all(path.suffix in TABLES for path in paths))


def together(
    parts: Sequence[dict[str, _Array]], called: Sequence[str], *, is_table: bool
) -> dict[str, _Array]:
    """Arrays of several sources, those of each behind those of the one before. called: what an
    error calls each. is_table: a column that is whole in one of them alone is float32 in all.
    Raises DataError for parts that are not alike."""
    for name in parts[0] if is_table else ():
        if any(part[name].dtype == np.float32 for part in parts):
            for part in parts:
                part[name] = part[name].astype(np.float32)
    for part, place in zip(parts, called, strict=True):
        for name, array in part.items():
            one = parts[0][name]
            if (array.dtype, array.shape[1:]) != (one.dtype, one.shape[1:]):
                raise DataError(
                    f"{place}: {name!r} is {array.dtype}{list(array.shape[1:])}, and in "
                    f"{called[0]} {one.dtype}{list(one.shape[1:])}: expected the same in all"
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


def array_of(source: str) -> Any:
    path = local(source)
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


def local(source: str) -> Path:
    """The file on this machine; a remote one is fetched for as long as this process lives."""
    path = Path(source)
    if "://" in source:
        with reading(source):
            files, there = url_to_fs(f"simplecache::{source}", **http_options(source))
            with files.open(there) as file:
                path = Path(file.name)
    if not path.is_file():
        raise DataError(f"there is no file {source}")
    return path
