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
from ...dag.rounds.combiners import combined, middle_integers
from ...dag.rounds.noise import StreamKey, VectorNoise, secret_key
from ...dag.rounds.sums import (
    FixedPoint,
    IntegerSum,
    LargeContributionError,
    OverlapSum,
    WeightedSum,
    fits,
)
from ...dag.rounds.vector import Entry, RunVector, Span, VectorPiece, digest
from ...job.clients.client_privacy import STEP_BITS, no_integers
from ...job.rounds import RoundSettings
from ...job.settings import Settings, SettingsError
from ...net.links.buffers import TrimmedHeap
from ...proto import broker_pb2
from ..sync.norm import square_of
from .algebra import HeldEntry, RoundAlgebra
from .coding import CountedCoding, PartCoding, side_by_side
from .methods.round_strategies import (
    MeanOfBuffers,
    WholeOfBuffers,
    codings_of,
    positions_of,
    strategy_of,
)
from .methods.round_strategy import RoundStrategy
from .part_algebra import Buffers, EntryVersion, OnIntegers, Pieces, WrittenPart

__all__ = ["TensorAlgebra"]


_MOVED = "moved"
"""The slot of what the last version moved, where positions of numbers follow from that."""


class TensorAlgebra(RoundAlgebra[Tensor]):
    """Tensors of one holder. `replica`: the id of its replica. Raises CodecError for a codec that
    rounds cannot have, SettingsError for integers in a vector whose sums are masked."""

    def __init__(
        self,
        vector: RunVector,
        settings: RoundSettings,
        replica: str,
        noise_key: StreamKey = secret_key,
    ) -> None:
        """`noise_key`: of what is added to sums where clients are to be hidden."""
        self.vector, self.strategy = vector, strategy_of(settings)
        self._positions = positions_of(settings, vector)
        self._slots = self.strategy.slots + (_MOVED,) * (self._positions is not None)
        self.codings = codings_of(self.strategy, settings, vector, self._positions)
        self._masks = settings.secure
        integer = next((e.name for e in vector.entries if e.integer), "")
        if self._masks and integer:
            raise SettingsError("sync.secure", no_integers(integer))
        self._cohorts, self.most_rows = settings.cohorts, settings.most_rows
        self._privacy, self.keeps_given = settings.privacy, settings.keeps_given
        self._hiding = VectorNoise(vector, settings.seed, noise_key) if settings.privacy else None
        self._replica, self._round = replica, -1
        self._mean, self._whole = MeanOfBuffers(Settings()), WholeOfBuffers(Settings())
        self._overlap = settings.overlap
        """gamma and D, where contributions have how many sent each number in a second row."""
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
        elements = (entry.spec.elements,)
        if values.shape != ((2, *elements) if given and self._overlap else elements):
            raise TensorSpecError(
                f"state of rounds of {entry.value}: expected {entry.spec.elements} elements"
            )
        return values.to("cpu", torch.float32, copy=True)

    def began(self, held: HeldEntry[Tensor]) -> Tensor:
        """Return what local steps began with: the version in the dtype of the stages."""
        values = held.version.values
        return values if held.entry.integer else values.to(held.copies[0].dtype).float()

    def _left(self, held: HeldEntry[Tensor]) -> Tensor:
        """What was in the stages when it was taken down."""
        given = self._numbers(held)
        assert given is not None, f"nothing of {held.entry.name} was taken down"
        whole = self._strategy(held.entry).gives_values
        return given if whole else self.began(held) - given

    def _numbers(self, held: HeldEntry[Tensor]) -> Tensor | None:
        """What was taken down of an entry, without how many sent it."""
        given = held.given
        return given if given is None or not self._overlap else given[0]

    def contribution(
        self, held: HeldEntry[Tensor], clients: Tensor | None, senders: Tensor | None = None
    ) -> Tensor | None:
        entry, state = held.entry, {**held.version.state, **held.version.own}
        if self._privacy is not None and clients is not None:
            return -clients if bool(clients.isfinite().all()) else None
        strategy, now = self._strategy(entry), held.now if clients is None else clients
        given = strategy.contribution(entry.value, self.began(held), now, state)
        if self._positions is not None and not entry.is_buffer:
            self._positions.find(self._round, entry, held.version.state[_MOVED])
        if not entry.integer and not bool(given.isfinite().all()):
            return None
        if self._overlap:
            given = torch.stack([given, torch.zeros_like(given) if senders is None else senders])
        return given

    def drift(self, held: HeldEntry[Tensor]) -> float:
        given = self._numbers(held)
        if held.entry.is_buffer or given is None or self._privacy is not None or self._masks:
            return 0.0
        given = given.mean(0) if self.most_rows else given
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
        mine = self._numbers(held)
        given = found if mine is None else mine  # of copies nothing is given
        values, state = strategy.meet(value, before.values, given, found, before.state)
        if self._positions is not None:
            state = {**state, _MOVED: before.values - values}
        if not before.own or held.given is None:
            return EntryVersion(values, state, before.own)
        each = [(piece, given[piece.start : piece.stop]) for piece, _ in mean]
        heard = self._write(each, coding, self._round, self._replica).values
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

    def _write(
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
        mine = [(piece, values[..., piece.start : piece.stop]) for piece, values in given]
        if not isinstance(coding, CountedCoding):
            return self._give(part, mine, plan, coding)
        numbers = self._give(part, [(p, rows[0]) for p, rows in mine], plan, coding)
        counts = [(p, rows[1]) for p, rows in mine]
        senders = self._write(counts, coding, plan.round, self._replica, row=1)
        buffers = coding.joined(numbers.buffers, senders.buffers)
        return WrittenPart(buffers, torch.stack([numbers.values, senders.values]))

    def _give(
        self, part: Span, mine: Pieces[Tensor], plan: broker_pb2.RoundPlan, coding: PartCoding
    ) -> WrittenPart[Tensor]:
        written = self._write(mine, coding, plan.round, self._replica)
        for piece, [values] in self.cut(part, written.values):
            if not piece.entry.integer and not fits(values, plan.exponent):
                raise LargeContributionError(
                    f"{piece.entry.name} has moved by {float(values.abs().amax()):g}: expected "
                    f"less than 2^{plan.exponent}"
                )
        return written

    def give_rows(
        self,
        part: Span,
        given: Pieces[Tensor],
        rows: range,
        plan: broker_pb2.RoundPlan,
        coding: PartCoding,
    ) -> WrittenPart[Tensor]:
        found = torch.cat(
            [v[rows.start : rows.stop, piece.start : piece.stop] for piece, v in given], dim=1
        )
        if len(found) != len(rows):
            raise TensorSpecError(f"clients {rows} were not trained here")
        if not self.fits(part, found, plan.exponent, rows=True):
            raise LargeContributionError(
                f"a client has moved by {float(found.abs().amax()):g}: expected less than "
                f"2^{plan.exponent}"
            )
        return WrittenPart(RAW.encode(found.view(-1)).buffers, found)

    def combined(
        self, came: Mapping[Span, Sequence[tuple[int, Tensor]]], plan: broker_pb2.RoundPlan
    ) -> dict[Span, Tensor]:
        """Floats by the rule of the run, and of integers the middle one."""
        assert self._cohorts is not None, "no clients"
        tables, middle = list[Tensor](), list[tuple[int, slice, Tensor]]()
        for i, (part, blocks) in enumerate(came.items()):
            tables.append(torch.cat([v.view(-1, part[1] - part[0]) for _, v in blocks]))
            for at in self.vector.integers(part):
                found = middle_integers(tables[i][:, at].contiguous().view(torch.int64))
                middle.append((i, at, found.view(torch.float32)))
                tables[i][:, at] = 0.0  # whose bits may be those of no number
        made = combined(self._cohorts.aggregate, tables, self._cohorts.byzantine)
        for i, at, found in middle:
            made[i][at] = found
        return dict(zip(came, made, strict=True))

    def sum(self, part: Span, plan: broker_pb2.RoundPlan) -> WeightedSum | OverlapSum | IntegerSum:
        """Where clients are to be hidden noise is in the sum before anything else is."""
        total = self.place_sum(part, plan)
        if isinstance(total, IntegerSum):
            if self._privacy is not None and not self._privacy.distributed:
                total.add_multiples(self._grid(plan).rounded(self._noise(part, plan)))
            return total
        if self._privacy is not None:
            total.add_noise(self._noise(part, plan))
        return OverlapSum(total, part[1] - part[0], *self._overlap) if self._overlap else total

    def place_sum(self, part: Span, plan: broker_pb2.RoundPlan) -> WeightedSum | IntegerSum:
        grid, elements = self._grid(plan), part[1] - part[0]
        if self._masks:
            return IntegerSum(self._positions.kept(part) if self._positions else elements)
        return WeightedSum(elements, grid.weight, plan.exponent, self.vector.integers(part))

    def written_sum(self, part: Span, total: Tensor, coding: PartCoding) -> WrittenPart[Tensor]:
        return WrittenPart(RAW.encode(total).buffers, total)

    def _grid(self, plan: broker_pb2.RoundPlan) -> FixedPoint:
        """Where clients are to be hidden the mean is over as many as a round asks, however many
        came; where each peer adds noise of its own, no plan says how fine the grid is."""
        weight, step = plan.weight, 0.0
        if self._privacy is not None:
            assert self._cohorts is not None, "no clients"
            weight = max(weight, self._cohorts.per_round)  # what more of them weigh is no error
            step = self._privacy.step if self._privacy.distributed else 0.0
        return FixedPoint(weight, plan.exponent, step)

    def _noise(self, part: Span, plan: broker_pb2.RoundPlan) -> Tensor:
        assert self._privacy is not None, "no client is hidden"
        assert self._hiding is not None, "no client is hidden"
        found = self._hiding.of_sum(part, plan.round, plan.attempt)
        return found * (self._privacy.noise * self._privacy.clip)

    def masked(
        self, part: Span, given: Tensor, weight: int, plan: broker_pb2.RoundPlan, mask: OnIntegers
    ) -> WrittenPart[Tensor]:
        given = given if self._positions is None else given[self._positions.of(part)]
        multiples = self._grid(plan).fixed(given, weight)
        if self._hiding is not None and self._privacy is not None and self._privacy.distributed:
            at, number = (plan.round, plan.attempt), self._replica.partition(".")[2] or "0"
            multiples += self._hiding.of_giver(number, part, *at, STEP_BITS)
        bits = mask(multiples).view(torch.float32)
        return WrittenPart(RAW.encode(bits).buffers, bits)

    def unmasked(
        self, part: Span, total: Tensor, plan: broker_pb2.RoundPlan, lift: OnIntegers
    ) -> Tensor:
        mean = self._grid(plan).mean(lift(total.view(torch.int64)))
        mean = mean if self._positions is None else self._positions.whole(part, mean)
        return torch.cat([values for _, values in self._scaled(part, mean, plan)])

    def _scaled(
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
        if self._masks:
            return WrittenPart(RAW.encode(mean).buffers, mean)
        return self._write([*self._scaled(part, mean, plan)], coding, plan.round, "")

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
