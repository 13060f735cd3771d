"""Weights files cut into shards, each a blob of its own: which bytes, and which tensor lies where.

A tensor of more than LARGE_BYTES has shards to itself, so that the same tensor is the same blobs in
whichever file it lies; smaller ones that lie beside each other share one. No shard has more than
SHARD_BYTES, so that nobody needs more of a file in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ...peer.blobs.weight_shards import StoredTensor, WeightManifest, WeightShard
from ...peer.blobs.weights import DTYPE_NAMES, TensorLocation, WeightsFile
from .weight_files import Stored

__all__ = ["LARGE_BYTES", "SHARD_BYTES", "Cut", "Pretrained"]

SHARD_BYTES = 32 << 20
"""Half a minute at 10 Mbit/s: what is lost at most where nothing of a shard can be gone on from."""
LARGE_BYTES = 4 << 20


class Cut(NamedTuple):
    """Bytes [begin, begin + length) of a file that become a shard."""

    file: str
    begin: int
    length: int


Places = dict[Cut, list[tuple[int, int, int]]]
"""By range of a tensor: (index of the shard, offset, length)."""


@dataclass(frozen=True)
class Pretrained:
    """The tensors of `stored` that a model takes, by the model's own names."""

    stored: Stored
    entries: Mapping[str, TensorLocation]

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """What becomes a shard, in the order of the files."""
        return tuple(self._cut[0])

    @property
    def size_bytes(self) -> int:
        """The bytes of all shards together."""
        return sum(cut.length for cut in self.cuts)

    def read(self, cut: Cut) -> bytes:
        """The bytes of a shard. Blocks; from any thread. Raises WeightFilesError."""
        return self.stored.files[cut.file].read(cut.begin, cut.length)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each with its name, read one at a time. Raises WeightFilesError."""
        for name, entry in self.entries.items():
            yield name, self.stored.weights.read(entry)

    def manifest(self, hashes: Mapping[Cut, str], *, urls: bool = False) -> WeightManifest:
        """Which tensor lies where, once the hash of each cut is known. `urls`: whether it says
        where on the web they are."""
        shards = []
        for cut in self.cuts:
            url = self.stored.files[cut.file].url if urls else ""
            shards.append(WeightShard(hashes[cut], cut.length, url, cut.begin if url else 0))
        places = self._cut[1]
        tensors = {
            name: StoredTensor(
                DTYPE_NAMES[entry.dtype],
                entry.shape,
                tuple(place for part in _ranges(entry) for place in places[part]),
            )
            for name, entry in self.entries.items()
        }
        return WeightManifest(tuple(shards), tensors)

    @cached_property
    def _cut(self) -> tuple[list[Cut], Places]:
        cuts: list[Cut] = []
        places: Places = {}
        order = {name: i for i, name in enumerate(self.stored.files)}
        wanted = {part for entry in self.entries.values() for part in _ranges(entry)}
        end: tuple[str, int] | None = None  # where the last cut ends, if it may have more
        for part in sorted(wanted, key=lambda p: (order[p.file], p.begin, p.length)):
            file, begin, length = part
            if length > LARGE_BYTES:
                pieces = [
                    Cut(file, begin + at, min(SHARD_BYTES, length - at))
                    for at in range(0, length, SHARD_BYTES)
                ]
                places[part] = [(len(cuts) + i, 0, p.length) for i, p in enumerate(pieces)]
                cuts += pieces
                end = None
                continue
            if end == (file, begin) and cuts[-1].length + length <= SHARD_BYTES:
                last = cuts.pop()
                places[part] = [(len(cuts), last.length, length)]
                cuts.append(Cut(file, last.begin, last.length + length))
            else:
                places[part] = [(len(cuts), 0, length)]
                cuts.append(part)
            end = (file, begin + length)
        return cuts, places


def _ranges(entry: TensorLocation) -> Iterator[Cut]:
    for part in entry.parts:
        assert isinstance(part.source, WeightsFile), "these are files"
        yield Cut(part.source.hash, part.begin, part.length)
