"""Which snapshots lie here, which are taken, given and awaited: decisions only.

- The broker orders a snapshot of a step (`SnapshotOrder`), one at a time. It is taken when so many
  updates are in the stages and nothing of it can have changed: parameters, slots and buffers stay
  as they are until the update, codecs until a neighbour may be a step ahead, which needs this
  peer's part of the norm (N>). An order that comes later than that is missed, and the broker told.
- A holder gives each own snapshot to its keepers by the plan. A copy is reported when it is whole.
- On resuming, whoever lies nearest gives snapshots on (`Gift`); the assignment is built when all
  that this peer awaits are here.
- Snapshots outlive assignments and terms. They go when a newer set is complete, which the broker
  says, or when the run has ended.

Pure: no I/O, no clock, no threads.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..dag.flow import Role
from ..dag.plan import PeerId
from ..net.frame import FrameKey
from ..proto import broker_pb2, common_pb2
from . import events as e
from .snapshots import SnapshotId

__all__ = ["Keeping"]

_SLOTS = 2
"""Parts that may be here or on their way from one peer: one arrives while one is written."""


class Keeping:
    """Of one peer. Its methods return what is to be done, in order."""

    def __init__(self, peer: PeerId, found: Iterable[tuple[broker_pb2.Snapshot, int]] = ()) -> None:
        """`found`: what an earlier process left, with the number of parts."""
        self.peer = peer
        self.held: dict[SnapshotId, tuple[broker_pb2.Snapshot, int]] = {
            SnapshotId.of(snapshot): (snapshot, parts) for snapshot, parts in found
        }
        """Whole ones, with their number of parts."""
        self.wanted: int | None = None
        """The step that the next own snapshot is of, ordered and not begun."""
        self._taking: SnapshotId | None = None
        self._coming: dict[SnapshotId, set[int]] = {}
        """Parts that came of those that are not whole yet."""
        self._assign = broker_pb2.Assign()
        self._gifts: list[broker_pb2.Gift] = []
        self._keepers: list[broker_pb2.Keeper] = []

    # ------------------------------------------------------------ an assignment

    def begin(self, assign: broker_pb2.Assign) -> list[e.Instruction]:
        """A new plan: who gives what to whom from here on."""
        self.end()
        self._assign = assign
        self._keepers = list(assign.plan.keepers)
        self._gifts = [g for g in assign.resume.gifts if g.destination == self.peer]
        # Who gives to it may change; links among those who hold stages are there all the time.
        out: list[e.Instruction] = [e.Allow(p, Role.SNAPSHOT, _SLOTS) for p in self.counterparts]
        for gift in assign.resume.gifts:
            if gift.source == self.peer:
                out += self._give(self._of_set(gift.holder), gift.destination)
        return out

    def end(self) -> None:
        """The assignment ends; what is whole stays."""
        self.wanted = self._taking = None
        self._coming.clear()
        self._assign, self._gifts, self._keepers = broker_pb2.Assign(), [], []

    @property
    def counterparts(self) -> tuple[PeerId, ...]:
        """With whom snapshots may be exchanged under the present plan: its keepers and, where one
        of them is lost, the next holder."""
        found = dict.fromkeys(k.holder for k in self._assign.plan.keepers if k.peer == self.peer)
        found |= dict.fromkeys(k.peer for k in self._assign.plan.keepers if k.holder == self.peer)
        holders = list(dict.fromkeys(h for s in self._assign.plan.stages for h in s.holders))
        if self._assign.plan.keepers and self.peer in holders:
            at, n = holders.index(self.peer), len(holders)
            found |= dict.fromkeys((holders[at - 1], holders[(at + 1) % n]))
        for gift in self._assign.resume.gifts:
            if gift.source == self.peer:
                found[gift.destination] = None
            elif gift.destination == self.peer:
                found[gift.source] = None
        return tuple(PeerId(p) for p in found if p != self.peer)

    @property
    def awaits(self) -> bool:
        """Whether something that the assignment goes on from is still on its way."""
        return any(self._of_set(g.holder) not in self.held for g in self._gifts)

    def _of_set(self, holder: str) -> SnapshotId:
        """A snapshot of the set that the assignment resumes from."""
        assign = self._assign
        return SnapshotId(assign.run, assign.resume.term, assign.first_step, holder)

    # ------------------------------------------------------------ own snapshots

    def ordered(self, order: broker_pb2.SnapshotOrder) -> list[e.Instruction]:
        """Forgets what is not needed any more. `wanted` is what is to be taken now."""
        out: list[e.Instruction] = [
            e.DropSnapshot(s) for s in self.held if s.run == order.run and s.step < order.needed
        ]
        for item in out:
            assert isinstance(item, e.DropSnapshot)
            del self.held[item.snapshot]
        if order.keepers and (order.run, order.term) == (self._assign.run, self._assign.term):
            self._keepers = list(order.keepers)
        return out

    def take(self, step: int) -> list[e.Instruction]:
        """The stages have the ordered step's updates now."""
        self.wanted = None
        snapshot = self._own(step)
        self._taking = SnapshotId.of(snapshot)
        return [e.TakeSnapshot(self._assign.run, self._assign.term, snapshot)]

    def missed(self, step: int, why: str) -> list[e.Instruction]:
        self.wanted = None
        return [_report(self._own(step), why)]

    def taken(self, event: e.SnapshotTaken) -> list[e.Instruction]:
        """It lies here; its keepers get theirs."""
        found = SnapshotId.of(event.snapshot)
        if found != self._taking:
            return [e.DropSnapshot(found)]
        self._taking = None
        self.held[found] = event.snapshot, event.parts
        out: list[e.Instruction] = [_report(event.snapshot)]
        for keeper in self._keepers:
            if keeper.holder == self.peer:
                out += self._give(found, keeper.peer)
        return out

    def failed(self, snapshot: broker_pb2.Snapshot, why: str) -> list[e.Instruction]:
        """It could not be taken or written."""
        found = SnapshotId.of(snapshot)
        if found == self._taking:
            self._taking = None
        self.held.pop(found, None)
        return [e.DropSnapshot(found), _report(snapshot, why)]

    def _own(self, step: int) -> broker_pb2.Snapshot:
        plan = self._assign.plan
        return broker_pb2.Snapshot(
            run=self._assign.run,
            term=self._assign.term,
            step=step,
            holder=self.peer,
            spans=[
                broker_pb2.Span(start=s.start, stop=s.stop)
                for s in plan.stages
                if self.peer in s.holders
            ],
        )

    def _give(self, snapshot: SnapshotId, to: str) -> list[e.Instruction]:
        if snapshot not in self.held:
            return []  # the broker was told so; whoever awaits it complains in its time
        _, parts = self.held[snapshot]
        keys = (snapshot.frame(self._assign.term, i, parts, self.peer, to) for i in range(parts))
        return [e.SendFrame(key) for key in keys]

    # ------------------------------------------------------------ copies

    def expects(self, key: FrameKey) -> bool:
        """Whether the present plan names such a frame to this peer."""
        term, _, holder = key.port.partition("/")
        assign = self._assign
        if (key.run, key.term, key.destination) != (assign.run, assign.term, self.peer):
            return False
        of_set = (term, key.step) == (str(assign.resume.term), assign.first_step)
        if of_set and any((g.holder, g.source) == (holder, key.source) for g in self._gifts):
            return True
        keeps = any(
            (k.holder, k.peer) == (holder, self.peer) and holder == key.source
            for k in self._keepers
        )
        return keeps and term == str(assign.term)

    def arrived(self, key: FrameKey) -> list[e.Instruction]:
        """A part lies here. When all do, the broker hears of it."""
        found = SnapshotId.of_frame(key)
        out: list[e.Instruction] = [e.Release(key)]
        if found in self.held:
            return out
        coming = self._coming.setdefault(found, set())
        coming.add(key.microbatch)
        if len(coming) < key.hop:
            return out
        del self._coming[found]
        snapshot = self._message(found)
        self.held[found] = snapshot, key.hop
        return [*out, e.KeepSnapshot(snapshot, key.hop), _report(snapshot)]

    def _message(self, found: SnapshotId) -> broker_pb2.Snapshot:
        """Of a copy, whose spans the plan says that it was taken under; a gift's the broker knows
        already."""
        spans = []
        if found.term == self._assign.term:
            spans = [
                broker_pb2.Span(start=s.start, stop=s.stop)
                for s in self._assign.plan.stages
                if found.holder in s.holders
            ]
        else:
            spans = [
                broker_pb2.Span(start=s.start, stop=s.stop)
                for g in self._gifts
                if g.holder == found.holder
                for s in g.spans
            ]
        return broker_pb2.Snapshot(
            run=found.run, term=found.term, step=found.step, holder=found.holder, spans=spans
        )

    # ------------------------------------------------------------ the end of a run

    def forget(self, run: str) -> list[e.Instruction]:
        """The run has ended: nobody goes on from it."""
        gone = [s for s in self.held if s.run == run]
        for snapshot in gone:
            del self.held[snapshot]
        return [e.DropSnapshot(s) for s in gone]

    def __repr__(self) -> str:
        return f"<Keeping {len(self.held)} snapshots, {len(self._coming)} on their way>"


def _report(snapshot: broker_pb2.Snapshot, why: str = "") -> e.Tell:
    report = broker_pb2.SnapshotReport(snapshot=snapshot, held=not why)
    if why:
        report.reason.CopyFrom(common_pb2.Reason(code="snapshot", text=why))
    return e.Tell(broker_pb2.PeerMessage(snapshot=report))
