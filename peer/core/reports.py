"""What a peer has told the broker of its run and keeps, should the broker die with it.

The broker has a step on its disk when every holder has reported it; it says so now and then
(`Committed`). Reports of later steps are told again, in their order, to a broker that was started
again and goes on with the run (`Welcome.resumed`); what it has already, it drops.

Bounded: a peer that keeps `most` reports begins no other step until the broker has taken some. So
nothing is lost however long the broker is away; training pauses instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from ...proto import broker_pb2
from .step import Steps

__all__ = ["MOST_BYTES", "Reports", "fitting", "heaviest", "step_report"]

MOST_BYTES = 60 * 1024
"""The most bytes of what a peer tells in one message, with room for its frame: the broker refuses
64 KiB."""
_IN_A_LIST = 4
"""Bytes that an entry of a list takes besides its own, at most."""

_Part = broker_pb2.LinkUse | broker_pb2.Snapshot


def fitting(found: Iterable[_Part], room_bytes: int) -> int:
    """How many of these, from the first on, a message has room for."""
    ends = accumulate(part.ByteSize() + _IN_A_LIST for part in found)
    return sum(end <= room_bytes for end in ends)


def heaviest(uses: Sequence[broker_pb2.LinkUse], room_bytes: int) -> tuple[broker_pb2.LinkUse, ...]:
    """Return the uses with the most bytes, then those that took longest to decode, in their order:
    a holder with a thousand links has more than one message has room for, and few that carry
    much."""
    ranked = sorted(range(len(uses)), key=lambda i: (-uses[i].bytes, -uses[i].decode_s, i))
    kept = ranked[: fitting((uses[i] for i in ranked), room_bytes)]
    return tuple(uses[i] for i in sorted(kept))


def step_report(
    run: str, term: int, steps: Steps, sent_bytes: int, again_bytes: int
) -> broker_pb2.PeerMessage:
    """Return the report of the step that was made last, with as many of its links as fit. Bytes
    that were sent since the last report, and those of frames that a broken connection lost."""
    report = broker_pb2.StepReport(
        run=run,
        term=term,
        step=steps.step,
        seconds=steps.trained_s,
        compute_s=steps.compute_s,
        sent_bytes=sent_bytes,
        peak_bytes=steps.peak_bytes,
        outcome=steps.outcome,
        evaluation=steps.evaluation,
        stages=steps.stage_times.values(),
        update_s=steps.update_s,
        again_bytes=again_bytes,
    )
    report.links.extend(heaviest(steps.links, MOST_BYTES - report.ByteSize()))
    return broker_pb2.PeerMessage(step=report)


class Reports:
    """The reports of one assignment that the broker does not have yet; `most`: step reports
    kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._steps: deque[broker_pb2.PeerMessage] = deque()
        self._exported: broker_pb2.PeerMessage | None = None
        self._fault: broker_pb2.PeerMessage | None = None
        self._known = 0  # Steps that the broker has.

    def __len__(self) -> int:
        """Return the number of step reports."""
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
        """Return what is to be told once more to a broker that lacks the steps from this one on."""
        self.committed(step)
        last = (self._exported, self._fault)
        return [*self._steps, *(message for message in last if message is not None)]
