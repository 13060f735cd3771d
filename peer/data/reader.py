"""Reading a run's samples from its shards, by content hash."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...dag.permutation import Indices
from .manifest import Column, DataError, Manifest, Shard
from .sampler import Sampler

__all__ = ["Reader"]

_Array = npt.NDArray[Any]


class _Stored:
    """One column over all its shards; items are addressed by their number in the column."""

    def __init__(self, column: Column, shards: list[Shard], get: Callable[[str], Path]) -> None:
        self.column, self.shards, self.get = column, shards, get
        self.ends = list(accumulate(s.count for s in shards))
        self.open: dict[int, _Array] = {}

    def shard_numbers(self, start: int, stop: int) -> range:
        """The shards that items [start, stop) lie in."""
        return range(bisect_right(self.ends, start), bisect_right(self.ends, stop - 1) + 1)

    def take(self, at: Indices) -> _Array:
        """The items with these numbers, any shape: (*at, *shape)."""
        if len(self.shards) == 1:
            return self._map(0)[at]
        number = np.searchsorted(self.ends, at.reshape(-1), side="right")
        found = np.empty((at.size, *self.column.shape), self.column.dtype)
        for n in np.unique(number).tolist():
            mine = number == n
            first = self.ends[n] - self.shards[n].count
            found[mine] = self._map(n)[at.reshape(-1)[mine] - first]
        return found.reshape(*at.shape, *self.column.shape)

    def pieces(self) -> Iterator[_Array]:
        return (self._map(n) for n in range(len(self.shards)))

    def _map(self, n: int) -> _Array:
        if n not in self.open:
            shard, path = self.shards[n], self.get(self.shards[n].hash)
            if path.stat().st_size != shard.size_bytes:
                raise DataError(
                    f"shard {shard.hash[:12]} has {path.stat().st_size} bytes here, "
                    f"expected {shard.size_bytes}: fetch it again"
                )
            shape = (shard.count, *self.column.shape)
            dtype = np.dtype(self.column.dtype).newbyteorder("<")
            # Mapped, so that a shard costs the pages that are read and no copy of the file.
            self.open[n] = np.asarray(np.memmap(path, dtype, "r", shape=shape))
        return self.open[n]


class Reader:
    """Batches of a run. `get(hash)` gives the local path of a shard whose content was verified; it
    may fetch, and is called once per shard. Batches are fresh CPU tensors of the caller's own.
    """

    def __init__(
        self, manifest: Manifest, get: Callable[[str], Path], *, seed: int, microbatches: int
    ) -> None:
        self.manifest = manifest
        self.sampler = Sampler(manifest, seed, microbatches)
        self._stored = {
            c.name: _Stored(c, [s for s in manifest.shards if s.column == c.name], get)
            for c in manifest.columns
        }

    def needs(
        self, step: int, microbatches: Iterable[int], size: int, names: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Hashes of the shards that these microbatches of a step read, each once, in order of use;
        only for the batch's tensors called `names` (empty: all)."""
        return self._needs((self.sampler.train(step, m, size) for m in microbatches), names)

    def needs_held_out(
        self, microbatches: Iterable[int], size: int, names: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Hashes of the shards that these held-out microbatches read, each once, in order of use;
        `names` as of `needs`."""
        return self._needs((self.sampler.held_out(m, size) for m in microbatches), names)

    def batch(self, step: int, microbatch: int, size: int) -> dict[str, Tensor]:
        """Tensors of a training microbatch: (size, *sample shape) each. For text and tokens, inputs
        are int64 ids (size, length) and targets the ids that follow."""
        return self.samples(self.sampler.train(step, microbatch, size))

    def held_out(self, microbatch: int, size: int) -> dict[str, Tensor]:
        """Tensors of a held-out microbatch."""
        return self.samples(self.sampler.held_out(microbatch, size))

    def pieces(self, column: str) -> Iterator[_Array]:
        """All items of a column, shard after shard; nobody may write to them."""
        return self._stored[column].pieces()

    def _span(self) -> int:
        return self.manifest.length + 1 if self.manifest.kind != "arrays" else 1

    def _needs(self, samples: Iterable[Indices], names: Collection[str]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for at in samples:
            for name in self._wanted(names):
                stored = self._stored[self.manifest.sources(name)]
                for start in at.tolist():
                    for n in stored.shard_numbers(start, start + self._span()):
                        found[stored.shards[n].hash] = None
        return tuple(found)

    def _wanted(self, names: Collection[str]) -> list[str]:
        return [n for n in self.manifest.fields if not names or n in names]

    def samples(self, at: Indices, names: Collection[str] = ()) -> dict[str, Tensor]:
        """Tensors of the samples that begin at these items (`Sampler`); `names` as in `needs`."""
        found: dict[str, Tensor] = {}
        wanted = self._wanted(names)
        if self.manifest.kind != "arrays":
            stored = self._stored[self.manifest.columns[0].name]
            windows = stored.take(at[:, None] + np.arange(self._span())).astype(np.int64)
            for name in wanted:  # (size, length)
                part = windows[:, :-1] if name == self.manifest.inputs else windows[:, 1:]
                found[name] = torch.from_numpy(np.ascontiguousarray(part))
            return found
        for name in wanted:
            rows = self._stored[name].take(at)
            found[name] = torch.from_numpy(rows.astype(rows.dtype.newbyteorder("="), copy=False))
        return found
