"""Weights where the user has them: safetensors files on this machine, on the web, or wherever
fsspec reaches; alone, in a folder, or with an index that says which tensor is in which file.

Headers are read, and byte ranges when they are asked for; no file is read as a whole.

    stored = find(("/models/llama-8b",))
    stored.entries["model.embed_tokens.weight"]     # dtype, shape, and where its bytes lie
    stored.read(part)                               # some of them
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...net.file_names import is_file_name
from ...net.web.web import Web, WebError, WebFile, is_web
from ...peer.blobs.weights import (
    ByteRange,
    Serialized,
    TensorLocation,
    WeightError,
    Weights,
    WeightsFile,
)

__all__ = ["File", "Stored", "WeightFilesError", "find", "open_file", "open_url", "pretrained_file"]

_INDEX = "model.safetensors.index.json"
_ALONE = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth")
"""Endings of what torch.save writes."""
_MOST_INDEX = 64 << 20
"""Bytes of an index: 500,000 names."""


class WeightFilesError(ValueError):
    """Weights that are not there, not whole, or not what their index says; the message says which,
    and where."""


class File:
    """One safetensors file. name: for people, and unique; identity: another one when its content
    may be another; empty: that cannot be told. url: where a peer could read it; empty: nowhere."""

    name: str
    size_bytes: int
    identity: str
    url = ""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes. Blocks; from any thread. Raises WeightFilesError."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises WeightFilesError where it can be told that it has changed since it was opened."""


@dataclass(frozen=True)
class Stored:
    """The tensors of some files, the later ones first where two have a name."""

    files: Mapping[str, File]
    """By name."""
    weights: Weights = field(init=False)

    def __post_init__(self) -> None:
        known = [WeightsFile(f.name, f.size_bytes, name=f.name) for f in self.files.values()]
        read = lambda name, offset, length: self.files[name].read(offset, length)  # noqa: E731
        object.__setattr__(self, "weights", Weights(known, read))

    @cached_property
    def entries(self) -> Mapping[str, TensorLocation]:
        """Where each tensor lies. Raises WeightFilesError."""
        try:
            return self.weights.entries
        except WeightError as error:
            quantised = "'dtype': 'F8" in str(error)
            why = ": quantised weights are not trained" if quantised else ""
            raise WeightFilesError(f"{error}{why}") from None

    def file(self, part: ByteRange) -> File:
        assert isinstance(part.source, WeightsFile), "these are files"
        return self.files[part.source.hash]


# ---------------------------------------------------------------- finding


def find(names: Sequence[str], web: Web | None = None) -> Stored:
    """The weights at some places: files, folders with an index or with one file, URLs of either.

    Raises WeightFilesError for what is missing, cut off, or in an index and not in its file.
    """
    web = web or Web()
    files: dict[str, File] = {}
    indices: list[tuple[str, dict[str, str]]] = []
    for name in names:
        found, index = _at(name, web)
        files |= {f.name: f for f in found}
        indices += index
    stored = Stored(files)
    for where, index_of in indices:
        for tensor, file in index_of.items():
            entry = stored.entries.get(tensor)
            if entry is None or any(stored.file(p).name != file for p in entry.parts):
                raise WeightFilesError(
                    f'{where} says that "{tensor}" is in {file}, which does not have it: the index '
                    "is of other files, or one of them was not fetched whole"
                )
    return stored


_Indices = list[tuple[str, dict[str, str]]]


def _at(name: str, web: Web) -> tuple[list[File], _Indices]:
    if name.endswith(".json"):
        return _by_index(name, web)
    if name.endswith(".safetensors"):
        return [open_file(name, web)], []
    if is_web(name) or "://" in name:
        folder = name.rstrip("/")
        if (text := _text(f"{folder}/{_INDEX}", web)) is not None:
            return _by_index(f"{folder}/{_INDEX}", web, text)
        return [open_file(f"{folder}/{_ALONE}", web)], []
    path = Path(name)
    if path.is_file():
        return [_own_file(name, web)], []
    if not path.is_dir():
        raise WeightFilesError(f"{path} is not there: expected a safetensors file, or a folder")
    if (first := pretrained_file(path, safetensors=True)) is not None:
        return _at(str(first), web)
    found = sorted(path.glob("*.safetensors.index.json"))
    if len(found) > 1:
        listed = ", ".join(p.name for p in found)
        raise WeightFilesError(f"{path} has {len(found)} indices ({listed}): name one of them")
    if found:
        return _by_index(str(found[0]), web)
    alone = [open_file(str(p), web) for p in sorted(path.glob("*.safetensors"))]
    if not alone and (pickled := pretrained_file(path)) is not None:
        return _at(str(pickled), web)
    if not alone:
        raise WeightFilesError(f"{path} has no *.safetensors and no {_INDEX}")
    _refuse_twice(alone)
    return alone, []


def pretrained_file(
    folder: Path, variant: str = "", *, safetensors: bool | None = None
) -> Path | None:
    """The file or index that transformers' `from_pretrained` takes of a folder, in its order:
    model.safetensors, its index, pytorch_model.bin, its index; None where there is none of these.
    `safetensors`: only such files, or none of them."""
    names = ["model.safetensors", _INDEX] * (safetensors is not False)
    names += ["pytorch_model.bin", "pytorch_model.bin.index.json"] * (not safetensors)
    for name in names:
        stem, _, ending = name.rpartition(".")
        path = folder / (f"{stem}.{variant}.{ending}" if variant else name)
        if path.is_file():
            return path
    return None


def _refuse_twice(files: Sequence[File]) -> None:
    """Raises WeightFilesError where two files of a folder have a tensor of one name: nothing says
    which of them is meant."""
    having: dict[str, str] = {}
    for file in files:
        for tensor in Stored({file.name: file}).entries:
            if having.setdefault(tensor, file.name) != file.name:
                raise WeightFilesError(
                    f'{having[tensor]} and {file.name} both have "{tensor}", and no index says '
                    "which of them counts: name the files that are meant (model.weights)"
                )


def _by_index(name: str, web: Web, text: bytes | None = None) -> tuple[list[File], _Indices]:
    """The files that an index names, beside it."""
    if text is None and (text := _text(name, web)) is None:
        raise WeightFilesError(f"{name} is not there: expected the index of a folder of weights")
    try:
        listed = json.loads(text)["weight_map"]
        sound = all(map(is_file_name, listed.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightFilesError(
            f"{name} is no index of safetensors files ({type(error).__name__}): expected a table "
            "`weight_map` of tensors and files"
        ) from None
    if not sound or not listed:
        raise WeightFilesError(f"{name}: expected `weight_map` to name files beside it")
    folder = name.rpartition("/")[0]
    beside = {file: f"{folder}/{file}" if folder else file for file in sorted({*listed.values()})}
    files = [_own_file(path, web, f"which {name} names") for path in beside.values()]
    return files, [(name, {tensor: beside[file] for tensor, file in listed.items()})]


def _text(name: str, web: Web) -> bytes | None:
    """A small file; None where there is none. Raises WeightFilesError."""
    try:
        if is_web(name):
            return web.small(name, _MOST_INDEX)
        if "://" in name:
            from fsspec.core import url_to_fs

            files, path = url_to_fs(name)
            return files.cat_file(path) if files.exists(path) else None
        return Path(name).read_bytes() if Path(name).is_file() else None
    except (WebError, OSError, ImportError) as error:
        raise WeightFilesError(str(error)) from None


# ---------------------------------------------------------------- files


def open_file(name: str, web: Web | None = None, why: str = "") -> File:
    """A file at a path or URL. `why`: who says that it is there, for people. Raises
    WeightFilesError."""
    if is_web(name):
        return open_url(name, web or Web())
    try:
        return _Elsewhere(name) if "://" in name else _Local(Path(name))
    except FileNotFoundError:
        raise WeightFilesError(f"{name}{f', {why},' if why else ''} is not there") from None
    except (OSError, ImportError, ValueError) as error:
        text = str(error)
        raise WeightFilesError(text if name in text else f"{name}: {text}") from None


def _own_file(name: str, web: Web, why: str = "") -> File:
    """As `open_file`, for a name that the user gave himself: of his own machine also a file that
    torch.save wrote."""
    if name.endswith(_PICKLED) and "://" not in name and Path(name).is_file():
        return _Pickled(Path(name))
    return open_file(name, web, why)


def open_url(url: str, web: Web) -> File:
    """A file on the web, by http or https and nothing else: a stranger may have named it. Raises
    WeightFilesError."""
    try:
        return _OnWeb(web, web.look(url))
    except (WebError, OSError, ValueError) as error:
        text = str(error)
        raise WeightFilesError(text if url in text else f"{url}: {text}") from None


class _Local(File):
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path.resolve()
        self.size_bytes = self._path.stat().st_size
        self.identity = self._identity()

    def _identity(self) -> str:
        found = self._path.stat()
        return f"{self._path}|{found.st_size}|{found.st_mtime_ns}|{found.st_ino}"

    def check(self) -> None:
        if not self._path.exists() or self._identity() != self.identity:
            raise WeightFilesError(
                f"{self.name} was changed while it was read: submit again when it is whole"
            )

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray()
        try:
            with open(self._path, "rb", buffering=0) as file:
                while piece := os.pread(file.fileno(), length - len(data), offset + len(data)):
                    if len(piece) == length:
                        return piece
                    data += piece
        except OSError as error:
            raise WeightFilesError(f"{self.name} cannot be read: {error.strerror}") from None
        return _whole(self.name, bytes(data), offset, length)


class _OnWeb(File):
    """A file on the web: each answer of its server is checked as it comes."""

    def __init__(self, web: Web, file: WebFile) -> None:
        self._web, self._file = web, file
        self.name = self.url = file.url
        self.size_bytes = file.size_bytes
        self.identity = f"{file.url}|{file.size_bytes}|{file.tag}" if file.tag else ""

    def read(self, offset: int, length: int) -> bytes:
        try:
            return self._web.read(self._file, offset, length)
        except WebError as error:
            raise WeightFilesError(str(error)) from None


class _Elsewhere(File):
    """Whatever fsspec knows: s3://, gs://, hf://, … Nothing in it tells of a change."""

    def __init__(self, name: str) -> None:
        from fsspec.core import url_to_fs

        self.name = name
        self._files, self._path = url_to_fs(name)
        found: dict[str, Any] = self._files.info(self._path)
        self.size_bytes = int(found["size"])
        tag = found.get("ETag") or found.get("etag") or ""
        self.identity = f"{name}|{self.size_bytes}|{tag}" if tag else ""

    def read(self, offset: int, length: int) -> bytes:
        try:
            data: bytes = self._files.cat_file(self._path, start=offset, end=offset + length)
        except OSError as error:
            raise WeightFilesError(f"{self.name} cannot be read: {error}") from None
        return _whole(self.name, data, offset, length)


class _Pickled(_Local):
    """A file of torch.save, as the safetensors file of its tensors, whose bytes are made when they
    are read. torch's weights-only loader reads it: nothing in it runs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            try:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # of before torch 1.6, which cannot be mapped
                found = torch.load(path, map_location="cpu", weights_only=True)
            self._made = Serialized(self._tensors(found))
        except (pickle.UnpicklingError, RuntimeError, EOFError, WeightError) as error:
            raise WeightFilesError(
                f"{path} is no file of tensors alone, and nothing else of it is read: "
                f"{str(error).splitlines()[0]:.200}. Save it as safetensors"
            ) from None
        self.size_bytes = self._made.size_bytes

    def _tensors(self, found: Any) -> dict[str, Tensor]:
        if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
            found = found["state_dict"]
        tensors = found if isinstance(found, Mapping) else {}
        other = [n for n, t in tensors.items() if not isinstance(t, Tensor)]
        if other or not tensors:
            what = f"{other[0]!r:.60}, which is no tensor" if other else "no table of tensors"
            raise WeightError(f"it has {what}")
        return {str(name): tensor.detach() for name, tensor in tensors.items()}

    def _identity(self) -> str:
        return f"{super()._identity()}|safetensors"

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray()
        for piece in self._made.pieces(offset, length):
            data += piece[: length - len(data)]
            if len(data) == length:
                break
        return _whole(self.name, bytes(data), offset, length)


def _whole(name: str, data: bytes, offset: int, length: int) -> bytes:
    if len(data) != length:
        raise WeightFilesError(
            f"{name} gave {len(data)} of {length} bytes from {offset} on: it was cut off since it "
            "was looked at"
        )
    return data
