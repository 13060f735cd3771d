"""Handing parts over: a holder that says that it will leave costs no step.

- Its owner stops or closes it, or the time that it meant to stay is nearly over. It goes on with
  its part; the broker orders a set of snapshots at a step that nobody begins (hold). When all steps
  before it are committed, and the set lies at peers that stay, the next term begins exactly there,
  with another peer in its place, or planned anew where no single one fits.
- Several that leave are handed over together. Each is told how long to stay, or why nobody takes
  its part (HandoverReply): it leaves after its step then, and what follows is a loss as any other.
  So it is too when the deadline comes first, which follows from how long steps and copies took.
- A run that is over before such a step is simply done to its end.
- A run that moves to a better plan, or is put aside, stops between two steps in the same way. Put
  aside, it waits for the copies of its set too, until the deadline; its holders are free then.

Whoever takes the part is chosen in `broker/recovery/replacements.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...dag.plan.plan import PeerId
from ...dag.plan.report import PlanWithReport
from ...proto.broker_pb2 import RUNNING, BrokerMessage, HandoverReply
from ...proto.common_pb2 import Reason
from ..events import Instruction, Tell
from ..membership.member import Member
from ..recovery.replacements import able_left, replacements
from ..recovery.view import View
from .context import ReplicaContext
from .snapshots import ReplicaSnapshots

__all__ = ["PAUSE", "Handover", "HandoverResult", "PlannedStop"]

_FACTOR = 3.0
"""The deadline, in times of what the steps and the copies are expected to take."""
_LEAST_S = 30.0
_UNMEASURED_S = 300.0
"""The deadline while no step, or no copy, was measured."""


@dataclass(frozen=True, slots=True)
class PlannedStop:
    """What a run stops for between two steps: to move to a plan, whose pairs exchange frames, or
    (None) to be put aside. ends: that plan is the present one, and no more steps are made."""

    text: str
    plan: PlanWithReport | None = None
    pairs: tuple[tuple[PeerId, PeerId], ...] = ()
    ends: bool = False


PAUSE = PlannedStop("it is put aside")
"""Until it is done, or nobody wants it any more; after a restart of the broker too."""


@dataclass(frozen=True, slots=True)
class HandoverResult:
    """What `look` found: these leave now, or the errand is to be done; and the text says what
    happened, for people (of a pause, what it lacks)."""

    leavers: tuple[PeerId, ...]
    text: str
    errand: PlannedStop | None = None


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """leavers: in the order in which they asked. to_end: the run ends before it can be."""

    leavers: tuple[PeerId, ...]
    began: float
    until: float
    to_end: bool


class Handover:
    """Moves the parts of leaving holders of one replica to other peers."""

    def __init__(self, context: ReplicaContext, snapshots: ReplicaSnapshots) -> None:
        self._context, self._record, self._snapshots = context, context.record, snapshots
        self.errand: PlannedStop | None = None
        self._under_way: _UnderWay | None = None
        self._waited = False
        """For the copies of the set that it is to be put aside with, until the deadline."""
        self._refused: dict[PeerId, None] = {}
        """Those whose part nobody takes, in this term."""
        self._stays: dict[PeerId, float] = {}
        """Of the present holders that said it: until when they mean to stay."""

    @property
    def leaving(self) -> dict[PeerId, str]:
        return self._context.term.leaving

    def __bool__(self) -> bool:
        """Whether `look` may have something to do."""
        return bool(self.leaving) or self.errand is not None

    def __repr__(self) -> str:
        doing = f" under way until {self._under_way.until:g} s" if self._under_way else ""
        return f"<Handover {', '.join(self.leaving) or 'nothing'}{doing}>"

    # ------------------------------------------------------------ what happens

    def reset(self) -> None:
        """The run's phase changes: what was under way is over, one way or the other."""
        self._under_way = None
        self._refused = {}
        if self.errand is not None and self.errand.plan is not None:
            self.errand = None  # the plan was for what was there

    def stop_for(self, errand: PlannedStop | None) -> None:
        """The run shall stop between two steps; None: it need not any more."""
        self.errand, self._under_way, self._waited = errand, None, False

    def ends(self, why: str) -> None:
        """Note that the run is to end at the next step of which a set can be had, but where that is
        its last anyway, or it is to be put aside."""
        record, errand = self._record, self.errand
        moves = errand is None or (errand.plan is not None and not errand.ends)
        if record.running and moves and record.plan and self._next_step < record.steps:
            planned = PlanWithReport(record.plan, record.report)
            self.stop_for(PlannedStop(why, planned, ends=True))

    def leaves(self, peer: PeerId, why: str) -> None:
        """Note that a peer leaves, as it or its owner has said."""
        self.leaving[peer] = why
        self._refused.pop(peer, None)
        self._under_way = None  # begun again, with it

    def remains(self, peer: PeerId) -> None:
        """Forget a peer that does not leave any more, or has left."""
        if self.leaving.pop(peer, None) is not None:
            self._under_way = None

    def begin_term(self) -> None:
        """The plan is new."""
        self._stays = {}
        for peer in self._record.peers:
            self.holds(self._context.members.members[peer])

    def holds(self, member: Member) -> None:
        """Note that a peer has a part, be it again."""
        if member.closed is not None:
            self.leaves(member.id, member.closed.text)
        if member.stays_until < math.inf:
            self._stays[member.id] = member.stays_until

    # ------------------------------------------------------------ time

    def due(self) -> float:
        """When something is to be done without an event."""
        if self._under_way is not None:
            return self._under_way.until
        return min((t for t, _ in self._ends()), default=math.inf) if self._stays else math.inf

    def _ends(self) -> list[tuple[float, PeerId]]:
        """By when the parts of those that mean to leave later should be handed over, if the run is
        not over before they do."""
        if self._record.step_s is None:  # nor is it known when the run ends
            return []
        margin = self._within_s(self._next_step - self._record.committed)
        return [(t - margin, p) for p, t in self._stays.items() if p not in self.leaving]

    @property
    def _next_step(self) -> int:
        """The first step of which a set can be had. In front of the last of its round a replica has
        what goes on in the same round only, as it does after a pause."""
        step, gate = self._snapshots.cadence.next_step(self._record.committed), self._context.gate
        if gate is not None and self.errand is PAUSE:
            return min(step, gate)
        return step + (step == gate)

    def timed(self, now: float) -> HandoverResult | None:
        """A deadline may have come: theirs, who leave now; or that of a stay, which is handed over
        from here on."""
        under = self._under_way
        if under is not None:
            if now < under.until:
                return None
            self.reset()  # a pause is tried again
            self._waited = not under.to_end
            for peer in under.leavers:
                self._refused[peer] = None
            if under.to_end or not under.leavers:
                return None
            text = (
                f"{self._who(under.leavers)} did not hand over within "
                f"{now - under.began:.0f} s: {self._why(under.leavers)}"
            )
            return HandoverResult(under.leavers, text)
        for at, peer in self._ends():
            if now >= at:
                until = self._stays.pop(peer)
                if self._record.ends_at(now) > until:
                    self.leaving[peer] = f"it means to stay for {max(0.0, until - now):.0f} s more"
        return None

    # ------------------------------------------------------------ deciding

    def look(self, now: float) -> tuple[list[Instruction], HandoverResult | None]:
        """Return what is to be done now about the peers that leave."""
        for peer in [p for p in self.leaving if p not in self._record.peers]:
            del self.leaving[peer]
        if self._record.phase != RUNNING:
            return [], None
        here = [p for p in self.leaving if self._context.mine(p) and p not in self._refused]
        if not here and self.errand is None:
            return self._snapshots.let_go(), None
        if self._under_way is None:
            return self._begin(here, self._snapshots.view(now)), None
        return self._go_on(self._under_way)

    def _begin(self, here: Sequence[PeerId], view: View) -> list[Instruction]:
        out: list[Instruction] = []
        step, steps, members = self._next_step, self._record.steps, view.members.members
        within_s = self._within_s(step - self._record.committed)
        chosen: tuple[PeerId, ...] = ()
        takes = f"the run, which ends with step {steps}"
        to_end = step >= steps
        for peer in here:
            why = "" if to_end else self._why_not(view, (*chosen, peer))
            if not why:
                chosen = (*chosen, peer)
                continue
            self._refused[peer] = None
            out += self._told(peer, 0.0, why)
            if members[peer].closed is None:  # it goes on, and was not asked
                del self.leaving[peer]
        if to_end and self.errand is not None and self.errand.plan is not None:
            self.errand = None
        if not chosen and self.errand is None:
            return [*out, *self._snapshots.let_go()]
        if to_end:
            out += self._snapshots.let_go()
        else:
            found = replacements(view, chosen) if chosen else None
            names = self._who(tuple(found.values())) if found else "a new plan"
            takes = f"{names} to take its part at step {step}"
            out += self._snapshots.hold(step)
        self._under_way = _UnderWay(chosen, view.now, view.now + within_s, to_end)
        for peer in chosen:
            out += self._told(peer, within_s, takes)
        return out

    def _go_on(self, under: _UnderWay) -> tuple[list[Instruction], HandoverResult | None]:
        if under.to_end:
            return [], None
        snapshots, cadence = self._snapshots, self._snapshots.cadence
        found, held = snapshots.found(), snapshots.on_hold
        ready = found is not None and found.step == self._record.committed == held
        lacks = ""
        if self.errand is not None and self.errand.plan is None and cadence.whole != held:
            # Its peers are free then: without copies the next that is lost would cost its steps.
            ready = ready and self._waited
            lacks = ", whose snapshots not everybody has a copy of"
        errand, self.errand = self.errand, self.errand if not ready else None
        if ready and errand is not None and errand.plan is None:
            return [], HandoverResult((), lacks, errand)
        if ready and errand is not None and not under.leavers:
            return [], HandoverResult((), f"{errand.text} at step {held}", errand)
        if ready and found is not None and found.without(under.leavers):
            text = f"{self._who(under.leavers)} hands over at step {held}"
            return [], HandoverResult(under.leavers, f"{text}: {self._why(under.leavers)}")
        if cadence.pending is not None or cadence.whole == held >= self._record.committed:
            return [], None
        # Somebody was past that step already, or a copy was lost.
        if self._next_step < self._record.steps:
            return snapshots.hold(self._next_step), None
        self._under_way = _UnderWay(under.leavers, under.began, under.until, True)
        return snapshots.let_go(), None

    def _within_s(self, steps: int) -> float:
        """Seconds in which so many steps and the copies of a set should well be over."""
        step_s, took_s = self._record.step_s, self._snapshots.cadence.took
        if step_s is None or took_s is None:  # steps that are known may take longer than that
            return max(_UNMEASURED_S, _FACTOR * steps * (step_s or 0.0))
        return max(_LEAST_S, _FACTOR * (steps * step_s + took_s))

    def _why_not(self, view: View, leavers: tuple[PeerId, ...]) -> str:
        """Why these cannot hand over, the last of them, say; empty: they can."""
        if not view.run.takes_snapshots:
            return "its run takes no snapshots (recovery.ladder)"
        if view.run.requirements.cohorts is not None and len(view.plan.stages) == 1:
            return "its clients make no step behind which another could take its part"
        keepers = self._snapshots.keepers(view.plan)
        if any(keepers.get(p) in (None, *leavers) for p in leavers):
            return "nobody who stays can keep its snapshot"
        found, here = replacements(view, leavers), view.members.members
        asked = all(here[p].closed is not None for p in leavers)
        if found is not None:
            longer = all(here[b].stays_until > here[a].stays_until for a, b in found.items())
            return "" if asked or longer else "no other peer means to stay longer"
        if not asked:
            return "no other peer can take its part as it is"
        left = [m for m in able_left(view) if m.id not in leavers]
        least = view.run.requirements.least
        return "" if len(left) >= least else "no other peer can take its part"

    # ------------------------------------------------------------ words

    def _told(self, peer: PeerId, within_s: float, why: str) -> list[Instruction]:
        """The answer to one that asked."""
        member, record = self._context.members.members[peer], self._record
        if member.closed is None:
            return []
        reply = HandoverReply(run=record.id, term=record.term, within_s=within_s)
        reply.reason.CopyFrom(Reason(code="hand-over", text=why))
        return [Tell(member.stream, BrokerMessage(handover=reply))]

    def _who(self, peers: Sequence[PeerId]) -> str:
        return ("peer " if len(peers) == 1 else "peers ") + self._context.labels(peers)

    def _why(self, leavers: Sequence[PeerId]) -> str:
        return "; ".join(dict.fromkeys(self.leaving[p] for p in leavers if p in self.leaving))
