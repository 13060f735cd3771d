"""The rounds of one run: what its replicas work on, and when they meet.

    (all at the gate) --begins--> local work --closes--> exchange --all made it--> committed ─┐
           ^                                                |   ^                            │
           |                                 a member is lost: attempt + 1                   │
           +────────────────────────── the next one begins ──────────────────────────────────┘

What a round is, its policy says (`broker/policies/policy.py`): who works on what, when it closes,
who exchanges with whom, and what it came to. Here is what holds for all of them.

- A round begins when the version before it is committed; the first one when all replicas run, or
  some have waited for the others long enough. Each gets steps by its speed.
- It closes when so many contributions are ready as the policy asks for, or when its deadline has
  passed and at least one is ready. For who lost somebody nobody waits longer than its contribution
  is worth. Who is not ready then is left out: its work is handed out again, and it takes the
  version from others when it is at the gate.
- A replica that begins another term in the round goes on with it, from a snapshot of this round
  (`ReplicaSnapshots.found`): with its local work or, behind the last step, with its contribution,
  for which there is another attempt.
- Members keep contribution and old version until `RoundStart` of the next round says that the
  version is committed, which it is when all have made it with one hash. Who has made another one
  takes the version of the others.
- Every decision is an event of the journal. After a restart the broker tells peers that come back
  what holds, and they tell it what they have done.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ...net.identity.statements import CheckStatement
from ...proto.broker_pb2 import (
    EXPORTING,
    FAILED,
    RUNNING,
    BrokerMessage,
    RoundAnswer,
    RoundReport,
    RoundWork,
    RunEvent,
)
from ..events import Instruction, SetTimer, Tell
from ..membership.member import Member, clean
from ..membership.membership import Membership
from ..policies.disputes import Disputes
from ..policies.policies import policy_of
from ..policies.round_view import NetworkOf, RoundView
from ..runs.replica import Replica
from ..runs.run import Run
from .attempts import Grid
from .claims import ClaimVerdict
from .contributions import standing
from .exchange_planner import ExchangePlanner
from .under_way import RoundUnderWay
from .versions import Evaluations, finish, save_version

__all__ = ["RoundCoordinator"]

GRACE_S = 30.0
"""So long the first round waits for replicas that are not ready yet, when one is."""


class RoundCoordinator:
    """Has the rounds of a run begin, close and end. Beside the record it knows of the round under
    way only (`RoundUnderWay`)."""

    def __init__(
        self,
        run: Run,
        members: Membership,
        network: NetworkOf,
        check: CheckStatement | None = None,
        secret: bytes = b"",
    ) -> None:
        """`check`: of what peers sign; None: they have no certificates. `secret`: of the draw of
        sums that are added up again."""
        self.run, self.rounds = run, run.rounds
        self._policy = policy_of(run.submitted)
        self._members, self._network, self._check, self._secret = members, network, check, secret
        self._exchange = ExchangePlanner(run, members)
        self._disputes, self._grid = Disputes(), Grid(self.rounds.versions.exponent)
        self._first: float | None = None
        """When the first replica was ready for the first round."""
        self._exchange_s = 0.0
        """How long the last exchange took; 0: not known."""
        self._armed = math.inf
        self._stood: dict[int, Hashable] = {}
        """By replica, as `changed` found it last."""
        self._looks_at = -math.inf
        self._round = self._under_way(None)

    def _under_way(self, since: float | None) -> RoundUnderWay:
        """A round that begins now, of which nothing is known yet; None: one that an earlier start
        of the broker has begun."""
        run, policy = self.run, self._policy
        view = RoundView(run.record, self._members, self._network, self._disputes)
        grid, exchange, check = self._grid, self._exchange, self._check
        return RoundUnderWay(run, view, policy, grid, exchange, check, self._secret, since)

    def _replica(self, number: int) -> Replica:
        return self.run.replicas[number]

    @property
    def _frozen(self) -> bool:
        """Whether nothing is begun: the run is paused. As long as some are on the way to a step at
        which they stop, which may be one of the next round, rounds go on."""
        records = [r.record for r in self.run.replicas]
        return any(r.paused for r in records) and not any(r.pausing for r in records)

    # ------------------------------------------------------------ what follows

    def changed(self, replicas: Iterable[Replica], now: float) -> list[Instruction]:
        """`follow`, where any of these is another one than before in what is decided by here, or
        nobody has looked for a while: most events are steps in the middle of a round."""
        stands = {r.record.number: standing(self.rounds, r) for r in replicas}
        same = all(self._stood.get(n) == stand for n, stand in stands.items())
        if same and now < self._looks_at:
            return []
        self._stood |= stands
        return self.follow(now)

    def follow(self, now: float) -> list[Instruction]:
        """Do what is to be done, behind any event that may have changed a replica."""
        self._looks_at = now + GRACE_S / 2  # before a wait ends that others' steps make longer
        if self.run.ended:
            return []
        if self._round.contributions.since is None:  # the broker was started again
            self._round.contributions.since = now
        failed = next((r for r in self.run.replicas if r.record.phase == FAILED), None)
        if failed is not None:
            why = failed.record.reason
            return self.run.fail(why.code, why.text, now)
        if self.rounds.work.over:
            return finish(self.run, now)
        if self._frozen:
            self._round.contributions.pause()
            return []
        if not self.rounds.work.begun:
            out = self._begin(now)
        elif self.rounds.versions.attempt and not self._round.attempts.void:
            out = self._commit(now) or self._arm(self._round.ends)
        else:
            out = self._close(now)
        self._round.let_wait(now, now + GRACE_S)
        return out

    def timer(self, now: float) -> list[Instruction]:
        """The attempt may have ended, or a wait."""
        self._armed = math.inf
        versions, attempts = self.rounds.versions, self._round.attempts
        ended = self.run.ended or self._frozen or self.rounds.work.over
        if ended or not versions.attempt or attempts.void or now < self._round.ends:
            return self.follow(now)
        if versions.unmasked:
            return self._give_up(now)
        for checks in self._round.checks:
            if checks.asked:
                return self._judge(checks.given_up(), now)
        masks = self._round.masks
        out = attempts.late(now, masks.waited_for if masks is not None else ())
        if out is None:
            text = f"{versions.attempt} attempts at round {versions.round}, in each of which "
            return self.run.fail("round", f"{text}all waited for others", now)
        return [*out, *self._close(now)]

    def _arm(self, at: float) -> list[Instruction]:
        if self._armed <= at:
            return []
        self._armed = at
        return [SetTimer(f"round:{self.run.id}", at)]

    def _publish(self, now: float, **event: Any) -> Instruction:
        return self.run.record.publish(RunEvent(**event), 0, now)

    # ------------------------------------------------------------ local work

    def _begin(self, now: float) -> list[Instruction]:
        """The first round: later ones begin when the one before is committed."""
        present = self._round.present
        if not present:
            self._first = None
            return []
        self._first = now if self._first is None else self._first
        if len(present) < len(self.run.replicas) and now < self._first + GRACE_S:
            return self._arm(self._first + GRACE_S)
        return self._hand_out(present, now)

    def _hand_out(
        self, numbers: Sequence[int], now: float, going: Sequence[RoundWork] = ()
    ) -> list[Instruction]:
        """The next round begins for these, who have its version; `going`: work that goes on."""
        at, number, before = self.rounds.position, self.rounds.versions.round, self._round
        numbers = [n for n in numbers if not before.view.is_out(n)] or numbers
        work = self._policy.work(
            self.run.record, numbers, self._exchange_s, going, lambda ps: self._network(ps, now)
        )
        homes = self.rounds.homes
        forgets = homes is not None and homes.known and any(w.afresh for w in work)
        self._disputes.begin(number)
        self._grid.begin()
        begun = self._policy.begun(self.run.record, numbers, work)
        out = [self._publish(now, round_begun=begun)]
        if forgets:
            text = f"round {number}: some clients' state is gone, so all begin without"
            out.append(self._publish(now, note=text))
        self._round = self._under_way(now)
        self._round.contributions.go_on_with(before.contributions, (w.replica for w in going))
        newest = [w for w in work if not w.behind]
        out += save_version(self.run, [w.replica for w in newest if not w.late], at)
        for w in newest:
            replica = self._replica(w.replica)
            start = self._policy.start_of(self.rounds, replica.id, w)
            message = BrokerMessage(round_start=start)
            out += [Tell(m.stream, message) for m in replica.context.holders()]
            out += replica.snapshots.begin_round(now)
        return [*out, *self._arm(self._round.contributions.closes_at)]

    def _tell_evaluation(self, now: float, *, closes: bool = False) -> list[Instruction]:
        """The one of the round under way, if it is complete, or the round ends."""
        told = self._round.evaluations.told(closes=closes)
        return [] if told is None else [self._publish(now, evaluated=told)]

    # ------------------------------------------------------------ the exchange

    def _close(self, now: float) -> list[Instruction]:
        """Plans the exchange, if it is time."""
        under_way, contributions = self._round, self._round.contributions
        bad, out = contributions.bad, under_way.attempts.restless(now)
        if set(self.rounds.work.given) <= set(bad):
            contributions.waits_for_late()
        if why := contributions.why_none:
            return [*out, *self.run.fail("round", f"no replica has a contribution: {why}", now)]
        found = under_way.readiness()
        ready, paused, still = found.ready, found.paused, found.still
        if few := self._why_few(len(ready)):
            return out if still or paused else [*out, *self.run.fail("secure", few, now)]
        enough = self._policy.is_enough(self.rounds, ready)
        again = under_way.view.attempt is not None and not self._policy.carries
        until = contributions.waits_until(ready, still, now, again=again)
        if not ready or not (now >= until or not still or enough):
            return out if now >= until else [*out, *self._arm(until)]
        if not self.rounds.versions.attempt and not enough:
            gone = not paused and all(map(contributions.has_lost, still))
            clients = under_way.clients if gone else None
            if clients is not None and (more := clients.hand_on(ready, now)):
                return [*out, *more, *self._arm(contributions.closes_at)]
            late = self._policy.too_late([n for n in still if not contributions.has_lost(n)])
            out += under_way.attempts.convict(late, "had no contribution in time", now)
            contributions.late.update(late)
        return [*out, *self._plan(ready, now)]

    def _plan(self, ready: Sequence[int], now: float) -> list[Instruction]:
        """Another attempt at the exchange, for those that are ready."""
        if self.rounds.work.spent:
            text = f"{self.rounds.work.sums} noisy sums are made, and sync.privacy allows no more"
            return self.run.fail("privacy", text, now)
        under_way = self._round
        attempt = self._policy.attempt(under_way.view, ready, under_way.at_gate, now)
        if few := self._why_few(len(attempt.members)):
            return self.run.fail("secure", few, now)
        out = [self._publish(now, round_planned=under_way.attempts.begin(attempt, now))]
        return [*out, *under_way.begin_attempt(attempt, ready), *self._arm(under_way.ends)]

    def _why_few(self, members: int) -> str:
        """Say why a round comes to nothing with so many members; empty: they are enough."""
        masks = self._round.masks
        return "" if masks is None else masks.why_few(members)

    # ------------------------------------------------------------ what peers say

    def reported(
        self, member: Member, number: int, said: RoundReport, now: float
    ) -> list[Instruction]:
        """A holder of a replica has reported, in its present term."""
        rounds, replica, view = self.rounds, self._replica(number), self._round.view
        there = replica.record.phase in (RUNNING, EXPORTING)
        stale = said.term != replica.record.term or not there
        if stale or member.id not in replica.record.peers or self.run.ended:
            return [replica.context.ignored("round", member, f"term {said.term} of {replica.id}")]
        self._round.further(member, replica, said, now)
        known = said.round == (rounds.versions.round if said.attempt else replica.context.round)
        if said.HasField("evaluation"):
            kept = known and self._round.evaluations.add(number, said.evaluation)
            return self._tell_evaluation(now) if kept else []
        if not known or not rounds.work.begun:
            return [replica.context.ignored("round", member, f"round {said.round}")]
        if said.attempt == 0:
            return self._contributed(number, member, said, now)
        inside = number in rounds.versions.inside
        if not inside or said.attempt != self._round.attempts.of(number):
            return [replica.context.ignored("round", member, f"attempt {said.attempt}")]
        if said.came:
            self._round.goes_on(member, number, said, now)
            return []
        if said.HasField("problem"):
            out, again = self._round.attempts.hindered(number, member, said, now)
            return [*out, *self._close(now)] if again else out
        masks, claims = self._round.masks, self._round.claims
        if said.HasField("masks"):
            void = self._round.attempts.void
            return [] if masks is None else masks.reported(member, said, now, void=void)
        if claims is not None and (wrong := claims.wrong(member, said)):
            return [replica.context.ignored("round", member, wrong)]
        view.made.setdefault(number, {})[member.id] = said
        return self.follow(now) if view.has_made(number) else []

    def _give_up(self, now: float) -> list[Instruction]:
        """The attempt has ended, and some have not made the version that is unmasked: they are not
        waited for any more."""
        if self._round.masks is not None and not self._round.masks.lifted:
            text = "too few peers have revealed their shares of masks in time"
            return self.run.fail("secure", f"round {self.rounds.versions.round}: {text}", now)
        self._round.give_up()
        return self.follow(now)

    def _contributed(
        self, number: int, member: Member, said: RoundReport, now: float
    ) -> list[Instruction]:
        contributions, given = self._round.contributions, self.rounds.work.given.get(number)
        if given is not None and said.more != given.more:
            return [self._replica(number).context.ignored("round", member, "it has more to do")]
        if said.HasField("problem"):
            if number in contributions.bad:
                return []
            why = clean(said.problem.text, 500)
            text = f"the contribution of {member.label} does not count: {why}"
            contributions.bad[number] = text
            note = RunEvent(note=f"round {said.round}: {text}")
            return [self.run.record.publish(note, number, now), *self.follow(now)]
        first = not contributions.is_ready(number)  # later ones change no plan that weighs it
        clients = self._round.clients if first else None
        out = [] if clients is None else clients.contributed(number, said, now)
        contributions.add(number, said.term, member.id)
        if self._round.masks is not None:
            self._round.masks.contributed(member.id, said.masks)
        follows = number not in contributions.bad and contributions.is_ready(number)
        return [*out, *self.follow(now)] if follows else out

    def answered(self, member: Member, said: RoundAnswer, now: float) -> list[Instruction]:
        """A member shows receipts, or says what came of sums that it added up again."""
        claims, audits = self._round.claims, self._round.audits
        if self.run.ended or claims is None:
            return []
        if said.turn:
            follows = audits is not None and audits.answered(member, said)
            return self.follow(now) if follows else []
        verdict = claims.answered(member, said)
        return [] if verdict is None else self._judge(verdict, now)

    def _judge(self, verdict: ClaimVerdict, now: float) -> list[Instruction]:
        """Claims of an attempt differ: there is another one without who is to blame."""
        return [*self._round.attempts.accused(verdict, now), *self._close(now)]

    # ------------------------------------------------------------ the version

    def _commit(self, now: float) -> list[Instruction]:
        """When all have made it."""
        under_way, view, masks = self._round, self._round.view, self._round.masks
        everybody, attempts = under_way.awaited, under_way.attempts
        unmasked = masks if self.rounds.versions.unmasked else None
        if unmasked is not None and not (everybody and unmasked.goes_on(everybody)):
            return self.run.fail("secure", unmasked.why_lost, now)
        if not all(map(view.has_made, everybody)):
            return []
        for checks in under_way.checks if unmasked is None else ():
            if (asked := checks.asks()) is not None:
                under_way.asked_at = now if asked else under_way.asked_at
                return asked if isinstance(asked, list) else self._judge(asked, now)
        found = self._policy.agreed(view, {n: attempts.hash_of(n) for n in everybody})
        if found is None:
            return self.run.fail("round", "every replica has holders that made other versions", now)
        version, equal = found
        out = attempts.differ([n for n in everybody if n not in equal], equal[0], now)
        self._disputes.done([m.replica for m in self.rounds.versions.members])
        done = attempts.done(version, equal, now)
        going = [self.rounds.work.given[n] for n in done.going]
        self._exchange_s = done.exchange_s
        out += self._tell_evaluation(now, closes=True)
        out.append(self._publish(now, round_done=done))
        if self.rounds.work.over:
            under_way.evaluations = Evaluations(self.rounds, self._policy)
            return [*out, *finish(self.run, now)]
        return [*out, *self._hand_out(equal, now, going)]

    # ------------------------------------------------------------ peers that come back

    def again(self, number: int, member: Member) -> list[Instruction]:
        """What a holder may not have heard."""
        return self._round.tell_again(self._replica(number), member)
