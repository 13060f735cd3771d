"""What holds for all peers of a host that keep their state in one folder: its owner pauses it, and
the traffic of a month is counted.

FOLDER/paused              there while its owner has paused the host
FOLDER/standing/PEER.json  how each peer stands: {"month": "2026-11", "moved_bytes": N, …}

The folder is that of `shoal join --state`, else the one that all peers of this user share. Pausing
is a file, so that it outlives every process; only the owner's user may write into the folder.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path

from ...net.identity.credential import write_private

__all__ = ["Host", "HostError", "Standing"]

SILENT_S = 60.0
"""A peer that has not written how it stands for so long runs no more; it does every ten seconds."""


class HostError(ValueError):
    """A file of the folder that cannot be used; the message says what to do."""


@dataclass(kw_only=True)
class Standing:
    """A peer as its owner sees it."""

    peer: str
    name: str
    broker: str
    month: str
    """ "2026-11", by the host's clock; that of `moved_bytes`."""
    moved_bytes: int
    """Sent and received, frames and blobs and what it says to the broker."""
    monthly_bytes: int | None
    """What all peers of the host may move in a month. None: no limit."""
    closed: str
    """Why it takes part in no run; empty: it does."""
    ended: bool = False
    """Whether its process has ended."""


class Host:
    """What all peers of one folder share: the owner's pause, and the traffic of a month. Nothing is
    written before it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ------------------------------------------------------------ pause

    @property
    def _flag(self) -> Path:
        return self.folder / "paused"

    @property
    def paused(self) -> bool:
        return self._flag.exists()

    @property
    def paused_since(self) -> datetime | None:
        """By the host's clock."""
        try:
            return datetime.fromtimestamp(self._flag.stat().st_mtime)
        except FileNotFoundError:
            return None

    def pause(self) -> None:
        """From now on, until `unpause`. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._flag.touch(mode=0o600)

    def unpause(self) -> None:
        """Let runs use the host again; raises OSError."""
        self._flag.unlink(missing_ok=True)

    # ------------------------------------------------------------ standing

    def standings(self) -> Iterator[Standing]:
        """Yields the standing of every peer that ever was here. Raises HostError."""
        for path in sorted((self.folder / "standing").glob("*.json")):
            found = _read(path)
            if time.time() - path.stat().st_mtime > SILENT_S:
                found.ended = True  # it was killed
            yield found

    def moved_bytes(self, month: str, but: str = "") -> int:
        """What all peers here moved in a month; without the peer `but`. Raises HostError."""
        found = (s for s in self.standings() if s.month == month and s.peer != but)
        return sum(s.moved_bytes for s in found)

    def standing(self, peer: str) -> Standing | None:
        """What was kept of a peer. Raises HostError."""
        path = self._path(peer)
        return _read(path) if path.exists() else None

    def keep(self, standing: Standing) -> None:
        """Keep a peer's standing on disk; raises OSError."""
        path = self._path(standing.peer)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(asdict(standing)).encode())  # outlives a power cut

    def _path(self, peer: str) -> Path:
        readable = re.sub(r"[^A-Za-z0-9_.-]", "-", peer)[:128]
        return self.folder / "standing" / f"{readable}.json"


def _read(path: Path) -> Standing:
    """Read a standing; raises HostError."""
    try:
        table = json.loads(path.read_text())
        if not isinstance(table, dict) or set(table) != {f.name for f in fields(Standing)}:
            raise ValueError("other keys")
        found = Standing(**table)
        if type(found.moved_bytes) is not int:
            raise ValueError("expected a whole number of bytes")
    except ValueError as error:
        raise HostError(
            f"{path} is not what a peer wrote ({error}): remove it, and what that peer has moved "
            "this month is not counted"
        ) from None
    return found
