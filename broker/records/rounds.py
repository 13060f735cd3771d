"""What of a run's rounds outlives the broker: which one is under way, what work was handed out for
it, what its exchange is, and which samples are committed."""

from __future__ import annotations

from collections.abc import Iterable

from ...dag.rounds.sums import EXPONENT
from ...proto.broker_pb2 import (
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundPlanned,
    RoundStart,
    RoundWork,
    RunEvent,
    SampleRange,
)
from ...proto.journal_pb2 import RoundsKept

__all__ = ["RoundRecord", "handed_out", "microbatches_of"]


def microbatches_of(work: RoundWork) -> int:
    """How many a replica was given."""
    return sum(s.count for s in work.samples)


def handed_out(work: RoundWork) -> int:
    """How many it had when the round began: the learning rate's schedule goes on as by these,
    though it may make fewer steps."""
    mine = microbatches_of(work)
    return mine // work.steps * work.planned if work.planned else mine


class RoundRecord:
    """Changes by events only.

    round: the one under way, or the next one: so many versions were made. work: of the replicas
    that are in it, by number; none: it has not begun. attempt, members, joiners: of its exchange,
    as it was planned last; 0: not yet. committed: microbatches of the run. exponent: as in
    RoundPlan. holders: in which term a replica made the newest version, by number; of the first
    version, which all begin from, nobody.
    """

    def __init__(self, steps: int, microbatches: int, eval_every: int) -> None:
        """`microbatches`: of one step of the run; `eval_every`: steps between evaluations, 0:
        none."""
        self.total, self._whole = steps * microbatches, microbatches
        self._eval_every = eval_every
        self._before = 0  # Microbatches that were committed a round ago.
        self.holders: dict[int, int] = {}
        self.round = self.attempt = self.committed = 0
        self.work: dict[int, RoundWork] = {}
        self.members: tuple[RoundMember, ...] = ()
        self.joiners: tuple[int, ...] = ()
        self.exponent = EXPONENT
        self.done_at_s = 0.0
        """When the last one was committed, or the first one began."""
        self._next = 0  # The first microbatch that was never handed out.
        self._returned: list[SampleRange] = []  # Handed out, and not committed.

    @property
    def begun(self) -> bool:
        return bool(self.work)

    @property
    def over(self) -> bool:
        """Whether every sample of the run is committed."""
        return self.committed >= self.total

    def member(self, number: int, term: int) -> RoundWork | None:
        """What a replica works on in its present term; None: it is not in the round."""
        work = self.work.get(number)
        return work if work is not None and work.term == term else None

    def start_of(self, replica: str, work: RoundWork) -> RoundStart:
        """What a replica is told of its work."""
        start, every = self.committed / self._whole, self._eval_every
        length = sum(map(handed_out, self.work.values())) / self._whole
        passed = every and int(start) // every > self._before // self._whole // every
        return RoundStart(
            run=replica,
            term=work.term,
            round=self.round,
            first_step=work.first_step,
            steps=work.steps,
            samples=work.samples,
            start=start,
            length=length * work.steps / work.planned if work.planned else length,
            evaluate=bool(passed) and work.replica == min(self.work),
        )

    def hand_out(self, counts: Iterable[int]) -> list[list[SampleRange]]:
        """Ranges of so many microbatches each, what came back first; nothing changes before the
        event that says so."""
        back = [(r.first, r.count) for r in self._returned]
        next_, found = self._next, list[list[SampleRange]]()
        for count in counts:
            mine: list[SampleRange] = []
            while count:
                if back:
                    first, size = back.pop(0)
                    if size > count:
                        back.insert(0, (first + count, size - count))
                else:
                    first, size = next_, count
                    next_ += count
                mine.append(SampleRange(first=first, count=min(size, count)))
                count -= mine[-1].count
            found.append(mine)
        return found

    # ------------------------------------------------------------ what happened

    def apply(self, event: RunEvent) -> None:
        """Raises ValueError for what cannot have been."""
        match event.WhichOneof("kind"):
            case "round_begun":
                self._begun(event.round_begun, event.at_s)
            case "round_planned":
                self._planned(event.round_planned)
            case "round_done":
                self._done(event.round_done, event.at_s)

    def _check(self, number: int) -> None:
        if number != self.round:
            raise ValueError(f"an event of round {number}: expected round {self.round}")

    def _begun(self, begun: RoundBegun, at_s: float) -> None:
        self._check(begun.round)
        if not self.round and not self.done_at_s:
            self.done_at_s = at_s
        for work in begun.work:
            if (before := self.work.get(work.replica)) is not None:
                self._give_back(_behind(before.samples, microbatches_of(work)))
            self.work[work.replica] = work
            for samples in work.samples:
                self._take(samples)

    def _take(self, taken: SampleRange) -> None:
        """They are handed out now."""
        if taken.first >= self._next:
            self._next = taken.first + taken.count
            return
        left: list[SampleRange] = []
        stop = taken.first + taken.count
        for r in self._returned:
            for first, end in (
                (r.first, min(r.first + r.count, taken.first)),
                (max(r.first, stop), r.first + r.count),
            ):
                if end > first:
                    left.append(SampleRange(first=first, count=end - first))
        self._returned = left

    def _give_back(self, samples: Iterable[SampleRange]) -> None:
        """They are not committed with this round."""
        self._returned.extend(samples)
        self._returned.sort(key=lambda r: r.first)

    def _planned(self, planned: RoundPlanned) -> None:
        self._check(planned.round)
        if planned.attempt <= self.attempt:
            raise ValueError(f"attempt {planned.attempt}, behind attempt {self.attempt}")
        self.attempt, self.exponent = planned.attempt, planned.exponent
        self.members, self.joiners = tuple(planned.members), tuple(planned.joiners)

    def _done(self, done: RoundDone, at_s: float) -> None:
        self._check(done.round)
        inside, self._before = {m.replica for m in done.members}, self.committed
        for number, work in self.work.items():
            if number in inside:
                self.committed += microbatches_of(work)
            else:
                self._give_back(work.samples)
        self.round, self.attempt = self.round + 1, 0
        self.work, self.members, self.joiners = {}, (), ()
        self.holders = {m.replica: m.term for m in (*done.members, *done.joined)}
        self.done_at_s = at_s

    # ------------------------------------------------------------ the journal's snapshots

    def kept(self) -> RoundsKept:
        return RoundsKept(
            round=self.round,
            attempt=self.attempt,
            committed=self.committed,
            work=self.work.values(),
            members=self.members,
            joiners=self.joiners,
            exponent=self.exponent,
            next=self._next,
            returned=self._returned,
            done_at_s=self.done_at_s,
            holders=[RoundMember(replica=n, term=term) for n, term in self.holders.items()],
            before=self._before,
        )

    def restore(self, kept: RoundsKept) -> None:
        self.round, self.attempt, self.committed = kept.round, kept.attempt, kept.committed
        self.work = {w.replica: w for w in kept.work}
        self.members, self.joiners = tuple(kept.members), tuple(kept.joiners)
        self.exponent, self.done_at_s = kept.exponent, kept.done_at_s
        self.holders = {m.replica: m.term for m in kept.holders}
        self._before = kept.before
        self._next, self._returned = kept.next, list(kept.returned)


def _behind(samples: Iterable[SampleRange], count: int) -> Iterable[SampleRange]:
    """All but the first so many of them."""
    for r in samples:
        taken = min(count, r.count)
        count -= taken
        if taken < r.count:
            yield SampleRange(first=r.first + taken, count=r.count - taken)
