"""The entries of a run's vector that lie at one holder, by value: what is known of each from round
to round, and pieces of them for the parts that are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

from ...dag.plan.cut import Stage
from ...dag.rounds.vector import Span, VectorPiece
from .algebra import EntryVersion, HeldEntry, Pieces, RoundAlgebra

__all__ = ["HeldEntries"]

V = TypeVar("V")
T = TypeVar("T")


class HeldEntries(Mapping[str, HeldEntry[V]], Generic[V]):
    """Entries at a holder of `stages`. `copies`: by value, an entry in each of the stages that has
    it, as the algebra reads and writes them. A tied one is of its first stage only (`owned`)."""

    def __init__(
        self, algebra: RoundAlgebra[V], stages: Iterable[Stage], copies: Mapping[str, Sequence[Any]]
    ) -> None:
        self._algebra, vector = algebra, algebra.vector
        here = [e for e in vector.entries if e.spec.elements and copies.get(e.value)]
        self._of_stages = [
            [e.value for e in here if s.start <= e.operator < s.stop]
            for s in sorted(stages, key=attrgetter("index"))
        ]
        mine = {value for values in self._of_stages for value in values}
        self._entries = {
            e.value: HeldEntry(algebra, e, copies[e.value], owned=e.value in mine) for e in here
        }
        self.elements = sum(e.spec.elements for e in here)

    def __getitem__(self, value: str) -> HeldEntry[V]:
        return self._entries[value]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    # ------------------------------------------------------------ hashes

    def versions(self) -> dict[str, int]:
        """By value, the hash of the version that the round began with, with its shared state."""
        found = {}
        for value, e in self.items():
            state = () if self._algebra.strategy.apart else e.version.state.values()
            found[value] = self._algebra.digest(e.entry, e.version.values, *state)
        return found

    def hashes(self, made: Mapping[str, EntryVersion[V]]) -> tuple[int, ...]:
        """Return the hash of each stage, by versions of its entries."""
        digest = self._algebra.digest
        return tuple(
            sum(digest(self[v].entry, made[v].values) for v in values) % 2**64
            for values in self._of_stages
        )

    # ------------------------------------------------------------ parts

    def of_part(self, part: Span, of: Callable[[HeldEntry[V]], T | None]) -> Pieces[T]:
        """Return the pieces of a part. Raises KeyError for an entry that there is nothing of."""
        found = list[tuple[VectorPiece, T]]()
        for piece in self._algebra.pieces_of(part):
            entry = self.get(piece.entry.value)
            mine = None if entry is None else of(entry)
            if mine is None:
                raise KeyError(piece.entry.name)
            found.append((piece, mine))
        return found

    def gathered(
        self, parts: Iterable[tuple[Span, V | None]]
    ) -> Iterator[tuple[HeldEntry[V], Pieces[V]]]:
        """Yield entries of which all pieces are there."""
        found: dict[str, dict[int, tuple[VectorPiece, V]]] = {}
        for part, came in parts:
            for piece, values in () if came is None else self._algebra.cut(part, came):
                entry = self.get(piece.entry.value)
                if entry is None:
                    continue
                pieces = found.setdefault(piece.entry.value, {})
                pieces[piece.start] = piece, values
                if sum(p.elements for p, _ in pieces.values()) == entry.entry.spec.elements:
                    yield entry, [pieces[start] for start in sorted(pieces)]
