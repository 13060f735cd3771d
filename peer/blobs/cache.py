"""Blobs that this peer fetched, in a folder of its own, each checked against its hash."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ...net.surroundings import write_whole
from ...net.web.web import WebError
from ...proto import common_pb2
from .weight_shards import WeightShard

__all__ = ["KEPT_S", "BlobCache", "BlobMismatchError", "Fetch", "FromWeb", "take_over"]

Fetch = Callable[[str, int, int], Iterator[bytes]]
"""(hash, offset, length; 0: to the end) -> the bytes in order, in pieces. Blocks."""
FromWeb = Callable[[WeightShard], Fetch]
"""Fetches a shard from the URL that it names."""

KEPT_S = 86_400.0
"""How long after their last use blobs of a process that was killed may stay for the next one."""
_HASH = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[0-9a-f]{64}(\.part)?")
_READ_BYTES = 1 << 20


class BlobMismatchError(ValueError):
    """A blob that is not what its name says; the message has both hashes or sizes."""


class BlobCache:
    """Fetches through `fetch` what is not here yet; where that came with wrong content, once more
    through `alone`. Keeps at most `limit_bytes`, the latest used, and all of the last `settle_s`.

    A fetch that breaks leaves a part, which the next one goes on from, as does one in a process to
    come (`take_over`). Safe from several threads
    and processes that share the folder: whoever has the lock of a part fetches, the others wait and
    find it whole. A file that is pushed out stays readable for whoever has it open or mapped.
    """

    def __init__(
        self,
        folder: Path,
        fetch: Fetch,
        limit_bytes: int = 16 * 2**30,
        *,
        alone: Fetch | None = None,
        settle_s: float = 60.0,
    ) -> None:
        self.folder = folder
        self.limit_bytes, self.settle_s = limit_bytes, settle_s
        self._fetch, self._alone = fetch, alone

    def path(self, name: str, most_bytes: int | None = None, fetch: Fetch | None = None) -> Path:
        """Path of the whole blob with this hash, of which no more than `most_bytes` are fetched
        (None: the cache's limit), through `fetch` in place of the cache's own ways. Raises
        BlobMismatchError, and what `fetch` raises."""
        if not _HASH.fullmatch(name):  # it becomes a file name: never a path of somebody's choice
            raise BlobMismatchError(f"{name[:80]!r} is not a hash: expected 64 hexadecimal digits")
        if not self._touch(name):
            with self._locked(name) as part:
                if part is not None and not self._touch(name):
                    most = self.limit_bytes if most_bytes is None else most_bytes
                    most = min(most, self.limit_bytes)
                    ways = (self._fetch, self._alone) if fetch is None else (fetch, None)
                    self._download(name, part, most, *ways)
        return self.folder / name

    @contextmanager
    def _locked(self, name: str) -> Iterator[IO[bytes] | None]:
        """The blob's part, for this thread alone; None when somebody else has made it whole."""
        path = self.folder / f"{name}.part"
        while not self.has(name):
            with open(path, "ab+", buffering=0) as part:
                fcntl.flock(part, fcntl.LOCK_EX)
                if not _is_at(part, path):  # it was finished, or given up, while this one waited
                    continue
                if self.has(name):  # finished right before the part was opened: this one is new
                    path.unlink()
                    break
                yield part
                return
        yield None

    def has(self, name: str) -> bool:
        """Whether the whole blob is here."""
        return self.size_of(name) is not None

    def size_of(self, name: str) -> int | None:
        """Bytes of the whole blob; None when it is not here."""
        if not _HASH.fullmatch(name):
            return None
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return None

    def whole(self, ref: common_pb2.BlobRef) -> bytes:
        """The blob's bytes, in memory: who calls has looked at the size that the reference says. A
        blob of another one is not read. Raises BlobMismatchError, and what `fetch` raises."""
        return self._sized(ref).read_bytes()

    def shard(self, shard: WeightShard, from_web: FromWeb) -> bytes:
        """The bytes of a shard of weights; where it is not here, from the web if it says so, else
        as any blob. Raises BlobMismatchError, WebError, and what `fetch` raises."""
        self.bring(shard, from_web)
        return self.whole(common_pb2.BlobRef(hash=shard.hash, size_bytes=shard.size_bytes))

    def bring(self, shard: WeightShard, from_web: FromWeb) -> None:
        """Has it here, as `shard` does, and reads nothing of it."""
        ref = common_pb2.BlobRef(hash=shard.hash, size_bytes=shard.size_bytes)
        if not shard.url or self.has(shard.hash):
            self._sized(ref)
            return
        try:
            self.path(shard.hash, shard.size_bytes, from_web(shard))
        except (BlobMismatchError, WebError) as problem:
            # Whoever has read it already, or the broker, may have it all the same.
            try:
                self._sized(ref)
            except Exception:
                raise BlobMismatchError(
                    f"weights from {shard.url}, byte {shard.at} on: {problem}"
                ) from None

    def mapped(self, ref: common_pb2.BlobRef) -> memoryview:
        """The bytes of a blob, mapped and not read: its pages come from the disk as they are looked
        at."""
        path = self._sized(ref)
        if not ref.size_bytes:
            return memoryview(b"")
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _sized(self, ref: common_pb2.BlobRef) -> Path:
        path = self.path(ref.hash, ref.size_bytes)
        if (size := path.stat().st_size) != ref.size_bytes:
            raise BlobMismatchError(f"blob {ref.hash[:12]} has {size} bytes, not {ref.size_bytes}")
        return path

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of a blob, without the rest of it. A part cannot be checked against
        the hash of the whole; its length is. Raises BlobMismatchError, and what `fetch` raises."""
        if not _HASH.fullmatch(name):
            raise BlobMismatchError(f"{name[:80]!r} is not a hash: expected 64 hexadecimal digits")
        if length == 0:
            return b""
        if self._touch(name):
            with open(self.folder / name, "rb") as file:
                file.seek(offset)
                data = file.read(length)
        else:
            data = b"".join(self._bounded(name, self._fetch(name, offset, length), length))
        if len(data) != length:
            raise BlobMismatchError(
                f"blob {name[:12]} gave {len(data)} bytes from {offset}, expected {length}"
            )
        return data

    def peek(self, name: str, offset: int, length: int) -> bytes:
        """At most so many bytes of a whole blob, at most a megabyte, fewer at its end; it does not
        count as used. Raises FileNotFoundError. Leaves no file open, even if nobody awaits it."""
        with open(self.folder / name, "rb", buffering=0) as file:
            return os.pread(file.fileno(), min(length, _READ_BYTES), offset)

    def _touch(self, name: str) -> bool:
        """Whether the blob is here; then it counts as just used."""
        now = time.time_ns()
        try:
            os.utime(self.folder / name, ns=(now, now))
        except FileNotFoundError:
            return False
        return True

    def _download(
        self, name: str, part: IO[bytes], most_bytes: int, fetch: Fetch, alone: Fetch | None
    ) -> None:
        path = self.folder / f"{name}.part"
        began_empty = part.seek(0, os.SEEK_END) == 0
        try:
            try:
                self._fill(name, part, fetch, most_bytes)
            except BlobMismatchError:
                if alone is None and began_empty:
                    raise
                part.truncate(0)
                self._fill(name, part, alone or fetch, most_bytes)
        except BlobMismatchError:  # nothing of it is worth keeping
            path.unlink()
            raise
        path.replace(self.folder / name)
        self._make_room(name)

    def _fill(self, name: str, part: IO[bytes], fetch: Fetch, most_bytes: int) -> None:
        """Goes on from what the part has. Raises BlobMismatchError when its content is not the
        name's."""
        digest = hashlib.sha256()
        part.seek(0)
        while data := part.read(_READ_BYTES):
            digest.update(data)
        if digest.hexdigest() == name:
            return
        size = part.tell()
        try:
            for piece in self._bounded(name, fetch(name, size, 0), most_bytes - size):
                write_whole(part, piece, self.folder / name)
                digest.update(piece)
        except Exception as error:
            if getattr(error, "code", "") == "OUT_OF_RANGE":
                raise BlobMismatchError(f"the part of blob {name[:12]} is longer than it") from None
            raise
        if digest.hexdigest() != name:
            raise BlobMismatchError(
                f"blob {name[:12]} came with the content of {digest.hexdigest()[:12]} "
                f"({part.tell()} bytes): it was damaged on its way or in the store"
            )

    @staticmethod
    def _bounded(name: str, pieces: Iterator[bytes], limit_bytes: int) -> Iterator[bytes]:
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > limit_bytes:
                raise BlobMismatchError(f"blob {name[:12]} sends more than {limit_bytes} bytes")
            yield piece

    def _make_room(self, but: str) -> None:
        """Removes the longest unused until the rest is within the limit, parts that nobody fetches
        among them."""
        found = []
        for path in self.folder.iterdir():
            if _FILE.fullmatch(path.name):
                with suppress(FileNotFoundError):  # somebody else makes room
                    stat = path.stat()
                    found.append((stat.st_mtime_ns, stat.st_size, path))
        total, settled = sum(size for _, size, _ in found), time.time() - self.settle_s
        for used_ns, size, path in sorted(found, key=lambda f: f[0]):
            if total <= self.limit_bytes or used_ns / 1e9 > settled:
                return
            if path.name != but and _let_go(path):
                total -= size

    def __repr__(self) -> str:
        sizes = [p.stat().st_size for p in self.folder.iterdir() if _HASH.fullmatch(p.name)]
        return f"<BlobCache {len(sizes)} blobs, {sum(sizes)} bytes>"


def take_over(folder: Path) -> None:
    """Take over what a process that was killed has left in a cache's folder and used in the last
    KEPT_S: as parts, which are believed once their hash was seen again, when they are wanted. To be
    called before there is a cache."""
    for path in [p for p in folder.iterdir() if _FILE.fullmatch(p.name)]:
        if time.time() - path.stat().st_mtime > KEPT_S:
            path.unlink()
        elif not path.suffix:
            path.rename(path.with_suffix(".part"))


def _let_go(path: Path) -> bool:
    """Remove a file that nobody has locked; return whether it is gone."""
    with suppress(FileNotFoundError), open(path, "r+b") as file:  # NFS locks what may be written
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink()
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the open file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
