"""A replica through losses, faults, moves and restarts of the broker.

Rules.

- A lost holder is an event: `broker/recovery/recover.py` says what is done about it. So too for a
  holder that reports a fault, or makes no progress; it is left out for a while. What would fail on
  any peer ends the run once two peers have said so, as does a fault at every peer that was tried;
  who said so first is replaced. A lost peer that only keeps snapshots ends nothing.
- A holder that says that it leaves hands its part over first (`handover.py`): no step is done
  again. In the same way a replica moves to a better plan.
- What must outlive the broker changes by events only (`broker/records/`). After a restart a replica
  that was RUNNING or EXPORTING goes on with its holders, which come back
  (`broker/recovery/returning.py`); one that was BUILDING goes back to WAITING.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import (
    BUILDING,
    EXPORTING,
    RUNNING,
    Fault,
    LinkStatus,
    RunEvent,
    RunFinishing,
    StepReport,
)
from ...proto.common_pb2 import Reason
from ..events import Instruction, Tell
from ..membership.member import Member, clean
from ..membership.membership import Lost
from ..recovery.recover import Fail, Recover, Replan, recover, replan
from ..recovery.replacements import replacements
from .handover import PlannedStop
from .lifecycle import Lifecycle

__all__ = ["Losses"]

FAULTS_OF_ONE = frozenset(
    {"blob", "busy", "compute", "draining", "export", "frame", "host", "link", "memory"}
    | {"snapshot", "stalled"}
)
"""Codes of faults that another peer need not have. Others would come again wherever the run is, so
they end it: once a second peer says so too, or where there is no second one."""
NOT_LIVE = "live"
"""A holder has applied the step that is to be begun anew from what is in the stages."""
NOT_REBUILT = "neighbour"
"""A lost stage cannot be made anew from the blocks around it."""
FAULTS_OF_TERMS = frozenset({NOT_LIVE, NOT_REBUILT})
FAULTS_OF_NETWORKS = frozenset({"deadline", "link", "stalled"})
"""Those that pass: a run waits, where it would end for others."""


class Losses:
    """Says what follows from peers that are gone, back, or at fault, and has `lifecycle` do it."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._life = lifecycle
        self._context, self._record = lifecycle.context, lifecycle.record
        self._snapshots, self._handover = lifecycle.snapshots, lifecycle.handover

    # ------------------------------------------------------------ peers that leave, and moves

    def owner_says(self, member: Member) -> None:
        """The owner of a peer with a part in it takes it out of runs, or no longer does."""
        if member.closed is None:
            self._handover.remains(member.id)
        elif member.id in self._record.peers:
            self._handover.leaves(member.id, member.closed.text)

    def hand_over(self, now: float) -> list[Instruction]:
        """Goes on with handing over the parts of those that leave."""
        if self._context.away:
            return []
        if self._context.rounds is None and self._context.stop.why and not self._record.last:
            self._handover.ends(self._context.stop.why)
        if not (self._handover or self._snapshots.on_hold):
            return []
        held = self._snapshots.on_hold
        out, over = self._handover.look(now)
        if held and not self._snapshots.on_hold:
            self._life.deadline.since = now
        if over is None:
            return out
        if over.errand is None:
            return out + self._go_on(over.leavers, "left", over.text, now, live=False)
        if over.errand.plan is None:
            return out + self._life.put_aside(now, lacks=over.text)
        return out + self._move(over.text, over.errand, now)

    def _move(self, text: str, errand: PlannedStop, now: float) -> list[Instruction]:
        """To a better plan, where the replica stands between two steps."""
        planned, context = errand.plan, self._context
        assert planned is not None
        pool = [m.id for m in context.members.pool if not context.suspects.out(m.id, now)]
        gone = [p for p in planned.plan.peers if context.mine(p) is None and p not in pool]
        if gone:
            why = f"the better plan is out of date: {', '.join(gone)} is not free any more"
            return [*self._snapshots.let_go(), *context.note(why, now)]
        wanted = Recover(planned, errand.pairs)
        if errand.ends:
            last = RunEvent(finishing=RunFinishing(step=self._record.committed))
            told = [context.publish(last, now), *context.note(f"it ends: {text}", now)]
            found = self._snapshots.found()
            return told + self._life.builds(wanted, found, "stopping", text, now)
        return self._life.builds(wanted, self._snapshots.found(), "moved", text, now)

    # ------------------------------------------------------------ losses and faults

    def lost(self, lost: Lost, now: float) -> list[Instruction]:
        """A peer with a part in it is no member any more."""
        peer, context = lost.member.id, self._context
        text = f"peer {lost.member.label} was lost {self._record.where}: {lost.cause}"
        if lost.code == "away":
            context.away.wait_for(peer, lost.member.heard_at + context.run.lease_s, text)
            return []
        self._handover.remains(peer)
        self._snapshots.lost(peer)
        context.suspects.lost(peer, now)
        if not self.needs(peer):
            out = context.note(text, now)
            if self._record.checkpoints.awaits(peer):
                out += self._life.no_checkpoint(text, now)
            return [*out, *self._snapshots.order(now), *self._life.finish_export(now)]
        return self._go_on((peer,), lost.code, text, now)

    def lied(self, peer: PeerId, text: str, now: float) -> list[Instruction]:
        """A lie of a peer was proved: it leaves, and others are to take its part."""
        context = self._context
        out = context.release((peer,), Reason(code="lied", text=text), now)
        if not self.needs(peer):
            return [*out, *context.note(text, now)]
        return [*out, *self._go_on((peer,), "lied", text, now)]

    def may_return(self, peer: PeerId) -> bool:
        """Whether a holder whose stream broke is waited for: all who have links with it still hear
        it. If its process had died, these would have broken as well."""
        runs = self._record.phase in (RUNNING, EXPORTING)
        return runs and self.needs(peer) and not self._context.term.down.get(peer)

    def link_told(self, member: Member, status: LinkStatus, now: float) -> list[Instruction]:
        """A link of a peer with a part in it broke, or is up again."""
        context = self._context
        if status.term != self._record.term or context.mine(member.id) is None:
            return []
        peer, down = PeerId(status.peer), context.term.down
        if status.up or peer not in context.parts:
            down.get(peer, {}).pop(member.id, None)
            return []
        down.setdefault(peer, {})[member.id] = None
        if peer not in context.away.broken:
            return []
        text = f"{context.away.broken[peer]}, as did its link with {member.label}"
        context.suspects.lost(peer, now)
        return self._go_on((peer,), "lost", text, now)

    def needs(self, peer: PeerId) -> bool:
        """Whether it cannot go on without a peer: a holder, until all have finished the last step
        and it has sent the weights that it answers for; and who gives a holder a snapshot."""
        record, term = self._record, self._context.term
        if record.phase == BUILDING:
            giving = [g.source for g in term.transfers if g.destination not in term.ready]
            return peer in record.peers or peer in giving
        if peer not in record.peers:
            return False
        over = record.phase == EXPORTING and all(p in term.finished for p in record.peers)
        return not over or (peer in record.exporters and peer not in term.exports)

    def fault(self, member: Member, fault: Fault, now: float) -> list[Instruction]:
        record, context = self._record, self._context
        other = context.mine(PeerId(fault.about))
        holds = member.run == record.id and member.id in record.peers
        convicted = (
            other is not None
            and other is not member
            and holds
            and context.suspects.accuse(member.id, other.id)  # also late
        )
        code = clean(fault.reason.code, 60) or "fault"
        breaks = code not in FAULTS_OF_ONE | FAULTS_OF_TERMS
        claimed = breaks and holds and context.suspects.claim(member.id, code)
        late = (convicted or claimed) and fault.term + 1 == record.term
        stale = self._life.stale("fault", member, fault.term, BUILDING, RUNNING, EXPORTING)
        if stale and not (late and record.active and member.state == "assigned"):
            return stale
        about = ""
        if fault.about:
            about = f" about peer {other.label if other else clean(fault.about, 128)}"
        what = clean(fault.reason.text, 2000) or clean(fault.reason.code, 60) or "no reason given"
        where = f"at step {fault.step}" if record.phase == RUNNING else record.where
        text = f"peer {member.label} reports a fault {where}{about}: {what}"
        out_of = other if other is not None and convicted else member
        if not self.needs(out_of.id):  # another may keep the copies
            context.suspects.leave_out(out_of.id, now)
            reason = Reason(code="released", text=text)
            return [*context.release((out_of.id,), reason, now), *context.note(text, now)]
        if code == "snapshot":
            only = replacements(self._snapshots.view(now), (member.id,)) is None
            self._snapshots.sets.spoilt(context.term.begun_from, member.id, only)
        if code in FAULTS_OF_TERMS and context.suspects.excuses(member.id, record.committed):
            return self._go_on((), code, text, now, live=False)
        if breaks and (claimed or self._is_alone(member, now, code)):
            return self._life.fail(code, text, now)
        return self._without((out_of.id,), code, text, now)

    def _is_alone(self, member: Member, now: float, code: str = "") -> bool:
        """Whether a peer is the run's only holder, or the only one that has its data and finds
        fault with that, and no other is there to take its part."""
        alone = self._record.peers == (member.id,) and not self._context.has_others
        view = self._snapshots.view(now)
        reads = (view.run.owner, self._record.data.hash) in member.manifests
        # What is wrong with data that only it has, nobody else could say.
        alone |= bool(self._record.local) and reads and code == "data"
        return alone and replacements(view, (member.id,)) is None

    def _without(
        self, peers: Sequence[PeerId], code: str, text: str, now: float
    ) -> list[Instruction]:
        """Go on without peers that are here and do not do their part."""
        record, suspects = self._record, self._context.suspects
        everybody = set(peers) >= set(record.peers)
        if everybody:  # they wait for each other: once more, from the term's start
            alone = len(record.peers) == 1
            tries = suspects.tries_at(record.committed)
            others = self._context.has_others and tries > 0  # these go on meanwhile
            if not others and not (alone and replacements(self._snapshots.view(now), peers)):
                peers = ()
        if not suspects.again(peers, record.committed, now):
            text += f". That was tried {suspects.tries} times at this step"
            if code not in FAULTS_OF_NETWORKS and not self._context.has_others:
                return self._life.fail(code, text, now)
            why: list[str] = []
            decision = replan(self._snapshots.view(now), why)
            return self._carry_out(decision, code, text + "".join(why), now)
        out = self._context.release(peers, Reason(code="released", text=text), now)
        return out + self._go_on(peers, code, text, now)

    def wrong_report(
        self, member: Member, report: StepReport, why: str, now: float
    ) -> list[Instruction]:
        """A holder reported a step that cannot be; or one so far ahead of others that either these
        do not say what they do, or it says what it does not: two that are ahead convict them."""
        ledger, accuse = self._record.ledger, self._context.suspects.accuse
        ahead = ledger is not None and report.step == ledger.next_of(member.id)
        missing: list[PeerId] = []
        if ledger is not None and ahead:
            by = dict.fromkeys((member.id, *ledger.far_ahead))
            missing = [p for p in ledger.missing if any([accuse(one, p) for one in by])]
        text = f"peer {member.label} reported {why}"
        if not missing and self._is_alone(member, now):
            return self._life.fail("protocol", text, now)
        return self._without(missing or (member.id,), "protocol", text, now)

    def _go_on(
        self, gone: Sequence[PeerId], code: str, text: str, now: float, live: bool = True
    ) -> list[Instruction]:
        """Without these holders. `live`: what is in the stages may be gone on from."""
        away = self._context.waits_no_longer()
        gone = (*gone, *(p for p in away if p not in gone))
        view = self._snapshots.view(now)
        decision, why = recover(view, gone, live)
        if isinstance(decision, Recover):
            return self._life.builds(decision, view.found, code, text + why, now)
        return self._carry_out(decision, code, text + why, now)

    def _carry_out(
        self, decision: Replan | Fail, code: str, text: str, now: float
    ) -> list[Instruction]:
        ends = isinstance(decision, Fail)
        return (self._life.fail if ends else self._life.collects)(code, text, now)

    # ------------------------------------------------------------ after a restart

    def keeper_back(self, keeper: Member, now: float) -> list[Instruction]:
        """A peer that only keeps copies attached again, with these."""
        return [] if self._context.away else self._snapshots.order(now)

    def back(self, member: Member, now: float) -> list[Instruction]:
        """A holder attached again, still with its part. It may not have heard the Start, nor which
        step is on hold, or no longer."""
        self._context.away.back(member.id)
        self._life.deadline.back(member.id, now)
        self._snapshots.cadence.given_up()  # it may not have heard the order
        if self._record.checkpoints.awaits(member.id):
            self._record.checkpoints.again()
        self._handover.holds(member)
        out: list[Instruction] = [Tell(member.stream, self._life.start())]
        if self._context.away:
            return out
        return [*out, *(self._snapshots.order(now) or self._snapshots.tell_order())]

    # ------------------------------------------------------------ time

    def timer(self, now: float) -> list[Instruction]:
        """The deadline's timer fired."""
        deadline, record, context = self._life.deadline, self._record, self._context
        if not deadline.passed(now):
            return []
        if context.away:
            return self._nobody_came(now)
        if record.phase == RUNNING:
            over = self._handover.timed(now)
            if over is not None:
                return self._go_on(over.leavers, "left", over.text, now)
            phase = deadline.of_phase
            if self._snapshots.on_hold or phase is None or now < phase:
                return []
        waited = now - deadline.since
        if record.phase == BUILDING:
            missing = [p for p in record.peers if p not in context.term.ready]
            text = f"not built within {waited:.0f} s: no Ready came from {{}}"
        elif record.phase == EXPORTING:
            missing = [p for p in record.exporters if p not in context.term.exports]
            if not missing:
                out = self._life.no_checkpoint(f"nothing of it came for {waited:.0f} s", now)
                return out + self._life.finish_export(now)
            text = f"no weights came for {waited:.0f} s: they are missing from {{}}"
        else:
            assert record.ledger is not None, record
            missing = list(record.ledger.missing)
            measured = record.ledger.median_s
            known = "none measured" if measured is None else f"median {measured:.2f} s"
            text = (
                f"step {record.committed} made no progress for {waited:.0f} s (steps so far: "
                f"{known}): no report came from {{}}"
            )
        text = text.format(context.labels(missing))
        return self._without(missing, "deadline", text, now)

    def _nobody_came(self, now: float) -> list[Instruction]:
        context = self._context
        away, broken = context.away.peers, context.away.broken
        lease = f"within a lease of {context.run.lease_s:g} s, {self._record.where}"
        text = "; ".join((*broken.values(), f"{context.labels(away)} did not come back {lease}"))
        for peer in broken:
            context.suspects.lost(peer, now)
        return self._go_on(away, "lost", text, now)
