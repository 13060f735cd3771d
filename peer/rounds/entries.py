"""What one holder keeps of an entry of the vector between two rounds: the version, what local steps
moved since then, and what is to become of both; and its names in snapshots.

    base  SLOT                the version that the round began with, and state
    given@N  base@N  SLOT@N   what was taken down in round N, and what was applied
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...compression.codec import Encoded
from ...dag.execute.execute import TensorSpecError
from ...dag.rounds.digest import digest
from ...dag.rounds.vector import Entry, RunVector
from .buffers import elements_of, in_place, minus, plus
from .strategy import RoundStrategy, State

__all__ = ["EntryVersion", "HeldEntry", "hash_of_segment"]

_BASE, _GIVEN = "base", "given"


@dataclass(frozen=True)
class EntryVersion:
    """An entry between two rounds: (elements,) each."""

    values: Tensor
    state: State
    own: State
    """Of this replica alone."""

    def named(self, when: str = "") -> dict[str, Tensor]:
        parts = {_BASE: self.values, **self.state, **self.own}
        return {f"{part}{when}": tensor for part, tensor in parts.items()}


@dataclass(eq=False)
class HeldEntry:
    """An entry of the vector that is in a stage here."""

    entry: Entry
    copies: tuple[Tensor, ...]
    """In the stages."""
    owned: bool
    strategy: RoundStrategy
    """The method's, or that of buffers."""
    version: EntryVersion
    """That the round began with."""
    given: Tensor | None = None
    applied: EntryVersion | None = None
    landing: Tensor | None = None
    """What the stages move by where the version lands that was made beside local steps."""
    shown: Tensor | None = None
    """What was in the stages, while the version is."""
    replaces: bool = False
    """Whether the stages get what was applied as it is, once it is committed: another attempt of
    the round may still want what local steps made here."""
    round: int = -1
    """Of `given` and `applied`."""
    encoded: dict[int, Encoded] = field(default_factory=dict)
    """By beginning of a piece, its contribution."""

    @classmethod
    def of(
        cls,
        entry: Entry,
        copies: Iterable[Tensor],
        strategy: RoundStrategy,
        *,
        slots: Iterable[str],
        owned: bool,
    ) -> HeldEntry:
        """It begins with what is in the stages. `slots`: of the state that replicas share."""
        copies = tuple(copies)
        values = elements_of(copies[0], entry)
        state = {slot: torch.zeros_like(values) for slot in slots}
        found = cls(entry, copies, owned, strategy, EntryVersion(values, state, {}))
        found.version = EntryVersion(values, state, found.nothing)
        return found

    @property
    def nothing(self) -> State:
        """The replica's own state at the beginning; only where an entry belongs there is one."""
        slots = self.strategy.own_slots if self.owned else ()
        return {slot: torch.zeros(self.entry.spec.elements) for slot in slots}

    @property
    def began(self) -> Tensor:
        """What local steps of the round began with: the version in the dtype of the stages."""
        if self.entry.integer:
            return self.version.values
        return self.version.values.to(self.copies[0].dtype).float()

    @property
    def taken(self) -> Tensor:
        """What was in the stages when it was taken down."""
        assert self.given is not None, f"nothing of {self.entry.name} was taken down"
        return self.given if self.strategy.gives_values else self.began - self.given

    @property
    def now(self) -> Tensor:
        """A copy of what is in the stages: (elements,), float32, on the host."""
        return elements_of(self.copies[0], self.entry)

    @torch.no_grad()
    def put(self, values: Tensor) -> None:
        for copy in self.copies:
            copy.copy_(in_place(values, self.entry, copy))

    # ------------------------------------------------------------ from version to version

    def commit(self, *, late: bool) -> None:
        """What was applied is the version; late: it is to land among local steps."""
        if self.replaces and self.applied is not None:
            self.put(self.applied.values)
        elif late and self.given is not None and self.applied is not None:
            self.landing = minus(self.mixed(self.applied.values), self.taken, self.entry)
        self.version, self.applied, self.replaces = self.applied or self.version, None, False
        self.given, self.encoded = None, {}

    def mixed(self, version: Tensor) -> Tensor:
        """What the stages come to by it, had no step been made since the contribution."""
        mix = self.strategy.mix
        if not mix or self.given is None or self.entry.is_buffer:
            return version
        was = self.taken
        return was + (version - was) * (1.0 - mix)

    def show(self) -> None:
        """The version is in the stages, until it lands."""
        self.shown = self.now
        self.put(self.version.values)

    def land(self) -> None:
        """The stages move from what was taken down to the version, and nothing that local steps did
        since then is lost."""
        if self.landing is not None:
            now = self.now if self.shown is None else self.shown
            self.put(plus(now, self.landing, self.entry))
        elif self.shown is not None:
            self.put(self.shown)
        self.shown = self.landing = None

    # ------------------------------------------------------------ snapshots

    def parts(self) -> dict[str, Tensor]:
        """What it goes on from; nobody may write to the tensors."""
        when, found = f"@{self.round}", self.version.named()
        if self.given is not None:
            found[f"{_GIVEN}{when}"] = self.given
        return found | (self.applied.named(when) if self.applied is not None else {})

    def load(self, parts: Mapping[str, Tensor], slots: Iterable[str]) -> None:
        """Goes on from what `parts` gave. Raises TensorSpecError for what is of another shape."""
        whole, slots = (self.entry.spec.elements,), tuple(slots)
        if any(tensor.shape != whole for tensor in parts.values()):
            value = self.entry.value
            raise TensorSpecError(f"state of rounds of {value}: expected {whole[0]} elements")
        self.version = self._read(parts, slots, "") or self.version
        for part, tensor in parts.items():
            kind, at, number = part.partition("@")
            if at and number.isdecimal():
                self.round = int(number)
                self.applied = self._read(parts, slots, f"@{number}") or self.applied
                self.given = tensor if kind == _GIVEN else self.given

    def _read(
        self, parts: Mapping[str, Tensor], slots: tuple[str, ...], when: str
    ) -> EntryVersion | None:
        own = tuple(self.version.own)
        if any(f"{part}{when}" not in parts for part in (_BASE, *slots, *own)):
            return None
        return EntryVersion(
            parts[f"{_BASE}{when}"],
            {slot: parts[f"{slot}{when}"] for slot in slots},
            {slot: parts[f"{slot}{when}"] for slot in own},
        )


def hash_of_segment(
    vector: RunVector, entries: Mapping[str, HeldEntry], start: int, stop: int
) -> int:
    """The hash of elements [start, stop) of the version that was made, with shared state, as far as
    their entries are here."""
    total = 0
    for piece in (p for part in vector.parts(start, stop) for p in vector.pieces(part)):
        entry = entries.get(piece.entry.value)
        made = entry and (entry.applied or entry.version)
        for slot, tensor in {"": made.values, **made.state}.items() if made else ():
            name = f"{piece.entry.value}\0{slot}\0{piece.start}"
            total += digest(name, tensor[piece.start : piece.stop])
    return total % 2**64
