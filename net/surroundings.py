"""What the machine around a program does not give it: a home, room on a disk, locks, descriptors.

None of it is a bug of ours, and none goes away by trying again at once. `fault_of` sorts an error
of the system, of SQLite or of a library into one class, whose text says which file, what happened,
and what to do about it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = [
    "SurroundingsError",
    "cache_home",
    "check_place",
    "config_home",
    "fault_of",
    "naming",
    "try_lock",
    "user_path",
    "write_whole",
]


class SurroundingsError(OSError):
    """The machine does not give what is needed. One line: which file, the cause, what to do."""


_FULL = "make room there, or take a folder on another disk"
_WRITE = "change its owner or mode, or take another folder"
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: "take a folder that can be written to",
    errno.EACCES: _WRITE,
    errno.EPERM: _WRITE,
    errno.EIO: "the disk behind it, or the connection to it, fails",
    errno.ESTALE: "the network file system has lost it: mount it again",
    errno.ENOLCK: "its file system keeps no locks: take a folder on another one",
    errno.EMFILE: "allow the process more open files (`ulimit -n`; in a unit: LimitNOFILE=)",
    errno.ENFILE: "the machine has too many open files: close some, or raise fs.file-max",
    errno.ENOMEM: "the machine has no memory left: free some",
    errno.ENAMETOOLONG: "take a folder with a shorter path",
    errno.ELOOP: "its symbolic links lead round in a circle",
}
_ANYWHERE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ENOLCK,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}
"""Errors that are the machine's whether or not they name a file; others may be a connection's."""
_RUST = re.compile(r"Os \{ code: (\d+)")
"""How libraries in Rust (safetensors, tokenizers) tell of an error of the system."""


def fault_of(error: BaseException) -> SurroundingsError | None:
    """Return what is missing around us, when that is what the error tells of; else None. Of a group
    of errors, the first that is such a one."""
    if isinstance(error, SurroundingsError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((f for e in error.exceptions if (f := fault_of(e)) is not None), None)
    if isinstance(error, MemoryError):
        return SurroundingsError("no memory is left: free some, or give this process more")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return SurroundingsError(
            "no thread can be started: allow more (`ulimit -u`; in a unit: TasksMax=)"
        )
    if isinstance(error, ImportError) and not (error.name or "").startswith("shoal"):
        return SurroundingsError(f"this installation is broken: {error}: install it anew")
    number, where, said = None, None, str(error)
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):  # its numbers are others
        number, where, said = error.errno, error.filename, error.strerror or said
        if where is None and "No usable temporary directory" in said:
            return SurroundingsError(
                "no folder for temporary files can be written to: set TMPDIR to one that can"
            )
    elif match := _RUST.search(said):
        number = int(match[1])
        said = os.strerror(number)
    if number is None or (where is None and number not in _ANYWHERE):
        return None
    if isinstance(where, bytes):
        where = os.fsdecode(where)
    named = "" if where is None else f"{where}: "  # a descriptor's number, now and then
    advice = _ADVICE.get(number, "")
    return SurroundingsError(f"{named}{said}" + (f": {advice}" if advice else ""))


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Puts the file's name to an OSError of the block that has none: writing to a full disk, and
    locking where there are no locks, name no file."""
    try:
        yield
    except SurroundingsError:
        raise
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_whole(file: IO[bytes], data: bytes | memoryview, path: Path) -> None:
    """Writes all of it to a file without a buffer, which by itself takes a part of it and no error
    where a disk is nearly full. Raises OSError with the file's name."""
    left = memoryview(data)
    with naming(path):
        while left:
            left = left[file.write(left) :]


def try_lock(file: IO[str], path: Path) -> bool:
    """Whether this process now holds the lock of an open file; False: another one does. Raises
    SurroundingsError where the file system keeps none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise SurroundingsError(
            f"{path} cannot be locked ({error.strerror}), so two processes could use it at once: "
            "its file system, a network's most likely, keeps no locks; take a folder on another "
            "one with --state"
        ) from None
    return True


def user_path(path: Path | str) -> Path:
    """The path with its "~" as this user's home, wherever it came from: a shell leaves that alone
    behind a "=". Raises SurroundingsError where there is no such home."""
    path = Path(path)
    if not str(path).startswith("~"):
        return path
    if path.parts[0] == "~":
        return _home(f"for {path}").joinpath(*path.parts[1:])
    try:
        return path.expanduser()
    except RuntimeError:
        user = path.parts[0].removeprefix("~")
        raise SurroundingsError(
            f'{path}: there is no user "{user}" with a home here: write the path in full, or '
            f"./{path} for a file of that name"
        ) from None


def config_home() -> Path:
    """The folder of this user's settings, as the XDG specification has it. Raises
    SurroundingsError."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def cache_home() -> Path:
    """The folder of what can be made again. Raises SurroundingsError."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, usual: str) -> Path:
    given = os.environ.get(variable, "").strip()
    return user_path(given) if given else _home(f"or {variable}") / usual


def _home(more: str) -> Path:
    """This user's home. Raises SurroundingsError where there is none: a numeric user of a container
    that no passwd file names."""
    if "HOME" in os.environ:
        home = os.environ["HOME"]
        if home:
            return Path(home)
    else:
        found = os.path.expanduser("~")
        if found != "~":
            return Path(found)
    raise SurroundingsError(
        f"this user ({os.getuid()}) has no home folder: set HOME to one that it can write to, "
        f"{more} (`shoal broker` and `shoal join` take --state FOLDER in its place)"
    )


def check_place() -> None:
    """Raises SurroundingsError where the current folder is gone: no relative path leads anywhere
    then, and torch's libraries end the process without a word of ours."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise SurroundingsError(
            "the current folder is gone, removed or renamed: `cd` into one that is there"
        ) from None
