"""Rounds on tensors where what is given is of clients: each by itself, or hidden by masks or noise,
or some numbers of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...compression.codec import RAW
from ...dag.execute.execute import TensorSpecError
from ...dag.rounds.combiners import combined, middle_integers
from ...dag.rounds.noise import StreamKey, VectorNoise, secret_key
from ...dag.rounds.sums import (
    FixedPoint,
    IntegerSum,
    LargeContributionError,
    OverlapSum,
    WeightedSum,
)
from ...dag.rounds.vector import Entry, RunVector, Span
from ...job.clients.client_privacy import STEP_BITS, no_integers
from ...job.rounds import RoundSettings
from ...job.settings import SettingsError
from ...proto import broker_pb2
from ..secure.shared_positions import SharedPositions
from ..sync.norm import square_of
from .algebra import HeldEntry
from .coding import CountedCoding, PartCoding
from .part_algebra import Buffers, EntryVersion, OnIntegers, Pieces, WrittenPart
from .tensors import TensorAlgebra

__all__ = ["ClientTensors"]

_MOVED = "moved"
"""The slot of what the last version moved, where positions of numbers follow from that."""


class ClientTensors(TensorAlgebra):
    """Tensors of one holder of a run with clients. Raises SettingsError for integers in a vector
    whose sums are masked."""

    def __init__(
        self,
        vector: RunVector,
        settings: RoundSettings,
        replica: str,
        noise_key: StreamKey = secret_key,
    ) -> None:
        """`noise_key`: of what is added to sums where clients are to be hidden."""
        super().__init__(vector, settings, replica)
        assert settings.cohorts is not None, "no clients"
        self._positions = _positions_of(settings, vector)
        if self._positions is not None:
            self._slots = (*self._slots, _MOVED)
            self.codings = self.strategy.codings(settings, vector, self._positions)
        self._masks, self._cohorts = settings.secure, settings.cohorts
        self._privacy = settings.privacy
        integer = next((e.name for e in vector.entries if e.integer), "")
        if self._masks and integer:
            raise SettingsError("sync.secure", no_integers(integer))
        self._hiding = VectorNoise(vector, settings.seed, noise_key)
        self._overlap = settings.overlap
        """gamma and D, where contributions have how many sent each number in a second row."""

    # ------------------------------------------------------------ entries

    def shape(self, entry: Entry, *, given: bool) -> tuple[int, ...]:
        whole = super().shape(entry, given=given)
        return (2, *whole) if given and self._overlap is not None else whole

    def numbers(self, held: HeldEntry[Tensor]) -> Tensor | None:
        """What was taken down of an entry, without how many sent it."""
        given = super().numbers(held)
        return given if given is None or self._overlap is None else given[0]

    def contribution(
        self, held: HeldEntry[Tensor], clients: Tensor | None, senders: Tensor | None = None
    ) -> Tensor | None:
        if self._privacy is not None and clients is not None:
            return -clients if bool(clients.isfinite().all()) else None
        if self._positions is not None and not held.entry.is_buffer:
            self._positions.find(self._round, held.entry, held.version.state[_MOVED])
        given = super().contribution(held, clients, senders)
        if given is None or self._overlap is None:
            return given
        return torch.stack([given, torch.zeros_like(given) if senders is None else senders])

    def drift(self, held: HeldEntry[Tensor]) -> float:
        if self._privacy is not None or self._masks:
            return 0.0
        given = held.given
        if not self.most_rows or given is None or held.entry.is_buffer:
            return super().drift(held)
        return float(square_of(given.mean(0)))

    def meet(
        self, held: HeldEntry[Tensor], mean: Pieces[Tensor], coding: PartCoding
    ) -> EntryVersion[Tensor]:
        version = super().meet(held, mean, coding)
        if self._positions is None:
            return version
        moved = held.version.values - version.values
        return replace(version, state={**version.state, _MOVED: moved})

    # ------------------------------------------------------------ parts

    def give(
        self, part: Span, given: Pieces[Tensor], plan: broker_pb2.RoundPlan, coding: PartCoding
    ) -> WrittenPart[Tensor]:
        if not isinstance(coding, CountedCoding):
            return super().give(part, given, plan, coding)
        numbers = super().give(part, [(p, rows[0]) for p, rows in given], plan, coding)
        counts = [(p, rows[1, p.start : p.stop]) for p, rows in given]
        senders = self.write_part(counts, coding, plan.round, self._replica, row=1)
        buffers = coding.joined(numbers.buffers, senders.buffers)
        return WrittenPart(buffers, torch.stack([numbers.values, senders.values]))

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

    def _grid(self, plan: broker_pb2.RoundPlan) -> FixedPoint:
        """Where clients are to be hidden the mean is over as many as a round asks, however many
        came; where each peer adds noise of its own, no plan says how fine the grid is."""
        weight, step = plan.weight, 0.0
        if self._privacy is not None:
            weight = max(weight, self._cohorts.per_round)  # what more of them weigh is no error
            step = self._privacy.step if self._privacy.distributed else 0.0
        return FixedPoint(weight, plan.exponent, step)

    def _noise(self, part: Span, plan: broker_pb2.RoundPlan) -> Tensor:
        assert self._privacy is not None, "no client is hidden"
        found = self._hiding.of_sum(part, plan.round, plan.attempt)
        return found * (self._privacy.noise * self._privacy.clip)

    def masked(
        self, part: Span, given: Tensor, weight: int, plan: broker_pb2.RoundPlan, mask: OnIntegers
    ) -> WrittenPart[Tensor]:
        given = given if self._positions is None else given[self._positions.of(part)]
        multiples = self._grid(plan).fixed(given, weight)
        if self._privacy is not None and self._privacy.distributed:
            at, number = (plan.round, plan.attempt), self._replica.partition(".")[2] or "0"
            multiples += self._hiding.of_giver(number, part, *at, STEP_BITS)
        bits = mask(multiples).view(torch.float32)
        return WrittenPart(RAW.encode(bits).buffers, bits)

    def unmasked(
        self, part: Span, total: Tensor, plan: broker_pb2.RoundPlan, lift: OnIntegers
    ) -> Tensor:
        mean = self._grid(plan).mean(lift(total.view(torch.int64)))
        mean = mean if self._positions is None else self._positions.whole(part, mean)
        return torch.cat([values for _, values in self.scaled(part, mean, plan)])

    def result(
        self,
        part: Span,
        mean: Tensor,
        came: Sequence[tuple[int, Buffers]],
        plan: broker_pb2.RoundPlan,
        coding: PartCoding,
    ) -> WrittenPart[Tensor]:
        if self._masks:
            return WrittenPart(RAW.encode(mean).buffers, mean)
        return super().result(part, mean, came, plan, coding)


def _positions_of(settings: RoundSettings, vector: RunVector) -> SharedPositions | None:
    """Return the positions of what is given; None: all is."""
    if settings.cohorts is None or not settings.cohorts.shares_positions:
        return None
    options = settings.cohorts.sends.compression_options
    return SharedPositions(vector, settings.seed, options.least_ratio, options.explore)
