"""Shards of a manifest, written column after column, each file named by the hash of its content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .manifest import Column, Shard

__all__ = ["ARRAY_SHARD_BYTES", "ShardWriter"]

ARRAY_SHARD_BYTES = 16 * 2**20


class ShardWriter:
    """Cuts columns into shards in a folder. `named` gives the hash of a shard from its column and
    content; None: SHA-256 of the content."""

    def __init__(self, folder: Path, named: Callable[[str, memoryview], str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.named = named or (lambda _, data: hashlib.sha256(data).hexdigest())
        self.shards: list[Shard] = []
        self.paths: dict[str, Path] = {}

    def add(self, column: Column, items: npt.NDArray[Any], limit_bytes: int) -> None:
        """Writes all items of a column, at most `limit_bytes` (at least one item) per shard."""
        per_shard = max(1, limit_bytes // column.item_bytes)
        for start in range(0, len(items), per_shard):
            part = np.ascontiguousarray(items[start : start + per_shard])
            part = part.astype(part.dtype.newbyteorder("<"), copy=False)
            data = part.reshape(-1).view(np.uint8).data
            name = self.named(column.name, data)
            path = self.folder / name
            if not path.exists():  # else somebody may have it mapped
                new = path.with_suffix(".new")
                new.write_bytes(data)
                new.replace(path)
            self.paths[name] = path
            self.shards.append(Shard(column.name, len(part), len(data), name))
