"""Weights in safetensors files that may lie elsewhere: reading single tensors by byte range, and
writing a part of a model.

A file is 8 bytes (little-endian length n of the header), n bytes of JSON, then the tensors' bytes:

    {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": …}

Offsets count from the end of the header. The file comes from the network, so the header is checked
before anything in it is believed.

Bytes are copied by numpy, which lets other threads run meanwhile. `bytes.join`, slices of bytes and
the library's `save` and `load` of bytes do not: a peer would be silent for 1 to 5 s per GB (on a
slow host), and its lease is 10 s.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..dag.split_weights import block_of, grouped

__all__ = [
    "Lazy",
    "Read",
    "Spec",
    "WeightError",
    "Weights",
    "WeightsFile",
    "joined",
    "merge_blocks",
    "serialize",
    "starting_tensor",
]

Read = Callable[[str, int, int], "bytes | bytearray | memoryview"]
"""(blob hash, offset, length) -> exactly these bytes of the blob; may fetch them, and block."""

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_LIMIT = 100 * 2**20  # the format's own


class WeightError(ValueError):
    """A weights file that is damaged, or that lacks a tensor; the message names both."""


class Spec(NamedTuple):
    """What a tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file as a blob."""

    hash: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    file: WeightsFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # of the blob
    length: int


class Lazy(Mapping[str, Tensor]):
    """Tensors by name that are read when they are asked for."""

    @abstractmethod
    def spec(self, name: str) -> Spec:
        """Of a tensor, without reading it. Raises KeyError for an unknown name."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, a fresh CPU tensor; only their bytes are read. Raises
        KeyError for an unknown name, WeightError for rows that it does not have."""


class Weights(Lazy):
    """The tensors of some files by name; each access reads that tensor's bytes and nothing more.

    The headers are read when the first name is asked for. Later files win over earlier ones.
    """

    def __init__(self, files: Sequence[WeightsFile], read: Read) -> None:
        self._files = tuple(files)
        self._read = read
        self._entries: dict[str, _Entry] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """A fresh CPU tensor. Raises KeyError for an unknown name, WeightError for a short read."""
        return self._read_tensor(self._index()[name])

    def __contains__(self, name: object) -> bool:
        return name in self._index()  # Mapping's own would read the tensor to find out

    def spec(self, name: str) -> Spec:
        entry = self._index()[name]
        return Spec(entry.shape, entry.dtype)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        entry = self._index()[name]
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise WeightError(f"rows {start} to {stop} of {name!r}, which has shape {entry.shape}")
        one = entry.length // entry.shape[0] if entry.shape[0] else 0
        shape = (stop - start, *entry.shape[1:])
        begin, length = entry.begin + start * one, (stop - start) * one
        return self._read_tensor(_Entry(entry.file, entry.dtype, shape, begin, length))

    def _read_tensor(self, entry: _Entry) -> Tensor:
        data = self._bytes(entry.file, entry.begin, entry.length)
        made = torch.empty(entry.shape, dtype=entry.dtype)
        _bytes_of(made)[:] = np.frombuffer(data, np.uint8)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._index())

    def __len__(self) -> int:
        return len(self._index())

    def _index(self) -> dict[str, _Entry]:
        if self._entries is None:
            found: dict[str, _Entry] = {}
            for file in self._files:
                found |= self._header(file)
            self._entries = found
        return self._entries

    def _bytes(self, file: WeightsFile, offset: int, length: int) -> bytes | bytearray | memoryview:
        data = self._read(file.hash, offset, length) if length else b""
        if len(data) != length:
            raise WeightError(
                f"weights {file.hash[:12]}: expected {length} bytes at {offset}, got {len(data)}"
            )
        return data

    def _header(self, file: WeightsFile) -> dict[str, _Entry]:
        where = f"weights {file.hash[:12]}"
        if file.size_bytes < 8:
            raise WeightError(f"{where} has {file.size_bytes} bytes: no safetensors file")
        length = int.from_bytes(self._bytes(file, 0, 8), "little")
        if length > min(_HEADER_LIMIT, file.size_bytes - 8):
            raise WeightError(f"{where}: a header of {length} bytes in {file.size_bytes} bytes")
        try:
            header = json.loads(bytes(self._bytes(file, 8, length)))
        except (ValueError, RecursionError) as error:
            raise WeightError(f"{where}: the header is no JSON: {error}") from None
        if not isinstance(header, dict):
            raise WeightError(f"{where}: the header is no table")
        start = 8 + length
        return {
            name: _entry(file, start, name, raw)
            for name, raw in header.items()
            if name != "__metadata__"
        }


def _entry(file: WeightsFile, start: int, name: str, raw: Any) -> _Entry:
    try:
        dtype, (begin, end) = _DTYPES[raw["dtype"]], raw["data_offsets"]
        shape = tuple(raw["shape"])
        sound = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
    except (KeyError, TypeError, ValueError):
        sound = False
    if (
        not sound
        or end - begin != math.prod(shape) * dtype.itemsize
        or end > (file.size_bytes - start)
    ):
        raise WeightError(f"weights {file.hash[:12]}: the entry of {name!r:.80} is {raw!r:.200}")
    return _Entry(file, dtype, shape, start + begin, end - begin)


def starting_tensor(files: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The tensor of a name or, of a block of a split parameter, its rows of the whole one; None
    when the files have neither. Of what is `Lazy`, only these rows are read."""
    if name in files:
        return files[name]
    block = block_of(name)
    if block is None or block.name not in files:
        return None
    if isinstance(files, Lazy):
        whole = files.spec(block.name).shape
        return files.rows(block.name, *block.rows(whole[0] if whole else 0))
    tensor = files[block.name]
    return tensor[slice(*block.rows(len(tensor)))]


def merge_blocks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an export under the user's names: the blocks of a split parameter become one
    tensor again, all others stay. Raises WeightError when a block is missing or does not fit."""
    found = {name: tensor for name, tensor in tensors.items() if block_of(name) is None}
    for name, blocks in grouped(tensors).items():
        parts = [tensors[str(block)] for block in blocks]
        rows = sum(len(part) if part.dim() else 0 for part in parts)
        heights = [stop - start for start, stop in (block.rows(rows) for block in blocks)]
        kinds = {(part.dtype, part.shape[1:]) for part in parts}
        whole = {block.parts for block in blocks} == {len(blocks)}
        fits = len(kinds) == 1 and all(p.dim() for p in parts)
        if name in found or not whole or not fits or heights != [len(p) for p in parts]:
            have = ", ".join(f"{block} {tuple(tensors[str(block)].shape)}" for block in blocks)
            raise WeightError(f"expected every block of {name!r} once, in equal parts: got {have}")
        found[name] = torch.cat(parts)
    return found


def joined(parts: Sequence[bytes | bytearray | memoryview]) -> npt.NDArray[np.uint8]:
    """All their bytes in memory of their own; see the module."""
    out = np.empty(sum(len(part) for part in parts), np.uint8)
    at = 0
    for part in parts:
        out[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return out


def serialize(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> memoryview:
    """A safetensors file of these tensors, those of the widest numbers first (so each lies where
    its dtype wants it), then in the order of their names. Two names of one tensor give two copies,
    so that every name of the user's module is there. Raises WeightError for a dtype that no file
    has."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise WeightError(f"{name!r} is {tensor.dtype}: expected one of {', '.join(_DTYPES)}")
        size = tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out = np.empty(8 + len(text) + at, np.uint8)
    out[: 8 + len(text)] = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    at = 8 + len(text)
    for name in names:
        flat = _bytes_of(tensors[name].detach().cpu().contiguous())
        out[at : at + len(flat)] = flat
        at += len(flat)
    return out.data


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor on the CPU."""
    if not tensor.numel():  # torch gives it strides that no view of bytes has
        return np.empty(0, np.uint8)
    found: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return found
