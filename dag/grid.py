"""Many holders of a stage in rows and columns: who adds up what when they exchange gradients.

When each of n holders gives every other one its part, a step has 2·n·(n-1) frames and every holder
n-1 connections. In rows of about √n holders each speaks with its row and its column only: about
4·n·(√n - 1) frames, 2·√n connections, as many bytes, and two more hops.

    S>  gives each member of its row the parts of the shards that this member answers for there
    S=  adds up the parts of its row, and gives each sum to the owner of the shard
    S+  the owner adds up the sums of all rows, and gives the total to who answers for it in each
    S*  gives each member of its row the totals of the shards that it answers for
    S<  puts all shards together

Holder j owns shard j. Rows are intervals in holder order whose lengths differ by one at most. In
each row the member answers for a shard that has the place of the shard's owner in its own row; for
those of a place that a shorter row lacks, the member whose place is the number of the owner's row,
modulo the length: so nobody answers for many more shards than others.

All holders get the same totals, added up in row order from sums in holder order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from .action import Kind
from .plan import PeerId, StageSlot

__all__ = ["Grid", "grid_of", "rows_for"]

MOST_ALL_TO_ALL = 8
"""Holders up to which each speaks with each: 4·n·(√n - 1) is at most half of 2·n·(n - 1) from 9 on,
and two more hops should buy that much."""


def rows_for(holders: int) -> int:
    """In how many rows so many holders exchange gradients; 0: each with each."""
    return 0 if holders <= MOST_ALL_TO_ALL else round(math.sqrt(holders))


@lru_cache(64)
def grid_of(slot: StageSlot) -> Grid | None:
    """That of a stage; None: its holders exchange each with each."""
    return Grid(slot.holders, slot.rows) if slot.rows else None


class Grid:
    """See the module. `rows`: 1 to the number of holders."""

    def __init__(self, holders: Sequence[PeerId], rows: int) -> None:
        n = len(holders)
        self.holders = tuple(holders)
        self.rows = tuple(self.holders[r * n // rows : (r + 1) * n // rows] for r in range(rows))
        self._row_of = {peer: row for row in self.rows for peer in row}
        self.handlers: tuple[tuple[PeerId, ...], ...] = tuple(
            tuple(row[place if place < len(row) else r % len(row)] for row in self.rows)
            for r, owners in enumerate(self.rows)
            for place in range(len(owners))
        )
        """By shard and row: who answers for the shard there."""
        answers: dict[PeerId, list[int]] = {peer: [] for peer in holders}
        for shard, handlers in enumerate(self.handlers):
            for peer in handlers:
                answers[peer].append(shard)
        self.answers = {peer: tuple(shards) for peer, shards in answers.items()}
        """By holder: the shards that it answers for in its row, ascending."""

    def row(self, peer: PeerId) -> tuple[PeerId, ...]:
        """The holder's row, itself included."""
        return self._row_of[peer]

    def shards(self, part: str, source: PeerId, destination: PeerId) -> int:
        """How many shards a transfer has; `part`: the end of its port."""
        member = {">row": destination, "*row": source}.get(part)
        return len(self.answers[member]) if member is not None else 1

    def transfers(self) -> Iterator[tuple[str, PeerId, PeerId, Kind, Kind]]:
        """(end of the port, source, destination, who gives it, who takes it), each taker's in the
        order in which it adds up or concatenates."""
        owned = list(zip(self.holders, self.handlers, strict=True))
        for row in self.rows:
            for a in row:
                for b in row:
                    yield ">row", a, b, Kind.SYNC_GIVE, Kind.SYNC_ROW
        for r in range(len(self.rows)):
            for owner, handlers in owned:
                yield "=row", handlers[r], owner, Kind.SYNC_ROW, Kind.SYNC_COMBINE
        for owner, handlers in owned:
            for handler in handlers:
                yield "+row", owner, handler, Kind.SYNC_COMBINE, Kind.SYNC_RELAY
        for row in self.rows:
            for a in row:
                for b in row:
                    yield "*row", a, b, Kind.SYNC_RELAY, Kind.SYNC_TAKE
