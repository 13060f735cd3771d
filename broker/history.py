"""What happened in a run, numbered, for watchers that come at any time.

A step's event takes 3 to 8 KB as a message in memory, by the links it tells of, and 55 to 120 bytes
packed with its neighbours; so only the newest are kept as messages.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ..proto.broker_pb2 import RunEvent
from ..proto.journal_pb2 import RunKept

__all__ = ["BLOCK", "History"]

BLOCK = 256
"""Events that are packed together, and the least that are not packed at all."""


class History:
    """Events numbered from 0 without gaps; the newest `kept` of them can be read again."""

    def __init__(self, kept: int) -> None:
        self.numbered = 0
        self._kept = kept
        self._packed: deque[bytes] = deque()  # BLOCK events each, then those of `_recent`
        self._recent: list[RunEvent] = []

    def __len__(self) -> int:
        """Events that can be read."""
        return min(self._kept, self._held)

    @property
    def recent(self) -> Sequence[RunEvent]:
        """The newest BLOCK events at least, or all; for looks that shall cost little."""
        return self._recent[-self._kept :]

    @property
    def events(self) -> Iterator[RunEvent]:
        """All that can be read, oldest first."""
        at = self.numbered - len(self)
        while at < self.numbered:
            first, events = self.read(at)
            yield from events
            at = first + len(events)

    def add(self, event: RunEvent) -> RunEvent:
        """Numbers an event and keeps it."""
        event.number = self.numbered
        self._append(event)
        self.numbered += 1
        return event

    def restore(self, events: Iterable[RunEvent], numbered: int) -> None:
        """What was kept before; `numbered`: events so far, those that are no longer kept too."""
        for event in events:
            self._append(event)
        self.numbered = numbered

    def read(self, start: int) -> tuple[int, tuple[RunEvent, ...]]:
        """Events from `start` on, or from the oldest kept one, behind the number of the first. Not
        always all: who wants more asks for those after them, until there is none."""
        first = min(max(start, self.numbered - len(self)), self.numbered)
        at = first - (self.numbered - self._held)
        block, offset = divmod(at, BLOCK)
        if block < len(self._packed):
            return first, _unpacked(self._packed[block])[offset:]
        return first, tuple(self._recent[at - BLOCK * len(self._packed) :])

    @property
    def _held(self) -> int:
        return BLOCK * len(self._packed) + len(self._recent)

    def _append(self, event: RunEvent) -> None:
        self._recent.append(event)
        if len(self._recent) == 2 * BLOCK:
            old = RunKept(events=self._recent[:BLOCK])
            # A day of steps is packed in seconds, and unpacked for somebody who comes late only.
            self._packed.append(zlib.compress(old.SerializeToString(), 1))
            del self._recent[:BLOCK]
        if self._packed and self._held - BLOCK >= self._kept:
            self._packed.popleft()


def _unpacked(block: bytes) -> tuple[RunEvent, ...]:
    return tuple(RunKept.FromString(zlib.decompress(block)).events)
