"""What a peer does in each phase of an exchange, on vectors of any kind: tensors, or hashes.

Both exchanges are carried out by this: those of a step, whose actions take all of a phase at once
and add it up in the order in which a collective lists it (the same bits whoever is faster), and
those between replicas, whose frames come when they come, to sums that have no order. Pure: what
came goes in, what leaves and the result come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from .collective import Hop
from .wiring import Exchange

__all__ = ["Reduction", "Summing", "VectorSpace", "give", "pass_on", "take"]

V = TypeVar("V")


class Summing(Protocol[V]):
    """The sum of the parts of a shard."""

    def add(self, hop: Hop, part: V) -> None:
        """Add a part. What it raises for one that cannot be added leaves the sum as it was."""

    def total(self) -> V:
        """Return the sum of what was added."""


class Reduction(Generic[V]):
    """What one peer makes of all that it takes in one phase: of parts the sum, shard by shard; a
    total is what it is. `summing`: makes the sum of a shard, of which there is nothing yet."""

    def __init__(self, summing: Callable[[], Summing[V]]) -> None:
        self._summing, self._came = summing, set[Hop]()
        self._sums: dict[int, Summing[V]] = {}
        self._totals: dict[int, V] = {}

    def take(self, hop: Hop, pieces: Sequence[V]) -> None:
        """Take the pieces of a message, one of each of its shards; a second time without effect."""
        if hop in self._came:
            return
        for shard, piece in zip(hop.shards, pieces, strict=True):
            if hop.total:
                self._totals[shard] = piece
            else:
                if shard not in self._sums:
                    self._sums[shard] = self._summing()
                self._sums[shard].add(hop, piece)
        self._came.add(hop)

    def has(self, hops: Iterable[Hop]) -> bool:
        """Return whether all of these came."""
        return self._came.issuperset(hops)

    def made(self) -> Mapping[int, V]:
        """Return what there is of each shard."""
        return {s: sum_.total() for s, sum_ in self._sums.items()} | self._totals


# ------------------------------------------------------------ a step's


class VectorSpace(Protocol[V]):
    """The vectors of one exchange. Here is what one with a single shard does, but for sums: it
    hands on what it gets."""

    def cut(self, vector: V) -> Sequence[V]:
        """The shards of a whole vector, in order."""
        return (vector,)

    def split(self, vector: V, shards: Sequence[int]) -> Sequence[V]:
        """What `concat` put together of these shards."""
        return (vector,)

    def concat(self, shards: Sequence[V]) -> V:
        """Some shards, one behind the other."""
        return shards[0]

    def join(self, shards: Sequence[V]) -> V:
        """The whole vector of all shards in order."""
        return shards[0]

    def add(self, parts: Sequence[V]) -> V:
        """The sum in the given order, of equal shards; nothing of them is changed."""

    def relay(self, total: V) -> V:
        """What a peer hands on of a result that it was given."""
        return total


class _InOrder(Generic[V]):
    """A sum in the order in which parts are added."""

    def __init__(self, space: VectorSpace[V]) -> None:
        self._space, self._parts = space, list[V]()

    def add(self, hop: Hop, part: V) -> None:
        self._parts.append(part)

    def total(self) -> V:
        return self._space.add(self._parts)


def give(exchange: Exchange, own: Callable[[Hop], V], space: VectorSpace[V]) -> Callable[[Hop], V]:
    """What a participant gives, by hop. `own`: its whole vector for a hop (`Hop.part`)."""
    whole = len(exchange.edges) == 2
    known: dict[int, Sequence[V]] = {}

    def given(hop: Hop) -> V:
        if hop.part not in known:
            vector = own(hop)
            known[hop.part] = (vector,) if whole else space.cut(vector)
        return _message(hop, known[hop.part], space)

    return given


def pass_on(taken: Sequence[tuple[Hop, V]], space: VectorSpace[V]) -> Callable[[Hop], V]:
    """What a peer gives after it added up or relayed what came, by hop."""
    results = {**_reduced(taken, space)}
    for shard in {s for hop, _ in taken if hop.total for s in hop.shards}:
        results[shard] = space.relay(results[shard])
    return lambda hop: _message(hop, results, space)


def take(taken: Sequence[tuple[Hop, V]], space: VectorSpace[V]) -> V:
    """The result that a receiver has of what came: every shard once as a total, or its parts."""
    results = _reduced(taken, space)
    return space.join([results[s] for s in range(len(results))])


def _message(hop: Hop, of: Mapping[int, V] | Sequence[V], space: VectorSpace[V]) -> V:
    if len(hop.shards) == 1:
        return of[hop.shards[0]]
    return space.concat([of[s] for s in hop.shards])


def _reduced(taken: Sequence[tuple[Hop, V]], space: VectorSpace[V]) -> Mapping[int, V]:
    reduction = Reduction[V](lambda: _InOrder(space))
    for hop, vector in taken:
        reduction.take(hop, space.split(vector, hop.shards) if len(hop.shards) > 1 else (vector,))
    return reduction.made()
