"""Weights in safetensors files that may lie elsewhere: reading single tensors by byte range, and
writing a part of a model. Large ones lie in shards with hashes of their own (`weight_shards.py`).

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...dag.transforms.split_weights import block_of, grouped, weight_of
from ...job import MOST_MANIFEST_BYTES
from .weight_shards import MOST_SIZES, StoredTensor, WeightError, WeightManifest, WeightShard

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "ByteRange",
    "Lazy",
    "Read",
    "Serialized",
    "ShapeDtype",
    "TensorLocation",
    "WeightError",
    "Weights",
    "WeightsFile",
    "Whole",
    "bytes_of",
    "entry_of",
    "has_start",
    "header_of",
    "joined",
    "merged_entries",
    "serialize",
    "spec_of",
    "split_names",
    "starting_rows",
    "starting_spec",
    "starting_tensor",
]

Read = Callable[[str, int, int], "bytes | bytearray | memoryview"]
"""(blob hash, offset, length) -> exactly these bytes of the blob; may fetch them, and block."""
Whole = Callable[[WeightShard], "bytes | bytearray | memoryview"]
"""All bytes of a shard, checked against its hash; may fetch them, and block."""

DTYPES = {
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100 * 2**20  # the format's own


class ShapeDtype(NamedTuple):
    """What a tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file as a blob; or, `sharded`, a manifest of weights in shards.

    name: for people; empty: they get the hash.
    """

    hash: str
    size_bytes: int
    sharded: bool = False
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"weights {self.hash[:12]}"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [begin, begin + length) of a file or of a shard."""

    source: WeightsFile | WeightShard
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor where it lies: the bytes of its parts, one behind the other."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[ByteRange, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> TensorLocation:
        """Rows [start, stop) of it; they are there."""
        one = self.size_bytes // self.shape[0] if self.shape[0] else 0
        at, wanted, found = 0, (start * one, stop * one), list[ByteRange]()
        for part in self.parts:
            low, high = max(wanted[0], at), min(wanted[1], at + part.length)
            if low < high:
                found.append(ByteRange(part.source, part.begin + low - at, high - low))
            at += part.length
        return TensorLocation(self.dtype, (stop - start, *self.shape[1:]), tuple(found))


class Lazy(Mapping[str, Tensor]):
    """Tensors by name that are read when they are asked for."""

    @abstractmethod
    def spec(self, name: str) -> ShapeDtype:
        """Shape and dtype of a tensor, without reading it. Raises KeyError for an unknown name."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, a fresh CPU tensor; only their bytes are read. Raises
        KeyError for an unknown name, WeightError for rows that it does not have."""

    def shards(self, name: str) -> tuple[WeightShard, ...]:
        """Return the shards that are read as a whole when `starting_tensor` reads this name, in its
        order; nothing of it is read. Unknown names have none."""
        return ()


class Weights(Lazy):
    """The tensors of some files by name; each access reads that tensor's bytes and nothing more,
    but whole shards. `whole` is asked where files are in shards.

    The headers are read when the first name is asked for. Later files win over earlier ones.
    """

    def __init__(
        self, files: Sequence[WeightsFile], read: Read, whole: Whole | None = None
    ) -> None:
        self._files = tuple(files)
        self._read, self._whole = read, whole
        self._entries: dict[str, TensorLocation] | None = None
        self._metadata: dict[str, str] = {}
        self._last: tuple[WeightShard, bytes | bytearray | memoryview] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """A fresh CPU tensor. Raises KeyError for an unknown name, WeightError for a short read."""
        return self.read(self.entries[name])

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # Mapping's own would read the tensor to find out

    def spec(self, name: str) -> ShapeDtype:
        entry = self.entries[name]
        return ShapeDtype(entry.shape, entry.dtype)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        entry = self.entries[name]
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise WeightError(f"rows {start} to {stop} of {name!r}, which has shape {entry.shape}")
        return self.read(entry.rows(start, stop))

    def shards(self, name: str) -> tuple[WeightShard, ...]:
        entry, block = self.entries.get(name), block_of(name)
        if entry is None and block is not None:
            whole = self.entries.get(block.name)
            if whole is not None and whole.shape:
                entry = whole.rows(*block.rows(whole.shape[0]))
        parts = () if entry is None else entry.parts
        return tuple(p.source for p in parts if isinstance(p.source, WeightShard))

    def read(self, entry: TensorLocation) -> Tensor:
        """A tensor of these files, made of some of their bytes. Raises WeightError."""
        made = torch.empty(entry.shape, dtype=entry.dtype)
        _fill(bytes_of(made), map(self._part, entry.parts))
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def entries(self) -> Mapping[str, TensorLocation]:
        """Where each tensor lies. Raises WeightError for a file that is damaged."""
        if self._entries is None:
            found: dict[str, TensorLocation] = {}
            for file in self._files:
                found |= self._sharded(file) if file.sharded else self._header(file)
            with suppress(WeightError):  # of a snapshot, which has some blocks and not all
                found |= merged_entries(found)
            self._entries = found
        return self._entries

    @property
    def metadata(self) -> Mapping[str, str]:
        """What files say of themselves, the later ones first. Raises WeightError."""
        _ = self.entries
        return self._metadata

    def _part(self, part: ByteRange) -> bytes | bytearray | memoryview:
        if isinstance(part.source, WeightsFile):
            return self._bytes(part.source, part.begin, part.length)
        if self._last is None or self._last[0] != part.source:
            assert self._whole is not None, "files in shards come with what reads shards"
            self._last = part.source, self._whole(part.source)
            if len(self._last[1]) != part.source.size_bytes:
                raise WeightError(
                    f"shard {part.source.hash[:12]}: expected {part.source.size_bytes} bytes, got "
                    f"{len(self._last[1])}"
                )
        return memoryview(self._last[1])[part.begin : part.begin + part.length]

    def _bytes(self, file: WeightsFile, offset: int, length: int) -> bytes | bytearray | memoryview:
        data = self._read(file.hash, offset, length) if length else b""
        if len(data) != length:
            raise WeightError(f"{file}: expected {length} bytes at {offset}, got {len(data)}")
        return data

    def _sharded(self, file: WeightsFile) -> dict[str, TensorLocation]:
        if file.size_bytes > MOST_MANIFEST_BYTES:
            raise WeightError(
                f"{file}: a manifest of {file.size_bytes} bytes: expected at most "
                f"{MOST_MANIFEST_BYTES}"
            )
        made = WeightManifest.from_json(bytes(self._bytes(file, 0, file.size_bytes)))
        found = {}
        for name, stored in made.tensors.items():
            parts = tuple(ByteRange(made.shards[i], at, length) for i, at, length in stored.parts)
            found[name] = entry_of(name, stored, parts)
        return found

    def _header(self, file: WeightsFile) -> dict[str, TensorLocation]:
        if file.size_bytes < 8:
            raise WeightError(f"{file} has {file.size_bytes} bytes: no safetensors file")
        length = int.from_bytes(self._bytes(file, 0, 8), "little")
        if length > min(_HEADER_LIMIT, file.size_bytes - 8):
            raise WeightError(
                f"{file}: a header of {length} bytes in {file.size_bytes} bytes: it was cut off, "
                "or is no safetensors file"
            )
        try:
            header = json.loads(bytes(self._bytes(file, 8, length)))
        except (ValueError, RecursionError) as error:
            raise WeightError(f"{file}: the header is no JSON: {error}") from None
        if not isinstance(header, dict):
            raise WeightError(f"{file}: the header is no table")
        start, said = 8 + length, header.get("__metadata__", {})
        self._metadata |= said if isinstance(said, dict) else {}
        return {
            name: _entry(file, start, name, raw)
            for name, raw in header.items()
            if name != "__metadata__"
        }


def entry_of(name: str, stored: StoredTensor, parts: tuple[ByteRange, ...]) -> TensorLocation:
    """A tensor of a manifest, whose bytes lie in these parts. Raises WeightError."""
    found = TensorLocation(DTYPES.get(stored.dtype, torch.bool), stored.shape, parts)
    if stored.dtype not in DTYPES or found.size_bytes != sum(part.length for part in parts):
        raise WeightError(f"the entry of {name!r:.80} in a manifest is {stored!r:.200}")
    return found


def _entry(file: WeightsFile, start: int, name: str, raw: Any) -> TensorLocation:
    try:
        dtype, (begin, end) = DTYPES[raw["dtype"]], raw["data_offsets"]
        shape = tuple(raw["shape"])
        sound = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
        sound = sound and len(shape) <= MOST_SIZES
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound or end - begin != math.prod(shape) * dtype.itemsize:
        raise WeightError(f"{file}: the entry of {name!r:.80} is {raw!r:.200}")
    if end > file.size_bytes - start:
        raise WeightError(
            f"{file}: the entry of {name!r:.80} is {raw!r:.200}, which ends at byte {start + end}, "
            f"and the file has {file.size_bytes}: it was cut off"
        )
    parts = (ByteRange(file, start + begin, end - begin),) if end > begin else ()
    return TensorLocation(dtype, shape, parts)


def starting_spec(files: Mapping[str, Tensor], name: str) -> ShapeDtype | None:
    """Shape and dtype of what `starting_tensor` would give; None where it gives nothing. A `Lazy`
    mapping is not read."""
    if (found := _found(files, name)) is None:
        return None
    there, rows = found
    shape, dtype = spec_of(files, there)
    return ShapeDtype(shape if rows is None else (rows[1] - rows[0], *shape[1:]), dtype)


def _found(files: Mapping[str, Tensor], name: str) -> tuple[str, tuple[int, int] | None] | None:
    """The name of what files have of a tensor and, of a block of that, its rows; None where they
    have nothing. Nothing is read."""
    if name in files:
        return name, None
    block = block_of(name)
    if block is None or block.name not in files:
        return None
    shape = spec_of(files, block.name).shape
    return block.name, block.rows(shape[0] if shape else 0)


def spec_of(files: Mapping[str, Tensor], name: str) -> ShapeDtype:
    """Shape and dtype of a tensor that is there."""
    if isinstance(files, Lazy):
        return files.spec(name)
    return ShapeDtype(tuple(files[name].shape), files[name].dtype)


def starting_tensor(files: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The tensor of a name or, of a block of a split parameter, its rows of the whole one; None
    when the files have neither. Of what is `Lazy`, only these rows are read."""
    if (found := _found(files, name)) is None:
        return None
    there, rows = found
    return files[there] if rows is None else _rows(files, there, *rows)


def _rows(files: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    return files.rows(name, start, stop) if isinstance(files, Lazy) else files[name][start:stop]


def starting_rows(files: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of what `starting_tensor` gives, which is there. Of what is `Lazy`, only
    these are read."""
    there, rows = _found(files, name) or (name, None)
    first = 0 if rows is None else rows[0]
    return _rows(files, there, start + first, stop + first)


def has_start(files: Mapping[str, Tensor], name: str) -> bool:
    """Whether `starting_tensor` would find it or, of scales, the weight that they are made of;
    nothing is read."""
    return any(_found(files, n) is not None for n in (name, weight_of(name)))


def merged_entries(entries: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """The entries with blocks merged into whole tensors, once or again: the bytes of blocks one
    behind the other. Raises WeightError for a whole tensor of other bytes."""
    found = {name: entry for name, entry in entries.items() if block_of(name) is None}
    for name, blocks in split_names({n: e for n, e in entries.items() if n not in found}):
        parts = [entries[b] for b in blocks]
        rows, where = sum(e.shape[0] for e in parts), tuple(p for e in parts for p in e.parts)
        made = TensorLocation(parts[0].dtype, (rows, *parts[0].shape[1:]), where)
        if found.setdefault(name, made) != made:
            raise WeightError(f"{name!r} is there whole and in blocks of other bytes")
    return found


def split_names(specs: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each split parameter among tensors with shape and dtype, with the names of its blocks, in
    order. Raises WeightError when a block is missing or does not fit."""
    for name, blocks in grouped(specs).items():
        parts = [specs[str(block)] for block in blocks]
        rows = sum(part.shape[0] if part.shape else 0 for part in parts)
        heights = [stop - start for start, stop in (block.rows(rows) for block in blocks)]
        kinds = {(part.dtype, part.shape[1:]) for part in parts}
        whole = {block.parts for block in blocks} == {len(blocks)}
        fits = len(kinds) == 1 and all(part.shape for part in parts)
        if name in specs or not whole or not fits or heights != [p.shape[0] for p in parts]:
            have = ", ".join(f"{block} {specs[str(block)].shape}" for block in blocks)
            raise WeightError(f"expected every block of {name!r} once, in equal parts: got {have}")
        yield name, [str(block) for block in blocks]


def joined(parts: Sequence[bytes | bytearray | memoryview]) -> npt.NDArray[np.uint8]:
    """All their bytes in memory of their own; see the module."""
    return _fill(np.empty(sum(len(part) for part in parts), np.uint8), parts)


def _fill(
    out: npt.NDArray[np.uint8], parts: Iterable[bytes | bytearray | memoryview]
) -> npt.NDArray[np.uint8]:
    at = 0
    for part in parts:
        out[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return out


def header_of(
    tensors: Mapping[str, ShapeDtype], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What a safetensors file of these tensors, one behind the other, begins with."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (shape, dtype) in tensors.items():
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Serialized:
    """A safetensors file of tensors, those of the widest numbers first (so each lies where its
    dtype wants it), then in the order of their names. Its bytes are made as they are read: the
    tensors may not change until then. Two names of one tensor give two copies, so that every name
    of the user's module is there. Raises WeightError for a dtype that no file has."""

    def __init__(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
        self._tensors = [tensors[name] for name in names]
        for name in names:
            tensor = tensors[name]
            if tensor.dtype not in DTYPE_NAMES:
                raise WeightError(
                    f"{name!r} is {tensor.dtype}: expected one of {', '.join(DTYPES)}"
                )
        like = {n: ShapeDtype(tuple(tensors[n].shape), tensors[n].dtype) for n in names}
        self._begin = header_of(like, metadata)
        self.size_bytes = len(self._begin) + sum(t.numel() * t.itemsize for t in self._tensors)

    def pieces(self, offset: int, most: int) -> Iterator[memoryview]:
        """The bytes from an offset on, in pieces of at most so many; one tensor at a time is copied
        from its device."""
        at = 0
        for part in (None, *self._tensors):
            size = len(self._begin) if part is None else part.numel() * part.itemsize
            if at + size > offset:
                flat = np.frombuffer(self._begin, np.uint8) if part is None else _flat(part)
                for start in range(max(0, offset - at), size, most):
                    yield flat[start : start + most].data
            at += size

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces(0, 1 << 24))


def serialize(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> memoryview:
    """The bytes of `Serialized`, in memory of their own. Raises WeightError."""
    file = Serialized(tensors, metadata)
    return _fill(np.empty(file.size_bytes, np.uint8), file.pieces(0, 1 << 26)).data


def _flat(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return bytes_of(tensor.detach().cpu().contiguous())


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor on the CPU."""
    if not tensor.numel():  # torch gives it strides that no view of bytes has
        return np.empty(0, np.uint8)
    found: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return found
