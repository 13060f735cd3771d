"""The exchange of a round, attempt by attempt: what came of each, what becomes of those who are to
blame if nothing does, and the grid that contributions are rounded to, by its exponent.

An element that is too large for the grid is another attempt with a coarser one, and that has a
limit: the first coarser grid is had for one member's word, as no digit of a weight is lost by it;
a coarser one still for the words of two. Who asks for it alone is left out. Grids become finer
again after some rounds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import EXPONENT
from ...dag.rounds.wiring import segments_of
from ...proto.broker_pb2 import RoundDone, RoundMember, RoundPlanned, RoundReport, RunEvent
from ..events import Instruction, Log
from ..membership.member import Member, clean
from ..policies.policy import RoundPolicy
from ..policies.round_view import LACKS, Blame, PlannedAttempt, RoundView
from ..runs.run import Run
from .claims import ClaimVerdict
from .contributions import Contributions

__all__ = ["MOST_REPORTED", "Attempts", "Grid"]

MOST_REPORTED = 1e30
"""Of a number that a peer reports."""
_MOST_ATTEMPTS = 8
"""In which all wait for one another, before the run fails."""
_MOST_LEFT = 3
"""Attempts of one round that a replica may end by going: then it is left out of the round."""
_RAISED = 12
"""By so much a contribution that is too large raises the exponent."""
_MOST_EXPONENT = 48
"""Who has a larger element is left out."""
_CALM = 16
"""Rounds without such a contribution behind which the exponent is lowered again."""


class Grid:
    """exponent: of the next attempt; as in RoundPlan."""

    def __init__(self, exponent: int) -> None:
        self.exponent = exponent
        self._calm = 0
        """Rounds since it was raised, or lowered."""
        self._large = defaultdict[int, set[int]](set)
        """By exponent, who had an element in this round that was too large for it."""

    def begin(self) -> None:
        """A round begins."""
        self._large.clear()
        self._calm += 1
        if self._calm >= _CALM and self.exponent > EXPONENT:
            self.exponent, self._calm = max(EXPONENT, self.exponent - _RAISED), 0

    def overflows(self, number: int, level: int) -> Collection[int]:
        """An element of a replica was too large for an exponent. Return who counts again with the
        next one, itself and whose word stood alone before; nobody: it is left out."""
        said = self._large[level]
        said.add(number)
        if level >= _MOST_EXPONENT or (level > EXPONENT and len(said) < 2):
            return ()
        self.exponent, self._calm = level + _RAISED, 0
        return said


class Attempts:
    """The attempts of one round; not durable."""

    def __init__(
        self,
        run: Run,
        view: RoundView,
        policy: RoundPolicy,
        contributions: Contributions,
        grid: Grid,
    ) -> None:
        self._run, self._view, self._policy = run, view, policy
        self._contributions, self._grid = contributions, grid
        self._versions = view.rounds.versions
        self._left = Counter[int]()
        """Attempts of this round that a replica was in, and went."""
        self._refuted = False
        """Whether members of the attempt have claimed different things."""
        self._apart: list[set[int]] = []
        """Pairs that did so in the round; twice only where there are two liars."""

    def is_gone(self, member: RoundMember) -> bool:
        """Whether a member of the attempt is not there any more, as it was."""
        record = self._run.replicas[member.replica].record
        given = member.replica in self._view.rounds.work.given
        return not record.running or record.term != member.term or not given

    @property
    def void(self) -> bool:
        """Whether members claim different things, or one is not there any more, as it was; or an
        earlier start of the broker planned the attempt, and who has heard of it nobody knows. One
        that is unmasked never is: its members are those of the round."""
        if self._versions.unmasked:
            return False
        if self._refuted:
            return True
        members, bad = self._versions.members, self._contributions.bad
        if self._policy.carries and any(m.replica in bad for m in members):
            return True  # and others are waited for
        return self._view.attempt is None or any(map(self.is_gone, members))

    def of(self, number: int) -> int:
        """In which attempt what a replica now does was planned."""
        return self._versions.attempt_of(self._view.sources.get(number, number))

    def begin(self, attempt: PlannedAttempt, now: float) -> RoundPlanned:
        """Return the event of another attempt. What was made in the present one counts no more, but
        for who goes on with it."""
        view, versions = self._view, self._versions
        self._left.update(m.replica for m in versions.members if self.is_gone(m))
        kept = {p for n in attempt.kept for p in self._run.replicas[n].record.peers}
        view.plans = {p: plan for p, plan in view.plans.items() if p in kept}
        view.made = {n: made for n, made in view.made.items() if n in attempt.kept}
        view.attempt, view.troubled, self._refuted = attempt, set(), False
        view.forgive()
        self._contributions.since = now
        return RoundPlanned(
            round=versions.round,
            attempt=versions.attempt + 1,
            members=attempt.members,
            joiners=attempt.joiners,
            exponent=self._grid.exponent,
        )

    # ------------------------------------------------------------ the version

    def hash_of(self, number: int) -> int | None:
        """One hash of all that a replica has made; None where its own holders differ."""
        plan, said, total = self._run.replicas[number].record.plan, self._view.made[number], 0
        assert plan is not None, f"replica {number} has no plan"
        for k, slot in enumerate(plan.stages):
            hashes = {
                said[p].hashes[plan.stages_of(p).index(k)]
                for p in slot.holders
                if len(said[p].hashes) == len(plan.stages_of(p))
            }
            if len(hashes) != 1:
                return None
            total += hashes.pop()
        return total % 2**64

    def done(self, version: int, equal: Sequence[int], now: float) -> RoundDone:
        """Return the event of the commit. `version`: its hash; `equal`: replicas that made it, or
        took it from others."""
        view, versions, members = self._view, self._versions, self._versions.members
        said = [report for reports in view.made.values() for report in reports.values()]
        moved = [sum(_sound(r.mean_moved) for r in of.values()) for of in view.made.values()]
        drifts = [
            math.sqrt(sum(_sound(r.drift) for r in view.made[m.replica].values()))
            for m in members
            if m.replica in view.made
        ]
        weights, total = {m.replica: m.weight for m in members if m.replica in view.made}, 0.0
        for n, weight in weights.items():
            total += weight * sum(_sound(r.clients_moved) for r in view.made[n].values())
        done = RoundDone(
            round=versions.round,
            attempt=versions.attempt,
            members=members,
            hash=version,
            drift=sum(drifts) / max(1, len(drifts)),
            clients_moved=math.sqrt(total / max(1, sum(weights.values()))),
            mean_moved=math.sqrt(max(moved, default=0.0)),
            sent_bytes=min(sum(r.sent_bytes for r in said), 2**64 - 1),
            waited_s=max((_sound(r.waited_s) for r in said), default=0.0),
            seconds=now - versions.done_at_s,
            exchange_s=now - (self._contributions.since or now),
            microbatches=view.rounds.work.committed_with(m.replica for m in members),
            sums=view.rounds.work.sums,
            skipped=sum(r.skipped for n in weights for r in view.made[n].values()),
            going=self._going,
            joined=[
                RoundMember(replica=n, term=view.run.replicas[n].term, source=view.sources.get(n))
                for n in equal
                if n in versions.joiners
            ],
        )
        for member in done.members if versions.unmasked else ():
            member.term = member.term if member.replica in equal else 0  # it takes it from others
        numbers = [m.replica for m in members]
        if (uploads := self._policy.uploads(view, numbers)) is not None:
            done.uploads.CopyFrom(uploads)
        done.lines.extend(self._policy.lines(view, numbers, done.exchange_s, now))
        if (reports := self._policy.reports(view, numbers)) is not None:
            done.clients.CopyFrom(reports)
        return done

    @property
    def _going(self) -> list[int]:
        """Replicas that are not in the version, and go on with their work."""
        if not self._policy.carries:
            return []
        rest = [n for n in self._view.rounds.work.given if n not in self._versions.inside]
        rest = [n for n in rest if not self._view.is_out(n)]
        return [n for n in rest if self._contributions.may_come(n)]

    # ------------------------------------------------------------ nothing comes of it

    def convict(
        self, numbers: Iterable[int], why: str, now: float, at: str = ""
    ) -> list[Instruction]:
        """Members lose their place in the round, and in later ones if it was so before. `at`: of
        the attempt, for people."""
        out = list[Instruction]()
        for number in numbers:
            self._contributions.bad.setdefault(number, f"replica {number} {why}")
            text = f"replica {number} {why}{self._view.disputes.strike(number)}"
            out.append(self._note(text, now, number, at))
        return out

    def _note(self, text: str, now: float, number: int = 0, at: str = "") -> Instruction:
        note = RunEvent(note=f"round {self._versions.round}{at}: {text}")
        return self._run.record.publish(note, number, now)

    def restless(self, now: float) -> list[Instruction]:
        """Convicts replicas that have gone from too many attempts of the round; and says whose
        contribution is too old to count."""
        bad, old = self._contributions.bad, self._contributions.too_old()
        found = [n for n, times in self._left.items() if times >= _MOST_LEFT and n not in bad]
        out = self.convict(found, "has gone from one attempt after the other", now)
        return [*out, *(self._note(why, now, n) for n, why in old.items())]

    def _judged(self, blame: Blame) -> list[int]:
        """Return who is left out, as is who has disputes with two others then."""
        disputes, inside = self._view.disputes, self._versions.inside
        for by, about in blame.disputes:
            disputes.accuse(by, about, others=len(inside) - 2)
        return [*blame.out, *disputes.convicted([n for n in inside if n not in blame.out])]

    def accused(self, verdict: ClaimVerdict, now: float) -> list[Instruction]:
        """What members claim of the attempt differs: nothing comes of it."""
        replicas, inside = self._run.replicas, self._versions.inside
        of = {p: n for n in inside for p in replicas[n].record.peers}
        self._view.troubled.update(of[p] for p in verdict.about if p in of)
        self._refuted, out = True, list[Instruction]()
        if verdict.lie is not None:
            number = of[PeerId(verdict.lie.peer)]
            liar, event = PeerId(verdict.lie.peer), RunEvent(lie=verdict.lie)
            out.append(self._run.record.publish(event, number, now))
            self._run.liars.add(liar)
            why = f"has lied: peer {liar} has signed "
            two = verdict.lie.HasField("second")
            why += "two things that contradict each other" if two else "a sum that is another"
            self._contributions.bad.setdefault(number, f"replica {number} {why}")
            text = f"round {self._versions.round}{self._at}: replica {number} {why}"
            out += self._run.replicas[number].losses.lied(liar, text, now)
        out += self.convict(sorted({of[p] for p in verdict.unshown}), verdict.why, now, self._at)
        pairs = ((of[a], of[b]) for a, b in verdict.apart)
        apart = dict.fromkeys((min(p), max(p)) for p in pairs)
        return [*out, *self._parted(apart, verdict.parted, now)]

    def _parted(self, pairs: Iterable[tuple[int, int]], why: str, now: float) -> list[Instruction]:
        """Replicas claim different things, and one of each pair is to blame."""
        disputes, inside, out = self._view.disputes, self._versions.inside, list[Instruction]()
        again = dict[int, None]()
        for a, b in pairs:
            if a == b or {a, b} in self._apart:
                again |= dict.fromkeys((a, b))
            self._apart.append({a, b})
            disputes.accuse(a, b, others=len(inside) - 2)
            text = f"replicas {a} and {b} {why}"
            out.append(self._note(text, now, at=self._at))
        known = disputes.convicted(inside) if out else ()
        why = "claims what others do not, or what its own peers do not"
        return [*out, *self.convict(known or again, why, now, self._at)]

    def differ(self, others: Sequence[int], like: int, now: float) -> list[Instruction]:
        """Replicas have made another version than `like` did."""
        found = self._judged(self._policy.differ(self._view, others, like))
        return self.convict(found, "made another version, or had others make one", now)

    def late(self, now: float, masked: Collection[int] = ()) -> list[Instruction] | None:
        """The attempt has ended, and some have not made the version, or have not got as far as to
        lift masks (`masked`: these, where sums have some): make ready for another one, without who
        is to blame; with all, where one pair has others who add up, or all wait for one
        another. None: they did so too often."""
        view, inside = self._view, self._versions.inside
        waiting = [n for n in inside if (n in masked if masked else not view.has_made(n))]
        view.troubled.update(waiting)
        blame = self._policy.late(view, waiting)
        out = self._judged(blame) or (() if view.disputes.between(inside) else waiting)
        if {m.replica for m in self._versions.members} <= set(out):
            if self._versions.attempt >= _MOST_ATTEMPTS:
                return None
            out = ()
        view.forgive()
        why, told = "made no version in time", list[Instruction]()
        for a, b in blame.disputes:
            text = f"nothing goes between replicas {a} and {b}: others add up what they give"
            told.append(self._note(text, now, at=self._at))
        if out and blame.convicts:
            return [*told, *self.convict(out, why, now, self._at)]
        if told:
            return told
        self._contributions.bad |= {n: f"replica {n} {why}" for n in out}
        names = ", ".join(f"replica {n}" for n in out) or "nobody"
        return [self._note(f"{names} {why}", now, at=self._at)]

    @property
    def _at(self) -> str:
        return f", attempt {self._versions.attempt}"

    # ------------------------------------------------------------ what peers say

    def hindered(
        self, number: int, member: Member, said: RoundReport, now: float
    ) -> tuple[list[Instruction], bool]:
        """Somebody cannot make the version; whether there is another attempt at once."""
        why, view, bad = clean(said.problem.text, 500), self._view, self._contributions.bad
        fields = (("run", self._run.id), ("peer", member.id), ("why", why))
        log = Log("round_hindered", fields, "warning")
        if self._versions.unmasked:  # and there is no other attempt
            return [log], False
        gives = any(m.replica == number for m in self._versions.members)
        if said.problem.code == "overflow" and not gives:
            view.forgive()
            text = "says that what it does not give is too large"
            return self.convict([number], text, now, self._at), True
        if number in bad:
            return [], False
        if said.problem.code == "overflow":
            view.troubled.add(number)
            view.forgive()
            text = f"replica {number} has an element that is too large"
            counts = self._grid.overflows(number, self._versions.exponent)
            bad |= {} if counts else {number: text}
            for other in counts:
                bad.pop(other, None)
            return [self._note(f"{text}: {why}", now, at=f", attempt {said.attempt}")], True
        known = any(number in lacks for lacks in view.lacks.values())
        self._blame(number, member.id, said.lacks, said.problem.code)
        return [] if known else [log], False

    def _blame(self, number: int, peer: PeerId, lacks: Iterable[str], what: str) -> None:
        """A peer of a replica lacks what others are to send it by its plan; of whom it waits for
        nothing, it says nothing. `what`: one of LACKS; anything else is said of contributions."""
        view, due = self._view, set[str]()
        plan = view.plans.get(peer)
        for s in segments_of(plan) if plan is not None else ():
            due |= {by for _, by in s.claims(peer).heard}
            due |= {s.takes_from(peer)} if peer in s.takers else set()
            due |= {source for source, destination in s.versions if destination == peer}
        lacked, replicas = due & set(lacks), self._run.replicas
        about = [n for n in self._versions.inside if lacked & set(replicas[n].record.peers)]
        view.lacks[what if what in LACKS else LACKS[0]][number].update(about or [number])


def _sound(reported: float) -> float:
    """A peer may report anything; what is no number from 0 on counts as 0, and what no run comes to
    as MOST_REPORTED: sums of these are finite."""
    return min(reported, MOST_REPORTED) if 0 <= reported < math.inf else 0.0
