"""What happened in a run, numbered, for watchers that come at any time.

A step's event takes 3 to 8 KB as a message in memory, by the links it tells of, and 55 to 120 bytes
packed with its neighbours; so only the newest are kept as messages, and few of a run that is over.
What is kept is bounded in number and in bytes: whoever makes large events keeps fewer of them.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from ...proto.broker_pb2 import RunEvent
from ...proto.journal_pb2 import RunKept

__all__ = ["BLOCK", "FEW", "LEAST", "MOST_BYTES", "EventHistory"]

BLOCK = 256
"""Events that are packed together, and the least that are not packed at all."""
FEW = 16
"""Events that stay messages when no more are expected; what a run ended with is among them."""
LEAST = 4
"""The same where events are large; an export is still among the last of a run that is done."""
MOST_BYTES = 16 << 20
"""Of what is packed: 50,000 steps of 300 bytes, three times what a step of 20 holders takes."""
_OPEN_BYTES, _REST_BYTES = 4 << 20, 64 << 10
"""Of messages, as they are on the wire, while more events are expected and when none is: BLOCK
steps of 8 KB twice, FEW of 4 KB. Events beyond are packed, down to LEAST."""


class EventHistory:
    """Events numbered from 0 without gaps; the newest `kept` of them can be read again, or fewer
    where these take more than `most_bytes`."""

    def __init__(self, kept: int, most_bytes: int = MOST_BYTES) -> None:
        self.numbered = 0
        self.most_bytes = most_bytes
        """Of what is packed; it may change."""
        self._kept = kept
        self._packed: deque[tuple[int, bytes]] = deque()
        """The number of the first, and so many as there are up to the next, or to `unpacked`."""
        self.unpacked: list[RunEvent] = []
        """The newest ones, as far as they are messages."""
        self._sizes: list[int] = []  # bytes of these
        self._recent_bytes = self._packed_bytes = 0  # sums

    @property
    def size_bytes(self) -> int:
        """Bytes of the kept events, as they would be on disk."""
        return self._recent_bytes + self._packed_bytes

    def __len__(self) -> int:
        """Events that can be read."""
        return min(self._kept, self._held)

    @property
    def recent(self) -> Sequence[RunEvent]:
        """The newest FEW events at least, and BLOCK while more are expected; or all. For looks that
        shall cost little."""
        return self.unpacked[-self._kept :]

    @property
    def events(self) -> Iterator[RunEvent]:
        """Return all events that can be read, oldest first."""
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

    @property
    def past(self) -> tuple[tuple[int, bytes], ...]:
        """What stands before `unpacked`: packed events, each behind the number of the first."""
        return tuple(self._packed)

    def restore(self, events: Iterable[RunEvent], numbered: int) -> None:
        """What was kept before; `numbered`: events so far, those that are no longer kept too."""
        for event in events:
            self._append(event)
        self.numbered = numbered

    def restore_past(self, first: int, packed: bytes) -> None:
        """What stood before that; the oldest first. Raises ValueError for what did not."""
        last = self._packed[-1][0] if self._packed else -1
        if not self.unpacked or not last < first < self.unpacked[0].number:
            raise ValueError(f"events from number {first} on are kept twice, or behind later ones")
        self._packed.append((first, packed))
        self._packed_bytes += len(packed)

    def read(self, start: int) -> tuple[int, tuple[RunEvent, ...]]:
        """Events from `start` on, or from the oldest kept one, behind the number of the first. Not
        always all: who wants more asks for those after them, until there is none."""
        first = min(max(start, self.numbered - len(self)), self.numbered)
        at = self.unpacked[0].number if self.unpacked else first
        if first >= at:
            return first, tuple(self.unpacked[first - at :])
        at, block = self._packed[bisect_right(self._packed, first, key=itemgetter(0)) - 1]
        return first, _unpacked(block)[first - at :]

    def rest(self) -> None:
        """No more events are expected: as few of them as possible stay messages."""
        while len(self.unpacked) > FEW:
            self._pack(min(BLOCK, len(self.unpacked) - FEW))
        self._shrink(_REST_BYTES)
        self.trim()

    def trim(self) -> None:
        """Lets go of the oldest that are packed, as far as they are too many or too large."""
        while self._packed:
            second = self._packed[1][0] if len(self._packed) > 1 else self.unpacked[0].number
            late = self.unpacked[-1].number + 1 - second >= self._kept
            if not late and self._packed_bytes <= self.most_bytes:
                return
            self._packed_bytes -= len(self._packed.popleft()[1])

    @property
    def _held(self) -> int:
        if not self.unpacked:
            return 0
        first = self._packed[0][0] if self._packed else self.unpacked[0].number
        return self.unpacked[-1].number + 1 - first

    def _append(self, event: RunEvent) -> None:
        size = event.ByteSize()
        self.unpacked.append(event)
        self._sizes.append(size)
        self._recent_bytes += size
        if len(self.unpacked) == 2 * BLOCK:
            self._pack(BLOCK)
        self._shrink(_OPEN_BYTES)
        self.trim()

    def _shrink(self, most_bytes: int) -> None:
        """Packs the older half of the messages while all take more than this."""
        while self._recent_bytes > most_bytes and len(self.unpacked) > LEAST:
            self._pack((len(self.unpacked) - LEAST + 1) // 2)

    def _pack(self, count: int) -> None:
        old = RunKept(events=self.unpacked[:count])
        # A day of steps is packed in seconds, and unpacked for somebody who comes late only.
        packed = zlib.compress(old.SerializeToString(), 1)
        self._packed.append((self.unpacked[0].number, packed))
        self._packed_bytes += len(packed)
        self._recent_bytes -= sum(self._sizes[:count])
        del self.unpacked[:count], self._sizes[:count]


def _unpacked(block: bytes) -> tuple[RunEvent, ...]:
    return tuple(RunKept.FromString(zlib.decompress(block)).events)
