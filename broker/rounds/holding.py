"""When replicas do not go on through rounds that were told ahead: why, how they are held, and what
is recalled when all that are there have answered (`windows.py`)."""

from __future__ import annotations

import math

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import RoundReport, RoundsRecalled, RunEvent
from ..events import Instruction, Log
from ..membership.member import Member, clean
from ..records.rounds import RoundRecord
from ..runs.run import Run
from .attempts import Attempts
from .contributions import Contributions
from .telling import tell_ahead, tell_hold, tell_plan, tell_start
from .version import Versions
from .windows import RoundWindow

__all__ = ["Holding"]


class Holding:
    """What holds back rounds of one run that gossips; not durable. hindrance: what a peer said of a
    round in which the record may not be yet."""

    def __init__(
        self,
        run: Run,
        record: RoundRecord,
        window: RoundWindow,
        contributions: Contributions,
        versions: Versions,
        attempts: Attempts,
    ) -> None:
        self._run, self._record, self.window = run, record, window
        self._contributions, self._versions, self._attempts = contributions, versions, attempts
        self.hindrance = ""
        self._alone_until = math.inf
        """When nobody waits any more for those whose stream broke."""

    @property
    def free(self) -> bool:
        """Whether replicas may be in another round than the record."""
        return self._record.told is not None and not self.window.level

    def trouble(self, now: float) -> str:
        """Why rounds do not go on as they were told; empty: they do."""
        inside = self._attempts.inside
        self._alone_until = self._contributions.waits_for_broken(inside, now)
        alone = now >= self._alone_until
        return self._hindered(now) or ("others wait for a replica that is away" if alone else "")

    def _hindered(self, now: float) -> str:
        record, attempts, bad = self._record, self._attempts, self._contributions.bad
        lost = [m.replica for m in record.members if attempts.is_gone(m)]
        if not attempts.plans:
            return "the broker was started again"
        if lost:
            return f"replica {lost[0]} was lost"
        if bad or self.hindrance:
            return self.hindrance or next(iter(bad.values()))
        if now >= attempts.ends or attempts.overdue(now):
            return "the version was not made in time"
        if any(n not in record.work for n in self._versions.present):
            return "a replica waits for a version"
        stops = any(r.lifecycle.handover for r in self._run.replicas)
        return "a replica is to stop" if record.ahead and (self._versions.odd or stops) else ""

    def calm_until(self, now: float) -> float:
        """When there may be trouble, if nothing happens."""
        return min(self._attempts.looks_at(now), self._alone_until)

    def hold(self, why: str, now: float) -> list[Instruction]:
        """All are asked where they stand."""
        window, number = self.window, self._record.round
        window.asked, window.order = True, number + 1
        alone = now >= self._alone_until
        window.away_until = now if alone else now + self._contributions.worth_s
        fields = (("run", self._run.id), ("round", number), ("why", why))
        out: list[Instruction] = [Log("rounds_held", fields)]
        for lacking in window.lacks:
            out += tell_hold(self._run, lacking, window.order)
        window.asked_until = now + self._attempts.lasts_s
        return out

    def given_up(self, now: float) -> list[int]:
        """Who is not waited for any longer, as its stream broke; only where no other answer
        lacks."""
        lacks = self.window.lacks
        away = {r.record.number for r in self._run.replicas if r.context.away.broken}
        return lacks if now >= self.window.away_until and away >= set(lacks) else []

    def answers_until(self, now: float) -> float | None:
        """When there is to be another look at who has not answered; None: at nobody."""
        window = self.window
        if not window.lacks or now >= window.asked_until:
            return None
        return window.away_until if now < window.away_until else window.asked_until

    def settle(self, now: float) -> list[Instruction]:
        """All that are there have answered: rounds that nobody has begun are recalled, and who is
        behind the record hears of its round."""
        window, record, out = self.window, self._record, list[Instruction]()
        for number in window.lacks:
            window.stands[number] = record.round
            self._contributions.bad[number] = f"replica {number} does not say where it stands"
        window.level, self.hindrance = True, ""
        last = max(record.round, *window.stands.values(), 0)
        if any(b.round > last for b in record.ahead):
            recalled = RoundsRecalled(last=last)
            out.append(self._run.record.publish(RunEvent(recalled=recalled), 0, now))
        for number in (n for n, at in window.behind.items() if at < record.round):
            out += tell_start(self._run, number) if number in record.work else []
            out += tell_plan(self._run, number, self._attempts.plans)
        return out

    # ------------------------------------------------------------ what peers say, and hear

    def answered(self, number: int, peer: PeerId, said: RoundReport) -> None:
        """A peer is held, and says in which round."""
        if self.window.asked and said.held == self.window.order:
            self.window.answered(number, peer, said.round)

    def keeps(self, number: int, member: Member, said: RoundReport) -> bool:
        """Whether it is of a round that the record may not be in yet, and waits until it is."""
        problem, current = said.HasField("problem"), said.round == self._record.round
        early = said.round > self._record.round or (self.free and problem)
        if not early or not self.window.keeps(number, member, said):
            return False
        if problem and current:
            self.hindrance = clean(said.problem.text, 500)
        return True

    def tell_again(self, number: int) -> list[Instruction]:
        """What a holder that came back may not have heard."""
        out = tell_ahead(self._run, number, self.window)
        if self.window.asked and number in self.window.lacks:
            out += tell_hold(self._run, number, self.window.order)
        return out
