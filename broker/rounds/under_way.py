"""What is known of the round under way: who can take part, whose contribution is there, and how the
attempt at its exchange goes. Nothing of it is durable: a broker that starts again knows less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...dag.plan.plan import PeerId
from ...net.identity.statements import CheckStatement
from ...proto.broker_pb2 import EXPORTING, BrokerMessage, RoundReport
from ..events import Instruction, Tell
from ..membership.member import Member
from ..policies.policy import RoundPolicy
from ..policies.round_view import PlannedAttempt, RoundView
from ..runs.replica import Replica
from ..runs.run import Run
from .attempts import Attempts, Grid
from .claims import SignedClaims
from .client_work import ClientWork
from .contributions import Contributions, is_at_gate, is_short
from .exchange_planner import ExchangePlanner
from .secure_sums import SecureSums
from .sum_audits import SumAudits
from .versions import Evaluations, last_start

__all__ = ["Readiness", "RoundUnderWay"]


@dataclass(frozen=True)
class Readiness:
    """Replicas that have work in a round. ready: those with a contribution. paused: those that have
    none, and none is waited for, as somebody paused them. still: those that have none yet."""

    ready: Sequence[int]
    paused: frozenset[int]
    still: Sequence[int]


class RoundUnderWay:
    """One round of a run, from its begin to its commit. clients, masks, claims, audits: None where
    the run has none of these."""

    def __init__(
        self,
        run: Run,
        view: RoundView,
        policy: RoundPolicy,
        grid: Grid,
        exchange: ExchangePlanner,
        check: CheckStatement | None,
        secret: bytes,
        since: float | None,
    ) -> None:
        """`check`, `secret`: as of `RoundCoordinator`. `since`: when the round began; None: an
        earlier start of the broker has begun it."""
        self.run, self.rounds, self.view, self.policy = run, run.rounds, view, policy
        self._exchange, wish = exchange, run.submitted.requirements
        self.contributions = Contributions(run, policy, since)
        self.attempts = Attempts(run, view, policy, self.contributions, grid)
        self.evaluations = Evaluations(self.rounds, policy)
        has_clients = wish.cohorts is not None
        self.clients = ClientWork(run, view, policy, self.contributions) if has_clients else None
        self.masks = SecureSums(run) if wish.cohorts is not None and wish.cohorts.secure else None
        self.claims = SignedClaims(run, view, check) if check is not None else None
        self.audits: SumAudits | None = None
        if check is not None and self.claims is not None and wish.audit:
            self.audits = SumAudits(run, view, exchange, self.claims, check, secret)
        self.checks = [c for c in (self.claims, self.audits) if c is not None]
        """What is asked of members before a version is committed, in order."""
        self._given_up = set[int]()
        """Replicas that an unmasked attempt does not wait for."""
        self.asked_at = 0.0
        """When members were asked for receipts or to add up again."""
        self._came, self._came_at = dict[tuple[PeerId, int], int](), -math.inf
        """By peer and term, how often something has come to it; and when that grew last."""

    # ------------------------------------------------------------ who can take part

    @property
    def present(self) -> list[int]:
        """Numbers of replicas whose peers can be spoken to, but for those that lost their place."""
        there = [r for r in self.run.replicas if r.record.running and not r.context.away]
        numbers = [r.record.number for r in there]
        return [n for n in numbers if not self.view.is_out(n)]

    @property
    def at_gate(self) -> list[int]:
        """Numbers of present replicas that wait for a version and have nothing to do."""
        there = [n for n in self.present if is_at_gate(self.rounds, self.run.replicas[n])]
        return [n for n in there if not self.contributions.is_busy(n)]

    def readiness(self) -> Readiness:
        """How far those that have work in the round are with it."""
        given, contributions = self.rounds.work.given, self.contributions
        work = [n for n in given if contributions.may_come(n)]
        ready = [n for n in work if contributions.is_ready(n)]
        if all(given[n].behind for n in ready):
            ready = []  # nobody has the version that the next one is made of
        replicas = self.run.replicas
        paused = frozenset(n for n in work if ready and replicas[n].record.paused)
        missing = [n for n in work if n not in {*ready, *paused}]
        return Readiness(ready, paused, [n for n in missing if not is_short(replicas[n])])

    # ------------------------------------------------------------ the attempt

    @property
    def ends(self) -> float:
        """When nobody waits for the attempt any more: it has its time, and goes on while something
        of it comes."""
        since, exchange = max(self.contributions.since or 0.0, self.asked_at), self._exchange
        since = since if self.masks is None else max(since, self.masks.asked_at)
        flows = min(self._came_at + exchange.quiet_s, since + exchange.longest_s)
        return max(since + exchange.attempt_s, flows)

    def further(self, member: Member, replica: Replica, said: RoundReport, now: float) -> None:
        """Move a replica's deadline where a holder is further than before in what is to be done: in
        an evaluation, if it evaluates in this round, or in the exchange, once all of its steps are
        done."""
        versions, what = self.rounds.versions, "round"
        if said.HasField("evaluation"):
            evaluators, what = self.policy.evaluators(self.rounds), "evaluation"
            due = said.round == versions.round and replica.record.number in evaluators
        else:
            due = is_at_gate(self.rounds, replica)
        if due:
            at = min(said.round, versions.round), min(said.attempt, max(1, versions.attempt))
            replica.lifecycle.deadline.further(member.id, what, at, now)

    def goes_on(self, member: Member, number: int, said: RoundReport, now: float) -> None:
        """Something of the attempt has come to a peer of a replica, which lacks what it lacks no
        more: it says so anew if nothing comes."""
        known = member.id, said.term
        if said.came > self._came.get(known, 0):
            self._came[known], self._came_at = said.came, now
            for lacks in self.view.lacks.values():
                lacks.pop(number, None)
            self.let_wait(now, now + self._exchange.quiet_s)

    def begin_attempt(self, attempt: PlannedAttempt, ready: Sequence[int]) -> list[Instruction]:
        """The attempt is written down: make the plans of its members, and tell them."""
        self.view.plans |= self._exchange.plans(attempt.groups)
        for checks in self.checks:
            checks.begin()
        if self.masks is not None:
            self.masks.begin((m.replica for m in attempt.members), self.view.plans)
        inside = {m.replica for m in attempt.members}
        self.view.disputes.left_out(n for n in ready if n not in inside)
        told = (*(n for n in ready if n in inside), *attempt.joiners)
        holders = (m for n in told for m in self.run.replicas[n].context.holders())
        return [i for member in holders for i in self.tell_plan(member)]

    def tell_plan(self, member: Member) -> list[Instruction]:
        """The part of a peer in the present attempt, if it has one."""
        plan = self.view.plans.get(member.id)
        return [] if plan is None else [Tell(member.stream, BrokerMessage(round_plan=plan))]

    def tell_again(self, replica: Replica, member: Member) -> list[Instruction]:
        """All of the round and the attempt that a holder of a replica may not have heard."""
        starts = []
        if replica.context.work is not None and replica.record.running:
            starts.append(self.policy.start_of(self.rounds, replica.id, replica.context.work))
        if self.rounds.work.over and replica.record.phase == EXPORTING:
            starts.append(last_start(self.run, replica))
        told = [Tell(member.stream, BrokerMessage(round_start=s)) for s in starts]
        asks = [i for part in (self.masks, *self.checks) if part for i in part.tell(member)]
        return [*told, *self.tell_plan(member), *asks]

    def let_wait(self, now: float, until: float) -> None:
        """Give replicas at the gate time, to `until` and as long as those take that they wait for:
        these have ends of their own."""
        if self.rounds.work.begun:
            local_s = max(0.0, self.contributions.closes_at - now)
            until += local_s + self._exchange.attempt_s
        for replica in self.run.replicas:
            if replica.record.running and is_at_gate(self.rounds, replica):
                replica.context.waits_until = max(replica.context.waits_until, until)

    def give_up(self) -> None:
        """Wait no more for who has not made the version."""
        self._given_up.update(n for n in self.awaited if not self.view.has_made(n))

    @property
    def awaited(self) -> list[int]:
        """Members and joiners of the attempt that are to make its version."""
        versions, present = self.rounds.versions, self.present
        found = [m.replica for m in versions.members]
        if versions.unmasked:
            gone = {m.replica for m in versions.members if self.attempts.is_gone(m)}
            found = [n for n in found if n not in gone | self._given_up]
        joiners = (n for n in versions.joiners if n not in self._given_up)
        return [*found, *(n for n in joiners if n in present)]
