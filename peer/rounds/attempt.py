"""One attempt to make the next version: what one peer exchanges for it, by the plan that it got.

Frames come and go in other threads beside the compute, so all that changes is under a lock. What
comes is checked and decoded before it counts: of a frame that is not what the plan says, nothing
does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from ...dag.exchange.collective import Hop
from ...dag.exchange.engine import Reduction
from ...dag.execute.execute import TensorSpecError
from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import LargeContributionError
from ...dag.rounds.vector import Span
from ...dag.rounds.wiring import (
    ALL,
    GATHER,
    GIVE,
    NEAR,
    RESULT,
    TAKEN,
    At,
    RoundFrame,
    RoundWiring,
    kind_of,
    port_of,
    segment_of,
    span_of,
)
from ...net.links.frame import Arrived, FrameKey
from ...proto import broker_pb2
from ..secure.attempt_receipts import AttemptReceipts
from ..secure.masked_sums import MaskedSums
from .client_rows import ClientRows
from .coding import PartCoding, SideBySide
from .part_algebra import Buffers, PartAlgebra, Pieces, WrittenPart

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
        self.plan, self.wiring, self.peer, self.algebra = plan, wiring, peer, algebra
        self._masks, self.receipts = masks, receipts
        self.given: dict[tuple[Span, int], Buffers] = {}
        self.applied = self.over = False
        self.codings = dict(algebra.codings)
        if own := algebra.strategy.coding(algebra.vector):
            self.codings |= {GIVE: own, RESULT: own}
        if algebra.strategy.side_by_side:
            self.codings[RESULT] = SideBySide(self.codings[GIVE], plan)
        self._rows = ClientRows(wiring, plan, algebra) if wiring.by_client else None
        """What is added up here, where each client's contribution comes by itself."""
        self._taken: dict[At, Reduction[WrittenPart[V]]] = {}
        self._made: dict[At, WrittenPart[V]] = {}
        """What was made of all that was taken, in place of that."""
        self._versions: dict[Span, V] = {}
        """Versions that came whole, by part."""
        self._lock = threading.Lock()

    @property
    def number(self) -> tuple[int, int]:
        """(round, attempt): the step and term of its frames."""
        return self.plan.round, self.plan.attempt

    # ------------------------------------------------------------ frames

    def comes(self, key: FrameKey) -> Span | None:
        """The part of a frame that the plan has come here; None for any other frame."""
        known = {} if self.over else self.wiring.comes
        return self._part(key, known, key.source, key.destination)

    def goes(self, key: FrameKey) -> Span | None:
        """The part of a frame that the plan has this peer send; None for any other frame."""
        return self._part(key, self.wiring.goes, key.destination, key.source)

    def _part(
        self, key: FrameKey, known: Mapping[RoundFrame, Hop | None], other: str, here: str
    ) -> Span | None:
        part = span_of(key.port)
        named = (key.step, key.term) == self.number and here == self.peer
        named = named and port_of(part) == key.port
        return part if named and (key.hop, part, other, key.microbatch) in known else None

    def _hop(self, key: FrameKey, part: Span) -> Hop | None:
        """Return the hop of a frame that comes or leaves; None: it is of a version."""
        out = key.source == self.peer
        known = self.wiring.goes if out else self.wiring.comes
        return known[key.hop, part, PeerId(key.destination if out else key.source), key.microbatch]

    def coding(self, key: FrameKey, part: Span) -> PartCoding:
        """Return how a frame of a part is written."""
        if key.hop != GIVE or not self.wiring.by_client:
            return self.codings[key.hop]
        hop = self._hop(key, part)
        assert hop is not None, "versions are not given"
        return self._of_rows(self.wiring.blocks(part, hop)[key.microbatch])

    def _of_rows(self, rows: range) -> PartCoding:
        return PartCoding(self.algebra.vector, "none", rows=len(rows))

    def header(self, key: FrameKey, part: Span) -> bytes:
        """Return what stands in front of a frame that is sent."""
        if self.receipts is None:
            return b""
        by = self.wiring.adders.get(part) if key.hop == RESULT else None
        return self.receipts.header(key, part, signer=by)

    def end(self) -> None:
        """Frees what was exchanged."""
        with self._lock:
            self.over, self._rows = True, None
            for kept in (self.given, self._taken, self._made, self._versions):
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
        values = self.algebra.decode(part, arrived.data, coding)
        if self.receipts is not None and receipt is not None:
            self.receipts.keep(key, part, receipt, signer=by)
        hop, passed = self._hop(key, part), key.hop in (GIVE, GATHER)
        most = self.plan.exponent + 1 if key.hop == RESULT else 128  # what a codec rounds up
        masked = key.hop == RESULT and self._masks is not None
        if not (passed or masked or self.algebra.fits(part, values, most)):
            raise LargeContributionError(f"{key}: an element is no number below 2^{most}")
        if hop is None:
            with self._lock:
                if not self.over:
                    self._versions.setdefault(part, values)
            return
        kept = hop.taken != TAKEN
        self.add(part, hop, WrittenPart((arrived.data,) if kept else (), values), key.microbatch)

    # ------------------------------------------------------------ sums

    def gifts(self) -> Iterator[tuple[Span, Hop, int]]:
        """Yield the contributions that this peer gives, by part and block."""
        for (part, _, phase), hops in self.wiring.gives.items():
            for hop in hops if phase == 0 else ():
                yield from ((part, hop, at) for at, _ in enumerate(self.wiring.blocks(part, hop)))

    def give(self, part: Span, hop: Hop, block: int, mine: Pieces[V]) -> WrittenPart[V]:
        """Write what this peer gives of a part, or of a block of it, sign it, and add it if that is
        done here: as others will read it, so that it makes no difference who adds up. Raises
        LargeContributionError, TensorSpecError for clients that are not there."""
        if self.wiring.by_client:
            rows = self.wiring.blocks(part, hop)[block]
            given = self.algebra.give_rows(part, mine, rows, self.plan, self._of_rows(rows))
        else:
            given = self.algebra.give(part, mine, self.plan, self.codings[GIVE])
            if self._masks is not None:
                mask = partial(self._masks.now.masked, part)
                given = self.algebra.masked(part, given.values, hop.weight, self.plan, mask)
        if self.receipts is not None:
            self.receipts.sign(GIVE, part, block, given.buffers)
        self.given[part, block] = given.buffers
        if self.wiring.taken_here(part, hop):
            self.add(part, hop, given, block)
        return given

    def add(self, part: Span, hop: Hop, given: WrittenPart[V], block: int = 0) -> None:
        """Take what a member gives of a part, or of a block of it, once. Raises
        LargeContributionError."""
        at = part, hop.destination, hop.taken
        with self._lock:
            if self.over or at in self._made:
                return
            if self._rows is not None and not hop.total:
                self._rows.add(part, hop, block, given.values)
            else:
                self._take(at, hop, given)

    def _take(self, at: At, hop: Hop, given: WrittenPart[V]) -> None:
        if at not in self._taken:
            self._taken[at] = Reduction(lambda: _Sum(self, at))
        self._taken[at].take(hop, (given,))

    def made(self, part: Span, phase: int = ALL) -> WrittenPart[V] | None:
        """Return what is made of all that this peer takes of a part in a phase; None while
        something lacks."""
        with self._lock:
            return self._make((part, self.peer, phase))

    def passed_on(self, key: FrameKey, part: Span) -> Buffers | None:
        """Return what a frame has of what came: the sum of the place, or the result, be it one that
        came here for all of the place. None while it lacks."""
        hop = self._hop(key, part)
        made = None if hop is None else self.made(part, hop.given)
        return None if made is None else made.buffers

    def _make(self, at: At) -> WrittenPart[V] | None:
        part, member, phase = at
        takes = self.wiring.takes.get(at)
        if at in self._made or not takes:
            return self._made.get(at)
        if self._rows is not None and phase == ALL:
            for whose, mean in self._rows.combined().items():
                self._keep((whose, member, ALL), self.result(whose, mean, ()))
            return self._made.get(at)
        for hop in takes:
            own = hop.given and self.wiring.given_here(part, hop)
            if own and (found := self._make((part, hop.source, hop.given))) is not None:
                self._take(at, hop, found)
        if at in self._taken and self._taken[at].has(takes):
            self._keep(at, self._taken.pop(at).made()[0])
        return self._made.get(at)

    def _keep(self, at: At, made: WrittenPart[V]) -> None:
        """Keep what is made, and sign it where it is a sum."""
        part, member, phase = at
        if self.receipts is not None and phase in (NEAR, ALL):
            takes, blocks = self.wiring.takes[at], self.wiring.blocks
            addends = (((kind_of(h), h.source), len(blocks(part, h))) for h in takes)
            heard = self.receipts.heard(part, addends)
            if phase == NEAR:
                self.receipts.sign_sum(member, part, made.buffers, heard)
            else:
                self.receipts.sign(RESULT, part, 0, made.buffers, heard)
        self._made[at] = made

    def result(self, part: Span, mean: V, came: Sequence[tuple[int, Buffers]]) -> WrittenPart[V]:
        """Write the mean of a part. `came`: weight and contribution of each giver, as it came."""
        return self.algebra.result(part, mean, came, self.plan, self.codings[RESULT])

    def came(self, hop: int) -> Iterator[tuple[Span, V | None]]:
        """What there is of each result, or version, that this peer takes."""
        if hop != RESULT:
            for part, *_ in self.wiring.gets:
                yield part, self._versions.get(part)
            return
        for part, _, phase in self.wiring.takes:
            if phase == TAKEN:
                found = self.made(part, TAKEN)
                values = None if found is None else found.values
                if values is not None and self._masks is not None:
                    lift = partial(self._masks.now.unmasked, part)
                    values = self.algebra.unmasked(part, values, self.plan, lift)
                yield part, values


class _Sum(Generic[V]):
    """The sum of what a member takes in a phase of an attempt, written: of its place, or of all,
    of which the mean is taken."""

    def __init__(self, attempt: RoundAttempt[V], at: At) -> None:
        self._attempt, self._at = attempt, at
        part, _, phase = at
        algebra, plan = attempt.algebra, attempt.plan
        self._near = algebra.place_sum(part, plan) if phase == NEAR else None
        self._sum = algebra.sum(part, plan) if self._near is None else self._near
        self._came: dict[Hop, Buffers] = {}
        """Contributions as they came, where these are passed on."""

    def add(self, hop: Hop, given: WrittenPart[V]) -> None:
        (self._sum.add_sum if hop.given else self._sum.add)(given.values, hop.weight)
        if self._attempt.algebra.strategy.side_by_side:
            self._came[hop] = given.buffers

    def total(self) -> WrittenPart[V]:
        attempt, (part, *_) = self._attempt, self._at
        if self._near is not None:
            return attempt.algebra.written_sum(part, self._near.total, attempt.codings[GATHER])
        each = [
            (h.weight, self._came[h]) for h in attempt.wiring.takes[self._at] if h in self._came
        ]
        return attempt.result(part, self._sum.mean(), each)


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
        self._first, self._receipts, self.algebra = attempt, attempt.receipts, algebra
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
        for part, hop, block in again.gifts() if not first.over else ():
            if again.wiring.taken_here(part, hop):
                buffers = first.given[part, block]
                data = memoryview(bytearray(b"".join(buffers)))
                values = self.algebra.decode(part, data, first.codings[GIVE])
                again.add(part, hop, WrittenPart(buffers, values), block)
        adders = first.wiring.adders
        found = broker_pb2.RoundAnswer(run=order.run, term=order.term, turn=order.turn)
        found.round, found.attempt, found.lacks[:] = order.round, order.attempt, self.refused
        if self.refused:
            return found
        for segment in order.segments:
            if segment.aggregator != me:
                continue
            ours = (part for part, _, phase in again.wiring.takes if phase == ALL)
            parts = [part for part in ours if segment.start < part[1] <= segment.stop]
            if any(again.made(part) is None for part in parts):
                return found  # without all audits, which says nothing
            audit = broker_pb2.SumAudit(start=segment.start, stop=segment.stop)
            audit.heard.extend(self._receipts.heard_of(segment_of(segment)))
            told = (self._receipts.refutes(part, adders[part]) for part in parts)
            if (apart := next(filter(None, told), None)) is not None:
                mine, said = apart
                audit.sum.CopyFrom(mine)
                audit.said.CopyFrom(said)
            found.audits.append(audit)
        return found
