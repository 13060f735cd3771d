"""Blobs that this peer fetched, in a folder of its own, each checked against its hash."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ..proto import common_pb2

__all__ = ["BlobCache", "BlobError", "Fetch"]

Fetch = Callable[[str, int, int], Iterator[bytes]]
"""(hash, offset, length; 0: to the end) -> the bytes in order, in pieces. Blocks."""

_HASH = re.compile(r"[0-9a-f]{64}")


class BlobError(ValueError):
    """A blob that is not what its name says; the message has both hashes or sizes."""


class BlobCache:
    """Fetches through `fetch` what is not here yet. Keeps at most `limit_bytes`, the latest used.

    Safe from several threads; two that want one blob cause one fetch. A file that is pushed out
    stays readable for whoever has it open or mapped.
    """

    def __init__(self, folder: Path, fetch: Fetch, limit_bytes: int = 16 * 2**30) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._fetch = fetch
        self._guard = threading.Lock()
        self._sizes: dict[str, int] = {}  # bytes of the files here, the latest used last
        self._busy: dict[str, threading.Lock] = {}  # of hashes that somebody fetches or waits for

    def path(self, name: str) -> Path:
        """Path of the whole blob with this hash. Raises BlobError, and what `fetch` raises."""
        if not _HASH.fullmatch(name):  # it becomes a file name: never a path of somebody's choice
            raise BlobError(f"{name[:80]!r} is not a hash: expected 64 hexadecimal digits")
        if self._touch(name):
            return self.folder / name
        with self._guard:
            lock = self._busy.setdefault(name, threading.Lock())
        try:
            with lock:
                if not self._touch(name):
                    size = self._download(name)
                    self._keep(name, size)
        finally:
            with self._guard:
                self._busy.pop(name, None)
        return self.folder / name

    def whole(self, ref: common_pb2.BlobRef) -> bytes:
        """The blob's bytes. Raises BlobError, and what `fetch` raises."""
        data = self.path(ref.hash).read_bytes()
        if ref.size_bytes and len(data) != ref.size_bytes:
            raise BlobError(f"blob {ref.hash[:12]} has {len(data)} bytes, not {ref.size_bytes}")
        return data

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of a blob, without the rest of it. A part cannot be checked against
        the hash of the whole; its length is. Raises BlobError, and what `fetch` raises."""
        if not _HASH.fullmatch(name):
            raise BlobError(f"{name[:80]!r} is not a hash: expected 64 hexadecimal digits")
        if length == 0:
            return b""
        if self._touch(name):
            with open(self.folder / name, "rb") as file:
                file.seek(offset)
                data = file.read(length)
        else:
            data = b"".join(self._bounded(name, self._fetch(name, offset, length), length))
        if len(data) != length:
            raise BlobError(
                f"blob {name[:12]} gave {len(data)} bytes from {offset}, expected {length}"
            )
        return data

    def _touch(self, name: str) -> bool:
        """Whether the blob is here; then it counts as just used."""
        with self._guard:
            size = self._sizes.pop(name, None)
            if size is not None:
                self._sizes[name] = size
            return size is not None

    def _download(self, name: str) -> int:
        part, size, digest = self.folder / f"{name}.part", 0, hashlib.sha256()
        try:
            with open(part, "wb") as file:
                for piece in self._bounded(name, self._fetch(name, 0, 0), self.limit_bytes):
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
            if digest.hexdigest() != name:
                raise BlobError(
                    f"blob {name[:12]} came with the content of {digest.hexdigest()[:12]} "
                    f"({size} bytes): it was damaged on its way or in the store"
                )
            part.replace(self.folder / name)
        finally:
            part.unlink(missing_ok=True)
        return size

    @staticmethod
    def _bounded(name: str, pieces: Iterator[bytes], limit_bytes: int) -> Iterator[bytes]:
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > limit_bytes:
                raise BlobError(f"blob {name[:12]} sends more than {limit_bytes} bytes")
            yield piece

    def _keep(self, name: str, size: int) -> None:
        with self._guard:
            self._sizes[name] = size
            total = sum(self._sizes.values())
            while total > self.limit_bytes and len(self._sizes) > 1:
                oldest = next(iter(self._sizes))
                total -= self._sizes.pop(oldest)
                (self.folder / oldest).unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<BlobCache {len(self._sizes)} blobs, {sum(self._sizes.values())} bytes>"
