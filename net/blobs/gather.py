"""One blob from several holders at once: each takes the next range that nobody has taken.

Ranges come back in any order and are given in theirs; at most a few per holder are kept. A holder
that fails is out, and its range is another one's; one that is slow loses the range that all wait
for to whoever has nothing else to do. Two that are slow have it until one of them is given up,
which takes a `floor` of their clients. Who of them sent what is not known afterwards: content is
checked against the blob's hash as a whole, by whoever asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from .client import BlobClient, BlobTransferError

__all__ = ["RANGE_BYTES", "gather"]

RANGE_BYTES = 1 << 20
"""What one holder is asked for at a time: half a second of an uplink of 16 Mbit/s."""
_AHEAD = 3
"""Ranges per holder that may wait for an earlier one."""


async def gather(
    holders: Sequence[BlobClient], hash: str, size: int, offset: int = 0
) -> AsyncIterator[bytes]:
    """Bytes [offset, size) of a blob of `size` bytes, in order. Raises the first holder's
    BlobTransferError when none is left."""
    async with _Gathering(holders, hash, size, offset) as found:
        while (piece := await found.next()) is not None:
            yield piece


class _Gathering:
    def __init__(self, holders: Sequence[BlobClient], hash: str, size: int, offset: int) -> None:
        self._holders, self._hash = holders, hash
        starts = range(offset, size, RANGE_BYTES)
        self._ranges = [(at, min(RANGE_BYTES, size - at)) for at in starts]
        self._open = list(range(len(self._ranges)))  # to be taken, ascending
        self._here: dict[int, bytes] = {}
        self._asked: dict[int, int] = {}  # by range that is on its way: how many were asked for it
        self._given = 0
        self._working = len(holders)
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._errors: dict[int, BlobTransferError] = {}  # by holder

    async def __aenter__(self) -> _Gathering:
        self._tasks = [
            asyncio.create_task(self._work(i, holder)) for i, holder in enumerate(self._holders)
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> bytes | None:
        """The range behind those that were given; None at the end."""
        if self._given == len(self._ranges):
            return None
        async with self._changed:
            await self._changed.wait_for(lambda: self._given in self._here or not self._working)
            if self._given not in self._here:
                raise self._errors[min(self._errors)]
            piece = self._here.pop(self._given)
            self._given += 1
            self._changed.notify_all()
            return piece

    async def _work(self, number: int, holder: BlobClient) -> None:
        try:
            while (taken := await self._take()) is not None:
                at, length = self._ranges[taken]
                try:
                    data = await holder.fetch(self._hash, at, length)
                except BlobTransferError as error:
                    self._errors[number] = error
                    self._asked[taken] -= 1
                    if not self._asked[taken] and taken not in self._here and taken >= self._given:
                        self._open = sorted([*self._open, taken])
                    return
                async with self._changed:
                    if taken >= self._given:  # else another one was faster
                        self._here[taken] = data
                    self._changed.notify_all()
        finally:
            async with self._changed:
                self._working -= 1
                self._changed.notify_all()

    async def _take(self) -> int | None:
        """The next range that is near enough, else the one that all wait for, once more; None when
        all are there or given."""
        most = _AHEAD * len(self._holders)

        def near() -> bool:
            return bool(self._open) and self._open[0] < self._given + most

        def late() -> bool:
            return self._given not in self._here and self._asked.get(self._given, 0) == 1

        def over() -> bool:
            return self._given + len(self._here) >= len(self._ranges)

        async with self._changed:
            await self._changed.wait_for(lambda: over() or near() or late())
            if over():
                return None
            taken = self._open.pop(0) if near() else self._given
            self._asked[taken] = self._asked.get(taken, 0) + 1
            return taken
