"""A ring: every participant has one neighbour that it sends to and one that it hears from.

Each of n shards goes round once and is added to at every stop, and once more as the total:
2·(n - 1) phases, in each of which everybody sends one n-th of the vector (Patarasuk and Yuan 2009).
Few connections and an even load, but a phase is as slow as the slowest link between neighbours and
latencies add up, so it is for links that are alike and short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .collective import Collective, Hop, Members

__all__ = ["Ring"]


class Ring(Collective):
    """The neighbours are those in the order of the groups, or of the participants."""

    name, coded = "ring", False

    def hops(self, members: Members) -> Iterator[Hop]:
        """Shard s starts behind participant s, so that s has the whole sum in phase n - 1."""
        ring = [p for group in members.groups for p in group] or members.participants
        n = len(ring)
        last = 2 * n - 2
        for s in range(n):
            for phase in range(n - 1):
                a, b = ring[(s + 1 + phase) % n], ring[(s + 2 + phase) % n]
                yield Hop(phase, phase + 1, a, b, (s,))
                yield Hop(0, phase + 1, b, b, (s,))
            for step in range(n - 1):
                phase, a, b = n - 1 + step, ring[(s + step) % n], ring[(s + step + 1) % n]
                yield Hop(phase, last, a, a, (s,), total=True)
                yield Hop(phase, last if step == n - 2 else phase + 1, a, b, (s,), total=True)

    def shards(self, members: Members) -> Sequence[int]:
        return [1] * len(members.participants)
