"""What a peer of the virtual world reads of blobs, and how many bytes of that it has to fetch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...proto import common_pb2

if TYPE_CHECKING:
    from .world import World

__all__ = ["BlobFetches"]


class BlobFetches:
    """Reads for one order to build. bytes: those that are not on the host yet. `there`: hashes of
    the whole blobs that are; what is read whole is from then on."""

    def __init__(self, world: World, there: set[str]) -> None:
        self._world, self._there = world, there
        self.bytes = 0

    def whole(self, name: str) -> bytes:
        data = self._world.blobs[name]
        self.bytes += 0 if name in self._there else len(data)
        self._there.add(name)
        return data

    def read(self, name: str, offset: int, length: int) -> bytes:
        self.bytes += 0 if name in self._there else length
        return self._world.blobs[name][offset : offset + length]

    def shard(self, name: str) -> Path:
        """Return a file with a blob."""
        path = self._world.folder / name
        data = self.whole(name)
        if not path.exists():
            path.write_bytes(data)
        return path

    def saved(self, ref: common_pb2.BlobRef) -> tuple[memoryview, ...]:
        """Return the parts of a snapshot that lies with the broker."""
        self.bytes += ref.size_bytes
        return self._world.saved[ref.hash]
