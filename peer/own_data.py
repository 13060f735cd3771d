"""Data that stays with this host: made into shards in the peer's own folder, and read from there.

A submitter says how to read it (the job's [data] table) and gets a manifest: numbers, shapes and
names of shards. A column that may not leave has shards whose names are keyed hashes (HMAC-SHA-256
with a secret of this host), so that nobody can try guesses at the data against the manifest. The
peers of one host share the secret: with the same data they make the same manifest. Columns that may
leave have ordinary content hashes, and are stored with the broker.

All methods block; from any thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any

from ..job.settings import json_object
from ..job.tables import Data
from ..net.blobs_client import BlobClient, BlobTransferError
from ..proto import broker_pb2, common_pb2
from .data.manifest import DataError, Manifest
from .data.sources import resolve
from .rights import OwnData

__all__ = ["Catalogue", "Made", "answer", "host_secret", "offers"]


@dataclass(frozen=True)
class Made:
    """One way of reading a data set. `local`: inputs of the model whose data stays here; `shards`:
    files by name; `leaving`: those that may leave."""

    manifest: Manifest
    local: tuple[str, ...]
    shards: Mapping[str, Path]
    leaving: tuple[Path, ...]

    @cached_property
    def hash(self) -> str:
        """Of the manifest."""
        return hashlib.sha256(self.manifest.to_json().encode()).hexdigest()


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
    """See the module. `folder` is this process's alone; `data`: the tables of peer.toml."""

    def __init__(self, folder: Path, data: Mapping[str, Mapping[str, Any]], secret: bytes) -> None:
        self.folder = folder
        self.data = {name: OwnData.from_table(table) for name, table in data.items()}
        self._secret = secret
        self._lock = threading.Lock()  # one is read at a time: each may take much memory
        self._made: dict[tuple[str, str], tuple[object, Made]] = {}
        self._known: dict[str, tuple[str, Made]] = {}  # by manifest, with the data set's name

    def make(self, name: str, options: str, submitter: str) -> Made:
        """The manifest of a data set for a job's [data] table. Raises ValueError, with no path of
        this host in its text; OSError for a full disk."""
        mine = self._allowed(name, submitter)
        wanted = Data.from_table(json_object(options))
        with self._lock:
            seen = _seen(mine.path)
            before = self._made.get((name, options))
            if before is None or before[0] != seen:
                made = self._make(name, mine, wanted)
                before = self._made[name, options] = seen, made
                self._known[made.hash] = name, made
        return before[1]

    def check(self, manifest: str, submitter: str, local: Collection[str]) -> None:
        """Raises DataError when a run with one of this host's manifests may not have its data, or
        would have it read elsewhere. `local`: the inputs that its plan keeps."""
        if manifest not in self._known:
            return
        name, made = self._known[manifest]
        self._allowed(name, submitter)
        if lost := [n for n in made.local if n not in local]:
            which = ", ".join(lost)
            raise DataError(f"the plan does not keep {which} beside the data {name!r}")

    def path(self, manifest: str, shard: str) -> Path | None:
        """Where a shard of a manifest of this host's is; None: it is none. A shard is read by the
        manifest that it was made for, and by no other: that one could have it go elsewhere."""
        known = self._known.get(manifest)
        return None if known is None else known[1].shards.get(shard)

    def _allowed(self, name: str, submitter: str) -> OwnData:
        mine = self.data.get(name)
        if mine is None:
            known = ", ".join(self.data) or "none"
            raise DataError(f"this peer has no data called {name!r}; it has: {known}")
        if mine.users is not None and submitter not in mine.users:
            raise DataError(f"its owner does not let {submitter or 'nobody'} use {name!r}")
        return mine

    def _make(self, name: str, mine: OwnData, wanted: Data) -> Made:
        inputs = [n.strip() for n in wanted.inputs.split(",") if n.strip()]
        labels = [wanted.targets] if wanted.targets else []
        asked = {"inputs": inputs, "labels": labels, "none": []}[wanted.keep_local]

        def stays(column: str) -> bool:
            return column not in mine.leaves or column in asked

        if wanted.kind == "arrays":
            local = tuple(filter(stays, (*inputs, *labels)))
        else:  # inputs and labels are the same tokens
            local = (*inputs, *labels) if asked or stays("tokens") else ()
        kept = {"tokens"} if wanted.kind != "arrays" and local else set(local)

        def named(column: str, data: memoryview) -> str:
            if column in kept:
                return hmac.new(self._secret, data, hashlib.sha256).hexdigest()
            return hashlib.sha256(data).hexdigest()

        try:
            manifest, paths = resolve(
                self.folder / name,
                kind=wanted.kind,
                source=mine.path,
                holdout=wanted.holdout,
                length=wanted.length,
                inputs=wanted.inputs,
                targets=wanted.targets,
                tokenizer=wanted.tokenizer,
                named=named,
            )
        except DataError as error:
            raise DataError(str(error).replace(mine.path, name)) from None
        leaving = [paths[s.hash] for s in manifest.shards if s.column not in kept]
        return Made(manifest, local, paths, tuple(dict.fromkeys(leaving)))


def _seen(source: str) -> object:
    """Differs when the files do."""
    found = (Path(p) for p in sorted(glob(source, recursive=True)))
    return tuple((p.name, s.st_mtime_ns, s.st_size) for p in found if (s := p.stat()))


async def answer(
    catalogue: Catalogue, ask: broker_pb2.Resolve, blobs: BlobClient
) -> broker_pb2.PeerMessage:
    """What to tell the broker: makes the manifest in a thread, stores what may leave, then it."""
    found = broker_pb2.Resolved(number=ask.number)
    try:
        made = await asyncio.to_thread(catalogue.make, ask.data, ask.options, ask.submitter)
        for path in made.leaving:
            await blobs.store(path)
        found.manifest.CopyFrom(await blobs.store(made.manifest.to_json().encode()))
        found.local.extend(made.local)
    except (ValueError, BlobTransferError) as error:
        found.problem.CopyFrom(common_pb2.Reason(code="data", text=str(error)))
    except OSError as error:  # its text may have a path of this host
        text = f"{ask.data!r} cannot be prepared: {error.strerror or type(error).__name__}"
        found.problem.CopyFrom(common_pb2.Reason(code="data", text=text))
    return broker_pb2.PeerMessage(resolved=found)
