"""Each with each: a participant adds up its shard of all vectors and gives everybody the sum.

2·n·(n - 1) frames for each chunk. A participant that adds up the share f of a vector of N bytes
sends and receives (1 + (n - 2)·f)·N of them. In chunks, the sums of the first come back while parts
of the last are still on their way, so lines that are slow both ways are used both ways at once:
with shares that follow them all are done at about max(N / slowest line, 2·(n - 1)·N / Σ lines), and
no all-reduce is faster (Patarasuk and Yuan 2009, for equal lines).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan.plan import PeerId
from .collective import Collective, Hop, Members

__all__ = ["AllToAll"]


class AllToAll(Collective):
    """The collective all-to-all: a participant adds up its shard of all vectors and gives everybody
    the sum. A participant of weight 0 adds up nothing."""

    name, coded = "all-to-all", True

    def hops(self, members: Members) -> Iterator[Hop]:
        """Chunk i of all shards is added up in phase i + 1; an owner's shards are its chunks."""
        owners, everybody, chunks = list(_owners(members)), members.participants, members.chunks
        for i in range(chunks):
            for source in everybody:
                for k, owner in enumerate(owners):
                    yield Hop(0, i + 1, source, owner, (k * chunks + i,))
        for i in range(chunks):
            for k, owner in enumerate(owners):
                for receiver in everybody:
                    yield Hop(i + 1, chunks + 1, owner, receiver, (k * chunks + i,), total=True)

    def shards(self, members: Members) -> Sequence[int]:
        return [w for w in _owners(members).values() for _ in range(members.chunks)]


def _owners(members: Members) -> dict[PeerId, int]:
    """Return who adds up something, and how much relative to the others."""
    peers = members.participants
    weights = members.weights if any(members.weights) else [1] * len(peers)
    return {peer: weight for peer, weight in zip(peers, weights, strict=True) if weight}
