"""Sums of an attempt that others add up once more than did at first (`RoundAudit`), at one peer.

Contributions come as they came to who added them up, with the same receipts. So what is made of
them is the same to the bit, or somebody's receipt is a lie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from ...dag.plan.plan import PeerId
from ...dag.rounds.vector import Span
from ...dag.rounds.wiring import GIVE, RoundWiring
from ...net.links.frame import Arrived, FrameKey
from ...proto.broker_pb2 import RoundAnswer, RoundAudit, SumAudit
from .algebra import RoundAlgebra, WrittenPart
from .attempt import RoundAttempt

__all__ = ["AddedAgain"]

V = TypeVar("V")


class AddedAgain(Generic[V]):
    """What is added up again, by `wiring`, of an attempt whose version is made. For any thread.
    refused: whose contributions came too early, and cannot be taken."""

    def __init__(
        self, attempt: RoundAttempt[V], wiring: RoundWiring, algebra: RoundAlgebra[V]
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

    def answer(self, order: RoundAudit) -> RoundAnswer:
        """Return what came of all that is added up again here, once all contributions came. Of each
        segment the first part counts whose sum is another than its receipt says."""
        me, first, again = self._first.peer, self._first, self._again
        for part, by, block in again.wiring.gives if not first.over else ():
            if by == me:
                buffers = first.given[part, block]
                data = memoryview(bytearray(b"".join(buffers)))
                values = self._algebra.decode(part, data, first.codings[GIVE])
                again.add(part, me, WrittenPart(buffers, values), block)
        adders = {part: by for part, by, _ in first.wiring.takes}
        found = RoundAnswer(run=order.run, term=order.term, turn=order.turn)
        found.round, found.attempt, found.lacks[:] = order.round, order.attempt, self.refused
        if self.refused:
            return found
        for segment in order.segments:
            if segment.aggregator != me:
                continue
            audit = SumAudit(start=segment.start, stop=segment.stop)
            audit.heard.extend(self._receipts.heard_of(segment))
            for part in again.wiring.adds:
                here = segment.start < part[1] <= segment.stop
                made = again.result(part) if here else None
                apart = self._receipts.refutes(part, adders[part]) if made else None
                if apart is not None:
                    mine, said = apart
                    audit.sum.CopyFrom(mine)
                    audit.said.CopyFrom(said)
                    break
            found.audits.append(audit)
        return found
