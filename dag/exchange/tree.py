"""A binary tree: sums go up to its root, the total comes down again.

2·⌊log₂ n⌋ phases and as many latencies, 2·(n - 1) frames and the whole vector on each, so it is for
small vectors of many participants. They fill the tree level by level, in the order of the groups if
there are any.
"""

from __future__ import annotations

from collections.abc import Iterator

from .collective import Collective, Hop, Members

__all__ = ["Tree"]


class Tree(Collective):
    """The collective tree: sums go up a binary tree, the total comes down again."""

    name, coded = "tree", False

    def hops(self, members: Members) -> Iterator[Hop]:
        peers = [p for group in members.groups for p in group] or members.participants
        deepest = _depth(len(peers) - 1)
        for i, peer in enumerate(peers):
            depth, below = _depth(i), range(2 * i + 1, min(2 * i + 3, len(peers)))
            if below:  # its own part, then those of who is below
                yield Hop(0, deepest - depth, peer, peer)
            for child in below:
                given = deepest - depth - 1 if 2 * child + 1 < len(peers) else 0
                yield Hop(given, deepest - depth, peers[child], peer)
            if not below:
                continue
            now = deepest + depth
            yield Hop(now, 2 * deepest, peer, peer, total=True)
            for child in below:
                relays = 2 * child + 1 < len(peers)
                taken = now + 1 if relays else 2 * deepest
                yield Hop(now, taken, peer, peers[child], total=True)


def _depth(i: int) -> int:
    return (i + 1).bit_length() - 1
