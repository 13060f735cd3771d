"""Tensors written as safetensors files that other programs read: one file, or several with an index
as Hugging Face's, none larger than FILE_BYTES but for a single tensor that is.

Bytes go from where they are to the file in pieces: no tensor is in memory as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from ...peer.blobs.weights import ShapeDtype, TensorLocation, bytes_of, header_of
from .records import replacing
from .weight_files import Stored, WeightFilesError

__all__ = [
    "FILE_BYTES",
    "Item",
    "cast",
    "files_of",
    "item_of",
    "items_of",
    "write_files",
    "write_values",
]

# A safetensors file that is written tensor by tensor, so that no more than one is here at once.


def write_values(path: Path, like: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> None:
    """Writes one file. `like` has shapes and dtypes; `value` gives each tensor's values when its
    turn comes, the widest numbers first, so that each lies where its dtype wants it."""
    names = sorted(like, key=lambda name: (-like[name].itemsize, name))
    with path.open("wb") as file:
        file.write(header_of({n: ShapeDtype(tuple(like[n].shape), like[n].dtype) for n in names}))
        for name in names:
            given = value(name).detach().contiguous()
            assert (given.shape, given.dtype) == (like[name].shape, like[name].dtype), name
            if given.numel():
                file.write(given.view(-1).view(torch.uint8).numpy().data)


FILE_BYTES = 5_000_000_000
"""Of one file, as Hugging Face cuts large models."""
_PIECE_BYTES = 8 << 20


class Item(NamedTuple):
    """A tensor to be written; `pieces` gives its bytes in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    size_bytes: int
    pieces: Callable[[], Iterable[bytes | memoryview]]


def items_of(stored: Stored, entries: Mapping[str, TensorLocation]) -> dict[str, Item]:
    """Tensors of files, by names that may be others than theirs."""

    def pieces(entry: TensorLocation) -> Iterator[bytes]:
        for part in entry.parts:
            for at in range(0, part.length, _PIECE_BYTES):
                size = min(_PIECE_BYTES, part.length - at)
                yield stored.file(part).read(part.begin + at, size)

    return {
        name: Item(e.dtype, e.shape, e.size_bytes, lambda e=e: pieces(e))  # type: ignore[misc]
        for name, e in entries.items()
    }


def cast(item: Item, dtype: torch.dtype) -> Item:
    """The tensor in another dtype, each number rounded once, as `Tensor.to` does."""
    if dtype == item.dtype:
        return item

    def pieces() -> Iterator[memoryview]:
        for piece in item.pieces():
            own = torch.frombuffer(bytearray(piece), dtype=item.dtype)
            yield bytes_of(own.to(dtype)).data

    return Item(dtype, item.shape, item.size_bytes // item.dtype.itemsize * dtype.itemsize, pieces)


def item_of(tensor: Tensor) -> Item:
    """A tensor that is in memory."""

    def pieces() -> Iterator[memoryview]:
        yield bytes_of(tensor.detach().cpu().contiguous()).data

    return Item(tensor.dtype, tuple(tensor.shape), tensor.numel() * tensor.itemsize, pieces)


def write_files(items: Mapping[str, Item], path: Path) -> Path:
    """Writes one file at `path` or, where that would be too large, several beside it
    (`model-00001-of-00003.safetensors`) and their index (`model.safetensors.index.json`); returns
    the file, or the index. Each replaces what was there as a whole. Raises OSError, and
    WeightFilesError where an index of other files is in the way."""
    groups = list(_grouped(items))
    count = len(groups)
    names = [f"{path.stem}-{i + 1:05}-of-{count:05}{path.suffix}" for i in range(count)]
    names = names if count > 1 else [path.name]
    listed = {n: file for file, group in zip(names, groups, strict=True) for n in group}
    index = path.with_name(f"{path.name}.index.json")
    _check_way(index, set(names))
    for name, group in zip(names, groups, strict=True):
        with replacing(path.with_name(name)) as temporary, temporary.open("wb") as file:
            _write(items, group, file)
    if count == 1:
        return path
    size = sum(item.size_bytes for item in items.values())
    table = {"metadata": {"total_size": size}, "weight_map": listed}
    with replacing(index) as temporary:
        temporary.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return index


def files_of(written: Path) -> list[Path]:
    """Return all files that `write_files` has written, by what it returned; a folder is one."""
    if written.name.endswith(".index.json"):
        listed = json.loads(written.read_bytes())["weight_map"]
        return [*(written.with_name(name) for name in sorted({*listed.values()})), written]
    return [written]


def _check_way(index: Path, names: set[str]) -> None:
    """Raises WeightFilesError where an index would lead its readers to other files."""
    try:
        there = set(json.loads(index.read_bytes())["weight_map"].values())
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        there = set()
    if there != names:
        raise WeightFilesError(
            f"{index} is of other files than would be written beside it: choose another path, or "
            "remove it"
        )


def _grouped(items: Mapping[str, Item]) -> Iterator[list[str]]:
    """The names by file, in their order; at least one file."""
    group, size = list[str](), 0
    for name, item in items.items():
        if group and size + item.size_bytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += item.size_bytes
    yield group


def _write(items: Mapping[str, Item], names: list[str], file: BinaryIO) -> None:
    # The widest numbers first, so that each lies where its dtype wants it.
    names = sorted(names, key=lambda n: (-items[n].dtype.itemsize, n))
    like = {n: ShapeDtype(tuple(items[n].shape), items[n].dtype) for n in names}
    file.write(header_of(like, {"format": "pt"}))
    for name in names:
        for piece in items[name].pieces():
            file.write(piece)
