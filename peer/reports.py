"""What a peer has told the broker of its run and keeps, should the broker die with it.

The broker has a step on its disk when every holder has reported it; it says so now and then
(`Committed`). Reports of later steps are told again, in their order, to a broker that was started
again and goes on with the run (`Welcome.resumed`); what it has already, it drops.

Bounded: a peer that keeps `most` reports begins no other step until the broker has taken some. So
nothing is lost however long the broker is away; training pauses instead.
"""

from __future__ import annotations

from collections import deque

from ..proto import broker_pb2

__all__ = ["Reports"]


class Reports:
    """Of one assignment; `most`: step reports."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._steps: deque[broker_pb2.PeerMessage] = deque()
        self._exported: broker_pb2.PeerMessage | None = None
        self._fault: broker_pb2.PeerMessage | None = None
        self._known = 0  # Steps that the broker has.

    def __len__(self) -> int:
        """Step reports."""
        return len(self._steps)

    @property
    def full(self) -> bool:
        return len(self._steps) >= self.most

    def keep(self, message: broker_pb2.PeerMessage) -> None:
        """A StepReport of the next step, an Exported, or a Fault, of which the first one counts. A
        step that is replayed is not kept: the broker has it."""
        match message.WhichOneof("kind"):
            case "step":
                if message.step.step >= self._known:
                    self._steps.append(message)
            case "exported":
                self._exported = message
            case "fault":
                self._fault = self._fault or message

    def committed(self, step: int) -> None:
        """The broker has every step before this one."""
        self._known = max(self._known, step)
        while self._steps and self._steps[0].step.step < step:
            self._steps.popleft()

    def again(self, step: int) -> list[broker_pb2.PeerMessage]:
        """What is to be told once more to a broker that lacks the steps from this one on."""
        self.committed(step)
        last = (self._exported, self._fault)
        return [*self._steps, *(message for message in last if message is not None)]
