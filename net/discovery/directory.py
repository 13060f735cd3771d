"""Where records are left and looked up. Whoever looks believes nothing that does not prove itself
(`record.py`), so a directory need not be honest; it may only be forgetful."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Directory", "DirectoryError", "MemoryDirectory"]


class DirectoryError(Exception):
    """The directory cannot be used; the message says why and what to do."""


class Directory(Protocol):
    """Where the records of one swarm are left and looked up."""

    async def publish(self, record: bytes) -> None:
        """Leaves a record. Raises DirectoryError when it cannot be used."""

    async def find(self) -> list[bytes]:
        """What others have left, of whatever kind; empty when nothing was found. Raises
        DirectoryError when it cannot be used."""


class MemoryDirectory:
    """The twin of the real one: keeps all that anybody leaves, and checks nothing."""

    def __init__(self) -> None:
        self._left: list[bytes] = []

    async def publish(self, record: bytes) -> None:
        self._left.append(record)

    async def find(self) -> list[bytes]:
        return list(self._left)
