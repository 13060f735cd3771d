"""What replicas have done in a round until it closes: whose contribution is there, whose cannot
count, and until when others wait for it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from ...dag.plan.plan import PeerId
from ...planner.replicas.rounds import MOST_TIMES
from ...proto.broker_pb2 import WAITING
from ..policies.policy import RoundPolicy
from ..records.rounds import RoundRecord
from ..runs.replica import Replica
from ..runs.run import Run

__all__ = ["Contributions", "is_at_gate", "is_short", "standing"]

_SHORT = frozenset({"peers", "memory", "queue"})
"""Why a replica waits that nobody else waits for."""


def is_short(replica: Replica) -> bool:
    """Whether too few peers are there for it: nobody knows for how long."""
    waits = replica.record.phase == WAITING and replica.lifecycle.asked is None
    return waits and replica.record.reason.code in _SHORT


def is_at_gate(rounds: RoundRecord, replica: Replica) -> bool:
    """Whether it waits in front of its next step, with or without a contribution."""
    record = replica.record
    return record.committed >= rounds.work.gate(record.number, record.term)


def standing(rounds: RoundRecord, replica: Replica) -> Hashable:
    """Return all that rounds ask about a replica; what it has contributed or made is told to
    them."""
    record, context = replica.record, replica.context
    about = record.phase, record.term, record.pausing, record.paused
    knows_pace = bool(record.step_s)  # `Contributions.closes_at`
    away = bool(context.away), bool(replica.lifecycle.handover)
    return about, away, is_short(replica), is_at_gate(rounds, replica), knows_pace


class Contributions:
    """Contributions to one round; not durable. bad: replicas whose contribution cannot count, and
    why. since: when local work began, or the attempt; None: before this start of the broker."""

    def __init__(self, run: Run, policy: RoundPolicy, since: float | None) -> None:
        """A round begins at a time, or an earlier start of the broker has begun it."""
        self._run, self._policy, self._rounds = run, policy, run.rounds
        self._ready: dict[int, tuple[int, set[PeerId]]] = {}
        """By replica, the holders whose contribution is there, in its present term."""
        self.bad: dict[int, str] = {}
        self.late = set[int]()
        """Those of `bad` that only came late."""
        self.since = since
        given = self._rounds.work.given.items() if since is not None else ()
        self._handed = {n: w.term for n, w in given}
        """By replica, the term in which it got its work."""
        self._alone_since: float | None = None
        """When only replicas that lost somebody were missing first; None: others are, so far."""

    def waits_for_late(self) -> None:
        """Nobody else has one that counts: theirs do after all."""
        for number in self.late:
            self.bad.pop(number, None)
        self.late = set()

    def go_on_with(self, before: Contributions, numbers: Iterable[int]) -> None:
        """Keep what is there of replicas whose work of the round `before` is of this one."""
        self._ready |= {n: before._ready[n] for n in numbers if n in before._ready}

    def too_old(self) -> dict[int, str]:
        """Return why contributions that are there do not count, as too many versions were made
        since they were begun; each once, for it is `bad` from then on."""
        found = {}
        for number, work in self._rounds.work.given.items():
            if number not in self.bad and self.is_ready(number) and not self._policy.counts(work):
                found[number] = (
                    f"replica {number} began {work.behind} versions ago: what its clients moved "
                    "is discarded"
                )
        self.bad |= found
        return found

    def may_come(self, number: int) -> bool:
        """Whether a replica has work of the round, of which a contribution may come or is there.
        Where work is carried on, that of a lost peer is nobody's at once, unless it began with the
        first version or is in a snapshot."""
        replica = self._run.replicas[number]
        if replica.context.work is None or number in self.bad:
            return False
        if not self._policy.carries or replica.record.phase != WAITING:
            return True
        first = replica.context.round == self._rounds.versions.first
        return first or replica.snapshots.found() is not None

    @property
    def why_none(self) -> str:
        """Why nobody can come who has the version that the next one is made of; empty where
        somebody may, such as who is short of peers and has its work in snapshots."""
        coming = {n: w for n, w in self._rounds.work.given.items() if self.may_come(n)}
        if any(not work.behind for work in coming.values()):
            return ""
        why = "; ".join(self.bad.values())
        if coming:
            return f"nobody is left that has its version{f' ({why})' if why else ''}"
        return why or "all were lost, with what they had of the round"

    def is_busy(self, number: int) -> bool:
        """Whether a replica still does its work of the round, and goes on with it if the round
        closes."""
        return self._policy.carries and self.may_come(number) and not self.is_ready(number)

    def pause(self) -> None:
        """Waits begin anew when the run goes on."""
        self.since, self._handed = None, {}

    def add(self, number: int, term: int, peer: PeerId) -> None:
        """That of a holder is there."""
        before, peers = self._ready.get(number, (0, set()))
        self._ready[number] = term, (peers if before == term else set()) | {peer}

    def goes_on(self, number: int) -> None:
        """Take back that all of a replica is there: it has more to do."""
        self._ready.pop(number, None)

    def is_ready(self, number: int) -> bool:
        """Whether all of a replica's are there."""
        replica, record = self._run.replicas[number], self._run.replicas[number].record
        term, peers = self._ready.get(number, (0, set()))
        there = record.running and not replica.context.away
        return there and term == record.term and peers >= set(record.peers)

    # ------------------------------------------------------------ until when

    @property
    def closes_at(self) -> float:
        """When local work ends for who is not ready then."""
        assert self.since is not None
        return self.since + self._policy.lasts_s(self._run.record, self._rounds)

    def waits_until(
        self, ready: Sequence[int], still: Sequence[int], now: float, *, again: bool = False
    ) -> float:
        """Until when those that are ready wait for the others. For a replica that lost somebody
        they wait, all together, at most for as long as its own work took: waiting longer costs more
        than its contribution is worth. again: nobody waits for others any more, behind the first
        attempt."""
        if not ready or not still or not all(map(self.has_lost, still)):
            return -math.inf if again else self.closes_at
        if self._alone_since is None:
            self._alone_since = now
        assert self.since is not None
        took = self._longest_s(still)
        if not took and any(self._is_away(n) for n in still):
            return self.closes_at  # whoever does not come back is said to be lost before
        took = took or self._alone_since - self.since  # of clients nobody knows it
        took = min(took, MOST_TIMES * self._longest_s(ready) or took)
        until = self._alone_since + took / len(ready)
        if self._run.submitted.requirements.sync.deadline != "auto":
            until = min(until, self.closes_at)
        return until

    def has_lost(self, number: int) -> bool:
        """Whether it has begun another term since it got its work, or waits for somebody."""
        replica = self._run.replicas[number]
        away = not replica.record.running or self._is_away(number)
        return away or self._handed.get(number, replica.record.term) != replica.record.term

    def _is_away(self, number: int) -> bool:
        """Whether a holder cannot be spoken to, and may come back: its stream broke, or the broker
        was started again."""
        return bool(self._run.replicas[number].context.away)

    def _longest_s(self, numbers: Sequence[int]) -> float:
        """Seconds of the local work that takes longest."""
        given, replicas = self._rounds.work.given, self._run.replicas
        return max(given[n].steps * replicas[n].record.round_step_s for n in numbers)
