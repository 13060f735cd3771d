"""Who a peer is across restarts: an id and a counter of starts, in a folder that one process owns.

FOLDER/peer.json   {"peer": "home-1-3fa2c1", "starts": 7}
FOLDER/lock        held by the running process, of any host that shares the folder by a file system
                   with locks (NFS of Linux has them), and names both; free when it is gone
FOLDER/scratch/    copies of this host's own data; emptied at every start and at the end
FOLDER/blobs/      what this process fetched, and after one that was killed what that did
                   (peer/blobs/cache.py); removed at the end
FOLDER/snapshots/  what a run can go on from; stays until the broker says that nobody needs it
FOLDER/clients/    state of clients of the newest federated run that has such; stays until another
                   one is worked on here
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...dag.plan.plan import PeerId
from ...net.identity.credential import write_private
from ...net.surroundings import naming, try_lock

__all__ = ["Identity", "IdentityError", "seat"]


class IdentityError(ValueError):
    """The folder is in use, or what lies in it is no identity."""


@contextmanager
def seat(folder: Path, name: str) -> Iterator[int]:
    """The lowest number, from 1 up, that no other living process has taken for this name; taken
    until the end of the block. So the same join line, pasted again, makes another peer, and after
    a restart each has the identity of its number again. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / f"{name}.{number}.seat"
        with open(path, "a") as lock:
            if try_lock(lock, path):
                yield number
                return


@dataclass(frozen=True)
class Incarnation:
    """One start of a peer. `counter` is higher than that of every start before on this host."""

    peer: PeerId
    boot: str
    counter: int
    scratch: Path

    @property
    def blobs(self) -> Path:
        return self.scratch.with_name("blobs")

    @property
    def snapshots(self) -> Path:
        return self.scratch.with_name("snapshots")

    @property
    def clients(self) -> Path:
        return self.scratch.with_name("clients")


class Identity:
    """`with Identity(folder, name) as me:` owns the folder until the end of the block; `name` is
    the readable part of a new id. Raises IdentityError, also when another process owns it, and
    OSError where the folder cannot be written or locked."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._lock: IO[str] | None = None

    def __enter__(self) -> Incarnation:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._acquire()
        try:
            peer, starts = self._read()
            self._write(peer, starts + 1)
            scratch = self.folder / "scratch"
            shutil.rmtree(scratch, ignore_errors=True)  # of a start that was killed
            scratch.mkdir(mode=0o700)
            me = Incarnation(peer, secrets.token_hex(8), starts + 1, scratch)
            me.blobs.mkdir(mode=0o700, exist_ok=True)
        except BaseException:
            with suppress(OSError):
                self._lock.close()
            raise
        return me

    def __exit__(self, *error: object) -> None:
        for name in ("scratch", "blobs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        assert self._lock is not None
        self._lock.close()

    def _acquire(self) -> IO[str]:
        path = self.folder / "lock"
        lock = open(path, "a+")  # noqa: SIM115  # closed by __exit__
        try:
            if not try_lock(lock, path):
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                raise IdentityError(
                    f"process {owner} already runs as the peer of {self.folder}: stop it, or give "
                    "this one a folder of its own with --state"
                )
            with naming(path):
                lock.truncate(0)
                lock.write(f"{os.getpid()} on {platform.node()}")
                lock.flush()
        except BaseException:
            with suppress(OSError):  # what could not be written cannot be on closing either
                lock.close()
            raise
        return lock

    def _read(self) -> tuple[PeerId, int]:
        path = self.folder / "peer.json"
        if not path.exists():
            readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.name).strip("-")[:64] or "peer"
            return PeerId(f"{readable}-{secrets.token_hex(3)}"), 0
        try:
            found = json.loads(path.read_text())
            peer, starts = found["peer"], found["starts"]
            if not isinstance(peer, str) or not peer or not isinstance(starts, int) or starts < 0:
                raise ValueError("expected a peer id and a count")
        except (ValueError, KeyError, TypeError) as error:
            raise IdentityError(
                f"{path} is not the identity of a peer ({error}): "
                'expected {"peer": ID, "starts": N}; remove it to join under a new id'
            ) from None
        return PeerId(peer), starts

    def _write(self, peer: PeerId, starts: int) -> None:
        data = json.dumps({"peer": peer, "starts": starts}).encode()
        write_private(self.folder / "peer.json", data)  # a crash leaves the old one or the new one
