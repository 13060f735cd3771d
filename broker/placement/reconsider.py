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
  `scheduler/replan.py` decides. So codecs follow the links: they are chosen again for every plan.
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
from ..events import ConsiderPlan, Instruction, Log, PlanConsidered, RunId
from ..links.probing import Probing
from ..membership.member import Member
from ..membership.membership import Membership
from ..recovery.handing import PlannedStop
from ..runs.runs import Run
from ..scheduler.base.interface import PeerOffer
from ..scheduler.planners.replan import Hysteresis, in_parts
from .placing import bad_plan
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
    """What is remembered of a run under one plan."""

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
        self._runs: dict[RunId, _Run] = {}
        self._versions = 0
        self._busy: RunId | None = None

    def look(self, runs: Iterable[Run], now: float) -> list[Instruction]:
        """Asks about the next run that is due."""
        for run in runs:
            if run.plan is None or not run.running:
                if self._busy == run.id:
                    self._busy = None
                if run.ended:
                    self._runs.pop(run.id, None)
                continue
            if self._busy is None and self._due(run, now):
                return self._look(run, now)
        return []

    def _due(self, run: Run, now: float) -> bool:
        if run.wish.wanted or not run.wish.replan:
            return False
        known = self._runs.get(run.id)
        if known is None or known.term != run.term:
            # Moves are rare over the whole run, whatever else changes its plan.
            hysteresis, off = (known.hysteresis, known.off) if known else (Hysteresis(), False)
            promise = self._promise(run, now)
            known = _Run(run.term, promise, hysteresis, run.committed, now, off=off)
            self._runs[run.id] = known
        known.broken_s = 0.0
        if known.off:
            return False
        lately_s = run.ledger.lately_s if run.ledger else None
        if known.promise.broken(lately_s, run.committed):
            assert lately_s is not None
            known.broken_s = lately_s
            known.promise.looked(run.committed)
            return True
        return run.committed - known.looked_step >= EVERY and now - known.looked_at >= EVERY_S

    def _promise(self, run: Run, now: float) -> Promise:
        assert run.plan is not None
        offers = self._offers(run)
        network = self.probing.network(tuple(offers), now)
        return Promise(run.report.predicted.step_s, network, offers)

    def _offers(self, run: Run) -> dict[PeerId, PeerOffer]:
        """The offers of the run's holders, as they are known now."""
        here = self.members.members
        return {p: here[p].offer for p in run.parts if p in here}

    def _look(self, run: Run, now: float) -> list[Instruction]:
        known = self._runs[run.id]
        known.looked_step, known.looked_at = run.committed, now
        facts = self._facts(run, now)
        if known.found and known.facts and alike(known.facts, facts):
            return self._weigh(run, known, known.found, now)
        self._versions += 1
        known.asked, known.found = self._versions, None
        known.facts = replace(facts, version=self._versions)
        self._busy = run.id
        return [known.facts]

    def _facts(self, run: Run, now: float) -> ConsiderPlan:
        assert run.plan is not None
        mine = [self.members.members[p] for p in run.parts if p in self.members.members]
        free = [
            m for m in suited(run, self.members, now) if m.state == "pool" and run.steady(m, now)
        ]
        offered: dict[str, Member] = {m.id: m for m in (*mine, *free)}
        peers = [m.id for m in offered.values()]
        return ConsiderPlan(
            run.id,
            0,
            run.spec,
            run.plan,
            tuple(m.offer_to(run.owner) for m in offered.values()),
            self.probing.network(peers, now),
        )

    def answered(self, run: Run | None, event: PlanConsidered, now: float) -> list[Instruction]:
        """What a look has found."""
        if self._busy == event.run:
            self._busy = None
        known = self._runs.get(event.run)
        if run is None or run.plan is None or known is None or known.asked != event.version:
            return []
        known.asked = None
        if known.term != run.term or not run.running:
            return []  # it was about a plan that is no longer the run's
        told = (event.running_s, event.candidate_s)
        if event.given_up:
            known.off = True
            return run.note(f"no better plan is looked for any more: {event.given_up}", now)
        if event.plan is None or not all(0 < s < math.inf for s in told):
            return []
        if problem := bad_plan(PlanWithReport(event.plan, event.report), event.pairs):
            fields = (("run", run.id), ("why", f"the plan cannot be used: {problem}"))
            return [Log("plan_dropped", fields, "warning")]
        known.found = event
        return self._weigh(run, known, event, now)

    def _weigh(self, run: Run, known: _Run, event: PlanConsidered, now: float) -> list[Instruction]:
        assert run.plan is not None
        assert event.plan is not None
        step, remaining = run.committed, max(0, run.spec.steps - run.committed)
        seconds = (event.running_s, event.candidate_s, event.migration_s)
        move, why = known.hysteresis.observe(step, *seconds, remaining), ""
        late_s, known.broken_s = known.broken_s, 0.0
        if move is None and late_s and known.promise.explains(event.running_s, late_s):
            move = known.hysteresis.at_once(step, *seconds, remaining)
        if late_s:
            offers = self._offers(run)
            network = self.probing.network(tuple(offers), now)
            why = known.promise.why(late_s, run.pairs, network, offers)
        if move is None or run.handing.errand is not None:  # it may be to pause
            late = (("run", run.id), ("step", step), ("why", why))
            return [Log("plan_late", late)] if why else []
        known.hysteresis.moved(step, at_once=not move.lasted)
        had, plan = known.said, event.plan
        known.said = plan
        reason = f"{why}; {move}" if why else str(move)
        fields = (("run", run.id), ("step", step), ("gain", move.gain), ("why", reason))
        log = Log("plan_prepared", fields)
        changes = _changes(run.plan, plan)
        if run.snapshots:
            text = f"{reason}: {changes}"
            planned = PlanWithReport(plan, event.report)
            run.handing.stop_for(PlannedStop(text, planned, event.pairs))
            return [log, *run.note(f"{text}, between two steps", now)]
        if had is not None and (had.stages, had.codecs) == (plan.stages, plan.codecs):
            return []  # said before
        text = f"{reason}; it would {changes}. Moving needs snapshots (recovery.ladder)"
        return [log, *run.note(text, now)]


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
