"""The manifest: which bytes a run's data is, and how they are cut into shards.

A run's data is a few *columns*, each a sequence of `total` items of one dtype and shape, stored as
raw little-endian bytes, item after item, in consecutive shards. Text has one column of bytes and
tokens one of ids; arrays have a column per field. The last `held_out` items are held out.
A manifest comes from the network, so reading one checks everything that later code relies on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from ...dag.ir.graph import ITEM_BYTES, TensorSpec

__all__ = ["Column", "DataError", "Kind", "Manifest", "Shard"]

Kind = Literal["text", "tokens", "arrays"]

STORED_BYTES = {n: b for n, b in ITEM_BYTES.items() if n != "bfloat16"} | {"uint16": 2}
"""Bytes of one element by stored dtype (numpy's); uint16 exists for token ids only."""

_HASH = re.compile(r"[0-9a-f]{64}")
_LIMIT = 2**48  # items or bytes; far above any real data


class DataError(ValueError):
    """Data that cannot be used; the message says what was expected, what came, and what to do."""


@dataclass(frozen=True, slots=True)
class Shard:
    """`count` consecutive items of a column, as one content-hashed file of `size_bytes` bytes."""

    column: str
    count: int
    size_bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class Column:
    """One stored sequence; `shape` is that of one item (empty for text and tokens)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def item_bytes(self) -> int:
        size = STORED_BYTES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True)
class Manifest:
    """Which bytes a run's data is, and how they are cut into shards. `length`: window of text and
    tokens (0 for arrays). `inputs` and `targets`: names of the batch's tensors, which are the
    argument names of the user's forward; `targets` may be empty for a model that wants none."""

    kind: Kind
    columns: tuple[Column, ...]
    shards: tuple[Shard, ...]
    total: int
    held_out: int
    length: int = 0
    inputs: str = "x"
    targets: str = "y"
    key: str = ""
    """The column that says whose a sample is, which no batch has; empty: none does."""

    @property
    def train(self) -> int:
        """Items to train on: [0, train); the rest is held out."""
        return self.total - self.held_out

    @property
    def different_held_out(self) -> int:
        """Held-out samples that differ: windows of text and tokens begin at each item."""
        return max(0, self.held_out - self.length)

    @property
    def fields(self) -> dict[str, TensorSpec]:
        """What a batch has: the spec of one sample of each tensor, by name."""
        if self.kind == "arrays":
            return {
                c.name: TensorSpec(c.shape, c.dtype) for c in self.columns if c.name != self.key
            }
        names = [n for n in (self.inputs, self.targets) if n]
        return {n: TensorSpec((self.length,), "int64") for n in names}

    def sources(self, field: str) -> str:
        """The column that a batch's tensor is read from."""
        return field if self.kind == "arrays" else self.columns[0].name

    def to_json(self) -> str:
        """Canonical: the same manifest gives the same bytes, and so the same content hash."""
        table = {"version": 1, **asdict(self)}
        if not self.key:
            del table["key"]
        return json.dumps(table, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises DataError for anything that is not a manifest in every detail."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the data manifest is no JSON: {error}") from None
        if isinstance(raw, dict):
            raw.setdefault("key", "")
        top = _table(raw, "", {"version", *cls.__dataclass_fields__})
        if top["version"] != 1:
            raise DataError(f"the data manifest has version {top['version']!r}, expected 1")
        if top["kind"] not in get_args(Kind):
            raise DataError(
                f"the data manifest has kind {top['kind']!r}, expected {get_args(Kind)}"
            )
        columns = tuple(_column(c) for c in _list(top["columns"], "columns"))
        shards = tuple(_shard(s) for s in _list(top["shards"], "shards"))
        found = cls(
            kind=cast(Kind, top["kind"]),
            columns=columns,
            shards=shards,
            total=_count(top["total"], "total"),
            held_out=_count(top["held_out"], "held_out"),
            length=_count(top["length"], "length"),
            inputs=_text(top["inputs"], "inputs"),
            targets=_text(top["targets"], "targets"),
            key=_text(top["key"], "key"),
        )
        return found.validate()

    def validate(self) -> Manifest:
        """Returns itself; raises DataError when its parts contradict each other."""
        names = [c.name for c in self.columns]
        if not names or len(set(names)) != len(names):
            raise DataError(f"the data manifest has columns {names}: expected distinct ones")
        if self.held_out >= self.total:
            raise DataError(f"{self.held_out} of {self.total} items are held out: none is left")
        for column in self.columns:
            mine = [s for s in self.shards if s.column == column.name]
            for s in mine:
                if s.size_bytes != s.count * column.item_bytes or s.count == 0:
                    raise DataError(
                        f"shard {s.hash[:12]} of {column.name!r} has {s.size_bytes} bytes for "
                        f"{s.count} items of {column.item_bytes} bytes"
                    )
            if sum(s.count for s in mine) != self.total:
                raise DataError(
                    f"the shards of {column.name!r} have {sum(s.count for s in mine)} items, "
                    f"the manifest says {self.total}"
                )
        if any(s.column not in names for s in self.shards):
            raise DataError("the data manifest has a shard of a column that it does not name")
        if self.key and (self.kind != "arrays" or names.count(self.key) != 1 or len(names) == 1):
            raise DataError(
                f"the data manifest has the key {self.key!r}, and columns {names} of kind "
                f"{self.kind}: expected one of several arrays"
            )
        if self.kind != "arrays":
            self._validate_windows()
        elif self.length:
            raise DataError(f"arrays have no window, but length is {self.length}")
        elif any(c.dtype == "uint16" for c in self.columns):
            raise DataError("an array has dtype uint16, which only tokens may have")
        return self

    def _validate_windows(self) -> None:
        if len(self.columns) != 1 or self.columns[0].shape:
            raise DataError(f"{self.kind} has one column of single items, got {self.columns}")
        allowed = ("uint8",) if self.kind == "text" else ("uint16", "int32")
        if self.columns[0].dtype not in allowed:
            raise DataError(f"{self.kind} has dtype {self.columns[0].dtype}, expected {allowed}")
        if not self.inputs or self.inputs == self.targets:
            raise DataError(
                f"inputs {self.inputs!r} and targets {self.targets!r}: two names needed"
            )
        if self.length < 1 or self.train < self.length + 1:
            raise DataError(
                f"{self.train} items are left to train on: a window has length + 1 = "
                f"{self.length + 1}; give more data or a smaller length or holdout"
            )
        if 0 < self.held_out < self.length + 1:
            raise DataError(
                f"{self.held_out} items are held out: a window has {self.length + 1}; "
                "raise holdout, or set it to 0"
            )


def _table(raw: Any, where: str, keys: set[str]) -> Mapping[str, Any]:
    if not isinstance(raw, dict) or set(raw) != keys:
        got = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise DataError(f"data manifest {where}: expected the keys {sorted(keys)}, got {got}")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise DataError(f"data manifest, {where}: expected a list, got {type(raw).__name__}")
    return raw


def _count(raw: Any, where: str) -> int:
    if type(raw) is not int or not 0 <= raw < _LIMIT:
        raise DataError(
            f"data manifest, {where}: expected an integer in [0, 2^48), got {raw!r:.80}"
        )
    return raw


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or len(raw) > 200:
        raise DataError(f"data manifest, {where}: expected a short text, got {raw!r:.80}")
    return raw


def _column(raw: Any) -> Column:
    table = _table(raw, "columns", {"name", "dtype", "shape"})
    if not isinstance(table["dtype"], str) or table["dtype"] not in STORED_BYTES:
        raise DataError(
            f"data manifest, dtype: {table['dtype']!r:.80} is none of {[*STORED_BYTES]}"
        )
    shape = tuple(_count(d, "shape") for d in _list(table["shape"], "shape"))
    column = Column(_text(table["name"], "name"), table["dtype"], shape)
    if len(shape) > 16 or not 0 < column.item_bytes < _LIMIT:
        raise DataError(f"data manifest: an item of shape {list(shape)} is empty or too large")
    return column


def _shard(raw: Any) -> Shard:
    table = _table(raw, "shards", {"column", "count", "size_bytes", "hash"})
    if not isinstance(table["hash"], str) or not _HASH.fullmatch(table["hash"]):
        raise DataError(f"data manifest, hash: expected 64 hex digits, got {table['hash']!r:.80}")
    return Shard(
        column=_text(table["column"], "column"),
        count=_count(table["count"], "count"),
        size_bytes=_count(table["size_bytes"], "size_bytes"),
        hash=table["hash"],
    )
