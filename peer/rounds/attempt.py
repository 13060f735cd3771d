"""One attempt to make the next version: what one peer exchanges for it, by the plan that it got.

Frames come and go in other threads beside the compute, so all that changes is under a lock. What
comes is checked and decoded before it counts: of a frame that is not what the plan says, nothing
does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...dag.execute.execute import TensorSpecError
from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import LargeContributionError, WeightedSum, fits
from ...dag.rounds.vector import PIECE, RunVector, Span
from ...dag.rounds.wiring import (
    GIVE,
    RESULT,
    VERSION,
    RoundWiring,
    port_of,
    span_of,
    wiring,
)
from ...net.links.frame import Arrived, FrameKey
from ...proto import broker_pb2
from ..core.rounds.exchange import segments_of
from .coding import PartCoding, flat_spec
from .side_by_side import FRONT_BYTES, most_bytes, side_by_side, total_of

__all__ = ["EarlyFrames", "PartMean", "RoundAttempt", "most_of_any"]

MOST_EARLY = 8
"""Frames of one peer that wait for their attempt: twice as many as a link has slots for."""
_MOST_FRONT = 1 << 16
"""What stands in front of a part's pieces."""
_MOST_MEMBERS = 64
"""Contributions in one result, before the plan says how many."""

Buffers = tuple[memoryview, ...]


class EarlyFrames:
    """Frames that came before their attempt was joined, a few of each peer. For any thread."""

    def __init__(self) -> None:
        self._kept: dict[FrameKey, Arrived] = {}
        self._lock = threading.Lock()

    def keep(self, arrived: Arrived) -> None:
        """Raises TensorSpecError for one too many of a peer."""
        key = arrived.key
        with self._lock:
            mine = sum(k.source == key.source for k in self._kept)
            if key not in self._kept and mine >= MOST_EARLY:
                raise TensorSpecError(
                    f"{key}: {mine} frames of {key.source} wait for an attempt already, of "
                    f"{MOST_EARLY} that may"
                )
            self._kept[key] = arrived

    def take(self, number: tuple[int, int]) -> list[Arrived]:
        """Those of an attempt, which are kept no longer, as are those of earlier ones."""
        with self._lock:
            kept, self._kept = self._kept, {}
            for key, arrived in kept.items():
                if (key.step, key.term) > number:
                    self._kept[key] = arrived
        return [a for k, a in kept.items() if (k.step, k.term) == number]

    def pop(self, key: FrameKey) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._kept.pop(key, None)


def most_of_any(
    key: FrameKey, vector: RunVector, codings: Mapping[int, PartCoding], rows: int, passed_on: bool
) -> int:
    """The most bytes that a frame can have whatever its plan says, of an attempt that is not known
    here: it is of one part. `rows`: of a version with its shared state; `passed_on`: a result is
    all contributions side by side."""
    start, stop = part = span_of(key.port)
    if not 0 <= start < stop <= vector.elements or stop - start > PIECE:
        return 0
    if key.hop == VERSION:
        return rows * flat_spec(stop - start).size_bytes
    if key.hop not in codings:
        return 0
    most = codings[key.hop].most_bytes(part)
    if passed_on:  # such a method writes every round alike
        return _MOST_MEMBERS * (FRONT_BYTES + most) if key.hop == RESULT else most
    return max(most, flat_spec(stop - start).size_bytes + _MOST_FRONT)  # another coding by then


@dataclass(frozen=True)
class PartMean:
    """The mean of a part, as it is written, and as everybody reads it."""

    buffers: Buffers
    values: Tensor


@dataclass(eq=False)
class _Adding:
    """A part that is added up here."""

    total: WeightedSum
    waits: dict[PeerId, int]
    """Weights of those whose contributions are not in it yet."""
    came: dict[PeerId, Buffers]
    """By giver, its contribution as it was written; kept where it is passed on."""


@dataclass(eq=False)
class RoundAttempt:
    """One attempt by the plan `plan`, for the peer `peer`."""

    plan: broker_pb2.RoundPlan
    peer: PeerId
    vector: RunVector
    coding: PartCoding
    side_by_side: bool = False
    """Whether contributions are passed on as they came."""
    wiring: RoundWiring = field(init=False)
    taken: dict[Span, Tensor] = field(default_factory=dict)
    """Results that came, by part."""
    versions: dict[Span, Tensor] = field(default_factory=dict)
    """New versions that came, with shared state."""
    applied: bool = False
    """Whether the new version is made here."""
    over: bool = False
    """Whether its round is: nothing comes any more."""

    def __post_init__(self) -> None:
        for s in self.plan.segments:
            if s.start > s.stop:
                raise TensorSpecError(f"segment [{s.start}, {s.stop}): it ends before it begins")
        self.wiring = wiring(self.vector, segments_of(self.plan), self.peer, self.plan.fragment)
        self._comes = {(GIVE, p, g.peer) for p, gs in self.wiring.adds.items() for g in gs}
        self._comes |= {(RESULT, *share) for share in self.wiring.takes}
        self._comes |= {(VERSION, *share) for share in self.wiring.gets}
        self._comes = {(hop, part, peer) for hop, part, peer in self._comes if peer != self.peer}
        self._goes = {(GIVE, *share) for share in self.wiring.gives}
        self._goes |= {(RESULT, *share) for share in self.wiring.results}
        self._goes |= {(VERSION, *share) for share in self.wiring.sends}
        self._adding: dict[Span, _Adding] = {}
        self._results: dict[Span, PartMean] = {}
        self._lock = threading.Lock()

    @property
    def number(self) -> tuple[int, int]:
        """(round, attempt): the step and term of its frames."""
        return self.plan.round, self.plan.attempt

    # ------------------------------------------------------------ frames

    def comes(self, key: FrameKey) -> Span | None:
        """The part of a frame that the plan has come here; None for any other frame."""
        return None if self.over else self._part(key, self._comes, key.source, key.destination)

    def goes(self, key: FrameKey) -> Span | None:
        """The part of a frame that the plan has this peer send; None for any other frame."""
        return self._part(key, self._goes, key.destination, key.source)

    def _part(
        self, key: FrameKey, known: set[tuple[int, Span, PeerId]], other: str, here: str
    ) -> Span | None:
        part = span_of(key.port)
        named = (key.step, key.term, key.microbatch) == (*self.number, 0) and here == self.peer
        named = named and port_of(part) == key.port and (key.hop, part, other) in known
        return part if named else None

    def end(self) -> None:
        """Frees what was exchanged."""
        with self._lock:
            self.over = True
            for kept in (self.taken, self.versions, self._adding, self._results):
                kept.clear()

    def take(self, key: FrameKey, part: Span, values: Tensor, written: Buffers) -> None:
        """A frame, decoded and as it came; a second one with its identity has no effect. Raises
        LargeContributionError, and then nothing was added."""
        if key.hop == GIVE:
            self.add(part, PeerId(key.source), values, written)
            return
        most = self.plan.exponent + 1 if key.hop == RESULT else 128  # what a codec rounds up
        rows = values.view(-1, part[1] - part[0])  # of a version with shared state
        integers = self.vector.integers(part)
        if not fits(rows[0], most, integers) or not fits(rows[1:], most):
            raise LargeContributionError(f"{key}: an element is no number below 2^{most}")
        with self._lock:
            if self.over:
                return
            (self.taken if key.hop == RESULT else self.versions).setdefault(part, values)

    # ------------------------------------------------------------ sums

    def decoded(self, part: Span, data: memoryview) -> Tensor:
        """A result that came. Raises CodecError or LargeContributionError."""
        if self.side_by_side:
            return total_of(data, part, self.coding, self.plan).mean()
        return self.coding.decode(part, data)

    def most_bytes(self, part: Span) -> int:
        """The most that a result can take."""
        if self.side_by_side:
            return most_bytes(part, self.coding, self.plan)
        return self.coding.most_bytes(part)

    def add(self, part: Span, giver: PeerId, values: Tensor, written: Buffers) -> None:
        """Adds a contribution once. Raises LargeContributionError."""
        with self._lock:
            if self.over or part in self._results:
                return
            adding = self._adding.get(part)
            if adding is None:
                elements, integers = part[1] - part[0], self.vector.integers(part)
                total = WeightedSum(elements, self.plan.weight, self.plan.exponent, integers)
                weights = {g.peer: g.weight for g in self.wiring.adds[part]}
                adding = _Adding(total, weights, {})
                self._adding[part] = adding
            if giver in adding.waits:
                adding.total.add(values, adding.waits[giver])
                del adding.waits[giver]
                if self.side_by_side:
                    adding.came[giver] = written

    def result(self, part: Span) -> PartMean | None:
        """The mean of a part that is added up here, encoded once; None while somebody's
        contribution is not in it."""
        with self._lock:
            found = self._results.get(part)
            adding = self._adding.get(part)
            if found or adding is None or adding.waits:
                return found
            found = self._results[part] = self._encoded(part, adding)
            del self._adding[part]
            return found

    def _encoded(self, part: Span, adding: _Adding) -> PartMean:
        mean = adding.total.mean()
        if self.side_by_side:
            givers = self.wiring.adds[part]
            return PartMean(side_by_side((g.weight, adding.came[g.peer]) for g in givers), mean)
        pieces, heard = [], []
        for piece in self.vector.pieces(part):
            at = piece.entry.start + piece.start - part[0]
            own = mean[at : at + piece.elements]
            encoded = self.coding.encode(piece, own, self.plan.round, "")
            pieces.append((piece, encoded))
            heard.append(self.coding.echo(piece, own, encoded))
        return PartMean(self.coding.written(pieces), torch.cat(heard))

    def results(self) -> Iterator[tuple[Span, Tensor | None]]:
        """What there is of each part that this peer takes."""
        for part, source in self.wiring.takes:
            if source == self.peer:
                found = self.result(part)
                yield part, found.values if found else None
            else:
                yield part, self.taken.get(part)
