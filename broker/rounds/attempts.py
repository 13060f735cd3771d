"""The exchange of a round, attempt by attempt: who is in it, for how long, and who is to blame if
nothing comes of it (`disputes.py`).

An element that is too large for the grid is another attempt with a coarser one, and that has a
limit: the first coarser grid is had for one member's word, as no digit of a weight is lost by it;
a coarser one still for the words of two. Who asks for it alone is left out. Grids become finer
again after some rounds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import EXPONENT
from ...proto.broker_pb2 import RoundMember, RoundPlan, RoundPlanned, RoundReport, RunEvent
from ..events import Instruction, Log
from ..membership.member import Member, clean
from ..records.rounds import RoundRecord, microbatches_of
from ..runs.run import Run
from .contributions import Contributions
from .disputes import Disputes, doubted
from .exchange import ExchangePlanner
from .policy import RoundPolicy
from .version import Versions

__all__ = ["Attempts"]

_RAISED = 12
"""By so much a contribution that is too large raises the exponent."""
_MOST_EXPONENT = 48
"""Who has a larger element is left out."""
_CALM = 16
"""Rounds without such a contribution behind which the exponent is lowered again."""
_MOST_LEFT = 3
"""Attempts of one round that a replica may end by going: then it is left out of the round."""


class Attempts:
    """The attempts of the round under way; not durable. plans: by peer, what it does in the present
    one; none: an earlier start of the broker made them. policy: who exchanges with whom."""

    def __init__(
        self,
        run: Run,
        record: RoundRecord,
        exchange: ExchangePlanner,
        contributions: Contributions,
        versions: Versions,
        disputes: Disputes,
        policy: RoundPolicy,
    ) -> None:
        self._run, self._record, self._exchange = run, record, exchange
        self._contributions, self._versions = contributions, versions
        self._disputes = disputes
        self._policy = policy
        self.plans: dict[PeerId, RoundPlan] = {}
        self._troubled = set[int]()
        """Who cannot make the version of this attempt, or is waited for."""
        self._lacks, self._sums_lack = (
            defaultdict[int, set[int]](set),
            defaultdict[int, set[int]](set),
        )
        """By replica, others whose contributions it lacks in this attempt; whose sums it does."""
        self._apart: list[tuple[int, int]] = []
        """Pairs of replicas that came into dispute in this attempt."""
        self._exponent, self._calm = record.exponent, 0
        """Of the next attempt; rounds since it was raised, or lowered."""
        self._large = defaultdict[int, set[int]](set)
        """By exponent, who had an element in this round that was too large for it."""
        self._left = Counter[int]()
        """Attempts of this round that a replica was in, and went."""

    def begin(self) -> None:
        """A round begins."""
        self.plans = {}
        self._anew()
        self._large.clear()
        self._left.clear()
        self._calm += 1
        if self._calm >= _CALM and self._exponent > EXPONENT:
            self._exponent, self._calm = max(EXPONENT, self._exponent - _RAISED), 0
        self._policy.begin()

    # ------------------------------------------------------------ who is in it

    @property
    def inside(self) -> list[int]:
        """Numbers of members and joiners."""
        return self._exchange.inside

    def is_gone(self, member: RoundMember) -> bool:
        """Whether a member of the attempt is not there any more, as it was."""
        record, work = self._run.replicas[member.replica].record, self._record.work
        return not record.running or record.term != member.term or member.replica not in work

    @property
    def void(self) -> bool:
        """Whether a member is not there any more, as it was; or an earlier start of the broker
        planned the attempt, and who has heard of it nobody knows."""
        return not self.plans or any(map(self.is_gone, self._record.members))

    def of(self, number: int) -> int:
        """In which attempt what a replica now does was planned."""
        return self._record.attempt_of(self._policy.sources.get(number, number))

    # ------------------------------------------------------------ until when

    @property
    def ends(self) -> float:
        assert self._contributions.since is not None
        return self._contributions.since + self.lasts_s

    @property
    def lasts_s(self) -> float:
        """How long one may take."""
        return self._exchange.attempt_s

    # ------------------------------------------------------------ the next one

    def planned(self, ready: Sequence[int], joining: Sequence[int], now: float) -> RoundPlanned:
        """Its event, for replicas whose contribution is there and others that take the version.
        What was made in the present attempt counts no more, but for groups that stay."""
        record, made = self._record, self._versions.made
        self._left.update(m.replica for m in record.members if self.is_gone(m))
        plan = self._run.replicas[ready[0]].record.plan
        assert plan is not None
        members = [
            RoundMember(
                replica=n,
                weight=microbatches_of(record.work[n]) * plan.microbatch_size,
                term=self._run.replicas[n].record.term,
            )
            for n in ready
        ]
        members.sort(key=lambda m: m.replica)
        anew = self._troubled if self.plans else None
        members = self._policy.grouped(members, anew=anew, now=now)
        joining = self._policy.joining(members, joining, self._troubled)
        self._versions.made = {n: made[n] for n in self._policy.kept if n in made}
        self._contributions.since = now
        self._anew()
        return RoundPlanned(
            round=record.round,
            attempt=record.attempt + 1,
            members=members,
            joiners=joining,
            exponent=self._exponent,
        )

    def make_plans(self) -> None:
        """What peers do in it, behind its event."""
        if self._policy.in_groups:
            self.plans |= self._exchange.plans(self._policy.sources)
        else:
            self.plans = self._exchange.plans()

    # ------------------------------------------------------------ nothing comes of it

    def _anew(self) -> None:
        """Nobody is in trouble, or to blame, in the attempt that begins."""
        self._troubled = set()
        self._forgive()

    def _forgive(self) -> None:
        self._lacks.clear()
        self._sums_lack.clear()

    def convict(
        self, numbers: Iterable[int], why: str, now: float, at: str = ""
    ) -> list[Instruction]:
        """Members lose their place in the round, and in later ones if it was so before. `at`: of
        the attempt, for people."""
        out = list[Instruction]()
        for number in numbers:
            self._contributions.bad.setdefault(number, f"replica {number} {why}")
            text = f"round {self._record.round}{at}: replica {number} {why}"
            note = RunEvent(note=text + self._disputes.strike(number))
            out.append(self._run.record.publish(note, number, now))
        return out

    def restless(self, now: float) -> list[Instruction]:
        """Convicts replicas that have gone from too many attempts of the round."""
        bad = self._contributions.bad
        found = [n for n, times in self._left.items() if times >= _MOST_LEFT and n not in bad]
        return self.convict(found, "has gone from one attempt after the other", now)

    def without_disputed(self, ready: Sequence[int]) -> list[int]:
        """Return replicas of which somebody can add up what all of these give."""
        goes = self._disputes.leaves_out(ready)
        return [n for n in ready if n not in goes]

    def shunned(self, number: int, members: Sequence[int]) -> bool:
        """Whether a joiner has disputes with all whose version it may take."""
        return all(self._disputes.between((number, m)) for m in members)

    def odd(self, others: Sequence[int], like: int, now: float) -> list[Instruction]:
        """Replicas have made another version than `like` did: one that did so out of what others
        gave it is in dispute with these, any other one is convicted, as is who has two disputes."""
        found, made = list[int](), self._versions.made
        for number in others:
            peers = doubted(number, like, made, self.plans)
            about = [n for n in self.inside if peers & set(self._run.replicas[n].record.peers)]
            about = [n for n in about if n != number]
            for other in about:
                self._disputes.accuse(number, other, others=len(self.inside) - 2)
            found += [] if about else [number]
        found += [n for n in self._disputes.convicted(self.inside) if n not in found]
        return self.convict(found, "made another version, or had others make one", now)

    def late(self) -> list[int]:
        """The attempt has ended, and those that have not made the version are in trouble: return
        who is left out of the next one. It is who has said nothing of others, and who has disputes
        with two others. Nobody, where it is enough that others add up."""
        waiting = [n for n in self.inside if not self._versions.has_made(n)]
        self._troubled.update(waiting)
        if self._policy.in_groups:
            return self._of_groups(waiting)
        # Who lacks a sum lacks it because of whoever's contribution lacks, if somebody's does.
        said = self._lacks if any(self._lacks[n] - {n} for n in waiting) else self._sums_lack
        spoke = {n for n in waiting if (self._lacks[n] | self._sums_lack[n]) - {n}}
        found, known = [n for n in waiting if n not in spoke], self._disputes.between(self.inside)
        for by in (n for n in waiting if n in spoke):
            for about in sorted(said[by] - {by, *found}):
                if {by, about} in known:  # of which nothing was to come any more
                    found.append(by)
                    break
                self._disputes.accuse(by, about, others=len(self.inside) - 2)
                self._apart.append((by, about))
        found += self._disputes.convicted([n for n in self.inside if n not in found])
        return found if found or self._disputes.between(self.inside) else waiting

    def _of_groups(self, waiting: list[int]) -> list[int]:
        """Return, of gossip, whom most wait for, else all that wait."""
        for lacks in (self._lacks, self._sums_lack):
            blamed = Counter(n for about in lacks.values() for n in about)
            if blamed:
                most = max(blamed.values())
                return [n for n in self.inside if blamed[n] == most]
        return waiting

    def give_up(self, without: Sequence[int], why: str, now: float) -> list[Instruction]:
        """Make ready for another attempt, without these."""
        self._forgive()
        at = f", attempt {self._record.attempt}"
        out = list[Instruction]()
        for a, b in self._apart:
            told = f"nothing goes between replicas {a} and {b}: others add up what they give"
            note = RunEvent(note=f"round {self._record.round}{at}: {told}")
            out.append(self._run.record.publish(note, 0, now))
        self._apart = []
        if without and not self._policy.in_groups:
            return [*out, *self.convict(without, why, now, at)]
        if out:
            return out
        for number in without:
            self._contributions.bad[number] = f"replica {number} {why}"
        names = ", ".join(f"replica {n}" for n in without) or "nobody"
        note = RunEvent(note=f"round {self._record.round}{at}: {names} {why}")
        return [self._run.record.publish(note, 0, now)]

    # ------------------------------------------------------------ what peers say

    def hindered(
        self, number: int, member: Member, said: RoundReport, now: float
    ) -> tuple[list[Instruction], bool]:
        """Somebody cannot make the version; whether there is another attempt at once."""
        why = clean(said.problem.text, 500)
        inside = any(m.replica == number for m in self._record.members)
        if said.problem.code == "overflow" and not inside:  # it contributes nothing
            return self.give_up([number], "says that what it does not give is too large", now), True
        if number in self._contributions.bad:
            return [], False
        if said.problem.code == "overflow":
            self._overflows(number)
            text = f"replica {number} has an element that is too large: {why}"
            note = RunEvent(note=f"round {said.round}, attempt {said.attempt}: {text}")
            return [self._run.record.publish(note, 0, now)], True
        known = number in self._lacks or number in self._sums_lack
        self._blame(number, member.id, said.lacks, sums=said.problem.code == "unsummed")
        if known:
            return [], False
        fields = (("run", self._run.id), ("peer", member.id), ("why", why))
        return [Log("round_hindered", fields, "warning")], False

    def _overflows(self, number: int) -> None:
        """An element of a replica is too large for the attempt: the next one has a larger exponent,
        or goes without that one."""
        self._troubled.add(number)
        self._forgive()
        level, bad = self._record.exponent, self._contributions.bad
        said = self._large[level]
        said.add(number)
        if level >= _MOST_EXPONENT or (level > EXPONENT and len(said) < 2):
            bad[number] = f"replica {number} has an element that is too large"
            return
        self._exponent, self._calm = level + _RAISED, 0
        for other in said:  # whose word stood alone before
            bad.pop(other, None)

    def _blame(self, number: int, peer: PeerId, lacks: Iterable[str], *, sums: bool) -> None:
        """A peer of a replica lacks what others are to send it by its plan; of whom it waits for
        nothing, it says nothing. `sums`: sums or versions, which those may lack as well, because
        of whoever's contribution lacks."""
        plan, due = self.plans.get(peer), set[str]()
        for s in plan.segments if plan is not None else ():
            due |= {g.peer for g in s.givers} if s.aggregator == peer else set()
            due |= {s.aggregator} if peer in s.takers else set()
            due |= {v.source for v in s.versions if v.destination == peer}
        lacked, replicas = due & set(lacks), self._run.replicas
        about = [n for n in self.inside if lacked & set(replicas[n].record.peers)]
        (self._sums_lack if sums else self._lacks)[number].update(about or [number])
