"""Folders of one process that nothing is left of: temporary ones, and those of Unix sockets.

A process that is killed removes nothing. So a temporary folder is locked for as long as its process
lives, and the next one of its kind removes those that nobody holds; what cleans the system's
temporary folder by age leaves locked ones alone. Sockets lie in a state folder where there is one:
its next process makes that anew, and nobody cleans it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["SocketFolder", "TemporaryFolder"]

log = logging.getLogger(__name__)


class TemporaryFolder:
    """A new folder, PREFIX and some random letters, for its owner only, until `close` or the end of
    this process. Raises OSError."""

    def __init__(self, prefix: str) -> None:
        self._sweep(prefix)
        made = Path(tempfile.mkdtemp(prefix=f".new-{prefix}"))
        self._held = os.open(made, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: it may be left over
            fcntl.flock(self._held, fcntl.LOCK_EX)
        self.path = made.with_name(prefix + secrets.token_hex(6))
        made.rename(self.path)  # nobody sweeps it before it is locked

    @staticmethod
    def _sweep(prefix: str) -> None:
        """Removes those of processes of this user that are gone."""
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            try:
                held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(held).st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass  # somebody lives there, or nobody can tell
            finally:
                os.close(held)

    def close(self) -> None:
        """Removes the folder with all that is in it; a second time nothing happens."""
        if self._held >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = -1


class SocketFolder:
    """A private folder of Unix sockets inside a state folder; None: a temporary one. `path` is how
    this process, and no other, names it: short enough for a socket, wherever the folder lies.
    Raises OSError."""

    def __init__(self, state: Path | None) -> None:
        self._temporary: TemporaryFolder | None = None
        self.folder = self._temporarily() if state is None else self._inside(state)
        self._held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        short = Path(f"/proc/self/fd/{self._held}")
        self.path = short if short.is_dir() else self.folder

    def _temporarily(self) -> Path:
        self._temporary = TemporaryFolder("shoal-sockets-")
        return self._temporary.path

    def _inside(self, state: Path) -> Path:
        folder = state / "sockets"
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir(mode=0o700, parents=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if Path(f"/proc/self/fd/{held}").is_dir():
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.bind(f"/proc/self/fd/{held}/probe")
                (folder / "probe").unlink()
        except OSError as error:
            found = self._temporarily()
            log.warning(
                "sockets_elsewhere folder=%s instead=%s why=%s: that file system has no sockets",
                *(folder, found, error.strerror),
            )
            shutil.rmtree(folder, ignore_errors=True)
            return found
        finally:
            os.close(held)
        return folder

    def close(self) -> None:
        """Removes the folder with the sockets in it."""
        os.close(self._held)
        if self._temporary is not None:
            self._temporary.close()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
