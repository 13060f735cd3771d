"""What happened in a run, numbered, for watchers that come at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from ..proto.broker_pb2 import RunEvent

__all__ = ["History"]


class History:
    """Events numbered from 0 without gaps; the newest `kept` of them can be read again."""

    def __init__(self, kept: int) -> None:
        self.events: deque[RunEvent] = deque(maxlen=kept)
        self.numbered = 0

    def add(self, event: RunEvent) -> RunEvent:
        """Numbers an event and keeps it."""
        event.number = self.numbered
        self.numbered += 1
        self.events.append(event)
        return event

    def restore(self, events: Iterable[RunEvent], numbered: int) -> None:
        """What was kept before; `numbered`: events so far, those that are no longer kept too."""
        self.events.extend(events)
        self.numbered = numbered

    def read(self, start: int) -> tuple[int, tuple[RunEvent, ...]]:
        """Events from `start` on, or from the oldest kept one, behind the number of the first."""
        oldest = self.numbered - len(self.events)
        first = min(max(start, oldest), self.numbered)
        return first, tuple(islice(self.events, first - oldest, None))
