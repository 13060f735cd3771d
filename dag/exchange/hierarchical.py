"""Inside and across places: each place adds up its own parts first, and one sum of each shard
crosses to the shard's owner, wherever that is; totals come back the same way.

So between two places about one vector goes each way, however many participants there are in them,
where each with each carries one for every pair. In each place one member handles a shard; members
take turns, so that of two places every pair of members carries as much, and owners are as often in
the one as in the other, so that both directions are used at once.

    0  gives each handler of its place the parts of its shards
    1  handlers add up their place's parts, and give each sum to the owner
    2  owners add up the sums of all places, and give the total to the handlers
    3  handlers give the totals to the members of their place
    4  puts all shards together
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..plan.plan import PeerId
from .collective import Hop, Members

__all__ = ["Hierarchical"]

MOST_SHARDS = 128


class Hierarchical:
    """The groups are the places; without any, everybody is in one."""

    name, coded = "hierarchical", False

    def hops(self, members: Members) -> Iterator[Hop]:
        places = members.groups or (members.participants,)
        shards = range(_shards(places))
        handlers = [_handlers(places, s) for s in shards]
        owners = [of[s % len(places)] for s, of in enumerate(handlers)]
        handled: list[dict[PeerId, tuple[int, ...]]] = [
            {peer: tuple(s for s in shards if handlers[s][r] == peer) for peer in place}
            for r, place in enumerate(places)
        ]
        for place, mine in zip(places, handled, strict=True):
            for a in place:
                for b in place:
                    if mine[b]:
                        yield Hop(0, 1, a, b, mine[b])
        # Of the shards that a handler has of one owner, one message.
        for r in range(len(places)):
            for handler, owner, some in _pairs(handlers, owners, r):
                yield Hop(1, 2, handler, owner, some)
        for r in range(len(places)):
            for handler, owner, some in _pairs(handlers, owners, r):
                yield Hop(2, 3, owner, handler, some, total=True)
        for place, mine in zip(places, handled, strict=True):
            for a in place:
                for b in place:
                    if mine[a]:
                        yield Hop(3, 4, a, b, mine[a], total=True)

    def shards(self, members: Members) -> Sequence[int]:
        return [1] * _shards(members.groups or (members.participants,))


def _shards(places: Sequence[Sequence[PeerId]]) -> int:
    """So many that all members of all places meet in turn, where that is no more than MOST_SHARDS;
    else as many as there are members in the largest, for each place once."""
    meetings = math.prod(map(len, places)) * len(places)
    return meetings if meetings <= MOST_SHARDS else max(map(len, places)) * len(places)


def _handlers(places: Sequence[Sequence[PeerId]], shard: int) -> list[PeerId]:
    """By place, who handles a shard."""
    at, found = shard // len(places), []
    meet = math.prod(map(len, places)) * len(places) <= MOST_SHARDS
    for place in places:
        found.append(place[at % len(place)])
        at = at // len(place) if meet else at
    return found


def _pairs(
    handlers: Sequence[Sequence[PeerId]], owners: Sequence[PeerId], place: int
) -> Iterator[tuple[PeerId, PeerId, tuple[int, ...]]]:
    """(handler there, owner, the shards that they have in common), by first shard."""
    found: dict[tuple[PeerId, PeerId], tuple[int, ...]] = {}
    for shard, owner in enumerate(owners):
        key = handlers[shard][place], owner
        found[key] = (*found.get(key, ()), shard)
    for (handler, owner), some in found.items():
        yield handler, owner, some
