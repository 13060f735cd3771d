"""Giving the pool to the runs that wait.

Rules.

- Runs get peers in the order of `waiting.py`, which also says why one has to wait.
- Of a run with several replicas, or of which planning says how many, all are planned together
  before it begins (FormReplicas); later on, a replica that waits is planned by itself.
- One plan is made at a time, so that no peer is promised twice. MakePlan carries a version; an
  answer with another version is dropped. An answer whose peers are not all free any more is stale:
  it is dropped too and asked for again.
- When no plan exists for want of peers or memory, the run waits for others than were asked
  (`waiting.py`); for any other reason, or where it shall not wait (`when_short`), it has failed.
- A plan waits until the links of the peers that it could use are measured, but at most `probe_s`
  after the last of them joined or the run could first be planned. A plan that would use pairs
  nobody measured has them measured, once, and is made again; so are links between replicas of
  which a run of saps will choose, as many as it takes (`broker/policies/pairs/measuring.py`).
- When planning a run had to be ended (it crashed its process, or passed a limit), its owner's
  runs come behind those of all others for LAST_S, whatever their priority.
- After a restart nothing is planned for one lease: peers that attach again shall be planned with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ...dag.plan.plan import PeerId
from ...dag.plan.report import PlanWithReport
from ...planner.answers.bad_plan import bad_plan
from ...planner.requests.asked import LAST_S, PLANNER
from ...proto.broker_pb2 import WAITING, Formation
from ..events import (
    FormReplicas,
    Instruction,
    Log,
    MakePlan,
    PlanFailed,
    PlanReady,
    Publish,
    ReplicaId,
    ReplicasFormed,
    RunId,
    SetTimer,
)
from ..links.probing import Probing
from ..membership.member import Member
from ..membership.membership import Membership
from ..policies.pairs.measuring import tournament
from ..policies.segments import Replicated, meeting
from ..records.submitted import SubmittedRun
from ..runs.replica import Replica
from ..runs.run import Run
from .bad_formation import bad_formation
from .datasets import lacks_data
from .waiting import Offered, PlanShortage, WaitReason, by_hand, consider, in_order, shared, suited

__all__ = ["PoolScheduler"]


class PoolScheduler:
    """planning: the run whose MakePlan is not answered yet. `draining`: nothing new starts."""

    def __init__(self, members: Membership, probing: Probing) -> None:
        self.members = members
        self.probing = probing
        self.planning: ReplicaId | None = None
        self.draining = False
        self._versions = 0
        self._changes = 0  # Grows with everything besides the members that `place` depends on.
        self._placed = (-1, -1, -1)  # What `place` saw last.
        self._patience: dict[ReplicaId, float] = {}  # Until when a run waits for probes.
        self._refined: dict[ReplicaId, None] = {}  # Runs whose plan asked for exact links already.
        self._last: dict[str, float] = {}  # Owners whose runs come last, until when.
        self._lacks: dict[ReplicaId, PlanShortage] = {}  # Runs that no plan was found for, and why.
        self._wake_at = math.inf  # When the first such wait is over.
        self._begins_at = -math.inf  # When the first plan may be made.

    def started(self, starts: int, now: float) -> None:
        """The broker was started for so manieth time."""
        if starts > 1:
            self._begins_at = now + self.members.options.lease_s

    def changed(self) -> None:
        """A run came, or the broker began to drain."""
        self._changes += 1

    def closed(self, replicas: Iterable[Replica]) -> None:
        """Forget replicas that ended, and may have waited for peers or for their plans."""
        self._changes += 1
        for replica in replicas:
            if self.planning == replica.id:
                self.planning = None
            self._patience.pop(replica.id, None)
            self._refined.pop(replica.id, None)
            self._lacks.pop(replica.id, None)

    def place(self, everybody: Callable[[], list[Replica]], now: float) -> list[Instruction]:
        """Asks for the next plan, and shows every waiting run why it waits."""
        seen = (self.members.version, self._changes, self.probing.version)
        if seen == self._placed and now < self._wake_at:
            return []
        self._wake_at = math.inf
        self._placed, replicas = seen, everybody()
        out: list[Instruction] = []
        ahead: Replica | None = None  # A run that nobody behind it may overtake.
        last = {owner for owner, until in self._last.items() if now < until}
        for replica in in_order((r for r in replicas if r.record.phase == WAITING), last):
            life = replica.lifecycle
            if replica.record.paused:
                continue
            if self.draining:
                out += life.waits("broker", "the broker is leaving and starts nothing new", now)
            elif replica.id == self.planning:
                ahead = ahead or replica
            elif replica.context.forms and replica.record.number:
                out += life.waits("queue", "waits until its run's replicas are formed", now)
            elif self._comes_free(replica):
                why = replica.record.reason
                text = f"{why.text.partition(' (waits')[0]} (waits for its peers to be free)"
                out += life.waits(why.code or "lost", text, now)
                ahead = replica
            elif now < self._begins_at:
                text = "waits for peers to attach again: the broker was started anew"
                out += [*life.waits("restart", text, now), SetTimer("plan", self._begins_at)]
                self._wake_at = self._begins_at
            elif ahead is not None:
                text = f"waits behind run {ahead.id} (priority {ahead.run.requirements.priority})"
                out += life.waits("queue", text, now)
            elif isinstance(verdict := self._consider(replica, replicas, now), WaitReason):
                out += life.waits(verdict.code, verdict.reason, now)
                out += [*self._wakes(replica, now), *self._reclaimed(replica, replicas, now)]
                ahead = replica if verdict.blocks else None
            elif self.planning is not None:
                out += life.waits("queue", f"waits for the plan of run {self.planning}", now)
                ahead = replica
            elif (until := self._measured_at(replica, verdict.members, now)) > now:
                text = f"waits for the links of {len(verdict.members)} peers to be measured"
                out += [*life.waits("probing", text, now), SetTimer("plan", until)]
                self._wake_at, ahead = until, replica
            else:
                out += self._ask(replica, _over(replica, replicas, verdict), now)
                ahead = replica
        return out

    def hopeful(self, replicas: Sequence[Replica], now: float) -> list[SubmittedRun]:
        """Runs that wait, and can be planned once peers that only keep copies are in the pool.
        Others have no use for these yet, however long they wait."""
        lent = {m.id for m in self.members.members.values() if m.state == "draining"}
        lent |= {p for r in replicas for p in r.only_keep}
        found: list[SubmittedRun] = []
        for replica in in_order(r for r in replicas if r.record.phase == WAITING):
            if replica.record.paused or self.draining:
                continue
            verdict = consider(replica, self.members, now, lent)
            if isinstance(verdict, Offered) and not self._nothing_new(replica, verdict.members):
                found.append(replica.run)
            elif isinstance(verdict, WaitReason) and verdict.blocks:
                break
        return found

    def _wakes(self, replica: Replica, now: float) -> list[Instruction]:
        """Looks again when a peer that is left out for a fault may be asked."""
        until = replica.context.suspects.first_back(now)
        if until is None:
            return []
        self._wake_at = min(self._wake_at, until)
        return [SetTimer("plan", self._wake_at)]

    def _reclaimed(
        self, replica: Replica, replicas: Sequence[Replica], now: float
    ) -> list[Instruction]:
        """Peers that only keep snapshots for others come back to the pool, where it can begin
        then."""
        if not any(run is replica.run for run in self.hopeful(replicas, now)):
            return []
        return [i for r in replicas if r.record.active for i in r.give_up_warm(now)]

    def _nothing_new(self, replica: Replica, members: Sequence[Member]) -> bool:
        """Whether no plan was found with these, of all that it would be planned over."""
        lack = self._lacks.get(replica.id)
        return lack is not None and not lack.open_to(members)

    def _comes_free(self, replica: Replica) -> bool:
        """Whether peers that had a part in it are about to be back in the pool."""
        everybody = self.members.members.values()
        return any(m.state == "draining" and m.run == replica.id for m in everybody)

    def _consider(
        self, replica: Replica, replicas: Sequence[Replica], now: float
    ) -> Offered | WaitReason:
        verdict = consider(replica, self.members, now)
        if isinstance(verdict, Offered):
            verdict = lacks_data(replica, self.members, now) or verdict
        if isinstance(verdict, WaitReason):
            return verdict
        if self._nothing_new(replica, _over(replica, replicas, verdict)):
            return self._lacks[replica.id].waits(suited(replica, self.members, now))
        return verdict

    def _measured_at(self, replica: Replica, members: Sequence[Member], now: float) -> float:
        """Until when the run's plan waits for probes, at most; `now`: no longer."""
        peers = [m.id for m in members]
        alone = len(peers) < 2  # whose plan has no link
        if alone or not self.probing.on or replica.run.requirements.wanted:
            return now
        if self.probing.settled(peers):
            return now
        longest = self.probing.options.probe_s
        until = self._patience.setdefault(replica.id, now + longest)
        if replica.id not in self._refined:
            until = min(until, self.probing.last_join(peers) + longest)
        return max(now, until)

    def _ask(self, replica: Replica, members: Sequence[Member], now: float) -> list[Instruction]:
        self._versions += 1
        life, run = replica.lifecycle, replica.run
        self.planning, life.asked = replica.id, self._versions
        self._lacks.pop(replica.id, None)
        life.offered = {m.id: (m.boot, m.counter) for m in members}
        text = f"is planned over {len(members)} peer{'' if len(members) == 1 else 's'}"
        out = life.waits("planning", text, now)
        offers = tuple(m.offer_to(run.owner) for m in members)
        network = self.probing.network([m.id for m in members], now)
        if replica.context.forms:
            return [*out, FormReplicas(replica.id, self._versions, run.spec, offers, network)]
        named = bool(run.requirements.wanted) and isinstance(
            by_hand(replica, self.members), Offered
        )
        before = replica.record.plan if replica.record.term and not named else None
        return [
            *out,
            MakePlan(replica.id, self._versions, replica.record.spec, offers, network, before),
        ]

    def answered(
        self,
        replica: Replica | None,
        event: PlanReady | ReplicasFormed | PlanFailed,
        decide: Callable[[RunId, Formation, float], tuple[Run, Publish]],
        now: float,
    ) -> list[Instruction]:
        """What a planner found for a run. `decide`: has it remember which replicas there are."""
        awaited = replica is not None and replica.id == self.planning
        if replica is None or not awaited or replica.lifecycle.asked != event.version:
            return [_dropped(event, "nobody waits for it")]
        self.planning = replica.lifecycle.asked = None
        self._changes += 1
        match event:
            case PlanReady():
                return self._planned(replica, event, now)
            case ReplicasFormed():
                return self._formed(replica, event, decide, now)
            case PlanFailed():
                return self._unplanned(replica, event, now)

    def _planned(self, replica: Replica, event: PlanReady, now: float) -> list[Instruction]:
        instead = self._unusable(replica, event, now)
        if instead is None:
            instead = self._measured_first(replica, event, _pairs(event), 1, now)
        return _begin(replica, event, now) if instead is None else instead

    def _formed(
        self,
        first: Replica,
        event: ReplicasFormed,
        decide: Callable[[RunId, Formation, float], tuple[Run, Publish]],
        now: float,
    ) -> list[Instruction]:
        """All replicas of a run begin at once."""
        for made in event.plans:
            if (instead := self._unusable(first, made, now)) is not None:
                return instead
        if problem := bad_formation(first, event):
            return first.lifecycle.fail("plan", f"the formation cannot be used: {problem}", now)
        pairs, turns = _pairs_formed(first, event)
        if (instead := self._measured_first(first, event, pairs, turns, now)) is not None:
            return instead
        run, published = decide(first.record.run.id, event.formation, now)
        why = "; ".join(event.formation.reasons[:1])
        fields = (("run", run.id), ("kind", event.formation.kind), ("why", why))
        out: list[Instruction] = [Log("run_formed", fields), published]
        everybody = frozenset(PeerId(p) for made in event.plans for p in made.plan.peers)
        for replica, made in zip(run.replicas, event.plans, strict=False):
            replica.context.promised = everybody
            out += _begin(replica, made, now)
            replica.context.promised = frozenset()
        return out

    def _unusable(self, replica: Replica, event: PlanReady, now: float) -> list[Instruction] | None:
        """Return the instructions in place of beginning with a plan; None: it can be begun with."""
        life = replica.lifecycle
        if self.draining:
            return [_dropped(event, "the broker is leaving")]
        planned = PlanWithReport(event.plan, event.report)
        plan = event.plan
        gone = [p for p in plan.peers if not self._still_free(replica, p)]
        foreign = [p for p in gone if p not in life.offered]
        pairs = _pairs(event)
        problem = f"the plan names peers that were not offered: {foreign}" if foreign else ""
        problem = problem or bad_plan(planned, pairs)
        if not problem and not plan.outline.stages:  # no peer could be told its part
            problem = "it does not say what crosses its stages"
        if problem:
            return life.fail("plan", f"the plan cannot be used: {problem}", now)
        if gone:
            # `place` runs behind every event and asks again over the peers that are there now.
            return [_dropped(event, f"{', '.join(gone)} left the pool meanwhile")]
        here, reach = self.members.members, self.members.reach
        mute = [f"{a} and {b}" for a, b in pairs if not reach(here[a], here[b])]
        if mute:
            text = (
                f"no side of {mute[0]} can be dialled: neither announced an address, and this "
                "broker relays nothing"
            )
            return life.fail("address", text, now)
        return None

    def _measured_first(
        self,
        replica: Replica,
        event: PlanReady | ReplicasFormed,
        pairs: Sequence[tuple[PeerId, PeerId]],
        turns: int,
        now: float,
    ) -> list[Instruction] | None:
        """Once in a run the links that it would use are measured, and it is planned again; None: it
        can be begun with. `turns`: pairs that a peer is in, which take one another's time."""
        unknown = () if replica.run.requirements.wanted else self.probing.unmeasured(pairs, now)
        if not unknown or replica.id in self._refined:
            return None
        self._refined[replica.id] = None
        self._patience[replica.id] = now + turns * self.probing.options.probe_s
        self.probing.wanted(unknown, now, turns)
        return [_dropped(event, f"{len(unknown)} of its links are measured first")]

    def _still_free(self, replica: Replica, peer: PeerId) -> bool:
        member = self.members.members.get(peer)
        if member is None or member.state != "pool":
            return False
        return replica.lifecycle.offered.get(peer) == (member.boot, member.counter)

    def _unplanned(self, replica: Replica, event: PlanFailed, now: float) -> list[Instruction]:
        life = replica.lifecycle
        heals = event.code in ("peers", "memory")
        others = any(m.id not in life.offered for m in suited(replica, self.members, now))
        gives_up = replica.run.requirements.recovery.when_short == "fail" and not others
        if event.code == PLANNER:
            self._last[replica.run.owner] = now + LAST_S
        if not heals or gives_up or (replica.run.requirements.wanted and not replica.record.term):
            return life.fail(event.code, event.reason, now)
        self._lacks[replica.id] = PlanShortage(
            life.offered, event.code, event.reason, event.short_bytes
        )
        self._patience.pop(replica.id, None)  # the next plan is over other peers, with new links
        return []  # `place` runs behind every event, and says why it waits


def _pairs(event: PlanReady) -> tuple[tuple[PeerId, PeerId], ...]:
    peers = event.plan.peers
    return event.pairs or tuple((a, b) for i, a in enumerate(peers) for b in peers[i + 1 :])


def _pairs_formed(first: Replica, event: ReplicasFormed) -> tuple[list[tuple[PeerId, PeerId]], int]:
    """Return the pairs of all replicas, then, where saps chooses who meets, those of replicas that
    might; and in how many turns they are measured."""
    pairs = [pair for made in event.plans for pair in _pairs(made)]
    wish = first.run.requirements
    if (method := wish.sync.of_rounds) is None or method.pairs != "saps":
        return pairs, 1
    replicas = [Replicated(made.plan) for made in event.plans]
    turns = tournament(len(replicas), wish.seed)
    met = ((replicas[a], replicas[b]) for turn in turns for a, b in turn)
    return [*pairs, *(pair for a, b in met for pair in meeting(a, b))], 1 + len(turns)


def _begin(replica: Replica, event: PlanReady, now: float) -> list[Instruction]:
    fields = (
        ("run", replica.id),
        ("stages", len(event.plan.stages)),
        ("why", "; ".join(event.report.reasons)),
    )
    planned = PlanWithReport(event.plan, event.report)
    return [
        Log("run_planned", fields),
        *replica.lifecycle.planned(planned, _pairs(event), event.local, now),
    ]


def _over(replica: Replica, replicas: Sequence[Replica], verdict: Offered) -> Sequence[Member]:
    """Peers that it is planned over: all, where its run's replicas are formed together; where each
    has data of its own, all but hosts of others; else its share of them."""
    if replica.context.forms:
        return verdict.members
    if every := replica.run.spec.client_data:
        owner, own = replica.run.owner, replica.record.data.hash
        others = {(owner, ref.hash) for ref in every if ref.hash != own}
        return [
            m
            for m in verdict.members
            if (owner, own) in m.manifests or others.isdisjoint(m.manifests)
        ]
    return shared(replica, replicas, verdict.members)


def _dropped(event: PlanReady | ReplicasFormed | PlanFailed, why: str) -> Log:
    fields = (("message", "plan"), ("run", event.replica), ("version", event.version), ("why", why))
    return Log("message_ignored", fields)
