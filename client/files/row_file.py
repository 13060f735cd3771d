"""A file of JSON lines that several processes append to, such as followers of one run."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ...job.settings import json_object
from ...net.finite import finite
from ...net.surroundings import write_whole
from ..errors import RecordError

__all__ = ["RowFile", "read_rows", "rows_of"]


def rows_of(text: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """The rows of whole lines of a file; what is behind the last line end is being written. Raises
    RecordError for a line that is none."""
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        try:
            yield json_object(line.decode())
        except ValueError as error:
            raise RecordError(
                f"{path} is damaged: a line is no row ({error}): remove the file, and following "
                "the run again writes it anew, as far as its broker knows"
            ) from None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, which somebody may be writing; none where there is none. Raises
    RecordError, OSError."""
    return rows_of(path.read_bytes() if path.is_file() else b"", path)


class RowFile:
    """Rows of a file, each written once, whoever writes it.

    `seen` gets each row of the file once, in order, those of other processes too: what was there at
    the beginning, and before each `add` what came since. Raises OSError, RecordError.
    """

    def __init__(self, path: Path, seen: Callable[[dict[str, Any]], None]) -> None:
        self.path = path
        self._seen = seen
        self._read_bytes = 0
        if path.exists():
            with path.open("ab+", buffering=0) as file:
                self._lock_and_read(file)

    def add(self, row: Mapping[str, Any], wanted: Callable[[], bool]) -> bool:
        """Append a row if it is still wanted when all others are known; return whether it was."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+", buffering=0) as file:
            self._lock_and_read(file)
            if not wanted():
                return False
            line = (json.dumps(finite(row)) + "\n").encode()
            write_whole(file, line, self.path)
            self._read_bytes += len(line)
            return True

    def _lock_and_read(self, file: IO[bytes]) -> None:
        """Lock an open file until it is closed, and read what is new. A line that a crash cut off
        is removed."""
        with suppress(OSError):  # a file system without locks: a row of two followers may be double
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(self._read_bytes)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            file.truncate(self._read_bytes + len(whole))
        self._read_bytes += len(whole)
        for row in rows_of(whole, self.path):
            self._seen(row)
