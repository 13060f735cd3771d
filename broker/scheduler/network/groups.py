"""Divisions of peers into equal groups: those that islands of fast links suggest, and all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

__all__ = ["Islands", "divisions", "every_division", "starts"]

Islands = Sequence[Sequence[int]]
"""Peers that lie together; every peer is in one."""


def starts(islands: Islands, groups: int, size: int) -> Iterator[list[list[int]]]:
    """Groupings that islands suggest: a group takes c peers at a time from the island that has most
    left, for each c that divides `size`. 1: across as many islands as there are; `size`: inside of
    one where it is large enough."""
    for c in range(1, size + 1):
        if size % c:
            continue
        left = [list(island) for island in islands]
        found = []
        for _ in range(groups):
            group: list[int] = []
            used: set[int] = set()
            while len(group) < size:
                # An island that it has nothing of yet, where such a one has enough peers.
                i = max(
                    range(len(left)),
                    key=lambda i: (min(len(left[i]), c), i not in used, len(left[i]), -i),
                )
                take = min(c, size - len(group))
                group += left[i][:take]
                del left[i][:take]
                used.add(i)
            found.append(group)
        yield found


def divisions(groups: int, size: int) -> int:
    """How many divisions of groups · size peers there are, whatever the order of the groups."""
    found = 1
    for left in range(groups * size, 0, -size):
        found *= math.comb(left - 1, size - 1)  # whom the first of those left is with
    return found


def every_division(peers: Sequence[int], size: int) -> Iterator[list[list[int]]]:
    """All of them; each group begins with the first peer that is in none before it."""
    if not peers:
        yield []
        return
    head, rest = peers[0], peers[1:]
    for others in itertools.combinations(rest, size - 1):
        left = [p for p in rest if p not in others]
        for more in every_division(left, size):
            yield [[head, *others], *more]
