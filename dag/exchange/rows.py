"""Many participants in rows: each speaks with its row, and with who has its place in other rows.

When each of n gives every other one its part, a step has 2·n·(n-1) frames and everybody n-1
connections. In rows of about √n each speaks with its row and its column only: about 4·n·(√n - 1)
frames, 2·√n connections, as many bytes, and two more phases.

    0  gives each member of its row the parts of the shards that this member answers for there
    1  adds up the parts of its row, and gives each sum to the owner of the shard
    2  the owner adds up the sums of all rows, and gives the total to who answers for it in each
    3  gives each member of its row the totals of the shards that it answers for
    4  puts all shards together

Participant j owns shard j. In each row the member answers for a shard that has the place of the
shard's owner in its own row; for those of a place that a shorter row lacks, the member whose place
is the number of the owner's row, modulo the length: so nobody answers for many more shards than
others. All get the same totals, added up in row order from sums in the order of the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ..plan.plan import PeerId
from .collective import Collective, Hop, Members

__all__ = ["MOST_ALL_TO_ALL", "TwoLevel", "even_rows"]


P = TypeVar("P")

MOST_ALL_TO_ALL = 8
"""Holders up to which each speaks with each: 4·n·(√n - 1) is at most half of 2·n·(n - 1) from 9 on,
and two more phases should buy that much."""


class TwoLevel(Collective):
    """In the rows that the groups say, or in even ones of about √n."""

    name, coded = "two-level", False

    def hops(self, members: Members) -> Iterator[Hop]:
        """Shards are numbered in the order of the rows."""
        rows = members.groups or even_rows(members.participants)
        owners = [peer for row in rows for peer in row]
        handlers = [
            [row[place if place < len(row) else r % len(row)] for row in rows]
            for r, own in enumerate(rows)
            for place in range(len(own))
        ]
        answers: dict[PeerId, tuple[int, ...]] = dict.fromkeys(owners, ())
        for shard, of_shard in enumerate(handlers):
            for peer in of_shard:
                answers[peer] += (shard,)
        inside = [(a, b) for row in rows for a in row for b in row]
        for a, b in inside:
            yield Hop(0, 1, a, b, answers[b])
        for r in range(len(rows)):
            for shard, owner in enumerate(owners):
                yield Hop(1, 2, handlers[shard][r], owner, (shard,))
        for shard, owner in enumerate(owners):
            for handler in handlers[shard]:
                yield Hop(2, 3, owner, handler, (shard,), total=True)
        for a, b in inside:
            yield Hop(3, 4, a, b, answers[a], total=True)

    def shards(self, members: Members) -> Sequence[int]:
        return [1] * len(members.participants)


def even_rows(peers: Sequence[P], rows: int = 0) -> tuple[tuple[P, ...], ...]:
    """Intervals of the order whose lengths differ by one at most; `rows` 0: about √n of them."""
    n = len(peers)
    rows = rows or round(math.sqrt(n))
    return tuple(tuple(peers[r * n // rows : (r + 1) * n // rows]) for r in range(rows))
