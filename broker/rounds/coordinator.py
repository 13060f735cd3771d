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
- Of gossip some rounds may be told ahead (`windows.py`): replicas go through them by themselves,
  and the record follows. At any trouble all are held, and from there on it is as said above.
- The broker carries no tensor, and every decision is an event of the journal. After a restart it
  tells peers that come back what holds, and they tell it what they have done.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import (
    DONE,
    EXPORTING,
    FAILED,
    RUNNING,
    WAITING,
    BrokerMessage,
    RoundBegun,
    RoundHold,
    RoundMember,
    RoundPlan,
    RoundPlanned,
    RoundReport,
    RoundsRecalled,
    RoundStart,
    RoundWork,
    RunEvent,
    VersionEvaluated,
)
from ..events import Instruction, Log, SetTimer, Tell
from ..membership.member import Member, clean
from ..membership.membership import Membership
from ..records.rounds import microbatches_of
from ..runs.replica import Replica
from ..runs.run import Run
from .exchange import ExchangePlanner
from .gossip import Gossip, NetworkOf
from .handing import local_work
from .saving import save_last, save_version
from .version import done_of, hash_of
from .windows import RoundWindow

__all__ = ["RoundCoordinator"]

GRACE_S = 30.0
"""So long the first round waits for replicas that are not ready yet, when one is."""
_SPARE_S = 30.0
"""Added to twice the expected time of local work."""
_RAISED = 12
"""By so much a contribution that is too large raises the exponent."""
_MOST_EXPONENT = 48
"""Who has a larger element is left out."""
_MOST_ATTEMPTS = 8
"""In which all wait for one another, before the run fails."""
_SHORT = frozenset({"peers", "memory", "queue"})
"""Why a replica waits that nobody else waits for."""
_STRIKES = 3
"""Versions of its own that a replica may make before it is left out for good."""


class RoundCoordinator:
    """Not durable: ready: by replica, the holders whose contribution is there, in its present term.
    made: by replica, what its holders say of the version. bad: replicas whose contribution cannot
    count in this round, and why."""

    def __init__(self, run: Run, members: Membership, network: NetworkOf) -> None:
        assert run.record.rounds is not None
        self.run, self.record, self._members = run, run.record.rounds, members
        self.ready: dict[int, tuple[int, set[PeerId]]] = {}
        self.made: dict[int, dict[PeerId, RoundReport]] = {}
        self.bad: dict[int, str] = {}
        self._blamed = Counter[int]()
        self._strikes = Counter[int]()
        self._handed: dict[int, int] = {}
        """By replica, the term in which it got its work."""
        self._alone_since: float | None = None
        """When only replicas that lost somebody were missing first; None: others are, so far."""
        self._since: float | None = None
        """When local work began, or the attempt; None: before this start of the broker."""
        self._first: float | None = None
        """When the first replica was ready for the first round."""
        self._evaluated = -1
        """The newest round before which a version was evaluated."""
        self._exchange_s = 0.0
        """How long the last exchange took; 0: not known."""
        self._armed = math.inf
        self._stood: dict[int, Hashable] = {}
        """By replica, as `changed` found it last."""
        self._looks_at = -math.inf
        self._exchange = ExchangePlanner(run, run.record.rounds, members)
        self._plans: dict[PeerId, RoundPlan] = {}
        self._troubled = set[int]()
        """Who cannot make the version of this attempt, or is waited for."""
        self._gossip: Gossip | None = None
        self._window: RoundWindow | None = None
        if self.record.gossips:
            self._gossip = Gossip(run, self.record, members, network)
            self._window = RoundWindow(run, self.record, self._gossip, self._exchange)
        self._odd = set[int]()
        """Who made another version while rounds are told ahead."""
        self._hindrance = ""
        """Why rounds that were told ahead cannot go on."""

    # ------------------------------------------------------------ what is known

    def _replica(self, number: int) -> Replica:
        return self.run.replicas[number]

    def _present(self) -> list[int]:
        """Numbers of replicas whose peers can be spoken to."""
        return [
            r.record.number
            for r in self.run.replicas
            if r.record.running and not r.context.away
            if self._strikes[r.record.number] < _STRIKES
        ]

    def _is_ready(self, number: int) -> bool:
        """Whether its contribution to this round is there."""
        replica, record = self._replica(number), self._replica(number).record
        term, peers = self.ready.get(number, (0, set()))
        there = record.running and not replica.context.away
        return there and term == record.term and peers >= set(record.peers)

    def _is_short(self, number: int) -> bool:
        """Whether too few peers are there for it: nobody knows for how long."""
        replica = self._replica(number)
        waits = replica.record.phase == WAITING and replica.lifecycle.asked is None
        return waits and replica.record.reason.code in _SHORT

    def _waits(self, number: int) -> bool:
        """Whether it stands at the gate, with or without a contribution."""
        record = self._replica(number).record
        return record.committed >= self.record.gate(number, record.term)

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
        stands = {r.record.number: self._standing(r) for r in replicas}
        same = all(self._stood.get(n) == standing for n, standing in stands.items())
        if same and now < self._looks_at:
            return []
        self._stood |= stands
        return self.follow(now)

    def _standing(self, replica: Replica) -> Hashable:
        record, number = replica.record, replica.record.number
        about = record.phase, record.term, record.pausing, record.paused
        knows_pace = bool(record.step_s)  # `_closes_at`
        away = bool(replica.context.away), bool(replica.lifecycle.handover)
        return about, away, self._is_short(number), self._waits(number), knows_pace

    def follow(self, now: float) -> list[Instruction]:
        """What is to be done, behind any event that may have changed a replica."""
        self._looks_at = now + GRACE_S / 2  # before a wait ends that others' steps make longer
        if self.run.ended:
            return []
        if self._since is None:  # the broker was started again
            self._since = now
        failed = next((r for r in self.run.replicas if r.record.phase == FAILED), None)
        if failed is not None:
            why = failed.record.reason
            return self.run.fail(why.code, why.text, now)
        record = self.record
        if record.over:
            return self._finish(now)
        if self._frozen:
            self._since, self._handed = None, {}  # waits begin anew when it goes on
            return []
        if not record.begun:
            out = self._begin(now)
        elif self._window is not None and self._free:
            out = self._follow_told(self._window, now)
        elif record.attempt and not self._void() and not self._overdue(now):
            ends = self._attempt_ends
            if record.told is not None and record.attempt == 1 and now < self._closes_at:
                ends = self._closes_at
            out = self._commit(now) or self._arm(ends)
        else:
            out = self._close(now)
        self._let_wait(now)
        return out

    def _let_wait(self, now: float) -> None:
        """Who waits at the gate does so for others, whose waits have ends of their own."""
        until = now + GRACE_S
        if self.record.begun:
            until += max(0.0, self._closes_at - now) + self._exchange.attempt_s
        for replica in self.run.replicas:
            if replica.record.running and self._waits(replica.record.number):
                replica.context.waits_until = max(replica.context.waits_until, until)

    # ------------------------------------------------------------ rounds that were told ahead

    @property
    def _free(self) -> bool:
        """Whether replicas may be in another round than the record."""
        return self.record.told is not None and not (self._window and self._window.level)

    def _follow_told(self, window: RoundWindow, now: float) -> list[Instruction]:
        """Commits what replicas have come to, or has them held."""
        out: list[Instruction] = []
        if not window.asked:
            alone, until = self._is_alone(now)
            why = self._trouble(now) or ("others wait for a replica that is away" if alone else "")
            if not why:
                ends = self._closes_at if now < self._closes_at else self._attempt_ends
                return self._commit(now) or self._arm(min(ends, until))
            window.asked, window.order = True, self.record.round + 1
            window.away_until = now if alone else now + self._worth_s
            fields = (("run", self.run.id), ("round", self.record.round), ("why", why))
            out.append(Log("rounds_held", fields))
            for number in window.lacks:
                out += self._tell_hold(number)
            window.asked_until = now + self._exchange.attempt_s
        away = {r.record.number for r in self.run.replicas if r.context.away.broken}
        if now >= window.away_until and away >= set(window.lacks):
            for number in window.lacks:
                out += [*self._replica(number).losses.give_up(now), *self._arm(now)]
        if window.lacks and now < window.asked_until:
            until = window.away_until if now < window.away_until else window.asked_until
            return [*out, *self._arm(until)]
        for number in window.lacks:
            window.stands[number] = self.record.round
            self.bad[number] = f"replica {number} does not say where it stands"
        window.level = True
        self._hindrance = ""
        last = max(self.record.round, *window.stands.values(), 0)
        if any(b.round > last for b in self.record.ahead):
            recalled = RoundsRecalled(last=last)
            out.append(self.run.record.publish(RunEvent(recalled=recalled), 0, now))
        for number in (n for n, at in window.stands.items() if at < self.record.round):
            out += self._tell_start(number) if number in self.record.work else []
            out += self._tell_plan(number)
        for number, member, said in window.said():
            out += self.reported(member, number, said, now)
        return [*out, *self.follow(now)]

    def _trouble(self, now: float) -> str:
        """Why rounds do not go on as they were told; empty: they do."""
        record = self.record
        lost = [m.replica for m in record.members if self._is_gone(m)]
        if not self._plans:
            return "the broker was started again"
        if lost:
            return f"replica {lost[0]} was lost"
        if self.bad or self._hindrance:
            return self._hindrance or next(iter(self.bad.values()))
        if now >= self._attempt_ends or self._overdue(now):
            return "the version was not made in time"
        if any(n not in record.work for n in self._present()):
            return "a replica waits for a version"
        if record.ahead and (self._odd or any(r.lifecycle.handover for r in self.run.replicas)):
            return "a replica is to stop"
        return ""

    def _is_alone(self, now: float) -> tuple[bool, float]:
        """Whether nobody waits for those any more whose stream broke in their local work, and until
        when others do."""
        inside = self._exchange.inside
        given = [n for n in inside if self.ready.get(n, (0, set()))[1]]
        still = [n for n in inside if n not in given]
        if not given or not still or not all(self._replica(n).context.away.broken for n in still):
            return False, math.inf
        return self._is_late(given, still, now)

    @property
    def _worth_s(self) -> float:
        """For so long others wait for one that is away."""
        most = max(w.steps * self._step_s(n) for n, w in self.record.work.items())
        return most / len(self.record.work)

    def _tell_ahead(self, window: RoundWindow, number: int) -> list[Instruction]:
        holders = self._replica(number).context.holders()
        return [Tell(m.stream, ahead) for m in holders for ahead in window.told(m.id)]

    def _tell_hold(self, number: int) -> list[Instruction]:
        replica = self._replica(number)
        assert self._window is not None, "only gossip has rounds that were told ahead"
        message = BrokerMessage(
            round_hold=RoundHold(
                run=replica.id, term=replica.record.term, number=self._window.order
            )
        )
        return [Tell(m.stream, message) for m in replica.context.holders()]

    def _is_gone(self, member: RoundMember) -> bool:
        """Whether a member of the attempt is not there any more, as it was."""
        record, work = self._replica(member.replica).record, self.record.work
        return not record.running or record.term != member.term or member.replica not in work

    @property
    def _gone(self) -> set[int]:
        """Members that nobody waits for, and whose part counts."""
        return self._window.gone(self.bad) if self._window is not None else set()

    def _overdue(self, now: float) -> bool:
        """Whether somebody's contribution to a round that was told ahead is late."""
        if self.record.told is None or self.record.attempt > 1 or now < self._closes_at:
            return False
        gone = self._gone
        return any(not self._is_ready(n) for n in self._exchange.inside if n not in gone)

    def _next_told(self, equal: Sequence[int], now: float) -> list[Instruction]:
        """The next round, of which peers know."""
        assert self._window is not None, "rounds were told ahead, and not of gossip"
        begun = self._window.goes_on(equal)
        out = self._begun(begun, self._window.plans.get(begun.round, {}), now)
        if self._window.level:
            for w in begun.work:
                out += [*self._tell_start(w.replica), *self._tell_plan(w.replica)]
        for number, member, said in self._window.said():
            out += self.reported(member, number, said, now)
        return [*out, *self.follow(now)]

    def timer(self, now: float) -> list[Instruction]:
        self._armed = math.inf
        if self._free:
            return self.follow(now)
        ended = self.run.ended or self._frozen or self.record.over
        under_way = self.record.attempt and not ended and not self._void()
        if under_way and now >= self._attempt_ends:
            late = self._late()
            self._troubled.update(n for n in self._exchange.inside if not self._has_made(n))
            if {m.replica for m in self.record.members} <= set(late):
                if self.record.attempt >= _MOST_ATTEMPTS:
                    text = f"{self.record.attempt} attempts at round {self.record.round}, in each "
                    return self.run.fail("round", f"{text}of which all waited for others", now)
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
        present = self._present()
        if not present:
            self._first = None
            return []
        self._first = now if self._first is None else self._first
        if len(present) < len(self.run.replicas) and now < self._first + GRACE_S:
            return self._arm(self._first + GRACE_S)
        return self._hand_out(present, now)

    def _hand_out(self, numbers: Sequence[int], now: float) -> list[Instruction]:
        """The next round begins for these, who have its version."""
        at, window = self.record.position, self._window
        numbers, self._odd = [n for n in numbers if n not in self._odd] or numbers, set()
        work = local_work(self.run, numbers, self._exchange_s)
        begun = RoundBegun(round=self.record.round, work=work)
        if window is not None:
            window.opens(begun, self._exchange_s, self._present(), now)
        out = self._begun(begun, window.plans.get(begun.round, {}) if window else {}, now)
        out += save_version(self.run, [w.replica for w in work if not w.late], at)
        for w in work:
            out += [*self._tell_start(w.replica), *self._tell_plan(w.replica)]
            if window is not None:
                out += self._tell_ahead(window, w.replica)
            out += self._replica(w.replica).snapshots.begin_round(now)
        return [*out, *self._arm(self._closes_at)]

    def _begun(
        self, begun: RoundBegun, plans: dict[PeerId, RoundPlan], now: float
    ) -> list[Instruction]:
        """`plans`: of its first attempt, if peers are told."""
        self.ready, self.made, self.bad, self._troubled = {}, {}, {}, set()
        self._handed, self._alone_since = {w.replica: w.term for w in begun.work}, None
        self._since, self._plans = now, {**plans}
        if self._gossip is not None:
            self._gossip.sources, self._gossip.kept = {}, set()
        return [self.run.record.publish(RunEvent(round_begun=begun), 0, now)]

    def _tell_start(self, number: int) -> list[Instruction]:
        replica = self._replica(number)
        message = BrokerMessage(round_start=self._start_of(replica, self.record.work[number]))
        return [Tell(m.stream, message) for m in replica.context.holders()]

    def _start_of(self, replica: Replica, work: RoundWork) -> RoundStart:
        apart = self.run.submitted.requirements.sync.apart
        return self.record.start_of(replica.id, work, apart=apart)

    @property
    def _closes_at(self) -> float:
        assert self._since is not None
        asked = self.run.submitted.requirements.sync.deadline
        if asked != "auto":
            return self._since + float(asked)
        times = [w.steps * self._step_s(n) for n, w in self.record.work.items()]
        if not all(times):  # nothing is known of some
            return self._since + self.run.submitted.options.first_step_s
        return self._since + 2 * max(times) + _SPARE_S

    def _close(self, now: float) -> list[Instruction]:
        """Plans the exchange, if it is time."""
        work = [n for n in self.record.work if self._replica(n).context.work and n not in self.bad]
        ready = [n for n in work if self._is_ready(n)]
        paused = {n for n in work if ready and self._replica(n).record.paused}
        still = [n for n in work if n not in {*ready, *paused} and not self._is_short(n)]
        needed = self.run.submitted.requirements.sync.needed(len(self.record.work))
        late, closes_at = self._is_late(ready, still, now)
        if not work:  # else who is short of peers has its own, in snapshots
            why = "; ".join(self.bad.values()) or "all were lost, with what they had of the round"
            return self.run.fail("round", f"no replica has a contribution: {why}", now)
        if not ready or not (late or not still or len(ready) >= needed):
            return [] if late else self._arm(closes_at)
        return self._plan(ready, now)

    def _is_late(
        self, ready: Sequence[int], still: Sequence[int], now: float
    ) -> tuple[bool, float]:
        """Whether nobody waits for the others any more, and until when they do. For a replica that
        lost somebody those that are ready wait, all together, at most for as long as its own work
        took: waiting longer costs more than its contribution is worth."""
        if not ready or not still or not all(map(self._has_lost, still)):
            again = bool(self._plans) and (self.record.told is None or self.record.attempt > 1)
            return now >= self._closes_at or again, self._closes_at
        if self._alone_since is None:
            self._alone_since = now
        took = max(self.record.work[n].steps * self._step_s(n) for n in still)
        until = self._alone_since + took / len(ready)
        if self.run.submitted.requirements.sync.deadline != "auto":
            until = min(until, self._closes_at)
        return now >= until, until

    def _has_lost(self, number: int) -> bool:
        """Whether it has begun another term since it got its work, or waits for somebody."""
        replica = self._replica(number)
        away = not replica.record.running or bool(replica.context.away)
        return away or self._handed.get(number, replica.record.term) != replica.record.term

    def _step_s(self, number: int) -> float:
        return self._replica(number).record.round_step_s

    # ------------------------------------------------------------ the exchange

    def _plan(self, ready: Sequence[int], now: float) -> list[Instruction]:
        record, gone = self.record, self._gone
        ready = [n for n in ready if n not in gone]
        size = self._microbatch_size(ready)
        members = [
            RoundMember(
                replica=n,
                weight=microbatches_of(record.work[n]) * size,
                term=self._replica(n).record.term,
            )
            for n in ready
        ]
        members += [m for m in record.members if m.replica in gone]
        members.sort(key=lambda m: m.replica)
        joiners = [n for n in self._present() if n not in (*ready, *gone) and self._waits(n)]
        kept: dict[int, dict[PeerId, RoundReport]] = {}
        if self._gossip is not None:
            anew = self._troubled if self._plans else None
            if anew is None and self._window is not None and record.told is not None:
                anew = self._window.unsettled(self.bad)
            members = self._gossip.grouped(members, anew=anew, now=now)
            joiners = self._gossip.joining(
                members, [n for n in joiners if n not in self._troubled], self.record.attempt
            )
            kept = {n: self.made[n] for n in self._gossip.kept if n in self.made}
        planned = RoundPlanned(
            round=record.round,
            attempt=record.attempt + 1,
            members=members,
            joiners=joiners,
            exponent=record.exponent,
        )
        self.made, self._since, self._troubled = kept, now, set()
        out: list[Instruction] = [self.run.record.publish(RunEvent(round_planned=planned), 0, now)]
        if self._gossip is None:
            self._plans = self._exchange.plans()
        else:
            self._plans |= self._exchange.plans(self._gossip.sources)
        for number in (*ready, *joiners):
            out += self._tell_plan(number)
        return [*out, *self._arm(self._attempt_ends)]

    def _microbatch_size(self, numbers: Sequence[int]) -> int:
        plan = self._replica(numbers[0]).record.plan
        assert plan is not None
        return plan.microbatch_size

    def _tell_plan(self, number: int) -> list[Instruction]:
        return [
            Tell(m.stream, BrokerMessage(round_plan=self._plans[m.id]))
            for m in self._replica(number).context.holders()
            if m.id in self._plans
        ]

    def _attempt_of(self, number: int) -> int:
        """In which attempt what a replica now does was planned."""
        sources = self._gossip.sources if self._gossip else {}
        return self.record.attempt_of(sources.get(number, number))

    @property
    def _attempt_ends(self) -> float:
        assert self._since is not None
        told = self.record.told is not None and self.record.attempt == 1
        return (self._closes_at if told else self._since) + self._exchange.attempt_s

    def _void(self) -> bool:
        """Whether a member of the attempt is not there any more, as it was; or an earlier start of
        the broker planned it, and who has heard of it nobody knows."""
        window = self._window if self.record.told is not None else None
        if not self._plans and (window is None or window.unsettled(self.bad)):
            return True
        members, gone = self.record.members, self._gone
        return any(self._is_gone(m) for m in members if m.replica not in gone)

    def _late(self) -> list[int]:
        """Whom most wait for; else those that have not made the version."""
        gone = self._gone
        missing = [n for n in self._exchange.inside if not self._has_made(n) and n not in gone]
        if self._blamed:
            most = max(self._blamed.values())
            return [n for n in self._exchange.inside if self._blamed[n] == most]
        return missing

    def _retry(self, without: Sequence[int], why: str, now: float) -> list[Instruction]:
        """Another attempt, without these."""
        names = ", ".join(f"replica {n}" for n in without) or "nobody"
        self._blamed.clear()
        for number in without:
            self.bad[number] = f"replica {number} {why}"
        text = f"round {self.record.round}, attempt {self.record.attempt}: {names} {why}"
        note = self.run.record.publish(RunEvent(note=text), 0, now)
        return [note, *self._close(now)]

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
        replica.lifecycle.deadline.since = now
        if said.HasField("evaluation"):
            if not self._evaluated < said.round <= record.round:
                return []
            self._evaluated = said.round
            step = record.committed // self.run.submitted.spec.microbatches
            told = VersionEvaluated(round=said.round, step=step, evaluation=said.evaluation)
            return [self.run.record.publish(RunEvent(evaluated=told), number, now)]
        window = self._window
        if said.held and window is not None:
            if window.asked and said.held == window.order:
                window.stands[number] = said.round
            return self.follow(now)
        early = said.round > record.round or (self._free and said.HasField("problem"))
        if early and window is not None and window.keeps(number, member, said):
            if said.HasField("problem") and said.round == record.round:
                self._hindrance = clean(said.problem.text, 500)
            return self.follow(now) if self._hindrance else []
        if said.round != record.round or not record.begun:
            return [replica.context.ignored("round", member, f"round {said.round}")]
        if said.attempt == 0:
            return self._contributed(number, member, said, now)
        if number not in self._exchange.inside or said.attempt != self._attempt_of(number):
            return [replica.context.ignored("round", member, f"attempt {said.attempt}")]
        if said.HasField("problem"):
            return self._hindered(number, member, said, now)
        self.made.setdefault(number, {})[member.id] = said
        return self.follow(now) if self._has_made(number) else []

    def _contributed(
        self, number: int, member: Member, said: RoundReport, now: float
    ) -> list[Instruction]:
        if said.HasField("problem"):
            why = clean(said.problem.text, 500)
            self.bad[number] = f"the contribution of {member.label} does not count: {why}"
            note = RunEvent(note=f"round {said.round}: {self.bad[number]}")
            return [self.run.record.publish(note, number, now), *self.follow(now)]
        term, peers = self.ready.get(number, (0, set()))
        if term != said.term:
            peers = set()
        self.ready[number] = said.term, peers | {member.id}
        return self.follow(now) if self._is_ready(number) else []

    def _hindered(
        self, number: int, member: Member, said: RoundReport, now: float
    ) -> list[Instruction]:
        """Somebody cannot make the version."""
        why = clean(said.problem.text, 500)
        if said.problem.code == "overflow":
            self._troubled.add(number)
        if said.problem.code == "overflow" and self.record.exponent < _MOST_EXPONENT:
            self.record.exponent += _RAISED
            return self._retry((), f"an element is too large: {why}", now)
        if said.problem.code == "overflow":
            return self._retry((number,), f"has an element that is too large: {why}", now)
        lacked = set(said.lacks)
        about = [n for n in self._exchange.inside if lacked & set(self._replica(n).record.peers)]
        self._blamed.update(about or [number])
        fields = (("run", self.run.id), ("peer", member.id), ("why", why))
        return [Log("round_hindered", fields, "warning")]

    # ------------------------------------------------------------ the version

    def _has_made(self, number: int) -> bool:
        peers = self._replica(number).record.peers
        return set(self.made.get(number, ())) >= set(peers)

    def _hash_of(self, number: int) -> int | None:
        plan = self._replica(number).record.plan
        return hash_of(plan, self.made[number]) if plan is not None else None

    def _commit(self, now: float) -> list[Instruction]:
        """When all have made it."""
        record = self.record
        present = set(self._present()) if record.joiners else set[int]()
        joiners = [n for n in record.joiners if n in present]
        gone = self._gone
        members = [m.replica for m in record.members if m.replica not in gone]
        if not all(self._has_made(n) for n in (*members, *joiners)):
            return []
        hashes = {n: self._hash_of(n) for n in (*members, *joiners)}
        known = Counter(h for h in hashes.values() if h is not None)
        if not known:
            return self.run.fail("round", "every replica has holders that made other versions", now)
        version = known.most_common(1)[0][0]
        equal = [n for n, h in hashes.items() if h == version]
        if self._gossip is not None and not record.gathers:
            equal = self._gossip.equal(record.members, hashes)
            version = sum(h for n in members if (h := hashes[n]) is not None) % 2**64
        out: list[Instruction] = []
        for number in (n for n in hashes if n not in equal and n not in self._odd):
            self._strikes[number] += 1
            text = f"round {record.round}: replica {number} made another version"
            if self._strikes[number] >= _STRIKES:
                text += f", for the {_STRIKES}. time: it is left out from here on"
            out.append(self.run.record.publish(RunEvent(note=text), number, now))
        joined = [
            RoundMember(
                replica=n,
                term=self._replica(n).record.term,
                source=self._gossip.sources[n] if self._gossip is not None else 0,
            )
            for n in equal
            if n in record.joiners
        ]
        done = done_of(record, self.made, version, joined, now - record.done_at_s)
        self._exchange_s = now - (self._since or now)
        out.append(self.run.record.publish(RunEvent(round_done=done), 0, now))
        if record.over:
            return [*out, *self._finish(now)]
        if record.ahead:
            self._odd |= {n for n in hashes if n not in equal}
            return [*out, *self._next_told([*hashes], now)]
        return [*out, *self._hand_out(equal, now)]

    def _finish(self, now: float) -> list[Instruction]:
        """Every sample is committed: a replica with the version brings the weights; when it has,
        the others are done."""
        replicas = self.run.replicas
        phases = [r.record.phase for r in replicas]
        out: list[Instruction] = []
        if DONE in phases:
            text = f"{self.record.round} rounds are done; another replica has brought the weights"
            for replica in replicas:
                if not replica.record.ended:
                    out += replica.lifecycle.done(text, now)
            return out
        if EXPORTING in phases:
            return []
        have = self.record.holders
        running = (r for r in replicas if r.record.running)
        first = next((r for r in running if have.get(r.record.number) == r.record.term), None)
        if first is None:
            text = "every replica with the last version was lost before it had brought its weights"
            return self.run.fail("round", text, now)
        start = RoundStart(
            run=first.id,
            term=first.record.term,
            round=self.record.round,
            first_step=first.record.committed,
            start=self.record.total / self.run.submitted.spec.microbatches,
            evaluate=self.run.submitted.requirements.eval_every > 0,
        )
        message = BrokerMessage(round_start=start)
        out = save_last(self.run, first.record.number, self.record.position)
        out += [Tell(m.stream, message) for m in first.context.holders()]
        return out + first.lifecycle.export(now)

    # ------------------------------------------------------------ peers that come back

    def again(self, number: int, member: Member) -> list[Instruction]:
        """What a holder may not have heard."""
        replica, out = self._replica(number), list[Instruction]()
        if replica.context.work is not None and replica.record.running:
            start = self._start_of(replica, replica.context.work)
            out.append(Tell(member.stream, BrokerMessage(round_start=start)))
        if (plan := self._plans.get(member.id)) is not None:
            out.append(Tell(member.stream, BrokerMessage(round_plan=plan)))
        if self._window is not None and self._free:
            out += self._tell_ahead(self._window, number)
            if self._window.asked and number in self._window.lacks:
                out += self._tell_hold(number)
        return out
