"""What one assignment says of snapshots: who keeps whose, who gives which to whom, and from which
set the run goes on. Pure: no I/O, no clock, no threads."""

from __future__ import annotations

from ....dag.plan.plan import PeerId
from ....proto import broker_pb2
from ..snapshots import SnapshotId

__all__ = ["SnapshotPlan"]


class SnapshotPlan:
    """The part of `peer` in the snapshots of one assignment; of an empty one, none. What frames are
    judged by is found once: a plan has up to a thousand holders."""

    def __init__(self, peer: PeerId, assign: broker_pb2.Assign) -> None:
        self.peer, self.assign = peer, assign
        keepers, transfers = assign.slice.plan.keepers, assign.resume.transfers
        self.keepers: list[str] = [k.peer for k in keepers if k.holder == peer]
        """Who gets the own snapshots; orders of the broker may name another one."""
        self.comes = [t for t in transfers if t.destination == peer]
        """Transfers that come here, of the set that the run goes on from."""
        self.goes = [t for t in transfers if t.source == peer]
        """Transfers that this peer makes."""
        self.counterparts = self._counterparts()
        """With whom snapshots may be exchanged."""
        self._spans: dict[str, list[broker_pb2.Span]] = {}

    def _counterparts(self) -> tuple[PeerId, ...]:
        """The keepers of the plan and, where one of them is lost, the next holder."""
        keepers = self.assign.slice.plan.keepers
        found = dict.fromkeys(k.holder for k in keepers if k.peer == self.peer)
        found |= dict.fromkeys(self.keepers)
        found |= dict.fromkeys(self.assign.slice.ring)
        for transfer in self.assign.resume.transfers:
            if transfer.source == self.peer:
                found[transfer.destination] = None
            elif transfer.destination == self.peer:
                found[transfer.source] = None
        return tuple(PeerId(p) for p in found if p != self.peer)

    @property
    def gives_blocks(self) -> bool:
        """Whether others make lost stages from blocks of this peer's own."""
        return bool(self.assign.resume.rebuilt) and any(g.holder == self.peer for g in self.goes)

    @property
    def awaited(self) -> dict[SnapshotId, None]:
        """Snapshots that others give to this peer."""
        return dict.fromkeys(self.of_set(t.holder) for t in self.comes)

    def gets(self, snapshot: SnapshotId, source: str) -> bool:
        """Whether `source` is to give this snapshot to this peer."""
        return any(self.of_set(t.holder) == snapshot and t.source == source for t in self.comes)

    def of_set(self, holder: str) -> SnapshotId:
        """Return a holder's snapshot in the set that the assignment goes on from."""
        assign, resume = self.assign, self.assign.resume
        return SnapshotId(assign.run, resume.term, assign.first_step, holder, resume.round)

    def spans_of(self, holder: str) -> list[broker_pb2.Span]:
        """Return the operators of a holder's stages."""
        if holder not in self._spans:
            stages = self.assign.slice.plan.stages
            self._spans[holder] = [
                broker_pb2.Span(start=s.start, stop=s.stop) for s in stages if holder in s.holders
            ]
        return self._spans[holder]

    def own(self, step: int, of_round: int) -> broker_pb2.Snapshot:
        """Return what names this peer's snapshot of a step."""
        assign = self.assign
        return self.message(SnapshotId(assign.run, assign.term, step, self.peer, of_round))

    def message(self, found: SnapshotId) -> broker_pb2.Snapshot:
        """Return a snapshot's message, whose spans say the plan under which it was taken or, of a
        transfer, who ordered that."""
        spans = [s for t in self.comes if t.holder == found.holder for s in t.spans]
        if found.term == self.assign.term:
            spans = self.spans_of(found.holder)
        named = broker_pb2.Snapshot(run=found.run, term=found.term, step=found.step, spans=spans)
        named.holder, named.round = found.holder, found.round
        return named
