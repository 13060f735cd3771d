"""Frames of one holder in rounds: of the exchange that was joined last, of sums that are added up
again, and those that came too early. For any thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Generic, TypeVar

from ...dag.execute.execute import TensorSpecError
from ...dag.plan.plan import PeerId
from ...dag.rounds.vector import PIECE, RunVector
from ...dag.rounds.wiring import (
    AUDIT,
    GATHER,
    GIVE,
    RESULT,
    VERSION,
    RoundWiring,
    blocks_of,
    span_of,
)
from ...net.links.frame import Arrived, FrameKey, Payload
from .algebra import HeldEntries, RoundAlgebra
from .attempt import AddedAgain, RoundAttempt
from .coding import PartCoding, SideBySide, flat_spec

__all__ = ["MOST_EARLY", "EarlyFrames", "RoundFrames", "most_of_any"]

V = TypeVar("V")
MOST_EARLY = 8
"""Frames of one peer that wait for their attempt: twice as many as a link has slots for."""
_MOST_FRONT = 1 << 16
"""What stands in front of a part's pieces."""


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
        """Return the frames of an attempt, and forget them and those of earlier ones."""
        with self._lock:
            kept, self._kept = self._kept, {}
            for key, arrived in kept.items():
                if (key.step, key.term) > number:
                    self._kept[key] = arrived
        return [a for k, a in kept.items() if (k.step, k.term) == number]

    def pop(self, key: FrameKey) -> None:
        """Forget a frame that nobody wants any more."""
        with self._lock:
            self._kept.pop(key, None)


class RoundFrames(Generic[V]):
    """What `peer` gets and gives."""

    def __init__(self, peer: PeerId, algebra: RoundAlgebra[V], entries: HeldEntries[V]) -> None:
        self._peer, self._algebra, self._entries = peer, algebra, entries
        self.attempt: RoundAttempt[V] | None = None
        """What was joined last."""
        self.again: AddedAgain[V] | None = None
        """Sums of it that are added up again here."""
        self.early, self._lock = EarlyFrames(), threading.Lock()

    def join(self, attempt: RoundAttempt[V]) -> None:
        """Frames are of this attempt from here on."""
        with self._lock:
            self.attempt, self.again = attempt, None

    def end_before(self, number: int) -> None:
        """End what is of an earlier round."""
        if self.attempt is not None and self.attempt.plan.round < number:
            self.attempt.end()
            if self.again is not None:
                self.again.end()

    def show(self, wiring: RoundWiring) -> None:
        """Have sums of the attempt added up again here, by `wiring`."""
        attempt = self.attempt
        assert attempt is not None, "no exchange was joined"
        if attempt.receipts is None:
            return
        again = AddedAgain(attempt, wiring, self._algebra)
        with self._lock:
            self.again = again
        for arrived in self.early.take(attempt.number):
            try:
                self.accept(arrived)
            except ValueError:
                again.refused[PeerId(arrived.key.source)] = None

    def accept(self, arrived: Arrived) -> None:
        """Raises TensorSpecError or CodecError for what is not as the plan says,
        LargeContributionError for what cannot be counted; then nothing has changed. What comes
        before its attempt was joined is looked at then."""
        key = arrived.key
        with self._lock:
            attempt, again, number = self.attempt, self.again, (key.step, key.term)
            shown = key.hop == AUDIT and attempt is not None and number == attempt.number
            early = shown and (again is None or again.comes(key) is None)
            if attempt is None or number > attempt.number or early:
                self.early.keep(arrived)
                return
        of = again if shown else attempt
        part = None if of is None else of.comes(key)
        if of is None or part is None:
            raise TensorSpecError(f"{key}: the plan of the round has none come to {self._peer}")
        of.take(part, arrived)

    def most_bytes(self, key: FrameKey) -> int:
        """The most that a frame of this key has; 0 for what no plan names."""
        attempt, algebra = self.attempt, self._algebra
        if attempt is None or (key.step, key.term) != attempt.number or key.hop == AUDIT:
            return most_of_any(key, algebra.vector, algebra.codings, algebra.most_rows)
        part = attempt.comes(key)
        return 0 if part is None else attempt.coding(key, part).most_bytes(part)

    def payload(self, key: FrameKey) -> Payload:
        """Raises KeyError for what is not there to be sent."""
        attempt = self.attempt
        part = attempt.goes(key) if attempt else None
        if attempt and key.hop == AUDIT and (key.step, key.term) == attempt.number:
            key, part = key._replace(hop=GIVE), span_of(key.port)
        if attempt is None or part is None:
            raise KeyError(f"{key} is not there to be sent by {self._peer}")
        buffers, coding = None, attempt.coding(key, part)
        if key.hop == GIVE:
            buffers = attempt.given.get((part, key.microbatch))
        elif key.hop in (GATHER, RESULT):
            buffers = attempt.passed_on(key, part)
        elif attempt.applied:  # what was made is the version once the round is over
            made = self._entries.of_part(part, lambda e: e.applied or e.version)
            buffers = self._algebra.whole(part, made, coding)
        if buffers is None:
            raise KeyError(f"{key} is not there to be sent by {self._peer}")
        header = attempt.header(key, part)
        return Payload(coding.name, header, coding.spec(part), buffers)


def most_of_any(
    key: FrameKey, vector: RunVector, codings: Mapping[int, PartCoding], most_rows: int = 0
) -> int:
    """The most bytes that a frame can have whatever its plan says, of an attempt that is not known
    here: it is of one part. `codings`: those of rounds as ever, by hop; `most_rows`: as in
    `RoundSettings`."""
    start, stop = part = span_of(key.port)
    if not 0 <= start < stop <= vector.elements or stop - start > PIECE or key.hop not in codings:
        return 0
    most = codings[key.hop].most_bytes(part)
    if key.hop == GIVE and most_rows:
        return len(blocks_of(part, most_rows)[0]) * flat_spec(stop - start).size_bytes
    if key.hop == VERSION or isinstance(codings[RESULT], SideBySide):
        return most  # every round has them alike
    return max(most, flat_spec(stop - start).size_bytes + _MOST_FRONT)  # another coding by then
