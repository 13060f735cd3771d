"""Looking for a better plan of a run that is running.

Rules.

- A run is reconsidered when it has committed EVERY steps since the last time, and at least EVERY_S
  seconds have passed. One at a time, over all runs; runs with a hand-written plan, or with
  `replan = false`, never.
- A run whose newest steps each took BROKEN times what its plan promised (`promise.py`) is looked at
  at once, and moved at once where what is known now explains them and another plan is better by as
  much as ever. So links that carry less than was believed cost a few steps, not a run.
- A plan is searched for only when something has changed since the last search: a peer that came or
  went, or a speed or a link by over CHANGED. Otherwise what was found then still stands.
- The answer compares both plans, each with its codecs, at the speeds and links of now;
  `planner/schedulers/replan.py` decides. Codecs follow the links: they are chosen for every plan.
- The run then stops between two steps, with a set of snapshots from which everybody loads what the
  other plan gives them: no step is done again. A run without snapshots only says that there is a
  better plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

import numpy as np

from ...dag.cost.network import Network
from ...dag.cost.speed import Speeds
from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import PlanWithReport
from ...planner.answers.bad_plan import bad_plan
from ...planner.base.interface import PeerOffer
from ...planner.schedulers.replan import Hysteresis, in_parts
from ..events import ConsiderPlan, Instruction, Log, PlanConsidered, ReplicaId
from ..links.probing import Probing
from ..membership.member import Member
from ..membership.membership import Membership
from ..runs.handover import PlannedStop
from ..runs.replica import Replica
from .promise import Promise
from .waiting import suited

__all__ = ["CHANGED", "EVERY", "EVERY_S", "Replanner", "alike"]

EVERY = 10
"""Committed steps between two looks: five of them fall into the time that a gain has to last."""
EVERY_S = 5.0
CHANGED = 0.05
"""A relative change of a speed, a latency or a bandwidth that asks for a new search. A plan moves
for a gain of a tenth; numbers that differ by less than half of that do not find one."""


@dataclass
class _Run:
    """Memory of a run under one plan."""

    term: int
    promise: Promise
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    looked_step: int = 0
    looked_at: float = -math.inf
    asked: int | None = None
    facts: ConsiderPlan | None = None
    """Of the last search."""
    found: PlanConsidered | None = None
    """What it found; None: it has not been answered, or found nothing to compare."""
    off: bool = False
    """Whether looking had to be ended, and would be again."""
    said: Plan | None = None
    """The better plan that people were told of."""
    broken_s: float = 0.0
    """What steps took when the last look was for their being slow; 0: it was another look."""


class Replanner:
    """Searches for better plans of running runs, one run at a time, and has runs move to them."""

    def __init__(self, members: Membership, probing: Probing) -> None:
        self.members, self.probing = members, probing
        self._runs: dict[ReplicaId, _Run] = {}
        self._versions = 0
        self._busy: ReplicaId | None = None

    def look(self, replicas: Iterable[Replica], now: float) -> list[Instruction]:
        """Asks about the next run that is due."""
        for replica in replicas:
            if replica.record.plan is None or not replica.record.running:
                if self._busy == replica.id:
                    self._busy = None
                if replica.record.ended:
                    self._runs.pop(replica.id, None)
                continue
            if self._busy is None and self._due(replica, now):
                return self._look(replica, now)
        return []

    def _due(self, replica: Replica, now: float) -> bool:
        record = replica.record
        if replica.run.requirements.wanted or not replica.run.requirements.replan:
            return False
        known = self._runs.get(replica.id)
        if known is None or known.term != record.term:
            # Moves are rare over the whole run, whatever else changes its plan.
            hysteresis, off = (known.hysteresis, known.off) if known else (Hysteresis(), False)
            promise = self._promise(replica, now)
            known = _Run(record.term, promise, hysteresis, record.committed, now, off=off)
            self._runs[replica.id] = known
        known.broken_s = 0.0
        if known.off:
            return False
        lately_s = record.ledger.lately_s if record.ledger else None
        if known.promise.broken(lately_s, record.committed):
            assert lately_s is not None
            known.broken_s = lately_s
            known.promise.looked(record.committed)
            return True
        return record.committed - known.looked_step >= EVERY and now - known.looked_at >= EVERY_S

    def _promise(self, replica: Replica, now: float) -> Promise:
        record = replica.record
        assert record.plan is not None
        offers = self._offers(replica)
        network = self.probing.network(tuple(offers), now)
        predicted = record.report.predicted
        return Promise(max(predicted.step_s, predicted.full_step_s), network, offers)

    def _offers(self, replica: Replica) -> dict[PeerId, PeerOffer]:
        """The offers of the run's holders, as they are known now."""
        here = self.members.members
        return {p: here[p].offer for p in replica.context.parts if p in here}

    def _look(self, replica: Replica, now: float) -> list[Instruction]:
        record = replica.record
        known = self._runs[replica.id]
        known.looked_step, known.looked_at = record.committed, now
        facts = self._facts(replica, now)
        if known.found and known.facts and alike(known.facts, facts):
            return self._weigh(replica, known, known.found, now)
        self._versions += 1
        known.asked, known.found = self._versions, None
        known.facts = replace(facts, version=self._versions)
        self._busy = replica.id
        return [known.facts]

    def _facts(self, replica: Replica, now: float) -> ConsiderPlan:
        record = replica.record
        assert record.plan is not None
        mine = [self.members.members[p] for p in replica.context.parts if p in self.members.members]
        free = [
            m
            for m in suited(replica, self.members, now)
            if m.state == "pool" and replica.steady(m, now)
        ]
        offered: dict[str, Member] = {m.id: m for m in (*mine, *free)}
        peers = [m.id for m in offered.values()]
        return ConsiderPlan(
            replica.id,
            0,
            replica.record.spec,
            record.plan,
            tuple(m.offer_to(replica.run.owner) for m in offered.values()),
            self.probing.network(peers, now),
        )

    def answered(
        self, replica: Replica | None, event: PlanConsidered, now: float
    ) -> list[Instruction]:
        """What a look has found."""
        if self._busy == event.replica:
            self._busy = None
        known = self._runs.get(event.replica)
        if replica is None or known is None or known.asked != event.version:
            return []
        record = replica.record
        if record.plan is None:
            return []
        known.asked = None
        if known.term != record.term or not record.running:
            return []  # it was about a plan that is no longer the run's
        told = (event.running_s, event.candidate_s)
        if event.given_up:
            known.off = True
            return replica.context.note(
                f"no better plan is looked for any more: {event.given_up}", now
            )
        if event.plan is None or not all(0 < s < math.inf for s in told):
            return []
        if problem := bad_plan(PlanWithReport(event.plan, event.report), event.pairs):
            fields = (("run", replica.id), ("why", f"the plan cannot be used: {problem}"))
            return [Log("plan_dropped", fields, "warning")]
        known.found = event
        return self._weigh(replica, known, event, now)

    def _weigh(
        self, replica: Replica, known: _Run, event: PlanConsidered, now: float
    ) -> list[Instruction]:
        record = replica.record
        assert record.plan is not None
        assert event.plan is not None
        step, remaining = record.committed, max(0, record.steps - record.committed)
        seconds = (event.running_s, event.candidate_s, event.migration_s)
        move, why = known.hysteresis.observe(step, *seconds, remaining), ""
        late_s, known.broken_s = known.broken_s, 0.0
        if move is None and late_s and known.promise.explains(event.running_s, late_s):
            move = known.hysteresis.at_once(step, *seconds, remaining)
        if late_s:
            offers = self._offers(replica)
            network = self.probing.network(tuple(offers), now)
            why = known.promise.why(late_s, replica.context.term.pairs, network, offers)
        if move is None or replica.handover.errand is not None:  # it may be to pause
            late = (("run", replica.id), ("step", step), ("why", why))
            return [Log("plan_late", late)] if why else []
        known.hysteresis.moved(step, at_once=not move.lasted)
        had, plan = known.said, event.plan
        known.said = plan
        reason = f"{why}; {move}" if why else str(move)
        fields = (("run", replica.id), ("step", step), ("gain", move.gain), ("why", reason))
        log = Log("plan_prepared", fields)
        changes = _changes(record.plan, plan)
        if replica.run.takes_snapshots:
            text = f"{reason}: {changes}"
            planned = PlanWithReport(plan, event.report)
            replica.handover.stop_for(PlannedStop(text, planned, event.pairs))
            return [log, *replica.context.note(f"{text}, between two steps", now)]
        if had is not None and (had.stages, had.codecs) == (plan.stages, plan.codecs):
            return []  # said before
        text = f"{reason}; it would {changes}. Moving needs snapshots (recovery.ladder)"
        return [log, *replica.context.note(text, now)]


def alike(a: ConsiderPlan, b: ConsiderPlan) -> bool:
    """Whether a search would find the same, as far as CHANGED tells things apart."""
    if a.plan is not b.plan or len(a.peers) != len(b.peers):
        return False
    return all(map(_same_peer, a.peers, b.peers)) and _same_links(a.network, b.network)


def _same_peer(a: PeerOffer, b: PeerOffer) -> bool:
    if _without_speeds(a) != _without_speeds(b):
        return False
    return all(
        math.isclose(getattr(a.pace, f.name), getattr(b.pace, f.name), rel_tol=CHANGED)
        for f in fields(Speeds)
        if f.name != "error"
    )


def _without_speeds(offer: PeerOffer) -> PeerOffer:
    return replace(offer, flops_per_s=0.0, speeds=None, learned=1.0)


def _same_links(a: Network | None, b: Network | None) -> bool:
    if a is None or b is None:
        return a is b
    numbers = ("latency_s", "bandwidth", "up", "down")
    return a.peers == b.peers and all(
        np.allclose(getattr(a, name), getattr(b, name), rtol=CHANGED, atol=0.0) for name in numbers
    )


def _changes(old: Plan, new: Plan) -> str:
    """What moving from one plan to the other changes, for people."""
    parts = in_parts(old, new)
    found = []
    if parts:
        found.append("move " + ", then ".join(" and ".join(part) for part in parts))
    links = {(c.source, c.destination) for c in set(old.codecs) ^ set(new.codecs)}
    if links:
        found.append(f"change the codecs of {len(links)} link{'s' if len(links) > 1 else ''}")
    return " and ".join(found) or "send microbatches on other routes"
