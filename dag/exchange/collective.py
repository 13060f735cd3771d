"""A collective: which messages carry an exchange out, in which phase.

Whatever is exchanged is a vector that is cut into shards. A collective is a list of hops: in phase
`given` the source gives some shards, in phase `taken` the destination uses them. Phase 0 is the
giving, in which everybody has a vector of its own; the last phase is the taking, in which everybody
who is to have the result puts it together; in between a peer adds up what came of a shard (parts),
or passes on what others added up (totals). A peer's own share of a sum, and what it keeps, are hops
to itself. What is taken was given in a lower phase, and all peers do lower phases first: so no two
wait for each other, whatever the collective.

So a new collective is one file with its hops, and a line in `collectives.py`: the flow of a step,
its schedule, the deadlock checker, costs, memory, the engine of a peer and that of the ghosts ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from ..plan.plan import PeerId

__all__ = ["Collective", "Hop", "Members"]


class Hop(NamedTuple):
    """One message of an exchange. Parts are added up in the order in which a collective lists the
    hops to their taker."""

    given: int
    """Phase in which the source gives it."""
    taken: int
    """Phase in which the destination uses it; greater."""
    source: PeerId
    destination: PeerId
    shards: tuple[int, ...] = (0,)
    """In the order in which they lie behind each other; at least one."""
    total: bool = False
    """Whether they are results; else parts, to be added up."""
    part: int = 0
    """Which of several of its own a participant gives: its place among the participants."""
    weight: int = 1
    """What a part counts for in a sum between replicas; in a step all count alike."""


class Members(NamedTuple):
    """Participants of an exchange. One may stand more than once where it has several to give, one
    for each; of collectives that cut, all are different and the same as the receivers."""

    participants: tuple[PeerId, ...]
    receivers: tuple[PeerId, ...]
    """Who ends with the result."""
    groups: tuple[tuple[PeerId, ...], ...] = ()
    """Participants side by side (in one place, of one pipeline), for collectives that ask; empty:
    nothing is known of them."""
    weights: tuple[int, ...] = ()
    """By participant, how much of the vector it is to add up, relative to the others, for
    collectives that ask; empty: all the same."""
    chunks: int = 1
    """Into how many parts each shard is cut, that follow each other, for collectives that ask."""
    first: int = 0
    """Place of the first participant among all, where only one's part in a star is looked at."""


class Collective:
    """Decides which messages carry an exchange out, and in which phase. Pure: the same members give
    the same hops in the same order."""

    name: ClassVar[str]
    """As in `[sync] collective` and in plans."""
    coded: ClassVar[bool]
    """Whether a codec that loses something may carry its hops: every part is then encoded once and
    every total once, and all receivers have the same bits."""

    def hops(self, members: Members) -> Iterator[Hop]:
        """All messages, those to one taker in the order of its reductions."""
        raise NotImplementedError

    def shards(self, members: Members) -> Sequence[int]:
        """The relative size of each shard into which the vector is cut."""
        return (1,)
