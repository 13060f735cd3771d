"""What rounds compute with, and what a holder keeps of an entry of the vector between two of them.

All that a peer does in a round stands once (`work.py`, `attempt.py`), whatever a *value* is, of an
entry or of a part of the vector: a `RoundAlgebra` says that. There are two of them, on tensors
(`tensors.py`), and on the hashes of a ghost (`sim/ghost/rounds.py`).

In snapshots the values of an entry are called

    base  SLOT                the version that the round began with, and state
    given@N  base@N  SLOT@N   what was taken down in round N, and what was applied
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ...dag.rounds.vector import Entry, RunVector, Span, VectorPiece
from ...proto import broker_pb2
from .coding import PartCoding
from .methods.round_strategy import RoundStrategy

__all__ = [
    "EntryVersion",
    "HeldEntry",
    "OnIntegers",
    "PartSum",
    "Pieces",
    "PlaceSum",
    "RoundAlgebra",
    "WrittenPart",
]

_BASE, _GIVEN = "base", "given"

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

    def named(self, when: str = "") -> dict[str, V]:
        """Return its values by their names in snapshots."""
        parts = {_BASE: self.values, **self.state, **self.own}
        return {f"{part}{when}": value for part, value in parts.items()}


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


class RoundAlgebra(Protocol[V]):
    """What values are at one holder, and how the method of its run computes with them. vector: of
    the run. codings: by hop, how parts are written in rounds as ever. most_rows, keeps_given: as in
    `RoundSettings`."""

    vector: RunVector
    strategy: RoundStrategy
    codings: Mapping[int, PartCoding]
    most_rows: int
    keeps_given: bool

    def begin(self, start: broker_pb2.RoundStart) -> None:
        """Begin a round, or hear of it again."""
        self.strategy.begin(start.round, gathers=start.gathers)

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

    # ------------------------------------------------------------ parts

    def pieces_of(self, part: Span) -> Sequence[VectorPiece]:
        """Return the pieces of a part, in order."""
        return tuple(self.vector.pieces(part))

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

    def combined(
        self, came: Mapping[Span, Sequence[tuple[int, V]]], plan: broker_pb2.RoundPlan
    ) -> Mapping[Span, V]:
        """Return what is made of clients' contributions, by part that is added up here. `came`: in
        the order of clients, how many of them a value has, and it."""

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
        when, found = f"@{self.round}", self.version.named()
        if self.given is not None and self.algebra.keeps_given:
            found[f"{_GIVEN}{when}"] = self.given
        return found | (self.applied.named(when) if self.applied is not None else {})

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
