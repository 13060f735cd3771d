"""Data that stays with this host: made into shards in the peer's own folder, and read from there.

A submitter says how to read it (the job's [data] table) and gets a manifest: numbers, shapes and
names of shards. What may leave is decided by the columns of that manifest, as the file has them,
whatever the table calls them: a column stays unless its owner lists it and the job does not keep
it. Right before a column's shards are stored with the broker the owner's list is asked again.

A column that stays has shards whose names are keyed hashes (HMAC-SHA-256 with a secret of this
host), so that nobody can try guesses at the data against the manifest. The peers of one host share
the secret: with the same data they make the same manifest. Columns that leave have ordinary content
hashes.

An error's text has no path of this host and no word of a library about the file, which may quote
its content. All methods but `make_in_turn` block; from any thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...job.settings import json_object
from ...job.tables import Data
from ...net.blobs.client import BlobClient, BlobTransferError
from ...proto import broker_pb2, common_pb2
from ..data.array_files import matching
from ..data.manifest import DataError, Manifest
from ..data.sources import resolve
from ..logs import note
from .rights import OwnData

__all__ = ["Catalogue", "Made", "answer", "host_secret", "offers"]

_log = logging.getLogger(__name__)

MOST_WAYS = 64
"""Ways of reading this host's data that are remembered of one submitter, and that may wait at once,
as many as the broker remembers answers of a peer."""


@dataclass(frozen=True)
class Made:
    """One way of reading the data set `data`. `kept`: the columns that stay here; `shards`: files
    by name."""

    data: str
    manifest: Manifest
    kept: frozenset[str]
    shards: Mapping[str, Path]

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the manifest, as hex digits."""
        return hashlib.sha256(self.manifest.to_json().encode()).hexdigest()

    @property
    def local(self) -> tuple[str, ...]:
        """Inputs of the model that are read from columns that stay."""
        made = self.manifest
        return tuple(name for name in made.fields if made.sources(name) in self.kept)

    @property
    def leaving(self) -> tuple[tuple[str, Path], ...]:
        """The files of all other columns, each with its column."""
        found = ((s.column, s.hash) for s in self.manifest.shards if s.column not in self.kept)
        return tuple((column, self.shards[name]) for column, name in dict.fromkeys(found))


def offers(data: Mapping[str, Mapping[str, Any]]) -> list[broker_pb2.DataSet]:
    """What a profile says of the tables of peer.toml."""
    sets = ((name, OwnData.from_table(table)) for name, table in data.items())
    return [broker_pb2.DataSet(name=name, users=one.users or ()) for name, one in sets]


def host_secret(folder: Path) -> bytes:
    """The secret in a folder; made when it is not there. For its owner only."""
    path = folder / "data-secret"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    try:
        os.link(new, path)  # of several peers that start together, the first one's counts
    except FileExistsError:
        pass
    finally:
        new.unlink()
    return path.read_bytes()


class Catalogue:
    """Makes shards of data that stays with this host, and serves them from the peer's own folder.
    `folder` is this process's alone; `data`: the tables of peer.toml."""

    def __init__(self, folder: Path, data: Mapping[str, Mapping[str, Any]], secret: bytes) -> None:
        self.folder = folder
        self.data = {name: OwnData.from_table(table) for name, table in data.items()}
        self._secret = secret
        self._reading = threading.Lock()  # one is read at a time: each may take much memory
        self._turn = asyncio.Lock()  # who waits takes no thread: others need theirs
        self._asking: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str, str, object], Made] = {}
        """By submitter, data set, options, and what the files were then; last used comes last."""

    async def make_in_turn(self, name: str, options: str, submitter: str) -> Made:
        """`make` in a thread, one ask after the other. Raises as it does, and DataError for who has
        too many asks open."""
        if self._asking[submitter] >= MOST_WAYS:
            raise DataError(
                f"{MOST_WAYS} requests of {submitter or 'nobody'} wait here already: ask again "
                "when some are answered"
            )
        self._asking[submitter] += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(self.make, name, options, submitter)
        finally:
            self._asking[submitter] -= 1
            self._asking += Counter()  # forgets who has none

    def make(self, name: str, options: str, submitter: str) -> Made:
        """The manifest of a data set for a job's [data] table. Raises ValueError, with no path of
        this host in its text; OSError for a full disk."""
        mine = self._allowed(name, submitter)
        wanted = Data.from_table(json_object(options))
        with self._reading:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # copies of private data
            way = name, options, _seen(mine.path)
            with self._lock:
                same = (made for (_, *before), made in self._made.items() if (*before,) == way)
                made = next(same, None)
            made = made or self._make(name, mine, wanted)
            self._use((submitter, *way), made)
        return made

    def _use(self, key: tuple[str, str, str, object], made: Made) -> None:
        with self._lock:
            self._made.pop(key, None)
            self._made[key] = made
            theirs = [other for other in self._made if other[0] == key[0]]
            for old in theirs[:-MOST_WAYS]:  # who asks for many loses their own
                del self._made[old]

    def check(self, manifest: str, submitter: str, local: Collection[str]) -> None:
        """Raises DataError when a run with one of this host's manifests may not have its data, or
        would have it read elsewhere. `local`: the inputs that its plan keeps."""
        found = self._of(manifest)
        if not found:
            return
        for key, made in found:
            self._use(key, made)
        self._allowed(made.data, submitter)
        if lost := [n for n in made.local if n not in local]:
            which = ", ".join(lost)
            raise DataError(f"the plan does not keep {which} beside the data {made.data!r}")

    def has(self, manifest: str) -> bool:
        """Whether a manifest is of this host's data."""
        return bool(self._of(manifest))

    def path(self, manifest: str, shard: str) -> Path | None:
        """Where a shard of a manifest of this host's is; None: it is none. A shard is read by the
        manifest that it was made for, and by no other: that one could have it go elsewhere."""
        found = self._of(manifest)
        return found[0][1].shards.get(shard) if found else None

    def _of(self, manifest: str) -> list[tuple[tuple[str, str, str, object], Made]]:
        with self._lock:
            return [(key, made) for key, made in self._made.items() if made.hash == manifest]

    def may_leave(self, name: str, column: str) -> bool:
        """Whether a data set's owner lets runs copy a column to the broker."""
        return column in self.data[name].leaves

    def _allowed(self, name: str, submitter: str) -> OwnData:
        mine = self.data.get(name)
        if mine is None:
            known = ", ".join(self.data) or "none"
            raise DataError(f"this peer has no data called {name!r}; it has: {known}")
        if mine.users is not None and submitter not in mine.users:
            raise DataError(f"its owner does not let {submitter or 'nobody'} use {name!r}")
        return mine

    def _make(self, name: str, mine: OwnData, wanted: Data) -> Made:
        asked = _asked(wanted)

        def stays(column: str) -> bool:
            return column in asked or not self.may_leave(name, column)

        def named(column: str, data: memoryview) -> str:
            if not stays(column):
                return hashlib.sha256(data).hexdigest()
            # Equal columns and equal data sets cannot be told by their names, either.
            keyed = hmac.new(self._secret, digestmod=hashlib.sha256)
            keyed.update(json.dumps([name, column]).encode())
            keyed.update(data)
            return keyed.hexdigest()

        try:
            manifest, paths = resolve(
                self.folder / name,
                kind=wanted.kind,
                source=mine.path,
                holdout=wanted.holdout,
                length=wanted.length,
                inputs=wanted.inputs,
                targets=wanted.targets,
                named=named,
            )
        except DataError as error:
            if error.__cause__ is not None:  # a library's words, which may tell of the content
                why = getattr(error.__cause__, "strerror", None) or type(error.__cause__).__name__
                raise DataError(f"{name} cannot be read: {why}") from None
            raise DataError(str(error).replace(mine.path, name)) from None
        kept = frozenset(c.name for c in manifest.columns if stays(c.name))
        return Made(name, manifest, kept, paths)


def _asked(wanted: Data) -> Collection[str]:
    """The columns that a job itself wants to stay."""
    if wanted.keep_local == "none":
        return ()
    if wanted.kind != "arrays":  # inputs and labels are the same tokens
        return ("tokens",)
    return wanted.input_names if wanted.keep_local == "inputs" else (wanted.targets,)


def _seen(source: str) -> object:
    """Return what differs when the files do, also where one of another time and the same size takes
    the place of one with its time set back."""
    found = ((p.name, p.stat()) for p in matching(source))
    return tuple((n, s.st_ino, s.st_ctime_ns, s.st_mtime_ns, s.st_size) for n, s in found)


async def answer(
    catalogue: Catalogue, ask: broker_pb2.Resolve, blobs: BlobClient
) -> broker_pb2.PeerMessage:
    """What to tell the broker: makes the manifest in a thread, stores what may leave, then it."""
    found = broker_pb2.Resolved(number=ask.number)
    problem = ""
    try:
        made = await catalogue.make_in_turn(ask.data, ask.options, ask.submitter)
        for column, path in made.leaving:
            if not catalogue.may_leave(made.data, column):
                raise AssertionError(f"{column} of {made.data} would leave, and its owner keeps it")
            await blobs.store(path)
        found.manifest.CopyFrom(await blobs.store(made.manifest.to_json().encode()))
        found.local.extend(made.local)
        found.blended = catalogue.data[made.data].blends_leave
    except (ValueError, BlobTransferError) as error:
        problem = str(error)
    except OSError as error:  # its text may have a path of this host
        problem = f"{ask.data!r} cannot be prepared: {error.strerror or type(error).__name__}"
    except Exception as error:
        # Any file can be asked to be read as anything: that ends neither the peer nor its run.
        note(_log, logging.ERROR, "data not read", data=ask.data, why=repr(error))
        problem = f"{ask.data!r} cannot be read as asked: {type(error).__name__}"
    if problem:
        found.problem.CopyFrom(common_pb2.Reason(code="data", text=problem))
    return broker_pb2.PeerMessage(resolved=found)
