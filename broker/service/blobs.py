"""Content-addressed bytes on disk: graphs, weights, data shards.

Rules.

- A blob is named by the SHA-256 of its content. Nothing that a client says becomes a file name
  except 64 hexadecimal digits that were checked.
- An upload is hashed while it is written; a blob appears under its name, by one rename, only when
  size and hash are right. So whatever is under a name is whole and verified.
- An upload that breaks leaves its part behind; the next one goes on where it ended (`size_of` says
  where). While one upload writes a part, another one of the same blob writes a file of its own from
  offset 0, and whoever ends first wins; both are right.
- Sizes are bounded: each blob, all blobs and announced uploads together, and by what the disk has.
  What one subject has announced and not brought keeps at most a quarter of either from others.
- `collect` removes what nobody needs: neither named to it, nor asked for, read or written for
  `grace_s`. Whoever reads a removed blob reads on to its end.

All methods block on the disk: call them in a thread. They may be called from several at once.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from ...net.temporary import TemporaryFolder
from ...planner.requests.run_spec import HASH
from ..access.admission import CallRefusedError

__all__ = ["BlobLimits", "BlobStore", "BlobStoreError", "Upload"]

_READ_BYTES = 1 << 20
WHOLE_BYTES = 64 << 20
"""Of a blob that is taken into memory: the largest graphs and manifests."""
TOUCHED_S = 60.0
"""How exactly the last use of a blob is remembered."""


class BlobStoreError(CallRefusedError):
    """A request that the store refuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobLimits:
    """How much the store takes."""

    blob_bytes: int = 64 << 30
    """Largest blob: the fp32 weights of 16 billion parameters."""
    total_bytes: int = 512 << 30
    """All blobs and announced uploads together."""
    blobs: int = 1_000_000
    """Number of blobs and parts; each is a file."""
    of_one: float = 0.25
    """Of `total_bytes`, what one subject may have announced and not brought; and of what is left
    here, the most that this keeps from others: two of the largest blobs."""
    spare_bytes: int = 256 << 20
    """Of the disk, left to the journal and to others."""
    grace_s: float = 86_400.0
    """How long a blob stays after its last use that no run needs: 100 GB over 10 Mbit/s, before the
    run is submitted that they are for."""


class BlobStore:
    """A folder of blobs. `folder` None: a temporary one, removed by `close`. `clock`: wall clock,
    seconds, as that of files; `free`: bytes that the disk of a folder has left."""

    def __init__(
        self,
        folder: Path | None = None,
        limits: BlobLimits | None = None,
        *,
        clock: Callable[[], float] = time.time,
        free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self.limits = limits or BlobLimits()
        self._clock, self._free = clock, free
        self._given = folder
        self._folder: Path | None = None
        self._temporary: TemporaryFolder | None = None
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # Whole blobs.
        self._used: dict[str, float] = {}  # When each of these, and each part, was last used.
        self._held = 0  # Their sum.
        self._parts: dict[str, int] = {}  # Bytes of parts that nobody writes now.
        self._open: dict[Upload, int] = {}  # Running uploads and their announced sizes.
        self._writing: set[str] = set()  # Blobs whose part is being written.
        self._count = itertools.count()

    def open(self) -> None:
        """Makes the folder and finds what is in it already. Raises OSError."""
        self._folder = self._given
        if self._folder is None:
            self._temporary = TemporaryFolder("shoal-blobs-")
            self._folder = self._temporary.path
        for kind in ("whole", "part"):
            (self._folder / kind).mkdir(parents=True, exist_ok=True)
        for path in sorted((self._folder / "whole").iterdir()):
            if HASH.fullmatch(path.name):
                self._sizes[path.name] = path.stat().st_size
                self._used[path.name] = path.stat().st_mtime
        self._held = sum(self._sizes.values())
        for path in sorted((self._folder / "part").iterdir()):
            if HASH.fullmatch(path.name):
                self._parts[path.name] = path.stat().st_size
                self._used.setdefault(path.name, path.stat().st_mtime)
            else:
                path.unlink()  # a second upload's own file; only the first one's part goes on

    def close(self) -> None:
        """Ends running uploads; a temporary folder is gone afterwards."""
        for upload in list(self._open):
            upload.stop()
        if self._temporary is not None:
            self._temporary.close()
        self._folder = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<BlobStore {len(self._sizes)} blobs, {self._held} bytes, {len(self._open)} uploads>"
        )

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "the store is not open"
        return self._folder

    def _path(self, kind: Literal["whole", "part"], name: str) -> Path:
        return self.folder / kind / name

    # ------------------------------------------------------------ reading

    def size_of(self, name: str) -> int:
        """Bytes of a blob that are here: all of it, or the part that an upload can go on from."""
        with self._lock:
            self._touch(name)
            if name in self._sizes:
                return self._sizes[name]
            return 0 if name in self._writing else self._parts.get(name, 0)

    def whole(self, name: str) -> bool:
        with self._lock:
            self._touch(name)
            return name in self._sizes

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Return the ones that are not here as a whole."""
        return [name for name in names if not self.whole(name)]

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those that are here as a whole."""
        with self._lock:
            return {name: self._sizes[name] for name in names if name in self._sizes}

    def _touch(self, name: str) -> None:
        """Somebody asked for it: it is used. The disk remembers that, too, for another start."""
        now, kind = self._clock(), "whole" if name in self._sizes else "part"
        if kind == "part" and name not in self._parts:
            return
        if now - self._used.get(name, 0.0) > TOUCHED_S:
            os.utime(self.folder / kind / name, (now, now))
            self._used[name] = now

    def read(
        self, name: str, offset: int = 0, length: int = 0, piece_bytes: int = _READ_BYTES
    ) -> Iterator[bytes]:
        """Bytes [offset, offset + length) of a blob (length 0: to its end) in pieces.

        Raises BlobStoreError at once, not at the first piece, when there is no such blob or range.
        """
        with self._lock:
            self._touch(name)
            size = self._sizes.get(name)
        if size is None:
            raise BlobStoreError("NOT_FOUND", f"there is no blob {name[:80]!r} here")
        stop = offset + length if length else size
        if not 0 <= offset <= stop <= size:
            raise BlobStoreError(
                "OUT_OF_RANGE",
                f"bytes [{offset}, {stop}) of blob {name}: it has {size} bytes",
            )
        return self._pieces(self._path("whole", name), offset, stop, piece_bytes)

    def _pieces(self, path: Path, at: int, stop: int, piece_bytes: int) -> Iterator[bytes]:
        with path.open("rb", buffering=0) as file:
            while at < stop:
                data = os.pread(file.fileno(), min(piece_bytes, stop - at), at)
                if not data:
                    raise OSError(f"{path} ends at byte {at}, expected {stop}")
                at += len(data)
                yield data

    def get(self, name: str, most_bytes: int = WHOLE_BYTES) -> bytes:
        """A whole blob, in memory. Raises BlobStoreError, before anything is read for one that is
        larger than what is wanted of it may be."""
        with self._lock:
            size = self._sizes.get(name, 0)
        if size > most_bytes:
            raise BlobStoreError(
                "INVALID_ARGUMENT",
                f"blob {name} has {size} bytes: expected at most {most_bytes} of what it is to be",
            )
        return b"".join(self.read(name))

    # ------------------------------------------------------------ writing

    def begin(self, name: str, size: int, offset: int = 0, by: str = "") -> Upload | None:
        """An upload of a blob that goes on at `offset`; None when the blob is here already. `by`:
        the subject that it is announced by; empty: nobody has an identity.

        Raises BlobStoreError when the name is no SHA-256, a limit would be passed, or the part that
        is here does not end at `offset` (ABORTED: ask `size_of` and begin again there).
        """
        if not HASH.fullmatch(name):
            raise BlobStoreError(
                "INVALID_ARGUMENT",
                f"{name[:80]!r} is no blob hash: expected 64 lowercase hexadecimal digits",
            )
        with self._lock:
            if name in self._sizes:
                self._touch(name)
                if self._sizes[name] != size:
                    raise BlobStoreError(
                        "INVALID_ARGUMENT",
                        f"blob {name} has {self._sizes[name]} bytes, the upload announces {size}",
                    )
                return None
            self._check_limits(name, size, by)
            shared = name not in self._writing
            here = self._parts.get(name, 0) if shared else 0
            if offset not in (0, here):
                raise BlobStoreError(
                    "ABORTED",
                    f"an upload of blob {name} would go on at byte {offset}, the part that is here "
                    f"ends at {here}: begin there",
                )
            if shared:
                self._writing.add(name)
                self._parts.pop(name, None)
            file_name = name if shared else f"{name}.{next(self._count)}"
            upload = Upload(self, name, size, self._path("part", file_name), shared, by)
            self._open[upload] = size
        try:
            upload.start(offset)
        except OSError as error:
            upload.stop()
            raise BlobStoreError(
                "RESOURCE_EXHAUSTED", f"the broker cannot write: {error}"
            ) from error
        return upload

    def put(self, data: bytes) -> str:
        """Stores bytes that are at hand; returns their name."""
        name = hashlib.sha256(data).hexdigest()
        upload = self.begin(name, len(data))
        if upload is not None:
            upload.write(data)
            upload.finish()
        return name

    def _check_limits(self, name: str, size: int, by: str) -> None:
        most = self.limits
        if size > most.blob_bytes:
            raise BlobStoreError(
                "RESOURCE_EXHAUSTED",
                f"blob {name} has {size} bytes: expected at most {most.blob_bytes}",
            )
        here = sum(held for part, held in self._parts.items() if part != name)
        here += self._held + sum(upload.written for upload in self._open)
        coming = Counter[str]()  # by subject; what is written is of the disk already
        for upload, announced in self._open.items():
            coming[upload.by] += announced - upload.written
        if by and coming[by] + size > most.of_one * most.total_bytes:
            raise BlobStoreError(
                "RESOURCE_EXHAUSTED",
                f"blob {name} has {size} bytes, and {by} has announced {coming[by]} that have not "
                f"come: expected at most {most.of_one * most.total_bytes:.0f} of one subject",
            )

        def promised(room: int) -> int:
            """What this subject's uploads need of it, and others keep from it."""
            return sum(
                announced if who in ("", by) else min(announced, int(most.of_one * room))
                for who, announced in coming.items()
            )

        room = most.total_bytes - here
        if (held := here + promised(max(0, room))) + size > most.total_bytes:
            raise BlobStoreError(
                "RESOURCE_EXHAUSTED",
                f"blob {name} has {size} bytes; the broker holds {held} of at most "
                f"{most.total_bytes}, {held + size - most.total_bytes} too many. What no run needs "
                f"goes {most.grace_s / 3600:.3g} h after its last use",
            )
        room = self._free(self.folder) - most.spare_bytes
        left = room - promised(max(0, room))
        if size - self._parts.get(name, 0) > left:
            raise BlobStoreError(
                "RESOURCE_EXHAUSTED",
                f"blob {name} has {size} bytes, and the broker's disk has room for {max(0, left)} "
                "more: make room there",
            )
        if len(self._sizes) + len(self._parts) + len(self._open) >= most.blobs:
            raise BlobStoreError(
                "RESOURCE_EXHAUSTED", f"the broker holds {most.blobs} blobs, its limit"
            )

    # ------------------------------------------------------------ collecting

    def collect(self, needed: Collection[str]) -> tuple[int, int]:
        """Removes what is neither needed nor used within `grace_s`; how many files, and bytes.
        Others get at the store between any two files."""
        with self._lock:
            since = self._clock() - self.limits.grace_s
            idle = [n for n, used in self._used.items() if used < since and n not in needed]
        count = size = 0
        for name in idle:
            with self._lock:
                if self._used.get(name, since) >= since:  # somebody has asked for it meanwhile
                    continue
                if name in self._sizes:
                    size += self._sizes[name]
                    self._held -= self._sizes.pop(name)
                    self._path("whole", name).unlink(missing_ok=True)
                    count += 1
                if name in self._parts:  # nobody writes it now
                    size += self._parts.pop(name)
                    self._path("part", name).unlink(missing_ok=True)
                    count += 1
                if name not in self._writing:
                    del self._used[name]
        return count, size

    def _ended(self, upload: Upload, *, whole: bool, part_bytes: int | None) -> None:
        """An upload's file is closed. part_bytes: what of it stays for a later upload."""
        with self._lock:
            self._open.pop(upload, None)
            if upload.shared:
                self._writing.discard(upload.name)
            if whole:
                os.replace(upload.path, self._path("whole", upload.name))
                self._used[upload.name] = self._clock()
                if upload.name not in self._sizes:
                    self._sizes[upload.name] = upload.size
                    self._held += upload.size
            elif upload.shared and part_bytes:
                self._parts[upload.name] = part_bytes
                self._used[upload.name] = self._clock()
            else:
                upload.path.unlink(missing_ok=True)


class Upload:
    """One upload of one blob; ends by `finish` or `stop`. `stop` may come from another thread than
    `write`, and waits for it."""

    def __init__(
        self, store: BlobStore, name: str, size: int, path: Path, shared: bool, by: str
    ) -> None:
        self.by = by
        self.name = name
        self.size = size
        self.path = path
        self.shared = shared
        self.written = 0
        self._store = store
        self._hash = hashlib.sha256()
        self._fd: int | None = None
        self._busy = threading.RLock()

    def __repr__(self) -> str:
        return f"<Upload {self.name[:8]} {self.written}/{self.size} bytes>"

    def start(self, offset: int) -> None:
        """Opens the file and hashes what is kept of it."""
        flags = os.O_RDWR | os.O_CREAT | (0 if offset else os.O_TRUNC)
        self._fd = os.open(self.path, flags, 0o600)
        while self.written < offset:
            data = os.pread(self._fd, min(_READ_BYTES, offset - self.written), self.written)
            if not data:
                raise OSError(f"{self.path} ends at byte {self.written}, expected {offset}")
            self._hash.update(data)
            self.written += len(data)

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes. Raises BlobStoreError when they are more than announced, or cannot be
        kept."""
        with self._busy:
            if self._fd is None:
                raise BlobStoreError(
                    "ABORTED", f"the upload of blob {self.name} was ended by the broker"
                )
            if self.written + len(data) > self.size:
                raise BlobStoreError(
                    "INVALID_ARGUMENT",
                    f"blob {self.name}: {self.written + len(data)} bytes came, {self.size} were "
                    "announced",
                )
            try:
                view = memoryview(data)
                while view:
                    done = os.pwrite(self._fd, view, self.written)
                    self._hash.update(view[:done])
                    self.written += done
                    view = view[done:]
            except OSError as error:
                why = f"the broker cannot write: {error.strerror}"
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    why = (
                        f"the broker's disk is full: blob {self.name} ends at byte {self.written} "
                        f"of {self.size}; make room there, and it goes on"
                    )
                raise BlobStoreError("RESOURCE_EXHAUSTED", why) from error

    def finish(self) -> None:
        """All bytes came: the blob is there. Raises BlobStoreError when they are too few (the part
        is kept) or not the ones that the name says (nothing is kept)."""
        with self._busy:
            if self.written < self.size:
                self.stop()
                raise BlobStoreError(
                    "ABORTED",
                    f"blob {self.name}: {self.written} of {self.size} bytes came; go on there",
                )
            found = self._hash.hexdigest()
            if found != self.name:
                self.written = 0  # nothing of it is worth keeping
                self.stop()
                raise BlobStoreError(
                    "INVALID_ARGUMENT",
                    f"the {self.size} bytes have SHA-256 {found}, not {self.name}",
                )
            if self._fd is not None:
                os.fsync(self._fd)  # the name promises the content, also after a power cut
            self._close()
            self._store._ended(self, whole=True, part_bytes=None)

    def stop(self) -> None:
        """Ends it early; what was written can be gone on from. Nothing happens after the end."""
        with self._busy:
            if self in self._store._open:
                self._close()
                self._store._ended(self, whole=False, part_bytes=self.written)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
