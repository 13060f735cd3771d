"""A run, which faces the client and owns its replicas."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from ...dag.plan.plan import PeerId
from ...job.words import count_of
from ...proto.broker_pb2 import CANCELLED, FAILED, Phase, RunEvent, RunFinishing, RunState
from ..events import Instruction, RunId
from ..membership.membership import Membership
from ..records.rounds import RoundRecord
from ..records.run import RunRecord
from .lifecycle import Lifecycle
from .replica import Replica

__all__ = ["Run"]


class Run:
    """Wishes of a client go to all of its replicas, or, where one cannot, to none. record: what
    outlives the broker."""

    def __init__(self, record: RunRecord, members: Membership) -> None:
        self.record, self.submitted = record, record.run
        self.replicas = tuple(Replica(record, r, members) for r in record.replicas)
        claims: dict[PeerId, str] = {}
        self.liars = {PeerId(p) for p in record.rounds.versions.liars} if record.rounds else set()
        """Peers that are asked for nothing any more."""
        for replica in self.replicas:
            replica.context.suspects.claims = claims
            replica.context.suspects.liars = self.liars

    def __repr__(self) -> str:
        return repr(self.record)

    @property
    def id(self) -> RunId:
        return self.record.id

    @property
    def owner(self) -> str:
        return self.record.owner

    @property
    def ended(self) -> bool:
        return self.record.ended

    @property
    def rounds(self) -> RoundRecord:
        """Rounds of a run that has any."""
        return self.record.of_rounds

    @property
    def has_rounds(self) -> bool:
        """Whether its replicas train apart, and meet in rounds."""
        return self.record.rounds is not None

    @property
    def state(self) -> RunState:
        return self.record.state

    def pause(self, now: float) -> list[Instruction]:
        """Raises ValueError when it cannot be paused."""
        for life in self._told:
            life.check_pause()
        made = self.rounds.versions.round if self.has_rounds and not self.ended else 0
        if made and not any(r.record.committed or r.record.paused for r in self.replicas):
            raise ValueError(
                f"the version of run {self.id}, of {count_of(made, 'round')}, is with its peers "
                "alone, and a pause would give these back: expected to leave it training, or "
                f"`shoal finish {self.id}`, which ends it with the version"
            )
        return self._all(lambda life: life.pause(now))

    def unpause(self, now: float) -> list[Instruction]:
        """Raises ValueError when it is not paused."""
        for life in self._told:
            life.check_unpause()
        return self._all(lambda life: life.unpause(now))

    def stops(self, now: float) -> list[Instruction]:
        """Have it end where its job's rule says so, at the end of the round under way; one without
        rounds sees to it itself (`handover.py`)."""
        why = self.record.stop.why
        if not why or not self.has_rounds or self.ended:
            return []
        return self.finish(now, why)

    def finish(self, now: float, why: str = "somebody has asked it to finish") -> list[Instruction]:
        """Have it end early and in good order, as if no more rounds had been wanted; nothing where
        it does anyway. Raises ValueError where it has no rounds, or has come to a bad end."""
        if not self.has_rounds:
            raise ValueError(
                f"run {self.id} makes no rounds, and its peers know its last step from the first "
                'one on: expected one whose [sync] kind is "federated", "local" or "gossip"; '
                f"`shoal cancel {self.id}` ends it without its weights"
            )
        versions, work = self.rounds.versions, self.rounds.work
        if (phase := self.state.phase) in (FAILED, CANCELLED):
            raise ValueError(f"run {self.id} is {Phase.Name(phase).lower()}: nothing to finish")
        if work.finishing or work.over:
            return []
        last = versions.round + work.rounds_left
        text = f"{why}: it ends with round {last}"
        events = RunEvent(finishing=RunFinishing(round=versions.round)), RunEvent(note=text)
        return [self.record.publish(event, 0, now) for event in events]

    def cancel(self, now: float) -> list[Instruction]:
        return self._all(lambda life: life.cancel(now))

    def fail(self, code: str, text: str, now: float) -> list[Instruction]:
        return self._all(lambda life: life.fail(code, text, now))

    def _all(self, what: Callable[[Lifecycle], list[Instruction]]) -> list[Instruction]:
        return list(chain.from_iterable(what(life) for life in self._told))

    @property
    def _told(self) -> list[Lifecycle]:
        still_open = [r for r in self.replicas if not r.record.ended]
        return [r.lifecycle for r in still_open or self.replicas]
