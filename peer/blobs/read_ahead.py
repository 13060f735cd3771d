"""Shards of weights are fetched while those before them are read.

Whoever builds a stage says which shards it will read, in which order. The one that it reads is its
own to fetch; a few behind it are fetched meanwhile into the cache, where it finds them, each
checked against its hash as ever. A fetch that fails only ends this: the reader comes to the same
shard, and to the same error, by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate

from .weight_shards import MOST_SHARD_BYTES, WeightShard

__all__ = ["AHEAD_BYTES", "ReadAhead", "Reading", "alone"]

Reading = Callable[[Sequence[WeightShard]], AbstractContextManager[object]]
"""Is told what will be read inside of it, in which order."""

AHEAD_BYTES = MOST_SHARD_BYTES
"""The most bytes of all shards that are on their way, as the reader's own may have alone: what
comes from the web is in memory until it is whole."""
_AT_ONCE = 3
"""With the reader's own, as a submitter sends them. More would share a slow line so that a server
seems too slow (`fetching.py`)."""


def alone(shards: Sequence[WeightShard]) -> AbstractContextManager[None]:
    """A `Reading` in which nothing is fetched before it is read."""
    return nullcontext()


class ReadAhead:
    """`read` gives a shard, and `bring` has it where `read` finds it: both fetch, from any thread.
    For one reader at a time. most_bytes: of what is on its way, but for the reader's own shard."""

    def __init__(
        self,
        read: Callable[[WeightShard], bytes],
        bring: Callable[[WeightShard], object],
        most_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._read, self._bring, self._most_bytes = read, bring, most_bytes
        self._changed = threading.Condition()
        self._reading: _Order | None = None

    def whole(self, shard: WeightShard) -> bytes:
        """A shard's bytes; what is behind it in the order may be fetched now. Raises what `read`
        raises."""
        with self._changed:
            if self._reading is not None:
                self._reading.reach(shard)
                self._changed.notify_all()
        return self._read(shard)

    @contextmanager
    def reading(self, shards: Sequence[WeightShard]) -> Iterator[None]:
        """Inside of it these are read, in this order; what is on its way at its end goes on."""
        order = self._reading = _Order(shards, self._most_bytes)
        for _ in range(min(_AT_ONCE, len(order.shards)) - 1):
            threading.Thread(target=self._work, args=(order,), daemon=True).start()
        try:
            yield
        finally:
            self._end(order)

    def _end(self, order: _Order) -> None:
        with self._changed:
            order.over, self._reading = True, None
            self._changed.notify_all()

    def _work(self, order: _Order) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: order.over or order.near)
                if order.over:
                    return
                shard = order.take()
            try:
                self._bring(shard)
            except Exception:  # whatever it is, the reader meets it where somebody hears of it
                self._end(order)
                return


class _Order:
    """Progress of the readers; the lock is its owner's."""

    def __init__(self, shards: Sequence[WeightShard], most_bytes: int) -> None:
        self.shards = tuple(dict.fromkeys(shards))
        self.over = len(self.shards) < 2
        self._most_bytes = most_bytes
        self._at = {shard: i for i, shard in enumerate(self.shards)}
        self._ends = tuple(accumulate((s.size_bytes for s in self.shards), initial=0))
        self._reader, self._next = 0, 1

    def reach(self, shard: WeightShard) -> None:
        self._reader = max(self._reader, self._at.get(shard, 0))
        self._next = max(self._next, self._reader + 1)
        self.over = self.over or self._next == len(self.shards)

    @property
    def near(self) -> bool:
        """Whether the next one may come: all from the reader's on are within the limit."""
        if self._next == len(self.shards):
            return False
        return self._ends[self._next + 1] - self._ends[self._reader] <= self._most_bytes

    def take(self) -> WeightShard:
        self._next += 1
        return self.shards[self._next - 1]
