"""Weights go from where they lie to a broker, shard by shard, none of them twice.

Each shard is read once, hashed, and sent where the broker lacks it: a few at a time, so that memory
does not grow with the model. An upload that is cut off goes on where it was, in the middle of a
shard too, as all that is there has its hash for a name. Hashes are remembered on this machine by
the file's identity (size and time of its change, or entity tag): what is there already, of a large
file on the web for instance, is not read again.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...net.blobs.client import BlobClient
from ...net.surroundings import cache_home
from ...proto.broker_pb2 import WeightFile
from ...proto.common_pb2 import BlobRef
from .shards import Cut, Pretrained
from .weight_files import File, WeightFilesError

__all__ = ["Remembered", "send", "several", "there"]

_AT_ONCE = 3
"""Shards in memory: one is read and hashed while another is on its way; the third hides the round
trips of both."""
_MOST_ASKED = 10_000
"""Blobs in one question, as many as a broker takes."""
_ASKED_EVERY_S = 3600.0
"""What nobody asks for goes after a day, and an upload may take longer."""
_SAID_AFTER_S = 5.0
"""Until the rate is said for the first time; twice as long each time after that."""

Say = Callable[[str], None]


async def send(
    blobs: BlobClient,
    pretrained: Pretrained,
    say: Say = lambda line: None,
    *,
    urls: bool = False,
    cache: Path | None = None,
) -> WeightFile:
    """Stores what the broker lacks, and the manifest. `urls`: nothing but the manifest, which says
    where on the web peers read; `cache`: where hashes are remembered.

    Raises WeightFilesError for a file that is not what it was, BlobTransferError.
    """
    sending = _Sending(blobs, pretrained, say, urls, cache)
    hashes = await sending.all()
    manifest = pretrained.manifest(hashes, urls=urls).to_json().encode()
    return WeightFile(blob=await blobs.store(manifest), sharded=True)


async def several(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do some work several times side by side. Raises what the first of them raises that fails."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def there(blobs: BlobClient, refs: Sequence[BlobRef]) -> list[BlobRef]:
    """Return those of some blobs that the broker has whole, however many are asked for."""
    found: list[BlobRef] = []
    for at in range(0, len(refs), _MOST_ASKED):
        some = refs[at : at + _MOST_ASKED]
        sizes = await blobs.have(some)
        found += [r for r, size in zip(some, sizes, strict=True) if size == r.size_bytes]
    return found


class _Sending:
    def __init__(
        self, blobs: BlobClient, pretrained: Pretrained, say: Say, urls: bool, cache: Path | None
    ) -> None:
        self._blobs, self._pretrained, self._say, self._urls = blobs, pretrained, say, urls
        used = dict.fromkeys(cut.file for cut in pretrained.cuts)
        self._files = {name: pretrained.stored.files[name] for name in used}
        self._known = {name: Remembered(file, cache) for name, file in self._files.items()}
        self._there: set[str] = set()  # hashes of shards that the broker has
        self._left: list[Cut] = []  # the next one last
        self._asked_s = 0.0
        self._hashes: dict[Cut, str] = {}
        self._done = self._sent = 0  # bytes
        self._began_s, self._say_in_s = time.monotonic(), _SAID_AFTER_S

    async def all(self) -> dict[Cut, str]:
        lacking = list(self._pretrained.cuts)
        self._there = await self._asked([(c, self._known[c.file].get(c)) for c in lacking])
        while lacking:
            self._left = lacking[::-1]
            await several(self._work)
            for name, file in self._files.items():
                try:
                    file.check()
                except WeightFilesError:
                    self._known[name].forget()
                    raise
            # What came days ago may have been removed: the broker knows of no run that needs it.
            lacking = [] if self._urls else await self._removed()
        return self._hashes

    async def _asked(self, cuts: Iterable[tuple[Cut, str | None]]) -> set[str]:
        """The hashes of those that the broker has, which counts as a use of each."""
        refs = [BlobRef(hash=name, size_bytes=cut.length) for cut, name in cuts if name]
        found = await there(self._blobs, refs)
        self._asked_s = time.monotonic()
        return {ref.hash for ref in found}

    async def _removed(self) -> list[Cut]:
        self._there = await self._asked(self._hashes.items())
        return [cut for cut, name in self._hashes.items() if name not in self._there]

    async def _work(self) -> None:
        while self._left:
            cut = self._left.pop()
            self._hashes[cut] = await self._one(cut)
            self._done += cut.length
            self._progress()
            if not self._urls and time.monotonic() - self._asked_s > _ASKED_EVERY_S:
                await self._asked(self._hashes.items())

    async def _one(self, cut: Cut) -> str:
        """The hash of a shard that is there now."""
        known = self._known[cut.file].get(cut)
        if known and (self._urls or known in self._there):
            return known
        data = await asyncio.to_thread(self._pretrained.read, cut)
        if self._urls:
            found = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
        else:
            found = (await self._blobs.store(data)).hash
            self._sent += cut.length
        if known and found != known:
            self._known[cut.file].forget()
            raise WeightFilesError(
                f"{cut.file} has another content than before, from byte {cut.begin} on: it was "
                "changed and has the same size and time. Submit again: it is read anew"
            )
        self._known[cut.file].put(cut, found)
        return found

    def _progress(self) -> None:
        passed_s = time.monotonic() - self._began_s
        if passed_s < self._say_in_s or not self._left:
            return
        self._say_in_s = min(2 * self._say_in_s, passed_s + 600.0)
        total, what = self._pretrained.size_bytes, "read" if self._urls else "uploaded"
        left_s = (total - self._done) * passed_s / self._done
        self._say(
            f"{self._done / 1e9:.2f} of {total / 1e9:.2f} GB of weights are {what}, "
            f"{self._done / passed_s / 1e6:.1f} MB/s: {_spoken(left_s)} to go (stopped, it goes on "
            "from there)"
        )


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Remembered:
    """The hashes of parts of a file, on disk by its identity. Losing them costs reading it again;
    so nothing about the disk is an error."""

    _LINE = re.compile(r"(\d{1,18}) (\d{1,18}) ([0-9a-f]{64})\n")

    def __init__(self, file: File, folder: Path | None = None) -> None:
        self._path: Path | None = None
        self._hashes: dict[tuple[int, int], str] = {}
        if not file.identity:
            return
        named = hashlib.sha256(file.identity.encode()).hexdigest()
        try:
            self._path = (folder or cache_home() / "shoal" / "hashes") / named
            for line in self._path.read_text().splitlines(keepends=True):
                if found := self._LINE.fullmatch(line):  # else it was cut off
                    self._hashes[int(found[1]), int(found[2])] = found[3]
        except (OSError, ValueError):
            pass

    def get(self, cut: Cut) -> str | None:
        return self._hashes.get((cut.begin, cut.length))

    def put(self, cut: Cut, hash: str) -> None:
        if self._path is None or self.get(cut) == hash:
            return
        self._hashes[cut.begin, cut.length] = hash
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as lines:
                lines.write(f"{cut.begin} {cut.length} {hash}\n")
        except OSError:
            self._path = None

    def forget(self) -> None:
        self._hashes.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
