"""Giving the pool to the runs that wait.

Rules.

- Runs get peers in the order of `waiting.py`, which also says why one has to wait.
- One plan is made at a time, so that no peer is promised twice. MakePlan carries a version; an
  answer with another version is dropped. An answer whose peers are not all free any more is stale:
  it is dropped too and asked for again.
- When no plan exists for want of peers or memory, the run waits for others than were asked
  (`waiting.py`); for any other reason, or where it shall not wait (`when_short`), it has failed.
- A plan waits until the links of the peers that it could use are measured, but at most `probe_s`
  after the last of them joined or the run could first be planned. A plan that would use pairs
  nobody measured has them measured, once, and is made again.
- When planning a run had to be ended (it crashed its process, or passed a limit), its owner's
  runs come behind those of all others for LAST_S, whatever their priority.
- Dial generations only grow, over all runs, probes and starts of the broker.
- After a restart nothing is planned for one lease: peers that attach again shall be planned with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields

from ...dag.plan.plan import PeerId, Plan, PlanError
from ...dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from ..events import PLANNER, Instruction, Log, MakePlan, PlanFailed, PlanReady, RunId, SetTimer
from ..links.probing import Probing
from ..membership.member import Member, dial
from ..membership.membership import Membership
from ..runs.runs import Run
from .datasets import lacks_data
from .waiting import Offered, PlanShortage, WaitReason, by_hand, consider, in_order, suited

__all__ = ["PoolScheduler", "bad_plan"]

LAST_S = 3600.0
"""How long others' runs come first when planning one of an owner's had to be ended: with all that
planning may take, each of theirs costs everybody minutes."""


class PoolScheduler:
    """planning: the run whose MakePlan is not answered yet. `draining`: nothing new starts."""

    def __init__(self, members: Membership, probing: Probing) -> None:
        self.members = members
        self.probing = probing
        self.planning: RunId | None = None
        self.draining = False
        self._versions = 0
        self._generations = 0
        self._changes = 0  # Grows with everything besides the members that `place` depends on.
        self._placed = (-1, -1, -1)  # What `place` saw last.
        self._patience: dict[RunId, float] = {}  # Until when a run waits for probes.
        self._refined: dict[RunId, None] = {}  # Runs whose plan asked for exact links already.
        self._last: dict[str, float] = {}  # Owners whose runs come last, until when.
        self._lacks: dict[RunId, PlanShortage] = {}  # Runs that no plan was found for, and why.
        self._wake_at = math.inf  # When the first such wait is over.
        self._begins_at = -math.inf  # When the first plan may be made.

    def started(self, starts: int, now: float) -> None:
        """The broker was started for so manieth time."""
        self._generations = (starts - 1) << 32
        if starts > 1:
            self._begins_at = now + self.members.options.lease_s

    def changed(self) -> None:
        """A run came, or the broker began to drain."""
        self._changes += 1

    def closed(self, run: Run) -> None:
        """A run ended that may have waited for peers or for its plan."""
        self._changes += 1
        if self.planning == run.id:
            self.planning = None
        self._patience.pop(run.id, None)
        self._refined.pop(run.id, None)
        self._lacks.pop(run.id, None)

    def place(self, runs: Iterable[Run], now: float) -> list[Instruction]:
        """Asks for the next plan, and shows every waiting run why it waits."""
        seen = (self.members.version, self._changes, self.probing.version)
        if seen == self._placed and now < self._wake_at:
            return []
        self._wake_at = math.inf
        self._placed = seen
        runs = list(runs)
        out: list[Instruction] = []
        ahead: Run | None = None  # A run that nobody behind it may overtake.
        last = {owner for owner, until in self._last.items() if now < until}
        for run in in_order((r for r in runs if not r.ended and not r.active), last):
            if run.paused:
                continue
            if self.draining:
                out += run.waits("broker", "the broker is leaving and starts nothing new", now)
            elif run.id == self.planning:
                ahead = ahead or run
            elif self._comes_free(run):
                text = f"{run.reason.text.partition(' (waits')[0]} (waits for its peers to be free)"
                out += run.waits(run.reason.code or "lost", text, now)
                ahead = run
            elif now < self._begins_at:
                text = "waits for peers to attach again: the broker was started anew"
                out += [*run.waits("restart", text, now), SetTimer("plan", self._begins_at)]
                self._wake_at = self._begins_at
            elif ahead is not None:
                text = f"waits behind run {ahead.id} (priority {ahead.wish.priority})"
                out += run.waits("queue", text, now)
            elif isinstance(verdict := self._consider(run, now), WaitReason):
                out += run.waits(verdict.code, verdict.reason, now)
                out += [*self._wakes(run, now), *self._reclaimed(runs, now)]
                ahead = run if verdict.blocks else None
            elif (lack := self._lacks.get(run.id)) and not lack.open_to(verdict.members):
                waits = lack.waits(suited(run, self.members, now))
                out += run.waits(waits.code, waits.reason, now)
                out += [*self._wakes(run, now), *self._reclaimed(runs, now)]
                ahead = run if waits.blocks else None
            elif self.planning is not None:
                out += run.waits("queue", f"waits for the plan of run {self.planning}", now)
                ahead = run
            elif (until := self._measured_at(run, verdict.members, now)) > now:
                text = f"waits for the links of {len(verdict.members)} peers to be measured"
                out += [*run.waits("probing", text, now), SetTimer("plan", until)]
                self._wake_at, ahead = until, run
            else:
                out += self._ask(run, verdict.members, now)
                ahead = run
        return out

    def _wakes(self, run: Run, now: float) -> list[Instruction]:
        """Looks again when a peer that is left out for a fault may be asked."""
        until = run.blamed.first_back(now)
        if until is None:
            return []
        self._wake_at = min(self._wake_at, until)
        return [SetTimer("plan", self._wake_at)]

    def _reclaimed(self, runs: Iterable[Run], now: float) -> list[Instruction]:
        """Peers that only keep snapshots for other runs come back to the pool."""
        return [i for run in runs if run.active for i in run.give_up_warm(self.members, now)]

    def _comes_free(self, run: Run) -> bool:
        """Whether peers that had a part in it are about to be back in the pool."""
        everybody = self.members.members.values()
        return any(m.state == "draining" and m.run == run.id for m in everybody)

    def _consider(self, run: Run, now: float) -> Offered | WaitReason:
        verdict = consider(run, self.members, now)
        if isinstance(verdict, WaitReason):
            return verdict
        return lacks_data(run, self.members, now) or verdict

    def _measured_at(self, run: Run, members: Sequence[Member], now: float) -> float:
        """Until when the run's plan waits for probes, at most; `now`: no longer."""
        peers = [m.id for m in members]
        if not self.probing.on or run.wish.wanted or self.probing.settled(peers):
            return now
        longest = self.probing.options.probe_s
        until = self._patience.setdefault(run.id, now + longest)
        if run.id not in self._refined:
            until = min(until, self.probing.last_join(peers) + longest)
        return max(now, until)

    def next_generation(self) -> int:
        """A new generation number, for a dial outside of any run."""
        self._generations += 1
        return self._generations

    def _ask(self, run: Run, members: Sequence[Member], now: float) -> list[Instruction]:
        self._versions += 1
        self.planning, run.asked = run.id, self._versions
        self._lacks.pop(run.id, None)
        run.offered = {m.id: (m.boot, m.counter) for m in members}
        text = f"is planned over {len(members)} peer{'' if len(members) == 1 else 's'}"
        out = run.waits("planning", text, now)
        offers = tuple(m.offer_to(run.owner) for m in members)
        network = self.probing.network([m.id for m in members], now)
        named = bool(run.wish.wanted) and isinstance(by_hand(run, self.members), Offered)
        before = run.plan if run.term and not named else None
        return [*out, MakePlan(run.id, self._versions, run.spec, offers, network, before)]

    def _answered(self, run: Run | None, event: PlanReady | PlanFailed) -> Run | None:
        """The run that this answers, no longer asked for; None for an answer nobody waits for."""
        if run is None or run.id != self.planning or run.asked != event.version:
            return None
        self.planning, run.asked = None, None
        self._changes += 1
        return run

    def planned(self, found: Run | None, event: PlanReady, now: float) -> list[Instruction]:
        run = self._answered(found, event)
        if run is None:
            return [_dropped(event, "nobody waits for it")]
        if self.draining:
            return [_dropped(event, "the broker is leaving")]
        plan = event.plan
        gone = [p for p in plan.peers if not self._still_free(run, p)]
        foreign = [p for p in gone if p not in run.offered]
        pairs = event.pairs or tuple(
            (a, b) for i, a in enumerate(plan.peers) for b in plan.peers[i + 1 :]
        )
        problem = f"the plan names peers that were not offered: {foreign}" if foreign else ""
        problem = problem or bad_plan(plan, pairs)
        if problem:
            return run.fail("plan", f"the plan cannot be used: {problem}", self.members, now)
        if gone:
            # `place` runs behind every event and asks again over the peers that are there now.
            return [_dropped(event, f"{', '.join(gone)} left the pool meanwhile")]
        members, relays = self.members.members, self.probing.options.relays
        mute = [f"{a} and {b}" for a, b in pairs if dial(members[a], members[b], relays) is None]
        if mute:
            text = (
                f"no side of {mute[0]} can be dialled: neither announced an address, and this "
                "broker relays nothing"
            )
            return run.fail("address", text, self.members, now)
        unknown = () if run.wish.wanted else self.probing.unmeasured(pairs, now)
        if unknown and run.id not in self._refined:
            self._refined[run.id] = None
            self._patience[run.id] = now + self.probing.options.probe_s
            self.probing.wanted(unknown, now)
            return [_dropped(event, f"{len(unknown)} of its links are measured first")]
        run.local = event.local
        fields = (("run", run.id), ("stages", len(plan.stages)), ("why", "; ".join(plan.reasons)))
        return [
            Log("run_planned", fields),
            *run.planned(plan, pairs, self.members, self.next_generation, now),
        ]

    def _still_free(self, run: Run, peer: PeerId) -> bool:
        member = self.members.members.get(peer)
        if member is None or member.state != "pool":
            return False
        return run.offered.get(peer) == (member.boot, member.counter)

    def unplanned(self, found: Run | None, event: PlanFailed, now: float) -> list[Instruction]:
        run = self._answered(found, event)
        if run is None:
            return [_dropped(event, "nobody waits for it")]
        heals = event.code in ("peers", "memory")
        others = any(m.id not in run.offered for m in suited(run, self.members, now))
        gives_up = run.wish.recovery.when_short == "fail" and not others
        if event.code == PLANNER:
            self._last[run.owner] = now + LAST_S
        if not heals or gives_up or (run.wish.wanted and not run.term):
            return run.fail(event.code, event.reason, self.members, now)
        self._lacks[run.id] = PlanShortage(run.offered, event.code, event.reason, event.short_bytes)
        self._patience.pop(run.id, None)  # the next plan is over other peers, with new links
        return []  # `place` runs behind every event, and says why it waits


def bad_plan(plan: Plan, pairs: Sequence[tuple[PeerId, PeerId]]) -> str:
    """Why a run cannot begin with what a planner made; empty: it can. What does not come back as
    it was would be another plan to peers, and no journal with it could be read."""
    try:
        plan.validate(plan.stages[-1].stop if plan.stages else 0)
        told = plan_from_proto(plan_to_proto(plan))
    except PlanError as error:
        return str(error)
    except (TypeError, ValueError, OverflowError, KeyError) as error:
        return f"it cannot be told to peers: {type(error).__name__}: {error}"
    other = [f.name for f in fields(Plan) if getattr(told, f.name) != getattr(plan, f.name)]
    if other:
        return f"peers would be told of other {' and '.join(other)} than it has"
    peers = plan.peers
    if any(a == b or a not in peers or b not in peers for a, b in pairs):
        return "it names links between peers that hold no stage"
    if len({frozenset(pair) for pair in pairs}) != len(pairs):
        return "it names a link twice"
    return ""


def _dropped(event: PlanReady | PlanFailed, why: str) -> Log:
    fields = (("message", "plan"), ("run", event.run), ("version", event.version), ("why", why))
    return Log("message_ignored", fields)
