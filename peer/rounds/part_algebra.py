"""What rounds compute of parts of the vector: what is given, added up and made of it, whatever a
*value* is. Of entries `algebra.py` says that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ...dag.rounds.vector import RunVector, Span, VectorPiece
from ...proto import broker_pb2
from .coding import PartCoding
from .methods.round_strategy import RoundStrategy

__all__ = [
    "Buffers",
    "EntryVersion",
    "OnIntegers",
    "PartAlgebra",
    "PartSum",
    "Pieces",
    "PlaceSum",
    "WrittenPart",
]

T = TypeVar("T")
V = TypeVar("V")
Buffers = tuple[memoryview, ...]
OnIntegers = Callable[[Tensor], Tensor]
"""Makes integers of integers, (elements,), int64."""
Pieces = Sequence[tuple[VectorPiece, T]]
"""Pieces in order, each with something of it, or of its entry."""


@dataclass(frozen=True)
class EntryVersion(Generic[V]):
    """An entry between two rounds. state: by slot, what all replicas share; own: what this one has
    by itself."""

    values: V
    state: Mapping[str, V]
    own: Mapping[str, V]


class WrittenPart(NamedTuple, Generic[V]):
    """A part as it is written, and as everybody reads it."""

    buffers: Buffers
    values: V


class PartSum(Protocol[V]):
    """A weighted sum of contributions to a part, which has no order."""

    def add(self, values: V, weight: int) -> None:
        """Add a contribution. Raises LargeContributionError, and adds nothing."""

    def add_sum(self, values: V, weight: int) -> None:
        """Add the sum of a place, whose contributions weigh so much, as `PlaceSum.total` has it.
        Raises LargeContributionError, and adds nothing."""

    def mean(self) -> V:
        """Return the mean of what was added."""


class PlaceSum(PartSum[V], Protocol[V]):
    """A sum of what a place gives, which is added to another one."""

    @property
    def total(self) -> V:
        """The sum of what was added."""


class PartAlgebra(Protocol[V]):
    """What values of parts are, at one holder. vector: of the run. codings: by hop, how parts are
    written in rounds as ever. most_rows: as in `RoundSettings`."""

    vector: RunVector
    strategy: RoundStrategy
    codings: Mapping[int, PartCoding]
    most_rows: int

    def give(
        self, part: Span, given: Pieces[V], plan: broker_pb2.RoundPlan, coding: PartCoding
    ) -> WrittenPart[V]:
        """Write a contribution to a part. Raises LargeContributionError."""

    def give_rows(
        self,
        part: Span,
        given: Pieces[V],
        rows: range,
        plan: broker_pb2.RoundPlan,
        coding: PartCoding,
    ) -> WrittenPart[V]:
        """Write these clients' contributions to a part, of those that are given. Raises
        LargeContributionError, TensorSpecError for clients that are not there."""
        raise TypeError("no client's contribution comes by itself here")

    def combined(
        self, came: Mapping[Span, Sequence[tuple[int, V]]], plan: broker_pb2.RoundPlan
    ) -> Mapping[Span, V]:
        """Return what is made of clients' contributions, by part that is added up here. `came`: in
        the order of clients, how many of them a value has, and it."""
        raise TypeError("no client's contribution comes by itself here")

    def sum(self, part: Span, plan: broker_pb2.RoundPlan) -> PartSum[V]:
        """Return the sum of a part to which nothing has been added."""

    def place_sum(self, part: Span, plan: broker_pb2.RoundPlan) -> PlaceSum[V]:
        """Return the sum of what a place gives to a part, to which nothing has been added."""

    def written_sum(self, part: Span, total: V, coding: PartCoding) -> WrittenPart[V]:
        """Write the sum of a place."""

    def result(
        self,
        part: Span,
        mean: V,
        came: Sequence[tuple[int, Buffers]],
        plan: broker_pb2.RoundPlan,
        coding: PartCoding,
    ) -> WrittenPart[V]:
        """Write the mean of a part. `came`: weight and contribution of each giver, as it came, if
        the method passes these on."""

    def masked(
        self, part: Span, given: V, weight: int, plan: broker_pb2.RoundPlan, mask: OnIntegers
    ) -> WrittenPart[V]:
        """Mask a contribution to a part. `given`: as it is written without masks. Raises
        LargeContributionError."""
        raise TypeError("values are no integers here, which masks are on")

    def unmasked(self, part: Span, total: V, plan: broker_pb2.RoundPlan, lift: OnIntegers) -> V:
        """Return the mean by a masked sum, as a result without masks has it."""
        raise TypeError("values are no integers here, which masks are on")

    def whole(self, part: Span, made: Pieces[EntryVersion[V]], coding: PartCoding) -> Buffers:
        """Write a part of a version, with shared state."""

    def decode(self, part: Span, data: memoryview, coding: PartCoding) -> V:
        """Read a part, whichever of the three it is. Raises CodecError."""

    def fits(self, part: Span, values: V, exponent: int, *, rows: bool = False) -> bool:
        """Return whether all that came of a part are numbers below 2^exponent. `rows`: of several
        clients, each with integers."""
        return True

    def cut(self, part: Span, values: V) -> Iterable[tuple[VectorPiece, V]]:
        """Return the pieces of a result, or of a version."""
