"""The SQLite file of admissions, and the note beside it by which an older one is found out.

FILE         invitations, parties, and which party used which invitation
FILE.last    how many changes were confirmed: 8 bytes, and a checksum of 4

Who was kicked is refused because this file says so: an emptied one, or an older copy, would let
everybody in again. So every change is counted in the file, by triggers in its own transaction, and
the count stands beside it too. A file with fewer changes is refused, as is one that is damaged or
gone while the note is there.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

from ...net.surroundings import SurroundingsError

__all__ = ["AdmissionsFile"]

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS invitations (
  id TEXT PRIMARY KEY, proof BLOB NOT NULL, role TEXT NOT NULL, uses INTEGER NOT NULL,
  used INTEGER NOT NULL DEFAULT 0, ends_s REAL NOT NULL, by TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS parties (
  subject TEXT PRIMARY KEY, role TEXT NOT NULL, key BLOB NOT NULL UNIQUE, invitation TEXT NOT NULL,
  joined_s REAL NOT NULL, kicked_s REAL) STRICT;
CREATE TABLE IF NOT EXISTS uses (
  subject TEXT NOT NULL, invitation TEXT NOT NULL, PRIMARY KEY (subject, invitation)) STRICT;
INSERT OR IGNORE INTO uses SELECT p.subject, p.invitation FROM parties p
  JOIN invitations i ON i.id = p.invitation;
CREATE TABLE IF NOT EXISTS guard (changes INTEGER NOT NULL) STRICT;
INSERT INTO guard SELECT 1 WHERE NOT EXISTS (SELECT * FROM guard);
""" + "".join(
    f"CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON {table} "
    "BEGIN UPDATE guard SET changes = changes + 1; END;\n"
    for table in ("invitations", "parties", "uses")
    for event in ("insert", "update", "delete")
)
_NOTE = struct.Struct("<QI")


class AdmissionsFile:
    """`db` is open until `close`, and changed within `changing` only. `path` None: in memory.
    Raises SurroundingsError where the file cannot be had, or lacks what was confirmed."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._note: int | None = None
        try:
            self.db = sqlite3.connect(path or ":memory:", isolation_level=None)
            try:
                self._open()
            except BaseException:
                self.close()
                raise
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None
        except OSError as error:
            if isinstance(error, SurroundingsError):
                raise
            raise self._unusable(f"{self._beside}: {error.strerror}") from None

    def _open(self) -> None:
        run = self.db.execute
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")  # used up means used up, after a crash too
        tables = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and (found := run("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise self._unusable(str(found))
        if self._path is not None and (confirmed := self._confirmed()) is not None:
            if "parties" not in tables:
                raise self._short("is empty or was removed")
            changes = self._changes() if "guard" in tables else 0
            if changes < confirmed:
                raise self._short(f"has {changes} changes of {confirmed}")
        self.db.executescript(_SCHEMA)
        if self._path is not None:
            self._note = os.open(self._beside, os.O_RDWR | os.O_CREAT, 0o600)
            self._confirm()

    def _changes(self) -> int:
        return int(self.db.execute("SELECT coalesce(max(changes), 0) FROM guard").fetchone()[0])

    @property
    def _beside(self) -> Path:
        assert self._path is not None
        return self._path.with_name(self._path.name + ".last")

    def _confirmed(self) -> int | None:
        """Changes that were confirmed, at least; None where nothing ever was."""
        try:
            data = self._beside.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) != _NOTE.size:
            return 0
        count, check = _NOTE.unpack(data)
        return int(count) if check == crc32(data[:8]) else 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """One change: on disk and noted at the block's end, or, where it raises, not made at all.
        Raises SurroundingsError where the disk does not take it."""
        try:
            with self.db:
                self.db.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.IntegrityError:
            raise  # what is written, not the disk
        except sqlite3.Error as error:
            raise SurroundingsError(
                f"{self._path}: {error}: nothing was changed; make room there, or see to the "
                "disk, and try again"
            ) from None
        try:
            self._confirm()
        except OSError as error:  # the change is on disk; only the note is older
            log.warning("admissions_not_noted why=%s", error.strerror)

    def _confirm(self) -> None:
        """Notes that what was changed until now is on disk. In place, in one write within one
        sector, so that it needs no room."""
        if self._note is not None:
            data = struct.pack("<Q", self._changes())
            os.pwrite(self._note, data + struct.pack("<I", crc32(data)), 0)

    def close(self) -> None:
        """Closes the file and the note beside it."""
        self.db.close()
        if self._note is not None:
            os.close(self._note)
            self._note = None

    def _short(self, what: str) -> SurroundingsError:
        return SurroundingsError(
            f"{self._path} {what}, and {self._beside.name} beside it says that more was confirmed: "
            "it is damaged, or an older copy, and who was kicked could come in again. Restore both "
            f"from a backup; or remove {self._beside.name} to go on with what is there, kick again "
            "whoever is to stay out, and invite anew"
        )

    def _unusable(self, why: str) -> SurroundingsError:
        return SurroundingsError(
            f"{self._path}: {why}: expected the broker's list of admissions; is its folder "
            "writable and the disk not full? A file that is broken: restore it from a backup"
        )
