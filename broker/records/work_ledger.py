"""The ledger of work: what each replica of a run does in a round, which of it is committed, and
what is still to be handed out.

Work is ranges of the run's samples (`RoundWork.samples`), counted in microbatches. Only those who
hand it out know of ranges; others ask who has work, how much of it there is, and where it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy

from ...proto.broker_pb2 import (
    Checkpoint,
    Cohort,
    RoundBegun,
    RoundDone,
    RoundPosition,
    RoundWork,
    SampleRange,
)
from ...proto.journal_pb2 import RoundsKept

__all__ = ["WorkLedger", "first_of", "handed_out", "shortened"]


def _size(work: RoundWork) -> int:
    """Microbatches of a replica's work."""
    return sum(s.count for s in work.samples)


def first_of(ranges: Iterable[SampleRange], count: int) -> list[SampleRange]:
    """The first so many microbatches of ranges."""
    found = []
    for r in ranges:
        if taken := min(count, r.count):
            found.append(SampleRange(first=r.first, count=taken))
            count -= taken
    return found


def handed_out(work: RoundWork) -> int:
    """Microbatches that a replica had when the round began: the learning rate's schedule goes on as
    by these, though it may make fewer steps."""
    return _size(work) // work.steps * work.planned if work.planned else _size(work)


class WorkLedger:
    """Changes by events only.

    given: by replica, its work of the round under way; none: it has not begun. total, committed:
    microbatches of the run. past: of replicas that have no work in this round, their last; who was
    in the round before may go on with what it made ahead. finishing: somebody has asked the run to
    end early. chosen: clients of a round to come, as the submitter's rule has chosen them; None:
    it has not.
    """

    def __init__(
        self, steps: int, microbatches: int, replicas: int = 1, *, round_steps: int = 1
    ) -> None:
        """`microbatches`: of one step of the run, in which each of `replicas` makes one of its
        own. `round_steps`: of the run, in a round."""
        self.total, self._whole = steps * microbatches, microbatches
        self._round, self.finishing = round_steps * microbatches, False
        self._own = microbatches // replicas
        self.chosen: Cohort | None = None
        self.committed = self._before = 0  # `_before`: a round ago.
        self.sums = 0
        """Noisy sums that were made, or may have been, of clients that are hidden in them."""
        self.given: dict[int, RoundWork] = {}
        self.past: dict[int, RoundWork] = {}
        self._next = 0  # The first microbatch that was never handed out.
        self._returned: list[SampleRange] = []  # Handed out, and not committed.

    def begin_from(self, saved: Checkpoint) -> None:
        """The run goes on from the version of another one. A rest that is no step of a replica is
        left out."""
        done = saved.step * self._whole
        at = saved.rounds if saved.HasField("rounds") else RoundPosition(committed=done, next=done)
        self.committed = self._before = at.committed
        self._next, self._returned = at.next, list(at.returned)
        self.total -= (self.total - self.committed) % self._own

    # ------------------------------------------------------------ the run

    def finish(self) -> None:
        """The run is to end early: with the next round that is handed out, for the replicas of one
        under way make no last version of it."""
        self.finishing = True
        if not self.begun:
            self._end_with(self._round)

    @property
    def rounds_left(self) -> int:
        """Rounds behind the one under way, once it is asked to finish, if nobody is left out."""
        return int(self.begun and not self.final)

    def _end_with(self, more: int) -> None:
        """Have no more than so many microbatches committed beside those that are."""
        self.total = min(self.total, self.committed + more)

    @property
    def over(self) -> bool:
        """Whether all work of the run is committed."""
        return self.committed >= self.total

    @property
    def spent(self) -> bool:
        """Whether no exchange may be begun any more."""
        return False

    @property
    def step(self) -> int:
        """Steps of the run that are committed, rounded down."""
        return self.committed // self._whole

    @property
    def length(self) -> float:
        """Steps of the whole run."""
        return self.total / self._whole

    def passed(self, every: int) -> bool:
        """Whether a multiple of so many steps of the run was reached with the round before."""
        return every > 0 and self.step // every > self._before // self._whole // every

    # ------------------------------------------------------------ the round under way

    @property
    def begun(self) -> bool:
        return bool(self.given)

    @property
    def schedule(self) -> tuple[float, float]:
        """Where the round begins in the learning rate's schedule, and how much of it the round is
        as it was handed out, in steps of the run."""
        handed = sum(map(handed_out, self.given.values()))
        return self.committed / self._whole, handed / self._whole

    @property
    def fragment(self) -> int:
        """Which one of the vector the round exchanges, from 1; 0: all of it."""
        return next((w.fragment for w in self.given.values()), 0)

    @property
    def final(self) -> bool:
        """Whether the round is the last one."""
        return any(w.final for w in self.given.values())

    def units(self, number: int) -> int:
        """Microbatches that a replica contributes with its work of the round."""
        return _size(self.given[number])

    def committed_with(self, numbers: Iterable[int]) -> int:
        """Microbatches of the run that are committed when the work of these is."""
        return self.committed + sum(map(self.units, numbers))

    def member(self, number: int, term: int) -> RoundWork | None:
        """The work of a replica in its present term; None: it is not in the round."""
        work = self.given.get(number)
        return work if work is not None and work.term == term else None

    def carried(self, number: int, term: int) -> RoundWork | None:
        """Work of the round before, of a replica that made some ahead of the version that all have
        now; None: nothing."""
        work = self.past.get(number)
        return work if work is not None and work.term == term and work.ahead else None

    def gate(self, number: int, term: int) -> int:
        """In front of which of its steps a replica waits for the broker, at the latest."""
        work = self.member(number, term) or self.past.get(number)
        there = work is not None and work.term == term
        return work.first_step + work.steps + work.ahead if work is not None and there else 0

    # ------------------------------------------------------------ ranges of samples

    def position(self, round_: int) -> RoundPosition:
        """Where the run stands between two rounds, with the number of the second."""
        return RoundPosition(
            round=round_, committed=self.committed, next=self._next, returned=self._returned
        )

    def hand_out(
        self, counts: Iterable[int], keeping: Iterable[SampleRange] = ()
    ) -> list[list[SampleRange]]:
        """Ranges of so many microbatches each, what came back first, and none of those that are
        kept for others; nothing changes before the event that says so."""
        new = SampleRange(first=self._next, count=2**62)
        free, found = _without([*self._returned, new], keeping), list[list[SampleRange]]()
        for count in counts:
            found.append(first_of(free, count))
            free = _without(free, found[-1])
        return found

    # ------------------------------------------------------------ what happened

    def begin(self, begun: RoundBegun) -> None:
        """Replicas have got work, or go on with it, or the first part of it, in another term."""
        if self.chosen is not None and self.chosen.round == begun.round:
            self.chosen = None
        for work in begun.work:
            if (before := self.given.get(work.replica)) is not None:
                self._give_back(_without(before.samples, work.samples))
            self.given[work.replica] = work
            if self._is_newest(work):
                self.past.pop(work.replica, None)
            taken = _all(work)
            self._returned = _without(self._returned, taken)
            self._next = max([self._next, *(r.first + r.count for r in taken)])

    def planned(self) -> None:
        """Another attempt at the exchange begins."""

    def done(self, done: RoundDone) -> None:
        """The work of the members is committed, and that of others comes back."""
        inside = {m.replica for m in done.members}
        self._before, self.committed = self.committed, self.committed_with(inside)
        for number, work in self.given.items():
            self._give_back(work.ahead_samples if number in inside else _all(work))
            if self._is_newest(work):
                self.past[number] = work if number in inside else _closed(work)
        for joined in done.joined:
            self.past.pop(joined.replica, None)
        self.given = {}
        if self.finishing:
            self._end_with(self._round)

    def _is_newest(self, work: RoundWork) -> bool:
        """Whether the replica has begun no term with other work since this was handed out."""
        past = self.past.get(work.replica)
        return past is None or past.term <= work.term

    def _give_back(self, samples: Iterable[SampleRange]) -> None:
        """Keep ranges that are not committed with this round for later ones."""
        self._returned = sorted((*self._returned, *samples), key=lambda r: r.first)

    # ------------------------------------------------------------ the journal's snapshots

    def kept(self) -> RoundsKept:
        return RoundsKept(
            committed=self.committed,
            before=self._before,
            work=self.given.values(),
            past=self.past.values(),
            next=self._next,
            returned=self._returned,
            sums=self.sums,
            finishing=self.finishing,
            chosen=self.chosen,
            total=self.total if self.finishing else 0,
        )

    def restore(self, kept: RoundsKept) -> None:
        self.sums, self.finishing = kept.sums, kept.finishing
        self.chosen = kept.chosen if kept.HasField("chosen") else None
        self.total = kept.total if kept.finishing else self.total
        self.committed, self._before = kept.committed, kept.before
        self.given = {w.replica: w for w in kept.work}
        self.past = {w.replica: w for w in kept.past}
        self._next, self._returned = kept.next, list(kept.returned)


def _without(ranges: Iterable[SampleRange], taken: Iterable[SampleRange]) -> list[SampleRange]:
    """The rest of ranges when some are taken out."""
    spans = [(r.first, r.first + r.count) for r in ranges]
    for t in taken:
        stop = t.first + t.count
        parts = (((a, min(b, t.first)), (max(a, stop), b)) for a, b in spans)
        spans = [(a, b) for both in parts for a, b in both if b > a]
    return [SampleRange(first=a, count=b - a) for a, b in spans]


def _all(work: RoundWork) -> list[SampleRange]:
    return [*work.samples, *work.ahead_samples]


def _closed(work: RoundWork) -> RoundWork:
    """The work of a replica that was left out: nothing of what it makes ahead counts."""
    found = deepcopy(work)
    found.steps, found.ahead = work.steps + work.ahead, 0
    return found


def shortened(work: RoundWork, least: int, late_s: float, step_s: float, waiting: int) -> RoundWork:
    """Return the work without its last steps; their samples are handed out again with a later
    round. `late_s`: seconds by which it would end behind the others, of whom `waiting` wait. A step
    more is left out as long as that costs less than all of them waiting for it. `least`: so many
    steps it has made already. Work that overlaps with that of another round stays as it is, and so
    do clients, who are trained to their end or not at all."""
    found = RoundWork()
    found.CopyFrom(work)
    if not (late_s > 0 and step_s > 0 and waiting) or work.ahead or work.late or work.cohort:
        return found
    most = math.ceil(late_s / step_s - 1 / waiting)
    steps = max(1, least, work.steps - max(0, most))
    if steps >= work.steps:
        return found
    count = sum(s.count for s in work.samples) // work.steps * steps
    del found.samples[:]
    found.samples.extend(first_of(work.samples, count))
    found.planned = work.planned or work.steps
    found.steps = steps
    return found
