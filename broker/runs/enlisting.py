"""Keepers of a replica that runs: peers that came since its term began, in place of those that are
gone.

- A plan says who keeps copies when its term begins. From then on a free peer is given the part of a
  keeper in the same term, and holders are told of it: nobody's training stops for that.
- None is taken for whom a waiting replica would begin, now or with the peers that keep copies.
  One that could not begin even so leaves them all alone, and they come back once it could.
- Who keeps what is no more than the broker's memory, as is where copies lie: after a restart of the
  broker such a keeper is told to leave, as any peer that nobody awaits, and is asked again then.
  That it may have copies is kept (`broker/snapshots/places.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...dag.plan.plan import PeerId, SnapshotKeeper
from ...dag.plan.report import PlanWithReport
from ...dag.schedule.slices import PlanSlices
from ...proto.broker_pb2 import DialOrder, Keeper, RunEvent
from ...proto.common_pb2 import Reason
from ..events import Instruction
from ..records.submitted import SubmittedRun
from ..snapshots.keepers import choose_keepers
from .context import ReplicaContext
from .snapshots import ReplicaSnapshots
from .term import assignment, tell_part

__all__ = ["KeeperSearch"]

_AGAIN_S = 1.0
"""Between two looks at peers that other replicas wait for."""


class KeeperSearch:
    """Gives free peers the part of keepers, within a term of one replica."""

    def __init__(self, context: ReplicaContext, snapshots: ReplicaSnapshots) -> None:
        self._context, self._record, self._snapshots = context, context.record, snapshots
        self._seen: object = None
        """Facts of the last look: it finds nothing else before they change."""
        self._again_at = math.inf
        """When a peer that is left out for a fault may be asked."""

    def look(self, hopeful: Callable[[], Sequence[SubmittedRun]], now: float) -> list[Instruction]:
        """Has free peers keep copies where fewer do than the job asks for; one at least while a
        holder leaves whose copies nobody could keep. `hopeful`: runs that wait and may begin
        with free peers."""
        context, plan = self._context, self._context.plan
        run, members, suspects = context.run, context.members, context.suspects
        if not self._record.running or plan is None or not run.takes_snapshots or context.away:
            return []
        leaving = bool(context.term.leaving)
        facts = members.version, self._record.term, self._snapshots.unreliable, leaving
        if facts == self._seen and now < self._again_at:
            return []
        self._seen, self._again_at = facts, suspects.first_back(now) or math.inf
        unreliable = self._snapshots.unreliable
        ours = [m for p in plan.warm if (m := context.mine(p)) and m.closed is None]
        here = [m for m in ours if m.id not in unreliable]
        wish = run.requirements.recovery.spares
        if leaving and len(self._snapshots.keepers(plan)) < len(plan.peers):
            wish = max(1, wish)
        if len(here) >= wish:
            return []
        spares = [m for m in context.spares(plan.peers) if not suspects.out(m.id, now)]
        waiting = hopeful() if spares else ()
        free = [m for m in spares if not any(run.suits(m) for run in waiting)]
        if len(free) < len(spares):  # until they are not wanted any more
            self._again_at = min(self._again_at, now + _AGAIN_S)
        if not free:
            return []
        keepers = choose_keepers(
            PlanWithReport(plan, self._record.report),
            (*here, *free),
            members,
            wish,
            lambda m: context.rank(m, now),
            unreliable,
        )
        return self._enlist(keepers, now)

    def _enlist(self, keepers: tuple[SnapshotKeeper, ...], now: float) -> list[Instruction]:
        """Give the copies to these peers from here on; do nothing when none of them is new."""
        context, members = self._context, self._context.members
        parts, before = context.parts, context.plan
        new = dict.fromkeys(k.peer for k in keepers if context.mine(k.peer) is None)
        if not new or before is None:
            return []
        plan = context.term.plan = replace(before, keepers=keepers)
        reason = Reason(code="released", text="another peer keeps the copies")
        gone = [p for p in parts if p not in context.parts]
        out = context.release(gone, reason, now)
        context.unwelcome(gone)  # after a restart the broker may still wait for one of them
        own: dict[PeerId, DialOrder] = {}
        others: dict[PeerId, list[DialOrder]] = {p: [] for p in new}
        for k in keepers:
            if k.peer not in new or (way := members.dial(k.holder, k.peer)) is None:
                continue
            source, order = way
            if source == k.holder:
                own[k.holder] = order
            else:
                others[k.peer].append(order)
        slices, base = PlanSlices(plan), assignment(context, self._record.committed, None)
        for peer in new:
            member = members.members[peer]
            out += members.assign(member, self._record.id)
            out.append(tell_part(context, member, base, slices.of(peer), others[peer]))
        text = f"copies of its snapshots are kept by {context.labels(new)} from here on"
        keep = [Keeper(holder=k.holder, peer=k.peer) for k in keepers]
        out.append(context.publish(RunEvent(note=text, keepers=keep), now))
        return [*out, *self._snapshots.kept_by(own, now)]
