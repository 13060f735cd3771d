"""What of a run's rounds outlives the broker: which one is under way, what work was handed out for
it, what its exchange is, and which samples are committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from ...dag.rounds.sums import EXPONENT
from ...proto.broker_pb2 import (
    Checkpoint,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundPlanned,
    RoundPosition,
    RoundStart,
    RoundWork,
    RunEvent,
    SampleRange,
)
from ...proto.journal_pb2 import MetPairs, RoundsKept

__all__ = ["RoundRecord", "handed_out", "microbatches_of", "pairs_of"]


def microbatches_of(work: RoundWork) -> int:
    """How many a replica was given."""
    return sum(s.count for s in work.samples)


def pairs_of(members: Iterable[RoundMember]) -> tuple[tuple[int, int], ...]:
    """Who met whom in gossip; none where all met, or everybody was alone."""
    groups: dict[int, list[int]] = {}
    for member in members:
        groups.setdefault(member.group, []).append(member.replica)
    found = (sorted(g) for number, g in sorted(groups.items()) if number and len(g) == 2)
    return tuple((a, b) for a, b in found)


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
    version, which all begin from, nobody. past: of replicas that have no work in this round, their
    last; who was in the round before may go on with what it made ahead. met: of gossip, the pairs
    of the newest rounds, since all met last.
    """

    def __init__(
        self,
        steps: int,
        microbatches: int,
        eval_every: int,
        replicas: int = 1,
        *,
        remembers: int | None = None,
    ) -> None:
        """`microbatches`: of one step of the run, in which each of `replicas` makes one of its own;
        `eval_every`: steps between evaluations, 0: none; `remembers`: of gossip, so many rounds'
        pairs."""
        self.total, self._whole = steps * microbatches, microbatches
        self._own = microbatches // replicas
        self._eval_every, self.gossips = eval_every, remembers is not None
        self.met: deque[tuple[tuple[int, int], ...]] = deque(maxlen=remembers)
        self._before = 0  # Microbatches that were committed a round ago.
        self.holders: dict[int, int] = {}
        self.round = self.attempt = self.committed = 0
        self.work: dict[int, RoundWork] = {}
        self.past: dict[int, RoundWork] = {}
        self.members: tuple[RoundMember, ...] = ()
        self.joiners: tuple[int, ...] = ()
        self.exponent = EXPONENT
        self.done_at_s = 0.0
        """When the last one was committed, or the first one began."""
        self._next = 0  # The first microbatch that was never handed out.
        self._returned: list[SampleRange] = []  # Handed out, and not committed.
        self.first = 0
        """The round whose version all begin from."""

    def begin_from(self, saved: Checkpoint) -> None:
        """The run goes on from the version of another one. A rest that is no step of a replica is
        left out."""
        done = saved.step * self._whole
        at = saved.rounds if saved.HasField("rounds") else RoundPosition(committed=done, next=done)
        self.first = self.round = at.round
        self.committed = self._before = at.committed
        self._next, self._returned = at.next, list(at.returned)
        self.total -= (self.total - self.committed) % self._own

    @property
    def position(self) -> RoundPosition:
        """Where it stands, between two rounds."""
        return RoundPosition(
            round=self.round,
            committed=self.committed,
            next=self._next,
            returned=self._returned,
        )

    @property
    def begun(self) -> bool:
        return bool(self.work)

    @property
    def over(self) -> bool:
        """Whether every sample of the run is committed."""
        return self.committed >= self.total

    @property
    def gathers(self) -> bool:
        """Whether the round of gossip that is under way ends with one mean of all replicas: the
        last one does."""
        return self.gossips and self.committed + self.handed >= self.total

    @property
    def handed(self) -> int:
        """Microbatches that were handed out for the round under way, as it began."""
        return sum(map(handed_out, self.work.values()))

    @property
    def _passed(self) -> bool:
        """Whether an evaluation became due with the round before."""
        whole, every = self._whole, self._eval_every
        return every > 0 and self.committed // whole // every > self._before // whole // every

    @property
    def evaluators(self) -> Collection[int]:
        """Replicas that evaluate what they begin the round with, if that is due: in gossip all of
        them; else one, the first in which the version does not land where the next one does, for
        frames of two evaluations at one step are one another's doubles."""
        if self.gossips:
            return self.work.keys()
        fit = (n for n, w in self.work.items() if w.late < w.steps + w.ahead)
        return sorted(fit)[:1] if self._passed else ()

    def attempt_of(self, number: int) -> int:
        """In which attempt what a member now does was planned."""
        found = (m.attempt for m in self.members if m.replica == number)
        return next(found, 0) or self.attempt

    @property
    def fragment(self) -> int:
        """Which one of the vector the round under way exchanges, from 1; 0: all of it."""
        return next((w.fragment for w in self.work.values()), 0)

    @property
    def final(self) -> bool:
        """Whether the round under way is the last one."""
        return any(w.final for w in self.work.values())

    def member(self, number: int, term: int) -> RoundWork | None:
        """What a replica works on in its present term; None: it is not in the round."""
        work = self.work.get(number)
        return work if work is not None and work.term == term else None

    def carried(self, number: int, term: int) -> RoundWork | None:
        """What a replica made ahead of the version that all have now: its work of the round before;
        None: nothing."""
        work = self.past.get(number)
        return work if work is not None and work.term == term and work.ahead else None

    def gate(self, number: int, term: int) -> int:
        """In front of which of its steps a replica waits for the broker, at the latest."""
        work = self.member(number, term) or self.past.get(number)
        there = work is not None and work.term == term
        return work.first_step + work.steps + work.ahead if work is not None and there else 0

    def start_of(self, replica: str, work: RoundWork, *, apart: bool = False) -> RoundStart:
        """What a replica is told of its work. apart: as there, of rounds behind the first."""
        length = self.handed / self._whole
        return RoundStart(
            run=replica,
            term=work.term,
            round=self.round,
            first_step=work.first_step,
            steps=work.steps,
            samples=work.samples,
            start=self.committed / self._whole,
            length=length * work.steps / work.planned if work.planned else length,
            evaluate=self._passed and work.replica in self.evaluators,
            ahead=work.ahead,
            ahead_samples=work.ahead_samples,
            late=work.late,
            gathers=self.gathers,
            fragment=work.fragment,
            apart=apart and self.round > 0,
        )

    def hand_out(
        self, counts: Iterable[int], keeping: Iterable[SampleRange] = ()
    ) -> list[list[SampleRange]]:
        """Ranges of so many microbatches each, what came back first, and none of those that are
        kept for others; nothing changes before the event that says so."""
        free = list(self._returned)
        for kept in keeping:
            free = _without(free, kept)
        back = [(r.first, r.count) for r in free]
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
            if self._is_newest(work):
                self.past.pop(work.replica, None)
            for samples in (*work.samples, *work.ahead_samples):
                self._take(samples)

    def _is_newest(self, work: RoundWork) -> bool:
        """Whether the replica has begun no term with other work since this was handed out."""
        past = self.past.get(work.replica)
        return past is None or past.term <= work.term

    def _take(self, taken: SampleRange) -> None:
        """They are handed out now."""
        if taken.first >= self._next:
            self._next = taken.first + taken.count
            return
        self._returned = _without(self._returned, taken)

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
        in_groups = any(m.group for m in done.members)
        for number, work in self.work.items():
            self._give_back(work.ahead_samples)
            if number in inside:
                self.committed += microbatches_of(work)
            else:
                self._give_back(work.samples)
            if self._is_newest(work):
                self.past[number] = work if number in inside else _closed(work)
        for joined in done.joined:
            self.past.pop(joined.replica, None)
        if self.gossips and in_groups:
            self.met.append(pairs_of(done.members))
        else:
            self.met.clear()
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
            past=self.past.values(),
            met=[MetPairs(replicas=[n for pair in pairs for n in pair]) for pairs in self.met],
        )

    def restore(self, kept: RoundsKept) -> None:
        self.round, self.attempt, self.committed = kept.round, kept.attempt, kept.committed
        self.work = {w.replica: w for w in kept.work}
        self.members, self.joiners = tuple(kept.members), tuple(kept.joiners)
        self.exponent, self.done_at_s = kept.exponent, kept.done_at_s
        self.holders = {m.replica: m.term for m in kept.holders}
        self._before = kept.before
        self.past = {w.replica: w for w in kept.past}
        self._next, self._returned = kept.next, list(kept.returned)
        for m in kept.met:
            self.met.append(tuple(zip(m.replicas[::2], m.replicas[1::2], strict=True)))


def _behind(samples: Iterable[SampleRange], count: int) -> Iterable[SampleRange]:
    """All but the first so many of them."""
    for r in samples:
        taken = min(count, r.count)
        count -= taken
        if taken < r.count:
            yield SampleRange(first=r.first + taken, count=r.count - taken)


def _without(ranges: Iterable[SampleRange], taken: SampleRange) -> list[SampleRange]:
    left: list[SampleRange] = []
    stop = taken.first + taken.count
    for r in ranges:
        for first, end in (
            (r.first, min(r.first + r.count, taken.first)),
            (max(r.first, stop), r.first + r.count),
        ):
            if end > first:
                left.append(SampleRange(first=first, count=end - first))
    return left


def _closed(work: RoundWork) -> RoundWork:
    """The work of a replica that was left out: nothing of what it makes ahead counts."""
    found = RoundWork()
    found.CopyFrom(work)
    found.steps, found.ahead = work.steps + work.ahead, 0
    return found
