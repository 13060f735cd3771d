"""When a replica has waited long enough.

Every phase but WAITING has a deadline: building and exporting a fixed one; running the larger of
`step_floor_s` and `step_factor` medians of the measured steps since the last report, with one more
median for each batch of an evaluation, and `first_step_s` before a step was measured.

Words alone move no deadline: what a peer says counts where it is further than that peer was in this
term, and its coming back once between two steps of its own.
"""

from __future__ import annotations

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import BUILDING, EXPORTING, RUNNING
from ..events import Instruction, SetTimer
from .context import Reached, ReplicaContext
from .handover import Handover
from .snapshots import ReplicaSnapshots

__all__ = ["Deadline"]

_BACK = "back"

_SLOW_BYTES_PER_S = 1.25e6
"""10 Mbit/s: a home uplink. Who is slower still may be too slow."""
_LONGEST_MOVE_S = 86_400.0


class Deadline:
    """since: when what is counted from happened, seconds of the broker's clock."""

    def __init__(
        self, context: ReplicaContext, snapshots: ReplicaSnapshots, handover: Handover
    ) -> None:
        self._context, self._record = context, context.record
        self._snapshots, self._handover = snapshots, handover
        self.since = 0.0
        self._armed: float | None = None

    @property
    def at(self) -> float | None:
        """When something is to be done, unless something comes before."""
        phase = self.of_phase
        if self._context.away or self._record.phase != RUNNING or phase is None:
            return phase
        hand_over = self._handover.due()
        return hand_over if self._snapshots.on_hold else min(hand_over, phase)

    @property
    def of_phase(self) -> float | None:
        """When the current phase has failed."""
        if self._context.away:
            return self._context.away.until
        phase, options = self._record.phase, self._record.run.options
        if phase == BUILDING:
            return self.since + self._within_s(options.build_s)
        if phase == RUNNING:
            return max(self.since + self._allowance_s, self._context.waits_until)
        if phase == EXPORTING:
            return self.since + self._within_s(options.export_s)
        return None

    def _within_s(self, least_s: float) -> float:
        """`least_s`, or what the weights of the largest part take over a slow link, if that is
        more (a day at most): they are no more than what its holder's device holds."""
        most = max((p.device_bytes for p in self._context.term.expected.values()), default=0)
        return max(least_s, min(_LONGEST_MOVE_S, most / _SLOW_BYTES_PER_S))

    @property
    def _allowance_s(self) -> float:
        record, options = self._record, self._record.run.options
        measured = record.ledger.median_s if record.ledger else None
        if measured is None:
            return options.first_step_s
        # The median hides a rare evaluation, each batch of which takes at most as long as a step.
        assert record.plan is not None, record
        batches = len(record.plan.evaluation_routes) / len(record.plan.routes)
        return max(options.step_floor_s, (options.step_factor + batches) * measured)

    def further(self, peer: PeerId, what: str, how_far: Reached, now: float) -> None:
        """Counts from now on, if the peer has come further in `what` than ever in this term. The
        caller sees to it that nobody can say to be further than there is to do."""
        term = self._context.term
        least = term.begun_from.step - 1 if what == "step" and term.begun_from else -1
        if how_far > (reached := term.reached).get((peer, what), (least,)):
            reached[peer, what] = how_far
            reached.pop((peer, _BACK), None)
            self.since = now

    def back(self, peer: PeerId, now: float) -> None:
        """A holder has its stream again, and as much time as at first."""
        if self._context.term.reached.setdefault((peer, _BACK), (now,)) == (now,):
            self.since = now

    def arm(self) -> list[Instruction]:
        """Sets the timer when nothing is armed, or the deadline has come nearer than the timer."""
        at = self.at
        if at is None or (self._armed is not None and self._armed <= at):
            return []
        self._armed = at
        return [SetTimer(f"run:{self._record.id}", at)]

    def passed(self, now: float) -> bool:
        """The timer fired; whether the deadline has come."""
        self._armed = None
        return self.at is not None and now >= self.at

    def allow(self, seconds: float, now: float) -> None:
        """The broker itself stood still for so long: what is waited for has as much more time."""
        self.since = min(now, self.since + seconds)
        self._context.away.allow(seconds)
