"""Everything to one hub, which adds it up and gives the result to all receivers.

Two hops and the fewest frames; the hub's link carries everything. For what is small, or has few
participants. `Stars` is one of them for each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan.plan import PeerId
from .collective import Collective, Hop, Members

__all__ = ["Star", "Stars"]


class Star(Collective):
    """The hub is the first receiver."""

    name, coded = "star", True

    def hops(self, members: Members) -> Iterator[Hop]:
        yield from _star(members.participants, members.receivers, members.first)


class Stars(Collective):
    """One star in each group of participants, with its first as the hub. A group's others must be
    in no other group."""

    name, coded = "stars", False

    def hops(self, members: Members) -> Iterator[Hop]:
        at = 0
        for group in members.groups:
            yield from _star(group, tuple(dict.fromkeys(group)), at)
            at += len(group)


def _star(participants: Sequence[PeerId], receivers: Sequence[PeerId], first: int) -> Iterator[Hop]:
    hub = receivers[0]
    for part, peer in enumerate(participants, first):
        yield Hop(0, 1, peer, hub, part=part)
    for receiver in receivers:
        yield Hop(1, 2, hub, receiver, total=True)
