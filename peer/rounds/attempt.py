"""One attempt to make the next version: what one peer exchanges for it, by the plan that it got.

Frames come and go in other threads beside the compute, so all that changes is under a lock. What
comes is checked and decoded before it counts: of a frame that is not what the plan says, nothing
does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from ...dag.execute.execute import TensorSpecError
from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import LargeContributionError
from ...dag.rounds.vector import Span
from ...dag.rounds.wiring import (
    GATHER,
    GIVE,
    RESULT,
    Giver,
    RoundFrame,
    RoundWiring,
    port_of,
    segment_of,
    span_of,
)
from ...net.links.frame import Arrived, FrameKey
from ...proto import broker_pb2
from ..secure.attempt_receipts import AttemptReceipts
from ..secure.masked_sums import MaskedSums
from .coding import PartCoding, SideBySide
from .gathered import ClientRows, PlaceSums
from .part_algebra import Buffers, PartAlgebra, PartSum, Pieces, WrittenPart

__all__ = ["AddedAgain", "RoundAttempt"]

V = TypeVar("V")


class RoundAttempt(Generic[V]):
    """One attempt by the plan `plan`, for the peer `peer`, whose frames `wiring` has. given: by
    part and block, what it gives. applied: whether the new version is made here. over: whether its
    round is, and nothing comes any more."""

    def __init__(
        self,
        plan: broker_pb2.RoundPlan,
        wiring: RoundWiring,
        peer: PeerId,
        algebra: PartAlgebra[V],
        masks: MaskedSums | None = None,
        receipts: AttemptReceipts | None = None,
    ) -> None:
        """`masks`: those that are on all that is given; None: sums are not masked. `receipts`: what
        is signed of it; None: peers have no certificates."""
        self.plan, self.wiring, self.peer, self._algebra = plan, wiring, peer, algebra
        self._masks, self.receipts = masks, receipts
        self.given: dict[tuple[Span, int], Buffers] = {}
        self.applied = self.over = False
        self.codings = dict(algebra.codings)
        if own := algebra.strategy.coding(algebra.vector):
            self.codings |= {GIVE: own, RESULT: own}
        self._passes_on = algebra.strategy.side_by_side
        if self._passes_on:
            self.codings[RESULT] = SideBySide(self.codings[GIVE], plan)
        self._comes, self._goes = wiring.comes(peer), wiring.goes()
        self._rows = ClientRows(wiring, plan, algebra) if wiring.by_client else None
        """What is added up here, where each client's contribution comes by itself."""
        self._sums: dict[Span, tuple[PartSum[V], dict[PeerId, Buffers]]] = {}
        """Parts that are added up here; by giver, its contribution, where it is passed on."""
        self._places = PlaceSums(wiring, plan, algebra, receipts) if wiring.gathers else None
        self._gathered: dict[Span, WrittenPart[V]] = {}
        """Sums of the place that are given."""
        self._results: dict[Span, WrittenPart[V]] = {}
        self._came: dict[tuple[int, Span], V] = {}
        """Results and versions, by hop and part."""
        self._passed: dict[Span, Buffers] = {}
        """Results that came and go on to others of the place."""
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

    def _part(self, key: FrameKey, known: set[RoundFrame], other: str, here: str) -> Span | None:
        part = span_of(key.port)
        named = (key.step, key.term) == self.number and here == self.peer
        named = named and port_of(part) == key.port
        return part if named and (key.hop, part, other, key.microbatch) in known else None

    def coding(self, key: FrameKey, part: Span) -> PartCoding:
        """Return how a frame of a part is written."""
        if key.hop != GIVE or not self.wiring.by_client:
            return self.codings[key.hop]
        rows = self.wiring.blocks(part, PeerId(key.source))[key.microbatch]
        return PartCoding(self._algebra.vector, "none", rows=len(rows))

    def header(self, key: FrameKey, part: Span) -> bytes:
        """Return what stands in front of a frame that is sent."""
        if self.receipts is None:
            return b""
        by = self.wiring.adders.get(part) if key.hop == RESULT else None
        return self.receipts.header(key, part, signer=by)

    def end(self) -> None:
        """Frees what was exchanged."""
        with self._lock:
            self.over, self._rows, self._places = True, None, None
            sums = (self._sums, self._gathered, self._results)
            for kept in (self.given, self._came, self._passed, *sums):
                kept.clear()

    def take(self, part: Span, arrived: Arrived) -> None:
        """Takes a frame; a second one with its identity has no effect. Raises TensorSpecError or
        CodecError for what is not as the plan says, LargeContributionError for what cannot be
        counted, and then nothing was added."""
        key, coding = arrived.key, self.coding(arrived.key, part)
        expected, said = coding.spec(part), (arrived.spec, arrived.codec)
        signs = self.receipts is not None or not arrived.codec_header
        if said != (expected, coding.name) or not signs or arrived.absent:
            raise TensorSpecError(
                f"{key}: expected {expected!r} by {coding.name}, got "
                f"{'none' if arrived.absent else repr(arrived.spec)} by {arrived.codec!r}"
            )
        by, receipt = self.wiring.adders[part] if key.hop == RESULT else None, None
        if self.receipts is not None:
            receipt = self.receipts.read(part, arrived, signer=by)
        values = self._algebra.decode(part, arrived.data, coding)
        if self.receipts is not None and receipt is not None:
            self.receipts.keep(key, part, receipt, signer=by)
        if key.hop in (GIVE, GATHER):
            written = WrittenPart((arrived.data,), values)
            self.add(part, PeerId(key.source), written, key.microbatch)
            return
        most = self.plan.exponent + 1 if key.hop == RESULT else 128  # what a codec rounds up
        masked = key.hop == RESULT and self._masks is not None
        if not masked and not self._algebra.fits(part, values, most):
            raise LargeContributionError(f"{key}: an element is no number below 2^{most}")
        with self._lock:
            if not self.over:
                self._came.setdefault((key.hop, part), values)
                if key.hop == RESULT and self.wiring.sums:
                    self._passed.setdefault(part, (arrived.data,))

    # ------------------------------------------------------------ sums

    def give(self, part: Span, mine: Pieces[V], block: int) -> WrittenPart[V]:
        """Return what this peer gives of a part, or of a block of it, and sign that. Raises
        LargeContributionError, TensorSpecError for clients that are not there."""
        if self.wiring.by_client:
            rows = self.wiring.blocks(part, self.peer)[block]
            coding = PartCoding(self._algebra.vector, "none", rows=len(rows))
            given = self._algebra.give_rows(part, mine, rows, self.plan, coding)
        else:
            given = self._algebra.give(part, mine, self.plan, self.codings[GIVE])
            given = given if self._masks is None else self._masked(part, given, self._masks)
        if self.receipts is not None:
            self.receipts.sign(GIVE, part, block, given.buffers)
        return given

    def _masked(self, part: Span, given: WrittenPart[V], masks: MaskedSums) -> WrittenPart[V]:
        """Mask a contribution. Raises LargeContributionError."""
        givers = (g for s in self.plan.segments for g in s.givers)
        weight = next(g.weight for g in givers if g.peer == self.peer)
        mask = partial(masks.now.masked, part)
        return self._algebra.masked(part, given.values, weight, self.plan, mask)

    def add(self, part: Span, giver: PeerId, given: WrittenPart[V], block: int = 0) -> None:
        """Adds a contribution once, or the sum of a place. Raises LargeContributionError."""
        with self._lock:
            if self.over or part in self._results:
                return
            if self._places is not None and self._places.has(part, giver):
                self._add_near(self._places, part, giver, given.values)
            elif self._rows is not None:
                self._rows.add(part, giver, block, given.values)
            else:
                self._add(part, giver, given)

    def _add(self, part: Span, giver: PeerId, given: WrittenPart[V]) -> None:
        if part not in self._sums:
            self._sums[part] = self._algebra.sum(part, self.plan), {}
        total, came = self._sums[part]
        of = next((g for g in self.wiring.adds[part] if g.peer == giver), None)
        if of is not None and giver not in came:
            (total.add if of.hop == GIVE else total.add_sum)(given.values, of.weight)
            came[giver] = given.buffers if self._passes_on else ()

    def _add_near(self, places: PlaceSums[V], part: Span, giver: PeerId, values: V) -> None:
        """Add a contribution to the sum of its place, which is in that of all or given on."""
        found = places.add(part, giver, values)
        if found is not None and part in self.wiring.adds:
            self._add(part, *found)
        elif found is not None:
            self._gathered[part] = found[1]

    def summed(self, hop: int, part: Span) -> Buffers | None:
        """Return what goes on of a part: the sum of the place, or the result, be it one that came
        here for all of the place. None while it lacks."""
        made = self.result(part) if hop == RESULT else self._gathered.get(part)
        if hop == RESULT and made is None:
            return self._passed.get(part)
        return made.buffers if made is not None else None

    def result(self, part: Span) -> WrittenPart[V] | None:
        """The mean of a part that is added up here, encoded once; None while somebody's
        contribution is not in it."""
        with self._lock:
            total, came = self._sums.get(part, (None, {}))
            givers = self.wiring.adds.get(part, ())
            if self._rows is not None and not self._results:
                for whose, mean in self._rows.combined().items():
                    self._make(whose, mean, ())
            if total is not None and all(g.peer in came for g in givers):
                each = [(g.weight, came[g.peer]) for g in givers if self._passes_on]
                self._make(part, total.mean(), each)
                del self._sums[part]
            return self._results.get(part)

    def _make(self, part: Span, mean: V, each: Sequence[tuple[int, Buffers]]) -> None:
        """Write a result, and sign it."""
        made = self._algebra.result(part, mean, each, self.plan, self.codings[RESULT])
        if self.receipts is not None:
            heard = self.receipts.heard(part, self._blocks(part, self.wiring.adds[part]))
            self.receipts.sign(RESULT, part, 0, made.buffers, heard)
        self._results[part] = made

    def _blocks(self, part: Span, givers: Sequence[Giver]) -> list[tuple[Giver, int]]:
        """Return in how many frames each gives a part."""
        return [(g, len(self.wiring.blocks(part, g.peer))) for g in givers]

    def came(self, hop: int) -> Iterator[tuple[Span, V | None]]:
        """What there is of each result, or version, that this peer takes."""
        for part, source, _ in self.wiring.takes if hop == RESULT else self.wiring.gets:
            if hop == RESULT and source == self.peer:
                found = self.result(part)
                values = found.values if found else None
            else:
                values = self._came.get((hop, part))
            if hop == RESULT and values is not None and self._masks is not None:
                lift = partial(self._masks.now.unmasked, part)
                values = self._algebra.unmasked(part, values, self.plan, lift)
            yield part, values


class AddedAgain(Generic[V]):
    """Sums that are made once more than at first, by `wiring`, of an attempt whose version is made
    (`RoundAudit`): of contributions as they came to who added them up, with the same receipts.
    So the sum is the same to the bit, or somebody's receipt is a lie. For any thread. refused:
    whose contributions came too early, and cannot be taken."""

    def __init__(
        self, attempt: RoundAttempt[V], wiring: RoundWiring, algebra: PartAlgebra[V]
    ) -> None:
        """attempt: with receipts."""
        assert attempt.receipts is not None, "nothing is signed"
        self._first, self._receipts, self._algebra = attempt, attempt.receipts, algebra
        self.refused: dict[PeerId, None] = {}
        self._again = RoundAttempt(
            attempt.plan, wiring, attempt.peer, algebra, receipts=attempt.receipts
        )

    def comes(self, key: FrameKey) -> Span | None:
        """Return the part of a frame that comes here to be added up again; None: of no such one."""
        return self._again.comes(key._replace(hop=GIVE))

    def take(self, part: Span, arrived: Arrived) -> None:
        """Add a contribution. Raises TensorSpecError, CodecError and LargeContributionError as
        `RoundAttempt.take` does, and then nothing was added."""
        self._again.take(part, replace(arrived, key=arrived.key._replace(hop=GIVE)))

    def end(self) -> None:
        """Free what was added up."""
        self._again.end()

    def answer(self, order: broker_pb2.RoundAudit) -> broker_pb2.RoundAnswer:
        """Return what came of all that is added up again here, once all contributions came. Of each
        segment the first part counts whose sum is another than its receipt says."""
        me, first, again = self._first.peer, self._first, self._again
        for part, by, block in again.wiring.gives if not first.over else ():
            if by == me:
                buffers = first.given[part, block]
                data = memoryview(bytearray(b"".join(buffers)))
                values = self._algebra.decode(part, data, first.codings[GIVE])
                again.add(part, me, WrittenPart(buffers, values), block)
        adders = first.wiring.adders
        found = broker_pb2.RoundAnswer(run=order.run, term=order.term, turn=order.turn)
        found.round, found.attempt, found.lacks[:] = order.round, order.attempt, self.refused
        if self.refused:
            return found
        for segment in order.segments:
            if segment.aggregator != me:
                continue
            audit = broker_pb2.SumAudit(start=segment.start, stop=segment.stop)
            audit.heard.extend(self._receipts.heard_of(segment_of(segment)))
            for part in again.wiring.adds:
                if not segment.start < part[1] <= segment.stop:
                    continue
                if again.result(part) is None:
                    return found  # without all audits, which says nothing
                if (apart := self._receipts.refutes(part, adders[part])) is not None:
                    mine, said = apart
                    audit.sum.CopyFrom(mine)
                    audit.said.CopyFrom(said)
                    break
            found.audits.append(audit)
        return found
