"""Rounds on tensors: what values are, and what becomes of buffers, whatever the method does with
parameters.

A value of an entry is (elements,), float32, on the host: what frames bring and take is there too,
and the device keeps its memory for the steps. Of running statistics the mean counts, without
momentum and whole, and of integers the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...compression.codec import RAW, Encoded
from ...dag.execute.execute import TensorSpecError
from ...dag.rounds.sums import LargeContributionError, WeightedSum, fits
from ...dag.rounds.vector import Entry, RunVector, Span, VectorPiece, digest
from ...job.rounds import RoundSettings
from ...job.settings import Settings
from ...net.links.buffers import TrimmedHeap
from ...proto import broker_pb2
from ..sync.norm import square_of
from .algebra import HeldEntry, RoundAlgebra
from .coding import PartCoding, side_by_side
from .methods.round_strategies import STRATEGIES
from .methods.round_strategy import MeanOfBuffers, RoundStrategy, WholeOfBuffers
from .part_algebra import Buffers, EntryVersion, PartSum, Pieces, PlaceSum, WrittenPart

__all__ = ["TensorAlgebra"]


class TensorAlgebra(RoundAlgebra[Tensor]):
    """Tensors of one holder. `replica`: the id of its replica. Raises CodecError for a codec that
    rounds cannot have."""

    def __init__(
        self,
        vector: RunVector,
        settings: RoundSettings,
        replica: str,
    ) -> None:
        self.vector, self.strategy = vector, STRATEGIES[settings.method].of(settings)
        self._slots, self.codings = self.strategy.slots, self.strategy.codings(settings, vector)
        self.most_rows, self.keeps_given = settings.most_rows, settings.keeps_given
        self._replica, self._round = replica, -1
        self._mean, self._whole = MeanOfBuffers(Settings()), WholeOfBuffers(Settings())
        self._encoded: dict[tuple[str, int, int, int], Encoded] = {}
        """By entry, beginning and end of a piece, and row, the contribution to the round."""
        self._heap = TrimmedHeap()
        """Has holes where parts of a vector lay that were exchanged."""

    def begin(self, start: broker_pb2.RoundStart) -> None:
        super().begin(start)
        if start.round != self._round:
            self._round, self._encoded = start.round, {}
            self._heap.count(4 * self.vector.elements)

    # ------------------------------------------------------------ entries

    def _strategy(self, entry: Entry) -> RoundStrategy:
        """The method's, or that of buffers."""
        if not entry.is_buffer:
            return self.strategy
        return self._whole if entry.integer or self.strategy.apart else self._mean

    def read(self, copy: Tensor, entry: Entry) -> Tensor:
        dtype = torch.int64 if entry.integer else torch.float32
        return copy.detach().to("cpu", dtype, copy=True).reshape(-1).view(torch.float32)

    @torch.no_grad()
    def write(self, copy: Tensor, values: Tensor, entry: Entry) -> None:
        copy.copy_((values.view(torch.int64) if entry.integer else values).view(copy.shape))

    def first(self, held: HeldEntry[Tensor], values: Tensor) -> EntryVersion[Tensor]:
        own = self._strategy(held.entry).own_slots if held.owned else ()
        state, mine = (
            {slot: torch.zeros_like(values) for slot in slots} for slots in (self._slots, own)
        )
        return EntryVersion(values, state, mine)

    def loaded(self, values: Tensor, entry: Entry, *, given: bool = False) -> Tensor:
        if values.shape != self.shape(entry, given=given):
            raise TensorSpecError(
                f"state of rounds of {entry.value}: expected {entry.spec.elements} elements"
            )
        return values.to("cpu", torch.float32, copy=True)

    def shape(self, entry: Entry, *, given: bool) -> tuple[int, ...]:
        """Return that of a value, `given`: of a contribution."""
        return (entry.spec.elements,)

    def began(self, held: HeldEntry[Tensor]) -> Tensor:
        """Return what local steps began with: the version in the dtype of the stages."""
        values = held.version.values
        return values if held.entry.integer else values.to(held.copies[0].dtype).float()

    def _left(self, held: HeldEntry[Tensor]) -> Tensor:
        """What was in the stages when it was taken down."""
        given = self.numbers(held)
        assert given is not None, f"nothing of {held.entry.name} was taken down"
        whole = self._strategy(held.entry).gives_values
        return given if whole else self.began(held) - given

    def numbers(self, held: HeldEntry[Tensor]) -> Tensor | None:
        """What was taken down of an entry, of each element a number."""
        return held.given

    def contribution(
        self, held: HeldEntry[Tensor], clients: Tensor | None, senders: Tensor | None = None
    ) -> Tensor | None:
        entry, state = held.entry, {**held.version.state, **held.version.own}
        strategy, now = self._strategy(entry), held.now if clients is None else clients
        given = strategy.contribution(entry.value, self.began(held), now, state)
        return given if entry.integer or bool(given.isfinite().all()) else None

    def drift(self, held: HeldEntry[Tensor]) -> float:
        given = self.numbers(held)
        if held.entry.is_buffer or given is None:
            return 0.0
        return float(square_of(given - self.began(held) if self.strategy.apart else given))

    def moved_by(self, held: HeldEntry[Tensor], mean: Pieces[Tensor]) -> float:
        return 0.0 if held.entry.is_buffer else sum(float(square_of(row)) for _, row in mean)

    def mixed(self, held: HeldEntry[Tensor], version: Tensor) -> Tensor:
        mix = self._strategy(held.entry).mix
        if not mix or held.given is None:
            return version
        was = self._left(held)
        return was + (version - was) * (1.0 - mix)

    def landing(self, held: HeldEntry[Tensor], version: Tensor) -> Tensor:
        a, b = self.mixed(held, version), self._left(held)
        if held.entry.integer:
            return (a.view(torch.int64) - b.view(torch.int64)).view(torch.float32)
        return a - b

    def moved(self, values: Tensor, landing: Tensor, entry: Entry) -> Tensor:
        if entry.integer:
            return (values.view(torch.int64) + landing.view(torch.int64)).view(torch.float32)
        return values + landing

    def meet(
        self, held: HeldEntry[Tensor], mean: Pieces[Tensor], coding: PartCoding
    ) -> EntryVersion[Tensor]:
        self._heap.count(4 * held.entry.spec.elements)
        value, before, strategy = held.entry.value, held.version, self._strategy(held.entry)
        [found] = torch.cat([values for _, values in mean], dim=1)
        mine = self.numbers(held)
        given = found if mine is None else mine  # of copies nothing is given
        values, state = strategy.meet(value, before.values, given, found, before.state)
        if not before.own or held.given is None:
            return EntryVersion(values, state, before.own)
        each = [(piece, given[piece.start : piece.stop]) for piece, _ in mean]
        heard = self.write_part(each, coding, self._round, self._replica).values
        return EntryVersion(values, state, strategy.left(value, given, heard, found))

    def taken(self, held: HeldEntry[Tensor], version: Pieces[Tensor]) -> EntryVersion[Tensor]:
        values, *state = torch.cat([rows for _, rows in version], dim=1)
        own = held.version.own if self._round >= 0 else self.first(held, values).own
        return EntryVersion(values, dict(zip(self._slots, state, strict=True)), own)

    def digest(self, entry: Entry, *values: Tensor) -> int:
        return digest(entry.value, values[0] if len(values) == 1 else torch.cat(values))

    def digests(
        self, plan: broker_pb2.RoundPlan, made: Mapping[str, EntryVersion[Tensor]]
    ) -> tuple[int, ...]:
        if self.strategy.apart:
            return ()
        each = (self.vector.parts(s.start, s.stop, plan.part) for s in plan.segments)
        return tuple(self._digest(parts, made) for parts in each)

    def _digest(self, parts: Iterable[Span], made: Mapping[str, EntryVersion[Tensor]]) -> int:
        total = 0
        for piece in (p for part in parts for p in self.vector.pieces(part)):
            if (version := made.get(piece.entry.value)) is not None:
                for slot, tensor in {"": version.values, **version.state}.items():
                    name = f"{piece.entry.value}\0{slot}\0{piece.start}"
                    total += digest(name, tensor[piece.start : piece.stop])
        return total % 2**64

    # ------------------------------------------------------------ parts

    def write_part(
        self, values: Pieces[Tensor], coding: PartCoding, number: int, whose: str, row: int = 0
    ) -> WrittenPart[Tensor]:
        """Write a part; contributions, which are somebody's, are encoded once in a round."""
        kept, pieces, heard = self._encoded if whose else {}, [], []
        for piece, own in values:
            at = piece.entry.value, piece.start, piece.stop, row
            if at not in kept:
                kept[at] = coding.encode(piece, own, number, whose)
            pieces.append((piece, kept[at]))
            heard.append(coding.echo(piece, own, kept[at]))
        return WrittenPart(coding.written(pieces), torch.cat(heard))

    def give(
        self, part: Span, given: Pieces[Tensor], plan: broker_pb2.RoundPlan, coding: PartCoding
    ) -> WrittenPart[Tensor]:
        mine = [(piece, values[piece.start : piece.stop]) for piece, values in given]
        written = self.write_part(mine, coding, plan.round, self._replica)
        for piece, [values] in self.cut(part, written.values):
            if not piece.entry.integer and not fits(values, plan.exponent):
                raise LargeContributionError(
                    f"{piece.entry.name} has moved by {float(values.abs().amax()):g}: expected "
                    f"less than 2^{plan.exponent}"
                )
        return written

    def sum(self, part: Span, plan: broker_pb2.RoundPlan) -> PartSum[Tensor]:
        return self.place_sum(part, plan)

    def place_sum(self, part: Span, plan: broker_pb2.RoundPlan) -> PlaceSum[Tensor]:
        integers = self.vector.integers(part)
        return WeightedSum(part[1] - part[0], plan.weight, plan.exponent, integers)

    def written_sum(self, part: Span, total: Tensor, coding: PartCoding) -> WrittenPart[Tensor]:
        return WrittenPart(RAW.encode(total).buffers, total)

    def scaled(
        self, part: Span, mean: Tensor, plan: broker_pb2.RoundPlan
    ) -> Iterator[tuple[VectorPiece, Tensor]]:
        """Multiply parameters by what the plan says."""
        for piece, [values] in self.cut(part, mean):
            scaled = plan.scale and not piece.entry.is_buffer
            yield piece, values * plan.scale if scaled else values

    def result(
        self,
        part: Span,
        mean: Tensor,
        came: Sequence[tuple[int, Buffers]],
        plan: broker_pb2.RoundPlan,
        coding: PartCoding,
    ) -> WrittenPart[Tensor]:
        if came:
            return WrittenPart(side_by_side(came), mean)
        return self.write_part([*self.scaled(part, mean, plan)], coding, plan.round, "")

    def whole(self, part: Span, made: Pieces[EntryVersion[Tensor]], coding: PartCoding) -> Buffers:
        """The values, then slots one after the other."""
        found: list[memoryview] = []
        for slot in (None, *self._slots):
            for piece, version in made:
                values = version.values if slot is None else version.state[slot]
                found += RAW.encode(values[piece.start : piece.stop]).buffers
        return tuple(found)

    def decode(self, part: Span, data: memoryview, coding: PartCoding) -> Tensor:
        return coding.decode(part, data)

    def fits(self, part: Span, values: Tensor, exponent: int, *, rows: bool = False) -> bool:
        values = values.view(-1, part[1] - part[0])
        if rows:
            return fits(values, exponent, self.vector.integers(part))
        return fits(values[0], exponent, self.vector.integers(part)) and fits(values[1:], exponent)

    def cut(self, part: Span, values: Tensor) -> Iterator[tuple[VectorPiece, Tensor]]:
        table = values.view(-1, part[1] - part[0])
        for piece in self.vector.pieces(part):
            at = piece.entry.start + piece.start - part[0]
            yield piece, table[:, at : at + piece.elements]
