"""Sums of an attempt that are added up again once all have made the version, at one holder: what
was given goes to others as well, and who adds up says what came of it. Pure."""

from __future__ import annotations

from ....dag.plan.plan import PeerId
from ....dag.rounds.vector import RunVector
from ....dag.rounds.wiring import AUDIT, GIVE, RoundFrame, Share, segments_of, wiring
from ....proto import broker_pb2
from .. import events as e

__all__ = ["RepeatedSums"]


class RepeatedSums:
    """What `peer` does by one `order`, for an attempt by `plan`. wiring: of that. gives: what goes
    to others. unshown: frames that are still to come, to be added up again."""

    def __init__(
        self,
        peer: PeerId,
        replica: str,
        term: int,
        vector: RunVector,
        plan: broker_pb2.RoundPlan,
        order: broker_pb2.RoundAudit,
    ) -> None:
        self.order, self._replica, self._term = order, replica, term
        segments, most = segments_of(order), plan.part
        self.wiring = wiring(vector, segments, peer, plan.fragment, again=True, most=most)
        self.gives = [Share(*f[1:]) for f in self.wiring.goes if f[0] == GIVE]
        self.unshown: set[RoundFrame] = {(AUDIT, *f[1:]) for f in self.wiring.comes}
        self.adds = any(s.aggregator == peer for s in order.segments)
        """Whether this peer adds up again, be it a segment that has no part."""

    def begins(self) -> list[e.Instruction]:
        """The device hears of it, where something is added up."""
        return [e.ShowAgain(self._replica, self._term, self.wiring)] if self.adds else []

    def added(self) -> list[e.Instruction]:
        """Say what came of what is added up again here, once all of it is."""
        done = self.adds and not self.unshown
        return [e.AddAgain(self._replica, self._term, self.order)] if done else []

    def lacks(self) -> list[e.Instruction]:
        """Tell the broker whose contributions are still to come, if any are."""
        if not self.unshown:
            return []
        peers = sorted({peer for _, _, peer, _ in self.unshown})
        found = broker_pb2.RoundAnswer(run=self._replica, term=self._term, lacks=peers)
        found.round, found.attempt = self.order.round, self.order.attempt
        found.turn = self.order.turn
        return [e.Tell(broker_pb2.PeerMessage(round_answer=found))]
