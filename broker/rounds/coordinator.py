"""The rounds of one run: what its replicas work on, and when they meet.

    (all at the gate) --begins--> local work --closes--> exchange --all made it--> committed ─┐
           ^                                                |   ^                            │
           |                                 a member is lost: attempt + 1                   │
           +────────────────────────── the next one begins ──────────────────────────────────┘

- A round begins when the version before it is committed; the first one when all replicas run, or
  some have waited for the others long enough. Each gets steps by its speed.
- It closes when so many contributions are ready as the job's quorum says, or when its deadline has
  passed and at least one is ready. For who lost somebody nobody waits longer than its contribution
  is worth. Who is not ready then is left out: its samples are handed out
  again, and it takes the version from others when it is at the gate.
- A replica that begins another term in the round goes on with it, from a snapshot of this round
  (`ReplicaSnapshots.found`): with its local work or, behind the last step, with its contribution,
  for which there is another attempt.
- Members keep contribution and old version until `RoundStart` of the next round says that the
  version is committed, which it is when all have made it with one hash. Who has made another one
  takes the version of the others.
- The broker carries no tensor, and every decision is an event of the journal. After a restart it
  tells peers that come back what holds, and they tell it what they have done.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from ...proto.broker_pb2 import (
    EXPORTING,
    FAILED,
    RUNNING,
    BrokerMessage,
    RoundBegun,
    RoundMember,
    RoundReport,
    RunEvent,
)
from ..events import Instruction, SetTimer, Tell
from ..membership.member import Member, clean
from ..membership.membership import Membership
from ..runs.replica import Replica
from ..runs.run import Run
from .attempts import Attempts
from .contributions import Contributions, goes_on, is_at_gate, is_short, standing
from .disputes import Disputes
from .evaluations import Evaluations
from .exchange import ExchangePlanner
from .gossip import Gossip, NetworkOf
from .handing import local_work
from .policy import RoundPolicy
from .saving import finish, last_start, save_version
from .telling import start_of, tell_plan, tell_start
from .version import Versions, done_of

__all__ = ["RoundCoordinator"]

GRACE_S = 30.0
"""So long the first round waits for replicas that are not ready yet, when one is."""
_MOST_ATTEMPTS = 8
"""In which all wait for one another, before the run fails."""


class RoundCoordinator:
    """What it keeps beside the record is not durable: `contributions.py`, `attempts.py`,
    `version.py`."""

    def __init__(self, run: Run, members: Membership, network: NetworkOf) -> None:
        assert run.record.rounds is not None
        self.run, self.record = run, run.record.rounds
        self._disputes = Disputes()
        exchange = ExchangePlanner(run, self.record, members, self._disputes)
        self._policy = RoundPolicy(self.record)
        if self.record.gossips:
            self._policy = Gossip(run, self.record, members, network)
        self._contributions = Contributions(run, self.record)
        self._versions = Versions(run, self._disputes)
        known = self._contributions, self._versions
        self._attempts = Attempts(run, self.record, exchange, *known, self._disputes, self._policy)
        self._first: float | None = None
        """When the first replica was ready for the first round."""
        self._evaluations = Evaluations(self.record, run.submitted.spec.microbatches)
        self._exchange_s = 0.0
        """How long the last exchange took; 0: not known."""
        self._armed = math.inf
        self._stood: dict[int, Hashable] = {}
        """By replica, as `changed` found it last."""
        self._looks_at = -math.inf

    # ------------------------------------------------------------ what is known

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
        stands = {r.record.number: standing(self.record, r) for r in replicas}
        same = all(self._stood.get(n) == stand for n, stand in stands.items())
        if same and now < self._looks_at:
            return []
        self._stood |= stands
        return self.follow(now)

    def follow(self, now: float) -> list[Instruction]:
        """What is to be done, behind any event that may have changed a replica."""
        self._looks_at = now + GRACE_S / 2  # before a wait ends that others' steps make longer
        if self.run.ended:
            return []
        if self._contributions.since is None:  # the broker was started again
            self._contributions.since = now
        failed = next((r for r in self.run.replicas if r.record.phase == FAILED), None)
        if failed is not None:
            why = failed.record.reason
            return self.run.fail(why.code, why.text, now)
        record, attempts = self.record, self._attempts
        if record.over:
            return finish(self.run, now)
        if self._frozen:
            self._contributions.pause()
            return []
        if not record.begun:
            out = self._begin(now)
        elif record.attempt and not attempts.void:
            out = self._commit(now) or self._arm(attempts.ends)
        else:
            out = self._close(now)
        self._let_wait(now)
        return out

    def _let_wait(self, now: float) -> None:
        """Who waits at the gate does so for others, whose waits have ends of their own."""
        until = now + GRACE_S
        if self.record.begun:
            until += max(0.0, self._contributions.closes_at - now) + self._attempts.lasts_s
        for replica in self.run.replicas:
            if replica.record.running and is_at_gate(self.record, replica):
                replica.context.waits_until = max(replica.context.waits_until, until)

    def timer(self, now: float) -> list[Instruction]:
        self._armed = math.inf
        record, attempts = self.record, self._attempts
        ended = self.run.ended or self._frozen or record.over
        if record.attempt and not ended and not attempts.void and now >= attempts.ends:
            late = attempts.late()
            if {m.replica for m in record.members} <= set(late):
                if record.attempt >= _MOST_ATTEMPTS:
                    text = f"{record.attempt} attempts at round {record.round}, in each of which "
                    return self.run.fail("round", f"{text}all waited for others", now)
                late = []  # they wait for one another
            return self._retry(late, "made no version in time", now)
        return self.follow(now)

    def _arm(self, at: float) -> list[Instruction]:
        if self._armed <= at:
            return []
        self._armed = at
        return [SetTimer(f"round:{self.run.id}", at)]

    # ------------------------------------------------------------ local work

    def _begin(self, now: float) -> list[Instruction]:
        """The first round: later ones begin when the one before is committed."""
        present = self._versions.present
        if not present:
            self._first = None
            return []
        self._first = now if self._first is None else self._first
        if len(present) < len(self.run.replicas) and now < self._first + GRACE_S:
            return self._arm(self._first + GRACE_S)
        return self._hand_out(present, now)

    def _hand_out(self, numbers: Sequence[int], now: float) -> list[Instruction]:
        """The next round begins for these, who have its version."""
        at = self.record.position
        numbers = [n for n in numbers if not self._disputes.is_out(n)] or numbers
        work = local_work(self.run, numbers, self._exchange_s)
        self._disputes.begin(self.record.round)
        self._contributions.begin(work, now)
        self._versions.made = {}
        self._attempts.begin()
        begun = RoundBegun(round=self.record.round, work=work)
        out: list[Instruction] = [self.run.record.publish(RunEvent(round_begun=begun), 0, now)]
        out += self._tell_evaluation(now)
        out += save_version(self.run, [w.replica for w in work if not w.late], at)
        for w in work:
            out += tell_start(self.run, w.replica)
            out += self._replica(w.replica).snapshots.begin_round(now)
        return [*out, *self._arm(self._contributions.closes_at)]

    def _tell_evaluation(self, now: float, *, closes: bool = False) -> list[Instruction]:
        """The one of the round under way, if it is complete, or the round ends."""
        told = self._evaluations.told(closes=closes)
        return [] if told is None else [self.run.record.publish(RunEvent(evaluated=told), 0, now)]

    # ------------------------------------------------------------ the exchange

    def _close(self, now: float) -> list[Instruction]:
        """Plans the exchange, if it is time."""
        record, bad = self.record, self._contributions.bad
        out = self._attempts.restless(now)
        if set(record.work) <= set(bad):
            self._contributions.waits_for_late()
        work = [n for n in record.work if self._replica(n).context.work and n not in bad]
        ready = [n for n in work if self._contributions.is_ready(n)]
        paused = {n for n in work if ready and self._replica(n).record.paused}
        missing = [n for n in work if n not in {*ready, *paused}]
        still = [n for n in missing if not is_short(self._replica(n))]
        needed = self.run.submitted.requirements.sync.needed(len(record.work))
        again = bool(self._attempts.plans)
        until = self._contributions.waits_until(ready, still, now, again=again)
        if not work:  # else who is short of peers has its own, in snapshots
            why = "; ".join(bad.values()) or "all were lost, with what they had of the round"
            text = f"no replica has a contribution: {why}"
            return [*out, *self.run.fail("round", text, now)]
        if not ready or not (now >= until or not still or len(ready) >= needed):
            return out if now >= until else [*out, *self._arm(until)]
        if not record.attempt and not self._policy.in_groups and len(ready) < needed:
            late = [n for n in still if not self._contributions.has_lost(n)]
            out += self._attempts.convict(late, "had no contribution in time", now)
            self._contributions.late.update(late)
        return [*out, *self._plan(ready, now)]

    def _plan(self, ready: Sequence[int], now: float) -> list[Instruction]:
        if not self._policy.in_groups:
            ready = self._attempts.without_disputed(ready)
        others = [n for n in self._versions.present if n not in ready]
        joining = [n for n in others if is_at_gate(self.record, self._replica(n))]
        joining = [n for n in joining if not self._attempts.shunned(n, ready)]
        planned = self._attempts.planned(ready, joining, now)
        out: list[Instruction] = [self.run.record.publish(RunEvent(round_planned=planned), 0, now)]
        self._attempts.make_plans()
        for number in (*ready, *planned.joiners):
            out += tell_plan(self.run, number, self._attempts.plans)
        return [*out, *self._arm(self._attempts.ends)]

    def _retry(self, without: Sequence[int], why: str, now: float) -> list[Instruction]:
        """Another attempt, without these."""
        return [*self._attempts.give_up(without, why, now), *self._close(now)]

    # ------------------------------------------------------------ what peers say

    def reported(
        self, member: Member, number: int, said: RoundReport, now: float
    ) -> list[Instruction]:
        """A holder of a replica has reported, in its present term."""
        record, replica = self.record, self._replica(number)
        there = replica.record.phase in (RUNNING, EXPORTING)
        stale = said.term != replica.record.term or not there
        if stale or member.id not in replica.record.peers or self.run.ended:
            return [replica.context.ignored("round", member, f"term {said.term} of {replica.id}")]
        goes_on(replica, self.record, member, said, now)
        if said.HasField("evaluation"):
            kept = self._evaluations.add(number, said.round, said.evaluation)
            return self._tell_evaluation(now) if kept else []
        if said.round != record.round or not record.begun:
            return [replica.context.ignored("round", member, f"round {said.round}")]
        if said.attempt == 0:
            return self._contributed(number, member, said, now)
        if number not in self._attempts.inside or said.attempt != self._attempts.of(number):
            return [replica.context.ignored("round", member, f"attempt {said.attempt}")]
        if said.HasField("problem"):
            out, again = self._attempts.hindered(number, member, said, now)
            return [*out, *self._close(now)] if again else out
        self._versions.add(number, member.id, said)
        return self.follow(now) if self._versions.has_made(number) else []

    def _contributed(
        self, number: int, member: Member, said: RoundReport, now: float
    ) -> list[Instruction]:
        if number in self._contributions.bad:
            if not said.HasField("problem"):  # it may count yet
                self._contributions.add(number, said.term, member.id)
            return []
        if said.HasField("problem"):
            why = clean(said.problem.text, 500)
            text = f"the contribution of {member.label} does not count: {why}"
            self._contributions.bad[number] = text
            note = RunEvent(note=f"round {said.round}: {text}")
            return [self.run.record.publish(note, number, now), *self.follow(now)]
        self._contributions.add(number, said.term, member.id)
        return self.follow(now) if self._contributions.is_ready(number) else []

    # ------------------------------------------------------------ the version

    def _commit(self, now: float) -> list[Instruction]:
        """When all have made it."""
        record, versions = self.record, self._versions
        present, members = versions.present, [m.replica for m in record.members]
        everybody = [*members, *(n for n in record.joiners if n in present)]
        if not all(map(versions.has_made, everybody)):
            return []
        hashes = {n: versions.hash_of(n) for n in everybody}
        if not (found := self._policy.agreed(hashes)):
            return self.run.fail("round", "every replica has holders that made other versions", now)
        version, equal = found
        others = [n for n in everybody if n not in equal]
        out = self._attempts.odd(others, equal[0], now)
        self._disputes.done(members)
        joined = [
            RoundMember(
                replica=n,
                term=self._replica(n).record.term,
                source=self._policy.sources.get(n, 0),
            )
            for n in equal
            if n in record.joiners
        ]
        self._exchange_s = now - (self._contributions.since or now)
        took = now - record.done_at_s, self._exchange_s
        done = done_of(record, versions.made, version, joined, *took)
        out += self._tell_evaluation(now, closes=True)
        out.append(self.run.record.publish(RunEvent(round_done=done), 0, now))
        if record.over:
            return [*out, *finish(self.run, now)]
        return [*out, *self._hand_out(equal, now)]

    # ------------------------------------------------------------ peers that come back

    def again(self, number: int, member: Member) -> list[Instruction]:
        """What a holder may not have heard."""
        replica, out = self._replica(number), list[Instruction]()
        if replica.context.work is not None and replica.record.running:
            start = start_of(self.run, replica, replica.context.work)
            out.append(Tell(member.stream, BrokerMessage(round_start=start)))
        if self.record.over and replica.record.phase == EXPORTING:
            start = last_start(self.run, replica)
            out.append(Tell(member.stream, BrokerMessage(round_start=start)))
        if (plan := self._attempts.plans.get(member.id)) is not None:
            out.append(Tell(member.stream, BrokerMessage(round_plan=plan)))
        return out
