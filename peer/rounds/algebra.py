"""What rounds compute with, and what a holder keeps of an entry of the vector between two of them.

All that a peer does in a round stands once (`work.py`, `attempt.py`), whatever a *value* is, of an
entry or of a part of the vector (`part_algebra.py`): a `RoundAlgebra` says that. There are two of
them, on tensors (`tensors.py`), and on the hashes of a ghost (`sim/ghost/rounds.py`).

In snapshots the values of an entry are called

    base  SLOT                the version that the round began with, and state
    given@N  base@N  SLOT@N   what was taken down in round N, and what was applied
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from ...dag.plan.cut import Stage
from ...dag.rounds.vector import Entry, Span, VectorPiece
from ...proto import broker_pb2
from .coding import PartCoding
from .part_algebra import EntryVersion, PartAlgebra, Pieces

__all__ = ["HeldEntries", "HeldEntry", "RoundAlgebra"]

_BASE, _GIVEN = "base", "given"

T = TypeVar("T")
V = TypeVar("V")


class RoundAlgebra(PartAlgebra[V], Protocol[V]):
    """What values are at one holder, and how the method of its run computes with them.
    keeps_given: as in `RoundSettings`."""

    keeps_given: bool

    def begin(self, start: broker_pb2.RoundStart) -> None:
        """Begin a round, or hear of it again."""
        self.strategy.begin(start.round, gathers=start.gathers)

    def pieces_of(self, part: Span) -> Sequence[VectorPiece]:
        """Return the pieces of a part, in order."""
        return tuple(self.vector.pieces(part))

    # ------------------------------------------------------------ entries

    def read(self, copy: Any, entry: Entry) -> V:
        """Return what is in a stage."""

    def write(self, copy: Any, values: V, entry: Entry) -> None:
        """Put values into a stage."""

    def first(self, held: HeldEntry[V], values: V) -> EntryVersion[V]:
        """Return the version that a run begins with."""

    def loaded(self, values: V, entry: Entry, *, given: bool = False) -> V:
        """Copy a value of a snapshot, `given`: a contribution. Raises TensorSpecError for one of
        another shape."""
        return values

    def contribution(
        self, held: HeldEntry[V], clients: Any, senders: Tensor | None = None
    ) -> V | None:
        """Return what the replica gives of an entry; None for what is no finite number. `clients`:
        what each of its clients came to, or the mean of what they moved where they are to be
        hidden, if that is given in place of what is in the stages. `senders`: how many clients sent
        each number, where that makes a difference."""

    def drift(self, held: HeldEntry[V]) -> float:
        """Return the squared norm of what local steps moved, by the contribution."""
        return 0.0

    def moved_by(self, held: HeldEntry[V], mean: Pieces[V]) -> float:
        """Return the squared norm of the mean of all contributions in these pieces."""
        return 0.0

    def mixed(self, held: HeldEntry[V], version: V) -> V:
        """Return what stages come to by a version, had no step been made since the contribution."""
        return version

    def landing(self, held: HeldEntry[V], version: V) -> V:
        """Return what stages move by where a version lands that was made beside local steps."""

    def moved(self, values: V, landing: V, entry: Entry) -> V:
        """Return values that have moved by this."""

    def meet(self, held: HeldEntry[V], mean: Pieces[V], coding: PartCoding) -> EntryVersion[V]:
        """Return the next version, by the mean of all contributions in these pieces."""

    def taken(self, held: HeldEntry[V], version: Pieces[V]) -> EntryVersion[V]:
        """Return a version that came whole from who has applied it."""

    def digest(self, entry: Entry, *values: V) -> int:
        """Return the hash of an entry, those of a stage's entries add up."""

    def digests(
        self, plan: broker_pb2.RoundPlan, made: Mapping[str, EntryVersion[V]]
    ) -> tuple[int, ...]:
        """Return the hash of each segment, as far as its entries were made here; none of versions
        that are a replica's own."""
        return ()


@dataclass(eq=False)
class HeldEntry(Generic[V]):
    """An entry of the vector that is in a stage here."""

    algebra: RoundAlgebra[V]
    entry: Entry
    copies: Sequence[Any]
    """In the stages."""
    owned: bool
    version: EntryVersion[V] = field(init=False)
    """That the round began with."""
    given: V | None = None
    applied: EntryVersion[V] | None = None
    landing: V | None = None
    """What the stages move by where the version lands that was made beside local steps."""
    shown: V | None = None
    """What was in the stages, while the version is."""
    replaces: bool = False
    """Whether the stages get what was applied as it is, once it is committed: another attempt of
    the round may still want what local steps made here."""
    round: int = -1
    """Of `given` and `applied`."""

    def __post_init__(self) -> None:
        self.version = self.algebra.first(self, self.now)

    @property
    def now(self) -> V:
        """A copy of what is in the stages."""
        return self.algebra.read(self.copies[0], self.entry)

    def put(self, values: V) -> None:
        """Write values into all stages that have the entry."""
        for copy in self.copies:
            self.algebra.write(copy, values, self.entry)

    # ------------------------------------------------------------ from version to version

    def commit(self, *, late: bool) -> None:
        """Make what was applied the version; late: it is to land among local steps."""
        if self.replaces and self.applied is not None:
            self.put(self.applied.values)
        elif late and self.given is not None and self.applied is not None:
            self.landing = self.algebra.landing(self, self.applied.values)
        self.version, self.applied, self.replaces = self.applied or self.version, None, False
        self.given = None

    def forget(self) -> None:
        """Begin anew with what all share of it."""
        version, first = self.version, self.algebra.first(self, self.version.values)
        self.version = EntryVersion(version.values, first.state, version.own)

    def apply(self, version: EntryVersion[V], *, beside: bool, whole: bool, final: bool) -> None:
        """Take a version, which is in the stages unless steps go on `beside` it. `whole`: it came
        from another replica, and nothing of local steps is left; `final`: nothing follows."""
        self.applied = version
        if final or self.given is None or (whole and not beside):
            self.put(version.values)
        elif whole:
            self.replaces = True
        elif not beside:
            self.put(self.algebra.mixed(self, version.values))

    def show(self) -> None:
        """Put the version into the stages, until it lands."""
        self.shown = self.now
        self.put(self.version.values)

    def land(self) -> None:
        """Move the stages from what was taken down to the version; nothing that local steps did
        since then is lost."""
        if self.landing is not None:
            now = self.now if self.shown is None else self.shown
            self.put(self.algebra.moved(now, self.landing, self.entry))
        elif self.shown is not None:
            self.put(self.shown)
        self.shown = self.landing = None

    # ------------------------------------------------------------ snapshots

    def parts(self) -> dict[str, V]:
        """Return all that it goes on from; nobody may write to the values."""
        when, found = f"@{self.round}", _named(self.version)
        if self.given is not None and self.algebra.keeps_given:
            found[f"{_GIVEN}{when}"] = self.given
        return found | (_named(self.applied, when) if self.applied is not None else {})

    def load(self, parts: Mapping[str, V], *, anew: bool) -> None:
        """Go on from what `parts` gave. `anew`: without what a replica has by itself. Raises
        TensorSpecError for what is of another shape."""
        parts = {
            part: self.algebra.loaded(v, self.entry, given=part.startswith(f"{_GIVEN}@"))
            for part, v in parts.items()
        }
        if anew:
            parts |= self.algebra.first(self, self.version.values).own
        self.version = self._read(parts, "") or self.version
        for part, values in parts.items():
            kind, at, number = part.partition("@")
            if at and number.isdecimal():
                self.round = int(number)
                self.applied = self._read(parts, f"@{number}") or self.applied
                self.given = values if kind == _GIVEN else self.given

    def _read(self, parts: Mapping[str, V], when: str) -> EntryVersion[V] | None:
        try:
            state, own = (
                {slot: parts[f"{slot}{when}"] for slot in slots}
                for slots in (self.version.state, self.version.own)
            )
            return EntryVersion(parts[f"{_BASE}{when}"], state, own)
        except KeyError:
            return None


def _named(version: EntryVersion[V], when: str = "") -> dict[str, V]:
    """Return its values by their names in snapshots."""
    parts = {_BASE: version.values, **version.state, **version.own}
    return {f"{part}{when}": value for part, value in parts.items()}


class HeldEntries(dict[str, HeldEntry[V]], Generic[V]):
    """Entries of the vector at a holder of `stages`, by value. `copies`: by value, an entry in each
    of the stages that has it, as the algebra reads and writes them. A tied one is of its first
    stage only (`owned`)."""

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
        super().__init__(
            (e.value, HeldEntry(algebra, e, copies[e.value], owned=e.value in mine)) for e in here
        )
        self.elements = sum(e.spec.elements for e in here)

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
