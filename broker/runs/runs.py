"""One run through losses, moves and restarts; its phases are in `phases.py`.

Rules.

- A lost holder is an event (`broker/recovery/recovery.py`): a peer of the pool takes its part and
  everyone goes on from the newest snapshots (`terms.py`), or all are planned anew. So too for a
  holder that reports a fault, or makes no progress; it is left out for a while. What would fail on
  any peer ends the run, as does a fault at every peer that was tried. A lost peer that only keeps
  snapshots ends nothing.
- Where nothing of a lost holder is left, and the run's ladder allows it, another peer makes its
  stages anew from those around them (`dag/execute/neighbour.py`): nobody goes back, and the run is
  not exact from there on, which its state says (`inexact_from`).
- A holder that says that it leaves hands its part over first (`broker/recovery/handing.py`): no
  step is done again. In the same way a run moves to a better plan.
- What must outlive the broker changes by events only (`durable.py`). After a restart a run that was
  RUNNING or EXPORTING goes on with its holders, which come back (`broker/recovery/returning.py`);
  one that was BUILDING goes back to WAITING.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ...dag.ir.convert import MAX_TEXT
from ...dag.plan.plan import PeerId
from ...dag.plan.report import PlanWithReport, Prediction
from ...proto.broker_pb2 import (
    BUILDING,
    EXPORTING,
    RUNNING,
    WAITING,
    Fault,
    Heard,
)
from ..events import Instruction, Tell
from ..membership.member import Member, clean
from ..membership.membership import Lost, Membership
from ..recovery.handing import PAUSE, PlannedStop
from ..recovery.recovery import replacements, suited_left, unreached
from ..recovery.replica import rerouted, rerouted_pairs
from ..recovery.resume import substituted
from ..recovery.returning import ReattachWindow
from .phases import Phases

__all__ = ["Run"]

FAULTS_OF_ONE = frozenset(
    {"blob", "busy", "compute", "draining", "export", "frame", "host", "link", "memory"}
    | {"snapshot", "stalled"}
)
"""Codes of faults that another peer need not have. Others would come again wherever it runs."""
NOT_LIVE = "live"
"""A holder has applied the step that is to be begun anew from what is in the stages."""
NOT_REBUILT = "neighbour"
"""A lost stage cannot be made anew from the blocks around it."""
FAULTS_OF_NETWORKS = frozenset({"deadline", "link", "stalled"})
"""Those that pass: a run waits, where it would end for others."""


class Run(Phases):
    """A run, whatever happens to its peers."""

    # ------------------------------------------------------------ peers that leave, and moves

    def owner_says(self, member: Member) -> None:
        """The owner of a peer with a part in it takes it out of runs, or no longer does."""
        if member.closed is None:
            self.handing.remains(member.id)
        elif member.id in self.peers:
            self.handing.leaves(member.id, member.closed.text)

    def hand_over(
        self, members: Membership, generation: Callable[[], int], now: float
    ) -> list[Instruction]:
        """Goes on with handing over the parts of those that leave
        (`broker/recovery/handing.py`)."""
        if self.returning:
            return []
        held = self.on_hold
        out, over = self.handing.look(self, members, now)
        if held and not self.on_hold:
            self._since = now
        if over is None:
            return out
        if over.errand is None:
            gone, text = over.leavers, over.text
            return out + self._go_on(gone, "left", text, members, generation, now, live=False)
        if over.errand.plan is None:
            return out + self._put_aside(members, now, lacks=over.text)
        return out + self._move(over.text, over.errand, members, generation, now)

    def _move(
        self,
        text: str,
        errand: PlannedStop,
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        """To a better plan, where the run stands between two steps."""
        planned, pool = errand.plan, [m.id for m in members.pool if not self.blamed.out(m.id, now)]
        assert planned is not None
        peers = planned.plan.peers
        gone = [p for p in peers if members.mine(p, self.id) is None and p not in pool]
        if gone:
            why = f"the better plan is out of date: {', '.join(gone)} is not free any more"
            return [*self.release(members), *self.note(why, now)]
        return self._build(planned, errand.pairs, members, generation, "moved", text, now)

    # ------------------------------------------------------------ losses and faults

    def lost(
        self, lost: Lost, members: Membership, generation: Callable[[], int], now: float
    ) -> list[Instruction]:
        """A peer with a part in it is no member any more."""
        peer = lost.member.id
        text = f"peer {lost.member.label} was lost {self._where}: {lost.cause}"
        if lost.code == "away":
            self.returning.wait_for(peer, lost.member.heard_at + self.lease_s)
            self._left[peer] = text
            return []
        self.handing.remains(peer)
        self._refuse.pop(peer, None)
        self.blamed.lost(peer, now)
        if not self.needs(peer):
            out = self.note(text, now)
            if self.checkpoints.awaits(peer):
                out += self._no_checkpoint(text, now)
            return [*out, *self.order_snapshots(members, now), *self._finish_export(members, now)]
        return self._go_on((peer,), lost.code, text, members, generation, now)

    def may_return(self, peer: PeerId) -> bool:
        """Whether a holder whose stream broke is waited for: all who have links with it still hear
        it. If its process had died, these would have broken as well."""
        return self.phase in (RUNNING, EXPORTING) and self.needs(peer) and not self._down.get(peer)

    def heard(
        self,
        member: Member,
        heard: Heard,
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        """A link of a peer with a part in it broke, or is up again."""
        if heard.term != self.term or members.mine(member.id, self.id) is None:
            return []
        peer = PeerId(heard.peer)
        if heard.up or peer not in self.parts:
            self._down.get(peer, {}).pop(member.id, None)
            return []
        self._down.setdefault(peer, {})[member.id] = None
        if peer not in self._left:
            return []
        text = f"{self._left[peer]}, as did its link with {member.label}"
        self.blamed.lost(peer, now)
        return self._go_on((peer,), "lost", text, members, generation, now)

    def needs(self, peer: PeerId) -> bool:
        """Whether it cannot go on without a peer: a holder, until all have finished the last step
        and it has sent the weights that it answers for; and who gives a holder a snapshot."""
        if self.phase == BUILDING:
            giving = [g.source for g in self.gifts if g.destination not in self._ready]
            return peer in self.peers or peer in giving
        if peer not in self.peers:
            return False
        over = self.phase == EXPORTING and all(p in self._finished for p in self.peers)
        return not over or (peer in self._exporters and peer not in self._exports)

    def fault(
        self,
        member: Member,
        fault: Fault,
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        other = members.mine(PeerId(fault.about), self.id)
        convicted = (
            other is not None
            and other is not member
            and member.run == self.id
            and self.blamed.accuse(member.id, other.id)  # also late
        )
        late = convicted and fault.term + 1 == self.term
        stale = self._stale("fault", member, fault.term, BUILDING, RUNNING, EXPORTING)
        if stale and not (late and self.active and member.state == "assigned"):
            return stale
        about = ""
        if fault.about:
            about = f" about peer {other.label if other else clean(fault.about, 128)}"
        what = clean(fault.reason.text, 2000) or clean(fault.reason.code, 60) or "no reason given"
        where = f"at step {fault.step}" if self.phase == RUNNING else self._where
        text = f"peer {member.label} reports a fault {where}{about}: {what}"
        code = clean(fault.reason.code, 60) or "fault"
        if code == "snapshot":
            self.sets.spoilt(self.begun_from)
        if code in (NOT_LIVE, NOT_REBUILT):
            return self._go_on((), code, text, members, generation, now, live=False)
        if code not in FAULTS_OF_ONE:
            return self.fail(code, text, members, now)
        out_of = other if other is not None and convicted else member
        return self._without((out_of.id,), code, text, members, generation, now)

    def _without(
        self,
        peers: Sequence[PeerId],
        code: str,
        text: str,
        members: Membership,
        generation: Callable[[], int],
        now: float,
    ) -> list[Instruction]:
        """These peers are here and do not do their part: others shall."""
        everybody = set(peers) >= set(self.peers)
        alone = len(self.peers) == 1 and replacements(self, peers, members, now) is not None
        if everybody and not alone:  # they wait for each other: once more, from the term's start
            peers = ()
        if not self.blamed.again(peers, self.committed, now):
            text += f". That was tried {self.blamed.tries} times at this step"
            if code not in FAULTS_OF_NETWORKS:
                return self.fail(code, text, members, now)
            return self._collect(code, text, members, now)
        out = self._release(peers, text, members, now)
        return out + self._go_on(peers, code, text, members, generation, now)

    def _go_on(
        self,
        gone: Sequence[PeerId],
        code: str,
        text: str,
        members: Membership,
        generation: Callable[[], int],
        now: float,
        live: bool = True,
    ) -> list[Instruction]:
        """Without these holders. `live`: by their replicas, if they have some, from what is in the
        stages now."""
        assert self.plan is not None, self
        away = self._waits_no_longer(members, now)
        gone = (*gone, *(p for p in away if p not in gone))
        if live and (rest := self._replicas(gone, members)) is not None:
            text += "; replicas do its microbatches"
            pairs = rerouted_pairs(self.plan, self.pairs, gone)
            return self._build(rest, pairs, members, generation, code, text, now, live=True)
        found = self.goes_on_from(members)
        lost = found is None or found.checkpoint is not None
        rebuilds, why_not = self._rebuilds(gone, live and lost)
        if rebuilds and (taken := replacements(self, gone, members, now)) is not None:
            why_not = unreached(self.plan, taken, members, self.options.relays)
            if not why_not:
                return self._in_place(
                    taken, code, text, members, generation, now, rebuilt=tuple(taken.values())
                )
        elif rebuilds:
            why_not = "nobody in the pool can take its part"
        if why_not:
            text += f". It is not made anew from its neighbours: {why_not}"
        if not self.wish.recovery.ladder or (self.committed and lost and not self.begins_anew):
            text += ". No snapshot of it is left, and its ladder has no checkpoint"
            return self.fail(code, text, members, now)
        taken_by = replacements(self, gone, members, now)
        if taken_by is None:
            return self._collect(code, text, members, now)
        return self._in_place(taken_by, code, text, members, generation, now)

    def _rebuilds(self, gone: Sequence[PeerId], lost: bool) -> tuple[bool, str]:
        """Whether stages of these are to be made anew, with everybody else where it is; and why
        not, where that was asked for. `lost`: nothing of this run is left but a checkpoint."""
        ladder = self.wish.recovery.rebuilds
        if not (ladder and lost and self.committed and any(p in self.peers for p in gone)):
            return False, ""
        if self.phase not in (BUILDING, RUNNING):
            return False, "the training is over"
        if all(p in gone for p in self.peers):
            return False, "nobody is left"
        return True, ""

    def _in_place(
        self,
        taken_by: Mapping[PeerId, PeerId],
        code: str,
        text: str,
        members: Membership,
        generation: Callable[[], int],
        now: float,
        rebuilt: Sequence[PeerId] = (),
    ) -> list[Instruction]:
        """Others take the parts of lost holders, in the same plan."""
        assert self.plan is not None, self
        planned, pairs, names = PlanWithReport(self.plan, self.report), self.pairs, []
        for old, new in taken_by.items():
            stages = ", ".join(str(k) for k in planned.plan.stages_of(old))
            kind = "warm" if new in self.plan.warm else "from the pool"
            names.append(f"stage {stages} -> {members.members[new].label} ({kind})")
            planned = substituted(planned, old, new)
            pairs = tuple((new if a == old else a, new if b == old else b) for a, b in pairs)
        if rebuilt:
            names.append(
                "made anew from the blocks around it: the run is not exact from step "
                f"{self.inexact_from or self.committed} on"
            )
        text = "; ".join((text, *names))
        if names:
            told = (name[:MAX_TEXT] for name in names)
            reasons = (*told, "the rest is as before")
            planned = PlanWithReport(planned.plan, replace(planned.report, reasons=reasons))
        live = bool(rebuilt)
        return self._build(
            planned, pairs, members, generation, code, text, now, live, rebuilt, taken_by
        )

    def _replicas(self, gone: Sequence[PeerId], members: Membership) -> PlanWithReport | None:
        """The plan without these, if their replicas can go on at once."""
        assert self.plan is not None, self
        if "replica" not in self.wish.recovery.ladder or self.phase not in (BUILDING, RUNNING):
            return None
        plan = rerouted(self.plan, gone) if any(p in self.peers for p in gone) else None
        if plan is None or any(members.mine(p, self.id) is None for p in plan.peers):
            return None
        # What was predicted was for all of them.
        return PlanWithReport(plan, replace(self.report, predicted=Prediction()))

    def _collect(self, code: str, text: str, members: Membership, now: float) -> list[Instruction]:
        """Everybody goes back to the pool, and all are planned anew; not before somebody resumes
        it, if it was to pause."""
        if self.pausing:
            return self._put_aside(members, now, because=text)
        if self.wish.recovery.when_short == "fail" and not suited_left(self, members, now):
            return self.fail(code, f"{text}, and too few peers are left", members, now)
        self._waits_no_longer(members, now)
        out = self._release(self.parts, text, members, now)
        return out + self._enter(WAITING, now, code, text)

    # ------------------------------------------------------------ after a restart

    def resume(self, now: float) -> list[Instruction]:
        """The broker was started again; nobody is here yet."""
        self._since = now
        if self.phase == BUILDING:
            text = "the broker was started again while it was built"
            if self.pausing:
                text += f"; paused: `shoal resume {self.id}` goes on"
                return self._enter(WAITING, now, "paused", text)
            return self._enter(WAITING, now, "restart", f"{text}: it is planned anew")
        if self.active:
            self.taken_up()
            self.handing.stop_for(PAUSE if self.pausing else None)
            self.returning = ReattachWindow(self.peers, now + self.lease_s)
        return []

    def keeper_back(self, members: Membership, now: float) -> list[Instruction]:
        """A peer that only keeps copies attached again, with these."""
        return [] if self.returning else self.order_snapshots(members, now)

    def back(self, member: Member, members: Membership, now: float) -> list[Instruction]:
        """A holder attached again, still with its part. It may not have heard the Start, nor which
        step is on hold, or no longer."""
        self.returning.back(member.id)
        self._left.pop(member.id, None)
        self._since = now
        self.cadence.given_up()  # it may not have heard the order
        if self.checkpoints.awaits(member.id):
            self.checkpoints.again()
        self.handing.holds(member)
        out: list[Instruction] = [Tell(member.stream, self._start())]
        if self.returning:
            return out
        return [*out, *(self.order_snapshots(members, now) or self.tell_order(members))]

    # ------------------------------------------------------------ time

    def timer(
        self, members: Membership, generation: Callable[[], int], now: float
    ) -> list[Instruction]:
        self._armed = None
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        if self.returning:
            away = self.returning.away
            who = _labels(away, members)
            text = f"{who} did not come back within a lease of {self.lease_s:g} s"
            text = "; ".join((*self._left.values(), f"{text}, {self._where}"))
            for peer in self._left:
                self.blamed.lost(peer, now)
            return self._go_on(away, "lost", text, members, generation, now)
        if self.phase == RUNNING:
            over = self.handing.timed(self, members, now)
            if over is not None:
                return self._go_on(over.leavers, "left", over.text, members, generation, now)
            phase = self._phase_deadline
            if self.on_hold or phase is None or now < phase:
                return []
        waited = now - self._since
        if self.phase == BUILDING:
            missing = [p for p in self.peers if p not in self._ready]
            text = f"not built within {waited:.0f} s: no Ready came from {{}}"
        elif self.phase == EXPORTING:
            missing = [p for p in self._exporters if p not in self._exports]
            if not missing:
                out = self._no_checkpoint(f"nothing of it came for {waited:.0f} s", now)
                return out + self._finish_export(members, now)
            text = f"no weights came for {waited:.0f} s: they are missing from {{}}"
        else:
            assert self.ledger is not None, self
            missing = list(self.ledger.missing)
            measured = self.ledger.median_s
            known = "none measured" if measured is None else f"median {measured:.2f} s"
            text = (
                f"step {self.committed} made no progress for {waited:.0f} s (steps so far: "
                f"{known}): no report came from {{}}"
            )
        text = text.format(_labels(missing, members))
        return self._without(missing, "deadline", text, members, generation, now)


def _labels(peers: Iterable[PeerId], members: Membership) -> str:
    found = ((p, members.members.get(p)) for p in peers)
    return ", ".join(m.label if m else p for p, m in found) or "nobody"
