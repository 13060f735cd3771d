"""A term of a run: how it begins, and the snapshots that are taken in it.

- Everybody with a part in the plan gets an Assign: holders, and peers of the pool that keep
  snapshots (warm). It says from which step to go on, and who gives which snapshots to whom.
- A run goes on from the newest set of snapshots that still lies somewhere, whole; without one it
  begins with its starting weights. Both replay steps that are committed already: their reports are
  compared with what was told before, and have no other effect.
- Snapshots are ordered by `broker/snapshots/cadence.py`; a set is whole when each holder and its
  keeper have theirs. Older ones go then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ...dag.plan.plan import PeerId, Plan, SnapshotKeeper
from ...dag.plan.report import PlanReport, PlanWithReport
from ...dag.plan.swaps import swapped_operators, swaps
from ...dag.schedule.convert_plan import plan_to_proto
from ...dag.schedule.convert_report import report_to_proto
from ...dag.schedule.convert_slice import slice_to_proto
from ...dag.schedule.slices import PlanSlices
from ...net.web.places import why_not
from ...proto.broker_pb2 import (
    EXPORTING,
    RUNNING,
    Assign,
    BrokerMessage,
    DialOrder,
    Gift,
    Leave,
    Renamed,
    RunEvent,
    RunSpec,
    Snapshot,
    SnapshotOrder,
    SnapshotReport,
)
from ...proto.common_pb2 import Reason
from ...proto.graph_pb2 import CORE
from ...proto.journal_pb2 import Decision
from ..events import Instruction, Log, RunId, Tell
from ..membership.member import Member, clean, dial
from ..membership.membership import Membership
from ..options import BrokerOptions
from ..recovery.handing import Handover
from ..recovery.recovery import SuspectTracker
from ..recovery.resume import gifts, resume
from ..snapshots.cadence import SnapshotSchedule
from ..snapshots.checkpoints import as_set
from ..snapshots.keepers import choose_keepers, instead, ring_pairs
from ..snapshots.sets import SnapshotCatalog, SnapshotSet
from ..wish import RunRequirements
from .durable import DurableRun

__all__ = ["NEVER", "NOBODY", "TermBuilder"]

NEVER = 2**64 - 1
"""As the step that is needed: nothing is."""

BLOCKS = 0
"""In place of a term: what lost stages are made from, of which nothing is reported."""

Pair = tuple[PeerId, PeerId]

NOBODY: Mapping[PeerId, PeerId] = {}

LEAST_STAY_S = 300.0
"""Who means to leave sooner than that is asked after all others: handing its part over takes some
seconds of everybody's time (docs/recovery.md), which is one percent then."""
_LOSSES = 4096
"""Newest steps whose losses are compared with those of a replay."""


class _ByPeer:
    """What a plan has for each holder. slots: the spans of its stages; expected: by the plan;
    most_compute_s: of the busiest."""

    def __init__(self, plan: Plan | None, report: PlanReport) -> None:
        self.slots: dict[PeerId, list[tuple[int, int]]] = {}
        for stage in plan.stages if plan else ():
            for holder in stage.holders:
                self.slots.setdefault(holder, []).append((stage.start, stage.stop))
        self.expected = {p.peer: p for p in report.predicted.peers}
        self.most_compute_s = max((p.compute_s for p in self.expected.values()), default=0.0)


class TermBuilder(DurableRun):
    """Begins the terms of a run and takes snapshots in them. pairs: the pairs of the term's holders
    that exchange frames. sets: which snapshots lie where."""

    def __init__(
        self,
        run: RunId,
        number: int,
        spec: RunSpec,
        wish: RunRequirements,
        options: BrokerOptions,
        decisions: list[Decision],
        owner: str = "",
    ) -> None:
        super().__init__(run, number, spec, wish, options, decisions, owner)
        self.sets = SnapshotCatalog()
        self.cadence = SnapshotSchedule(0, 0)
        self.pairs: tuple[Pair, ...] = ()
        self.begun_from: SnapshotSet | None = None
        """The set that the present term goes on from; None: the starting weights."""
        self.gifts: tuple[Gift, ...] = ()
        """Who gives what of it to whom."""
        self._needed = 0
        """Snapshots of fewer steps may go, as peers were told."""
        self._keepers: dict[PeerId, PeerId] = {}
        """By holder, as peers were told."""
        self._instead: tuple[object, dict[PeerId, PeerId]] = (None, {})
        """By holder, as it was found, and what that was found by."""
        self._refuse: dict[PeerId, None] = {}
        """Keepers that did not take a copy."""
        self._losses: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        self._drift = 0.0
        self.blamed = SuspectTracker()
        self.handing = Handover()
        self.on_hold = 0
        """The step that nobody begins: parts are handed over there. 0: none."""
        self.local = wish.local
        """Inputs of the model that only peers with the data read, under the present plan."""
        self._found: tuple[Plan | None, _ByPeer] = (None, _ByPeer(None, self.report))
        self.speed_of: dict[PeerId, float] = {}
        """FLOP/s of the present holders, as they were when the term began."""

    @property
    def _by_peer(self) -> _ByPeer:
        """The tables by peer of the present plan; made once for each plan, since every report asks
        for them."""
        if self._found[0] is not self.plan:
            self._found = self.plan, _ByPeer(self.plan, self.report)
        return self._found[1]

    # ------------------------------------------------------------ the beginning

    @property
    def snapshots(self) -> bool:
        """Whether it takes any."""
        return "snapshot" in self.wish.recovery.ladder

    @property
    def parts(self) -> tuple[PeerId, ...]:
        """Everybody with a part in the present plan, holders first."""
        return () if self.plan is None else (*self.plan.peers, *self.plan.warm)

    def goes_on_from(self, members: Membership) -> SnapshotSet | None:
        """The newest set, of what lies at peers of this run or of the pool, or of checkpoints."""
        saved = self.checkpoints.newest(self.committed) if self.begins_anew else None
        if saved is None and self.spec.HasField("resumed"):
            saved = self.spec.resumed
        found = self._newest_set(members)
        if saved is None or (found is not None and found.step >= saved.step):
            return found
        return as_set(saved)

    @property
    def begins_anew(self) -> bool:
        """Whether it may go back to its last checkpoint, or to the weights that it began with."""
        return "checkpoint" in self.wish.recovery.ladder

    def _newest_set(self, members: Membership) -> SnapshotSet | None:
        if self.plan is None or not self.snapshots:
            return None

        def gives(peer: PeerId) -> bool:
            member = members.members.get(peer)
            free = member is not None and member.state == "pool"
            return free or members.mine(peer, self.id) is not None

        found = self.sets.newest(self._operators, self.committed, gives)
        if found is None or not self.handing.leaving:
            return found
        return found.without(self.handing.leaving) or found

    @property
    def unreliable(self) -> tuple[PeerId, ...]:
        """Peers with a part in it that nothing is to be left with."""
        return (*self.handing.leaving, *self._refuse)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, measured or predicted; None: not known."""
        measured = self.ledger.median_s if self.ledger else None
        return measured or self.report.predicted.step_s or None

    def ends_at(self, now: float) -> float:
        """When its last step is done, as far as that can be told."""
        return now + (self.spec.steps - self.committed) * (self.step_s or 0.0)

    def lacks_s(self, member: Member, now: float) -> float:
        """How long before the end of the run a peer means to leave, seconds."""
        return max(0.0, self.ends_at(now) - member.stays_until)

    def steady(self, member: Member, now: float) -> bool:
        """Whether it is asked first: not lost again and again of late, and not about to leave."""
        stays = member.stays_until - now >= LEAST_STAY_S
        ends = self.step_s is not None and self.ends_at(now) <= member.stays_until
        return (stays or ends) and not self.blamed.shaky(member.id, now)

    def begin_term(
        self,
        planned: PlanWithReport,
        pairs: Iterable[Pair],
        members: Membership,
        generation: Callable[[], int],
        now: float,
        live: bool = False,
        rebuilt: Sequence[PeerId] = (),
        taken_by: Mapping[PeerId, PeerId] = NOBODY,
    ) -> list[Instruction]:
        """The plan's peers are all in the pool, or in this run already. Of each pair the one that
        stands first dials, or the one that can. `live`: from what its holders have in their stages
        now, of which those in `rebuilt` make theirs anew. `taken_by`: by holder that is gone, who
        has its part in a plan that is as before else."""
        term = BLOCKS if rebuilt else self.term
        found = (
            SnapshotSet(term, self.committed, {}, live=True, rebuilt=(*rebuilt,)) if live else None
        )
        self.begun_from = found = found or self.goes_on_from(members)
        plan = self._with_keepers(planned, found, members, now)
        report = planned.report
        before = self.parts
        step = found.step if found else 0
        now_swapped = swapped_operators(plan)
        if self.plan is not None:
            others = swapped_operators(self.plan) != now_swapped
        else:  # the first plan; it may go on from another run's checkpoint
            saved = tuple((s.start, s.middle, s.stop) for s in self.spec.resumed.swapped)
            others = step > 0 and saved != now_swapped
        wire = plan_to_proto(plan)
        names = [Renamed(old=a, to=b) for a, b in taken_by.items()]
        event = RunEvent(plan=wire, report=report_to_proto(report), renamed=names)
        planned = PlanWithReport(plan, report)
        out: list[Instruction] = [self._publish(event, now, self.term + 1, planned)]
        slices = PlanSlices(plan)
        self.pairs = tuple(pairs) or slices.pairs
        if rebuilt:
            self.inexact_from = self.inexact_from or step
        elif step < self.inexact_from:
            # Back to before that; where stages change places, maybe to when others did.
            self.inexact_from = max(1, step) if swaps(plan) else 0
        if others:  # other blocks change places than in the steps that were told of
            self.inexact_from = self.inexact_from or step or self.committed
        self.cadence = self._cadence(step)
        self.checkpoints.given_up()
        self._keepers, self.on_hold = {}, 0
        base = Assign(
            run=self.id,
            term=self.term,
            full_graph=self.spec.graph,
            weights=self.spec.weights,
            data=self.spec.data,
            training=self.wish.training,
            submitter=self.owner,
            local=self.local,
            first_step=step,
            lossless_snapshots=self.wish.lossless_snapshots,
        )
        if self.spec.HasField("recipe"):
            base.recipe.CopyFrom(self.spec.recipe)
        if found is not None:
            own = found.checkpoint is None or found.checkpoint.run == self.id
            since = self.names.get(found.term, {}) if own else {}
            base.resume.CopyFrom(resume(found, plan, since))
        self.gifts = tuple(base.resume.gifts)
        self.speed_of = {p: members.members[p].offer.flops_per_s for p in plan.peers}
        dials, near = self._dials(plan, base, members, generation)
        for peer in self.parts:
            member = members.members[peer]
            if member.state == "pool":
                out += members.assign(member, self.id)
            assign = Assign()
            assign.CopyFrom(base)
            core = member.profile.operator_set == CORE
            assign.graph.CopyFrom(self.spec.core_graph if core else self.spec.graph)
            # Who makes a stage anew asks everybody.
            known = plan.peers if rebuilt else near[peer]
            assign.slice.CopyFrom(slice_to_proto(slices.of(peer, known)))
            assign.dials.extend(dials[peer])
            out.append(Tell(member.stream, BrokerMessage(assign=assign)))
        gone = [p for p in before if p not in self.parts]
        self.handing.begin_term(members.members[p] for p in plan.peers)
        return out + self._release(gone, "the run goes on without it", members, now)

    def _cadence(self, first: int) -> SnapshotSchedule:
        every = self.wish.recovery.snapshot_every
        return SnapshotSchedule(0 if every == "auto" else every, first, self.cadence.took)

    def taken_up(self) -> None:
        """An earlier start of the broker began the term: what that knew of it is not kept."""
        self.pairs = tuple(combinations(self.peers, 2))
        self.cadence = self._cadence(self.committed)

    def _dials(
        self,
        plan: Plan,
        assign: Assign,
        members: Membership,
        generation: Callable[[], int],
    ) -> tuple[dict[PeerId, list[DialOrder]], dict[PeerId, list[PeerId]]]:
        """By peer, whom it dials; and with whom it has links, whoever dials."""
        dials: dict[PeerId, list[DialOrder]] = {p: [] for p in self.parts}
        near: dict[PeerId, list[PeerId]] = {p: [] for p in self.parts}
        links: dict[frozenset[PeerId], Pair] = {}
        keepers = [(k.holder, k.peer) for k in plan.keepers]
        given = [(PeerId(g.source), PeerId(g.destination)) for g in assign.resume.gifts]
        for pair in (*self.pairs, *keepers, *ring_pairs(plan), *given):
            links.setdefault(frozenset(pair), pair)
        for a, b in links.values():
            near[a].append(b)
            near[b].append(a)
            way = dial(members.members[a], members.members[b], self.options.relays)
            if way is not None:  # the planner's pairs are looked at before
                source, target, address = way
                order = DialOrder(peer=target.id, address=address, generation=generation())
                dials[source.id].append(order)
        return dials, near

    def _with_keepers(
        self, planned: PlanWithReport, found: SnapshotSet | None, members: Membership, now: float
    ) -> Plan:
        plan = planned.plan
        if not self.snapshots:
            return plan
        warm = [m for p in self.parts if (m := members.mine(p, self.id)) and m.closed is None]
        free = [m for m in members.pool if self.suits(m)]
        wanted = self.wish.recovery.warm_spares
        spares = 1 if wanted == "auto" else wanted
        keepers = choose_keepers(
            planned,
            (*warm, *free),
            members,
            spares,
            self.options.relays,
            lambda m: self.lacks_s(m, now),
            self.unreliable,
        )
        plan = replace(plan, keepers=keepers)
        if found is None:
            return plan
        part = (*plan.peers, *plan.warm)
        givers = {(PeerId(g.destination), PeerId(g.source)) for g in gifts(found, plan)}
        more = tuple(SnapshotKeeper(h, p) for h, p in sorted(givers) if p not in part)
        return replace(plan, keepers=(*keepers, *more))

    def suits(self, member: Member) -> bool:
        """Whether a peer could take part, by its operators and by where on the web it reads."""
        core = self.wish.core or member.profile.operator_set != CORE
        return core and self.reads(member)

    def reads(self, member: Member) -> bool:
        """Whether a peer's owner lets it read the weights of the run from the web, if need be."""
        return not any(why_not(origin, member.profile.web) for origin in self.wish.origins)

    def _release(
        self, peers: Sequence[PeerId], text: str, members: Membership, now: float
    ) -> list[Instruction]:
        """They leave the run, which goes on."""
        out: list[Instruction] = []
        for peer in peers:
            if (member := members.mine(peer, self.id)) is not None:
                leave = Leave(run=self.id, term=self.term, goes_on=True)
                leave.reason.CopyFrom(Reason(code="released", text=text))
                out += [Tell(member.stream, BrokerMessage(leave=leave))]
                out += members.drain(member, now)
        return out

    def give_up_warm(self, members: Membership, now: float) -> list[Instruction]:
        """Another run has work for them. Holders keep each other's snapshots from here on."""
        if self.plan is None or self.phase != RUNNING:
            return []
        text = "another run has work for it"
        out = self._release(self.plan.warm, text, members, now)
        return out + self.order_snapshots(members, now) if out else out

    # ------------------------------------------------------------ snapshots

    def snapshot_reported(
        self, member: Member, report: SnapshotReport, members: Membership, now: float
    ) -> list[Instruction]:
        """What became of one at a peer, now or in an earlier term."""
        snapshot = report.snapshot
        if problem := self._odd(snapshot):
            ignored = (("message", "snapshot"), ("peer", member.id), ("run", self.id))
            return [Log("message_ignored", (*ignored, ("why", problem)))]
        if report.held:
            self.sets.held(member.id, snapshot)
            if (snapshot.term, snapshot.holder) == (self.term, member.id):
                self.cadence.taken(snapshot.step, now)
                self.checkpoints.taken(member.id, snapshot.step)
            return self.order_snapshots(members, now)
        self.sets.not_held(member.id, snapshot)
        why = clean(report.reason.text) or "it does not say why"
        fields = (("run", self.id), ("peer", member.id), ("step", snapshot.step))
        out: list[Instruction] = [Log("snapshot_missed", (*fields, ("why", why)))]
        if snapshot.term != self.term:
            return out
        refused = snapshot.holder != member.id and snapshot.step == self.cadence.pending
        self.cadence.missed(snapshot.step)
        own = snapshot.holder == member.id
        if own and snapshot.step == self.checkpoints.coming and self.checkpoints.untaken:
            self.checkpoints.given_up(late=True)
            out += self.order_snapshots(members, now)
        if refused and member.id not in self._refuse:
            out += self._refused(member, PeerId(snapshot.holder), why, members, now)
            out += self.order_snapshots(members, now)
        return out

    def _refused(
        self, keeper: Member, holder: PeerId, why: str, members: Membership, now: float
    ) -> list[Instruction]:
        """Another one keeps this holder's copies from here on, if there is one."""
        assert self.plan is not None, self
        self._refuse[keeper.id] = None
        other = instead(self.plan, members, self.unreliable).get(holder)
        text = f"peer {keeper.label} does not keep a copy of the snapshots of {holder}: {why}"
        if other is None or other in self._refuse:
            text += ". Nobody else can: without a copy the loss of that peer costs more steps"
        else:
            text += f"; {members.members[other].label} does instead"
        return [self._publish(RunEvent(note=text), now)]

    def _odd(self, snapshot: Snapshot) -> str:
        """What cannot be of a snapshot that a peer tells of; empty: nothing."""
        if self.plan is None or not 1 <= snapshot.term <= self.term:
            return f"a snapshot of term {snapshot.term}: the run is in term {self.term}"
        if not 0 < snapshot.step <= self.spec.steps:
            return f"a snapshot after {snapshot.step} of {self.spec.steps} steps"
        if not snapshot.holder or clean(snapshot.holder, 128) != snapshot.holder:
            return "a snapshot of nobody"
        spans = [(s.start, s.stop) for s in snapshot.spans]
        slots = self._by_peer.slots.get(PeerId(snapshot.holder), [])
        if snapshot.term == self.term and spans != slots:
            return f"a snapshot of {snapshot.holder} with other stages than the plan gives it"
        before = [0, *(stop for _, stop in spans)]
        ordered = all(a <= b < c for a, (b, c) in zip(before, spans, strict=False))
        if not spans or not ordered or before[-1] > self._operators:
            return f"a snapshot without stages, or not of {self._operators} operators in order"
        return ""

    @property
    def _operators(self) -> int:
        assert self.plan is not None, self
        return self.plan.stages[-1].stop

    def order_snapshots(self, members: Membership, now: float) -> list[Instruction]:
        """The next set, if one is due; and that older ones may go, when a newer one is whole."""
        if self.phase not in (RUNNING, EXPORTING) or self.plan is None:
            return []
        cadence, keepers = self.cadence, self._keepers_now(self.plan, members)
        if cadence.pending is not None:
            if self.sets.copied(cadence.pending, self.term, self.peers, keepers):
                # Copies to holders share links with the training: more of them would cost more.
                between_s = self.blamed.between_s(now) if self.plan.warm else math.inf
                cadence.copied(now, between_s)
            elif self._keepers_differ(keepers) or cadence.overdue(now):
                cadence.missed(cadence.pending)
        needed = self._needed
        if cadence.whole is not None and cadence.whole <= self.committed:
            needed = max(needed, cadence.whole)
        due = saves = None
        if not self.on_hold:
            due = saves = self.checkpoints.due(self.committed, self.spec.steps)
        if saves is not None:
            self.checkpoints.begin(
                self.id, self.term, saves, self.spec, self.plan, self.inexact_from
            )
        elif self.snapshots and self.running and not (self.checkpoints.untaken or self.on_hold):
            due = cadence.due(self.committed, self.spec.steps, now)
        if due is None and needed == self._needed:
            return []
        told = dict.fromkeys((*self.parts, *self.sets.peers))
        self.sets.not_needed(needed)
        self._needed, self._keepers = needed, keepers
        if due is not None:
            cadence.ordered(due)
        return self._tell_order(told, members, due or 0, upload=saves is not None)

    def _keepers_differ(self, keepers: dict[PeerId, PeerId]) -> bool:
        """From those that peers were told of."""
        if keepers is not self._keepers and keepers == self._keepers:
            self._keepers = keepers  # the next report compares no thousand of them
        return keepers is not self._keepers

    def _tell_order(
        self, peers: Iterable[PeerId], members: Membership, step: int, *, upload: bool = False
    ) -> list[Instruction]:
        order = SnapshotOrder(
            run=self.id,
            term=self.term,
            step=step,
            needed=self._needed,
            upload=upload,
            hold=self.on_hold,
        )
        return _tell(peers, order, members, self._keepers)

    def hold(self, step: int, members: Membership) -> list[Instruction]:
        """Orders a set of this step, in place of the one that is pending, and that nobody begins
        the step."""
        assert self.plan is not None, self
        self.cadence.ordered(step)
        if self.checkpoints.untaken:
            self.checkpoints.given_up(late=True)
        self.on_hold = step
        self._keepers = self._keepers_now(self.plan, members)
        return self._tell_order(self.parts, members, step)

    def release(self, members: Membership) -> list[Instruction]:
        """No step is on hold any more."""
        if not self.on_hold:
            return []
        self.on_hold = 0
        return self.tell_order(members)

    def tell_order(self, members: Membership) -> list[Instruction]:
        """What holds, without another snapshot."""
        return self._tell_order(self.parts, members, 0)

    def _keepers_now(self, plan: Plan, members: Membership) -> dict[PeerId, PeerId]:
        """Found anew only when a member came, went or changed its part: asked at every report."""
        facts = plan, members.version, self.unreliable
        if self._instead[0] != facts:
            self._instead = facts, instead(plan, members, self.unreliable)
        return self._instead[1]

    def forget_snapshots(self, members: Membership) -> list[Instruction]:
        """It has ended. Its parts hear that as they leave; who else keeps something, now."""
        others = [p for p in self.sets.peers if members.mine(p, self.id) is None]
        self.sets = SnapshotCatalog()
        self._losses.clear()
        order = SnapshotOrder(run=self.id, term=self.term, needed=NEVER)
        return _tell(others, order, members)

    # ------------------------------------------------------------ replays

    def told_loss(self, step: int, loss: float) -> None:
        self._losses.append((step, loss))

    def replayed_loss(self, step: int, loss: float, now: float) -> list[Instruction]:
        """A step was done again: the same loss as before on equal devices, bit for bit."""
        before = next((had for k, had in reversed(self._losses) if k == step), None)
        if before is None or before == loss or (before != before and loss != loss):
            return []
        drift = abs(loss - before) / max(abs(before), 1e-12)
        if drift <= self._drift:
            return []
        self._drift = drift
        text = (
            f"step {step} gave the loss {loss:.9g} when it was done again, {before:.9g} before "
            f"({drift:.1e} of it): another device, or another order of sums"
        )
        return [self._publish(RunEvent(note=text), now)]


def _tell(
    peers: Iterable[PeerId],
    order: SnapshotOrder,
    members: Membership,
    keepers: Mapping[PeerId, PeerId] | None = None,
) -> list[Instruction]:
    """Each is told of its own keeper alone: a thousand peers would hear of a thousand keepers."""
    out: list[Instruction] = []
    for peer in peers:
        if member := members.members.get(peer):
            message = BrokerMessage(snapshot=order)
            if keepers:
                message.snapshot.keeper = keepers.get(peer, "")
            out.append(Tell(member.stream, message))
    return out
