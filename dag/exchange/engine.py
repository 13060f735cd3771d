"""What a peer does in each phase of an exchange, on vectors of any kind: tensors, or hashes.

Pure: own vectors and what came go in, what leaves and the result come out. Sums are in the order in
which messages are taken, so they are the same bits whoever is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from .collective import Hop
from .wiring import Exchange

__all__ = ["VectorSpace", "give", "pass_on", "take"]

V = TypeVar("V")


class VectorSpace(Protocol[V]):
    """The vectors of one exchange. Of one with a single shard, `cut`, `split`, `concat` and `join`
    hand on what they get."""

    def cut(self, vector: V) -> Sequence[V]:
        """The shards of a whole vector, in order."""

    def split(self, vector: V, shards: Sequence[int]) -> Sequence[V]:
        """What `concat` put together of these shards."""

    def concat(self, shards: Sequence[V]) -> V:
        """Some shards, one behind the other."""

    def join(self, shards: Sequence[V]) -> V:
        """The whole vector of all shards in order."""

    def add(self, parts: Sequence[V]) -> V:
        """The sum in the given order, of equal shards; nothing of them is changed."""

    def relay(self, total: V) -> V:
        """What a peer hands on of a result that it was given."""


def give(exchange: Exchange, own: Callable[[Hop], V], space: VectorSpace[V]) -> Callable[[Hop], V]:
    """What a participant gives, by hop. `own`: its whole vector for a hop (`Hop.part`)."""
    whole = len(exchange.edges) == 2
    known: dict[int, Sequence[V]] = {}

    def given(hop: Hop) -> V:
        if hop.part not in known:
            vector = own(hop)
            known[hop.part] = (vector,) if whole else space.cut(vector)
        shards = known[hop.part]
        if len(hop.shards) == 1:
            return shards[hop.shards[0]]
        return space.concat([shards[s] for s in hop.shards])

    return given


def pass_on(taken: Sequence[tuple[Hop, V]], space: VectorSpace[V]) -> Callable[[Hop], V]:
    """What a peer gives after it added up or relayed what came, by hop."""
    results = _results(taken, space)
    for shard in {s for hop, _ in taken if hop.total for s in hop.shards}:
        results[shard] = space.relay(results[shard])

    def given(hop: Hop) -> V:
        if len(hop.shards) == 1:
            return results[hop.shards[0]]
        return space.concat([results[s] for s in hop.shards])

    return given


def take(taken: Sequence[tuple[Hop, V]], space: VectorSpace[V]) -> V:
    """The result that a receiver has of what came: every shard once as a total, or its parts."""
    results = _results(taken, space)
    return space.join([results[s] for s in range(len(results))])


def _results(taken: Sequence[tuple[Hop, V]], space: VectorSpace[V]) -> dict[int, V]:
    pieces: dict[int, list[V]] = {}
    for hop, vector in taken:
        shards = space.split(vector, hop.shards) if len(hop.shards) > 1 else (vector,)
        for shard, piece in zip(hop.shards, shards, strict=True):
            pieces.setdefault(shard, []).append(piece)
    whole = {shard for hop, _ in taken if hop.total for shard in hop.shards}
    return {s: of[0] if s in whole else space.add(of) for s, of in pieces.items()}
