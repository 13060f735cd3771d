"""Inside and across places: each place adds up its own parts first, and one sum of each shard
crosses to the shard's owner, wherever that is; totals come back the same way.

So between two places about one vector goes each way, however many participants there are in them,
where each with each carries one for every pair. In each place one member handles a shard; members
take turns, so that of two places every pair of members carries something: as much as all others, or
by weights, so that wide pairs carry more. Owners are as often in each place, or by its weights.

With c chunks of each shard, numbered i:

    0            gives each handler of its place the parts of its shards
    1 + i        handlers add up their place's parts, and give each sum to the owner
    c + 1 + i    owners add up the sums of all places, and give the total to the handlers
    2·c + 1 + i  handlers give the totals to the members of their place
    3·c + 1      puts all shards together

In chunks, what goes on inside places goes on while other chunks cross.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..plan.plan import PeerId
from .collective import Collective, Hop, Members

__all__ = ["Hierarchical"]

MOST_SHARDS = 128


class Hierarchical(Collective):
    """The groups are the places; without any, everybody is in one. A participant of weight 0
    handles nothing, unless nobody in its place has more."""

    name, coded = "hierarchical", False

    def hops(self, members: Members) -> Iterator[Hop]:
        places, c = _places(members), members.chunks
        shards = _shards(members)
        handled = [
            {p: tuple(s for s, of in enumerate(shards) if of.handlers[r] == p) for p in place}
            for r, place in enumerate(places)
        ]
        inside = [(a, b, mine) for mine in handled for a in mine for b in mine]
        pairs = [pair for r in range(len(places)) for pair in _pairs(shards, r)]

        def chunk(some: Sequence[int], i: int) -> tuple[int, ...]:
            return tuple(s * c + i for s in some)

        for i in range(c):
            for a, b, mine in inside:
                if mine[b]:
                    yield Hop(0, 1 + i, a, b, chunk(mine[b], i))
        # Of the shards that a handler has of one owner, one message.
        for i in range(c):
            for handler, owner, some in pairs:
                yield Hop(1 + i, c + 1 + i, handler, owner, chunk(some, i))
        for i in range(c):
            for handler, owner, some in pairs:
                yield Hop(c + 1 + i, 2 * c + 1 + i, owner, handler, chunk(some, i), total=True)
        for i in range(c):
            for a, b, mine in inside:
                if mine[a]:
                    yield Hop(2 * c + 1 + i, 3 * c + 1, a, b, chunk(mine[a], i), total=True)

    def shards(self, members: Members) -> Sequence[int]:
        return [shard.size for shard in _shards(members) for _ in range(members.chunks)]


class _Shard(NamedTuple):
    handlers: tuple[PeerId, ...]
    """By place."""
    owner: PeerId
    size: int


def _places(members: Members) -> Sequence[Sequence[PeerId]]:
    return members.groups or (members.participants,)


def _shards(members: Members) -> list[_Shard]:
    """Return the number of shards with which all members of all places meet, where that is no more
    than MOST_SHARDS; else as many as there are members in the largest, for each place once."""
    places = _places(members)
    weight = dict.fromkeys(members.participants, 1)
    owned = [1] * len(places)
    if members.weights:
        weight = dict(zip(members.participants, members.weights, strict=True))
        owned = [sum(weight[p] for p in place) for place in places]
        weight |= {p: 1 for place, w in zip(places, owned, strict=True) if not w for p in place}
    if math.prod(map(len, places)) * len(places) <= MOST_SHARDS:
        meetings = [(of, math.prod(weight[p] for p in of)) for of in itertools.product(*places)]
    else:
        largest = max(places, key=len)
        meetings = [
            (tuple(place[i % len(place)] for place in places), weight[p])
            for i, p in enumerate(largest)
        ]
    return [
        _Shard(handlers, handlers[r], w * size)
        for handlers, w in meetings
        for r, size in enumerate(owned)
        if w * size
    ]


def _pairs(
    shards: Sequence[_Shard], place: int
) -> Iterator[tuple[PeerId, PeerId, tuple[int, ...]]]:
    """(handler there, owner, the shards that they have in common), by first shard."""
    found: dict[tuple[PeerId, PeerId], tuple[int, ...]] = {}
    for number, shard in enumerate(shards):
        key = shard.handlers[place], shard.owner
        found[key] = (*found.get(key, ()), number)
    for (handler, owner), some in found.items():
        yield handler, owner, some
