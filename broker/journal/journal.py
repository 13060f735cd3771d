"""The broker's journal: records of decisions, kept by SQLite in one file.

    with Journal(state / "journal.sqlite") as journal:      # None: in memory, for a passing broker
        decided = DurableState(options, journal.records())
        journal.append([record, …])                        # on disk when it returns

- A record is a row: its number, which grows by one, its bytes, and a checksum of both. A row that
  does not fit, and a gap, are found when the journal is read: a broker that went on without them
  would contradict what it has told.
- WAL with synchronous=FULL: `append` returns after an fsync, so that what was told survives a power
  cut too. With NORMAL only the end of the process would be safe. Several records share one fsync.
- `replace` puts a snapshot in the place of all that came before it. It is due when the journal has
  several times the records of the last one, or twice its bytes (`crowded`), so its size stays
  within a factor of what the broker remembers, and the work for it within a factor of the work for
  the records.
- A submission is let in only while the disk has more than a reserve (`free`), which is what runs
  that are there need to go on. A disk that is full all the same is FullError: nothing was written,
  and the same may be tried again.
- SQLite stops at a damaged frame of its log as if the log ended there. So the number and checksum
  of the last confirmed record stand beside the file too (`.last`), written after each fsync and
  without one of its own: a journal that ends before is refused, not taken for an older state.
- One broker at a time: the connection holds the file's lock until it is closed or the process ends.

All methods block on the disk; `append` and `replace` may be called in one other thread.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self
from zlib import crc32

from google.protobuf.message import DecodeError

from ...proto.journal_pb2 import Record
from ..options import BrokerOptions
from .decided import DurableState

__all__ = ["VERSION", "FullError", "Journal", "JournalError", "open_journal"]

log = logging.getLogger(__name__)

VERSION = 4
"""Version of the schema and the meaning of records: it grows with either, and no other one is read.
Plans list their visits since 3; no round is told ahead since 4."""
CROWDED = 4
"""So many times the records of the last snapshot."""
LEAST_RECORDS = 10_000
"""A journal with fewer is never crowded."""
CROWDED_BYTES = 2
"""So many times the bytes of the last snapshot."""
LEAST_BYTES = 64 << 20
"""A journal with fewer is never crowded for its size."""
RESERVE_BYTES = 128 << 20
"""Of the disk, for what runs that are there persist: some 50,000 steps of 20 holders.
Blobs leave twice as much (`BlobLimits.spare_bytes`), so they alone keep nobody from submitting."""
_APPLICATION = 0x53484F41  # "SHOA", in the file's header
_MARK = struct.Struct("<QQII")
"""Numbers of the first and last record, the checksum of the last, and one of all three."""
_WAL_BYTES = 16 << 20


class JournalError(ValueError):
    """The journal cannot be used. One line: what is wrong, with which file, and what to do."""


class FullError(JournalError):
    """The disk has no place for it, now."""


class Journal:
    """Keeps the broker's decisions in one SQLite file and reads them back. Raises JournalError
    wherever the file cannot be had, read or written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.count = 0
        """Records in it."""
        self.size_bytes = 0
        """Of these."""
        self._next = 1
        self._snapshot = self._snapshot_bytes = 0  # records of the last one, and their size
        self._mark: int | None = None  # the open file beside it
        name = "" if path is None else path.name
        self.away = f"move {name} and {name}.last away to begin without the runs in it"
        """Advice for one that cannot be used."""
        self._name = "the journal in memory" if path is None else f"the journal {path}"
        new = path is None or not path.exists()
        try:
            self._db = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=0.0,
                isolation_level=None,  # transactions are begun by hand
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise self._cannot("open", error) from error
        try:
            self._open(new)
        except BaseException:
            self.close()
            raise

    def _open(self, new: bool) -> None:
        run = self._db.execute
        try:
            run("PRAGMA locking_mode = EXCLUSIVE")
            run("BEGIN EXCLUSIVE")  # the lock stays from here on
            version, application = (
                int(run(f"PRAGMA {name}").fetchone()[0])
                for name in ("user_version", "application_id")
            )
            tables = int(run("SELECT count(*) FROM sqlite_master").fetchone()[0])
            if tables and application != _APPLICATION:
                raise JournalError(
                    f"{self._name} is a database of another program: give the broker a state "
                    "folder of its own"
                )
            if tables and version != VERSION:
                raise JournalError(
                    f"{self._name} has version {version}, this broker reads {VERSION}: install the "
                    f"shoal that wrote it, or {self.away}"
                )
            if not tables and self._last() is not None:
                raise self._short("is gone" if new else "is empty")
            if not tables:
                run(
                    "CREATE TABLE record (number INTEGER PRIMARY KEY, data BLOB NOT NULL, "
                    "checksum INTEGER NOT NULL) STRICT"
                )
                run(f"PRAGMA application_id = {_APPLICATION}")
                run(f"PRAGMA user_version = {VERSION}")
            run("COMMIT")
            run("PRAGMA journal_mode = WAL")
            run("PRAGMA synchronous = FULL")
            run(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            first, last, self.count, self.size_bytes = run(
                "SELECT coalesce(min(number), 1), coalesce(max(number), 0), count(*), "
                "coalesce(sum(length(data)), 0) FROM record"
            ).fetchone()
        except sqlite3.Error as error:
            raise self._cannot("open", error) from error
        self._first, self._next = first, last + 1
        if not new:
            self._check_last(last)
        self._open_mark(last)

    def close(self) -> None:
        """The lock is free afterwards."""
        self._db.close()
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None

    # ------------------------------------------------------------ the record beside it

    @property
    def _beside(self) -> Path:
        assert self.path is not None
        return self.path.with_name(self.path.name + ".last")

    def _last(self) -> tuple[int, int, int] | None:
        """Numbers of the first and last record that were confirmed, and the last one's checksum;
        None where that is not known: an older journal, or a damaged note, beside which every record
        still has its own checksum."""
        if self.path is None:
            return None
        try:
            data = self._beside.read_bytes()
        except OSError:
            return None
        if len(data) != _MARK.size:
            return None
        first, number, checksum, check = _MARK.unpack(data)
        return (first, number, checksum) if check == crc32(data[:-4]) else None

    def _check_last(self, last: int) -> None:
        """Raises JournalError where the journal lacks what was confirmed."""
        if self.path is None or (confirmed := self._last()) is None:
            return
        first, number, checksum = confirmed
        if last < number:
            raise self._short(f"ends at record {last}")
        found = self._db.execute("SELECT checksum FROM record WHERE number = ?", (number,))
        row = found.fetchone()  # a snapshot may have taken its place, if this note was lost
        if row is not None and row[0] != checksum:
            raise self._short(f"has another record {number}")
        if self._first != first and self._first <= number:  # else a snapshot took their place
            raise self._short(f"begins at record {self._first}, not {first}")

    def _short(self, what: str) -> JournalError:
        return JournalError(
            f"{self._name} {what}, and {self._beside.name} beside it says that more was confirmed: "
            "the end of it is damaged, or it is an older copy. Put a whole copy of that folder's "
            f"files in its place; remove {self._beside.name} to go on from the older state, which "
            f"peers may contradict; or {self.away}"
        )

    def _open_mark(self, last: int) -> None:
        if self.path is None:
            return
        try:
            self._mark = os.open(self._beside, os.O_RDWR | os.O_CREAT, 0o600)
            row = self._db.execute("SELECT checksum FROM record WHERE number = ?", (last,))
            found = row.fetchone()
            self._note(self._first, last, 0 if found is None else found[0])
        except OSError as error:
            raise JournalError(
                f"cannot write {self._beside} ({error.strerror}): the broker must be able to write "
                "to that folder: change its owner or mode"
            ) from None

    def _note(self, first: int, number: int, checksum: int) -> None:
        """Take down what is confirmed from here on. In place, in one write within one sector."""
        if self._mark is not None:
            head = _MARK.pack(max(0, first), number, checksum & 0xFFFFFFFF, 0)[:-4]
            os.pwrite(self._mark, head + struct.pack("<I", crc32(head)), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Journal {self.path or 'in memory'}, {self.count} records>"

    # ------------------------------------------------------------ reading

    def records(self) -> Iterator[Record]:
        """All of them, in order. Raises JournalError at the first one that is not whole."""
        wanted = self._first
        try:
            for number, data, checksum in self._db.execute(
                "SELECT number, data, checksum FROM record ORDER BY number"
            ):
                whole = number == wanted > 0 and isinstance(data, bytes)
                if not whole or checksum != _checksum(number, data):
                    raise self._damaged(wanted)
                try:
                    yield Record.FromString(data)
                except DecodeError:
                    raise self._damaged(wanted) from None
                wanted += 1
        except sqlite3.Error as error:
            raise self._damaged(wanted, error) from error

    def _damaged(self, number: int, error: Exception | None = None) -> JournalError:
        whole = number - self._first
        why = f" ({error})" if error is not None else ""
        return JournalError(
            f"{self._name} is damaged at record {number}{why}; the {whole} before it are whole: "
            f"put a copy in its place, or {self.away}"
        )

    # ------------------------------------------------------------ writing

    @property
    def crowded(self) -> bool:
        """Whether a snapshot is due."""
        return self.count > max(LEAST_RECORDS, CROWDED * self._snapshot) or self.size_bytes > max(
            LEAST_BYTES, CROWDED_BYTES * self._snapshot_bytes
        )

    def free(self) -> int | None:
        """Bytes of the disk that new runs may fill; None: the journal is in memory."""
        if self.path is None:
            return None
        try:
            return shutil.disk_usage(self.path.parent).free - RESERVE_BYTES
        except OSError as error:
            raise JournalError(
                f"cannot ask how full the disk of {self._name} is: {error}"
            ) from None

    def append(self, records: Iterable[Record]) -> None:
        """Adds records; they are on disk when it returns, all of them or, when it raises, none."""
        count, size = self._write(records, replace=False)
        self.count += count
        self.size_bytes += size

    def replace(self, snapshot: Iterable[Record]) -> None:
        """Puts a snapshot in the place of every record that is there; all or nothing, too. One
        record of it is in memory at a time."""
        first = self._next
        self.count, self.size_bytes = self._write(snapshot, replace=True)
        self._snapshot, self._snapshot_bytes = self.count, self.size_bytes
        self._first = first

    def _rows(self, records: Iterable[Record]) -> Iterator[tuple[int, bytes, int]]:
        for number, record in enumerate(records, self._next):
            data = record.SerializeToString(deterministic=True)
            yield number, data, _checksum(number, data)

    def _write(self, records: Iterable[Record], *, replace: bool) -> tuple[int, int]:
        """Returns how many there were, and their bytes."""
        run, last, size, checksum = self._db.execute, self._next - 1, 0, 0
        try:
            run("BEGIN")
            if replace:
                run("DELETE FROM record")
            for last, data, checksum in self._rows(records):
                run("INSERT INTO record VALUES (?, ?, ?)", (last, data, checksum))
                size += len(data)
            run("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:  # some errors have ended it already
                run("ROLLBACK")
            raise self._cannot("write", error) from error
        except BaseException:
            run("ROLLBACK")
            raise
        if last >= self._next:
            try:
                self._note(self._next if replace else self._first, last, checksum)
            except OSError as error:  # it is on disk, and can be told; only the note is older
                log.warning("journal_not_noted why=%s", error.strerror)
        written, self._next = last + 1 - self._next, last + 1
        return written, size

    def _cannot(self, what: str, error: sqlite3.Error) -> JournalError:
        """The error in words, with the next step."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        text = f"cannot {what} {self._name} ({error}): "
        match code:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                text += "another broker uses it: end that one, or give this one another --state"
            case sqlite3.SQLITE_FULL:
                return FullError(f"{text}the disk is full: free some space, and the broker goes on")
            case sqlite3.SQLITE_IOERR:
                text += "is the disk full? Free some space, then start the broker again"
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
                text += "the broker must be able to write to that folder: change its owner or mode"
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                text += f"the file is damaged: put a copy in its place, or {self.away}"
            case _:
                text += "start the broker again with another --state"
        return JournalError(text)


def open_journal(path: Path | None, options: BrokerOptions) -> tuple[Journal, DurableState]:
    """The journal at a path, whose folder is made, and what it holds. Raises JournalError."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(
                f"cannot make the folder of the journal {path} ({error.strerror}): the broker must "
                "be able to write there; give it another --state"
            ) from error
    journal = Journal(path)
    try:
        return journal, DurableState(options, journal.records())
    except BaseException as error:
        journal.close()
        if isinstance(error, ValueError) and not isinstance(error, JournalError):
            raise JournalError(
                f"the journal {path} cannot be replayed: {error}. Install the shoal that wrote it, "
                f"or {journal.away}"
            ) from error
        raise


def _checksum(number: int, data: bytes) -> int:
    return crc32(data, crc32(number.to_bytes(8, "little")))
