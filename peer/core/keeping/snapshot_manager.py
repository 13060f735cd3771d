"""Which snapshots lie here, which are taken, given and awaited: decisions only.

- The broker orders a snapshot of a step (`SnapshotOrder`), one at a time. It is taken when so many
  updates are in the stages and nothing of it can have changed: parameters, slots and buffers stay
  as they are until the update, codecs until a neighbour may be a step ahead, which needs this
  peer's part of the norm (or any, where nobody waits for that). An order that comes later than that
  is missed, and the broker told.
- A holder gives each own snapshot to its keepers by the plan, a few parts at a time. A copy is
  reported when it is whole. One that cannot be kept, since the disk is full, say, is reported too,
  and given up; the run goes on.
- Of each holder little lies here, whatever it sends: nothing larger than this peer announced to
  have (`most_bytes`), one copy on its way and, of those that are
  whole, the oldest that may be needed, the newest two, and what the assignment goes on from.
- Of a snapshot that is to be part of a checkpoint, a copy is brought to the broker besides.
- On resuming, whoever lies nearest gives snapshots on (`SnapshotTransfer`); the assignment is built
  when all that this peer awaits are here.
- Of what a lost stage is made from (`peer/compute/rebuilt.py`), each giver makes something like a
  snapshot of term 0 once its own stages stand. The broker hears nothing of these, and nobody keeps
  them.
- Snapshots outlive assignments and terms. They go when a newer set is complete, which the broker
  says, or when the run has ended.

Pure: no I/O, no clock, no threads.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from ....dag.execute.execute import TensorSpecError
from ....dag.plan.plan import PeerId
from ....dag.schedule.flow import Role
from ....net.links.frame import FrameKey
from ....proto import broker_pb2, common_pb2
from .. import events as e
from ..snapshots import BLOCKS, PART_BYTES, SnapshotId
from .gifts import SLOTS, Gifts
from .snapshot_plan import SnapshotPlan

__all__ = ["SnapshotManager", "takes"]

_NEWEST = 2
"""Snapshots kept of one holder under one plan: that of the last order, and that of the order
before."""


@dataclass
class _Coming:
    """A copy that is not whole. `parts`: how many it has, as the first of them says."""

    parts: int
    came: set[int] = field(default_factory=set)
    refused: str = ""
    """Why it is not kept; what else comes of it is dropped."""


class SnapshotManager:
    """Decides which snapshots one peer keeps, copies to others and deletes. Its methods return what
    is to be done, in order."""

    def __init__(
        self,
        peer: PeerId,
        found: Iterable[tuple[broker_pb2.Snapshot, int]] = (),
        most_bytes: int = 0,
    ) -> None:
        """`found`: what an earlier process left, with the number of parts. `most_bytes`: of one
        snapshot of another peer, the host memory that this one announced; 0: it said nothing."""
        self.peer = peer
        self._most_parts = -(-most_bytes // PART_BYTES) if most_bytes else 0
        self.held: dict[SnapshotId, tuple[broker_pb2.Snapshot, int]] = {
            SnapshotId.of(snapshot): (snapshot, parts) for snapshot, parts in found
        }
        """Whole ones, with their number of parts."""
        self.wanted: int | None = None
        """The step that the next own snapshot is of, ordered and not begun."""
        self.of_round = 0
        """Whose version is to be in it, of a run with rounds."""
        self.hold = 0
        """The step that nobody begins under this plan, as the broker last said; 0: none."""
        self._taking: SnapshotId | None = None
        self._upload: tuple[int, int] | None = None
        """Step and round of the own snapshot that is to be brought to the broker."""
        self._coming: dict[SnapshotId, _Coming] = {}
        self._needed = 0
        """The lowest step that somebody may go back to, as the broker last said."""
        self._plan = SnapshotPlan(peer, broker_pb2.Assign())
        self._gifts = Gifts(peer, self.held)

    # ------------------------------------------------------------ an assignment

    def begin(self, assign: broker_pb2.Assign) -> list[e.Instruction]:
        """A new plan: who gives what to whom from here on."""
        out = self.end()
        self._plan = plan = SnapshotPlan(self.peer, assign)
        # Who gives to it may change; links among those who hold stages are there all the time.
        out += [e.Allow(p, Role.SNAPSHOT, SLOTS) for p in plan.counterparts]
        for transfer in plan.goes:
            out += self._give(plan.of_set(transfer.holder), transfer.destination)
        return out

    def end(self) -> list[e.Instruction]:
        """The assignment ends; what is whole stays."""
        out = [self._forget(s) for s in (*self._coming, *self._awaited)] + self.rebuilt()
        self.wanted, self._taking, self._upload = None, None, None
        self._needed, self.hold = 0, 0
        self._gifts.clear()
        self._plan = SnapshotPlan(self.peer, broker_pb2.Assign())
        return out

    def _forget(self, snapshot: SnapshotId) -> e.Instruction:
        self.held.pop(snapshot, None)
        self._coming.pop(snapshot, None)
        return e.DropSnapshot(snapshot)

    @property
    def counterparts(self) -> tuple[PeerId, ...]:
        """With whom snapshots may be exchanged under the present plan."""
        return self._plan.counterparts

    @property
    def awaits(self) -> bool:
        """Whether something that the assignment goes on from is still on its way."""
        return bool(self._awaited)

    @property
    def _awaited(self) -> tuple[SnapshotId, ...]:
        return tuple(s for s in self._plan.awaited if s not in self.held)

    @property
    def refused_gift(self) -> str:
        """Why something of that could not be kept here; empty: nothing."""
        coming = (self._coming.get(s) for s in self._awaited)
        return next((c.refused for c in coming if c is not None and c.refused), "")

    @property
    def resumed(self) -> tuple[SnapshotId, ...]:
        """The snapshots here of the set that the assignment goes on from, with some of its stages;
        or, where these are rebuilt, the blocks that they are made from."""
        plan, resume = self._plan, self._plan.assign.resume
        if self.peer in resume.rebuilt:
            return tuple(s for s in self.held if s.term == BLOCKS)
        mine = [(s.start, s.stop) for s in plan.spans_of(self.peer)]
        named = map(plan.of_set, resume.holders)
        return tuple(
            s
            for s in named
            if s in self.held
            and any(a < x.stop and x.start < b for x in self.held[s][0].spans for a, b in mine)
        )

    def spoilt(self, why: str) -> list[e.Instruction]:
        """Report snapshots that cannot be gone on from."""
        gone = [(s, self.held[s][0]) for s in self.resumed]
        return [i for s, message in gone for i in (self._forget(s), _report(message, why))]

    def give_blocks(self) -> list[e.Instruction]:
        """The own stages stand: what others make lost ones from is to be copied."""
        plan = self._plan
        return self._take(plan.message(plan.of_set(self.peer))) if plan.gives_blocks else []

    def rebuilt(self) -> list[e.Instruction]:
        """Nobody needs what lost stages were made from any more."""
        return [self._forget(s) for s in [*self.held] if s.term == BLOCKS]

    # ------------------------------------------------------------ own snapshots

    def ordered(self, order: broker_pb2.SnapshotOrder) -> list[e.Instruction]:
        """Forgets what is not needed any more. `wanted` is what is to be taken now."""
        assign = self._plan.assign
        if (order.run, order.term) == (assign.run, assign.term):
            self._needed, self.hold = max(self._needed, order.needed), order.hold
            if order.HasField("keeper"):
                self._plan.keepers = [order.keeper] if order.keeper else []
            if takes(order):
                self.of_round = order.round
            if order.upload:
                self._upload = order.step, order.round
        gone = [s for s in self._here(order.run) if s.step < order.needed]
        return [self._forget(s) for s in gone]

    def _here(self, run: str) -> Iterator[SnapshotId]:
        """Ids of all whole or partial snapshots held of a run."""
        return (s for s in (*self.held, *self._coming) if s.run == run)

    def take(self, step: int) -> list[e.Instruction]:
        """The stages have the ordered step's updates now."""
        self.wanted = None
        return self._take(self._plan.own(step, self.of_round))

    def _take(self, snapshot: broker_pb2.Snapshot) -> list[e.Instruction]:
        self._taking, assign = SnapshotId.of(snapshot), self._plan.assign
        return [e.TakeSnapshot(assign.run, assign.term, snapshot)]

    def missed(self, step: int, why: str) -> list[e.Instruction]:
        self.wanted = None
        return [_report(self._plan.own(step, self.of_round), why)]

    def taken(self, event: e.SnapshotTaken) -> list[e.Instruction]:
        """Note that a snapshot lies here; its keepers get theirs."""
        found = SnapshotId.of(event.snapshot)
        if found != self._taking:
            return [e.DropSnapshot(found)]
        self._taking = None
        self.held[found] = event.snapshot, event.parts
        if found.term == BLOCKS:
            return [i for t in self._plan.goes for i in self._give(found, t.destination)]
        out = [_report(event.snapshot), *self._surplus(found)]
        if (found.step, found.round) == self._upload:
            out.append(e.UploadSnapshot(event.snapshot))
        for keeper in self._plan.keepers:
            out += self._give(found, keeper)
        return out

    def failed(self, snapshot: broker_pb2.Snapshot, why: str) -> list[e.Instruction]:
        """Report a snapshot that could not be taken or written."""
        found = SnapshotId.of(snapshot)
        if found == self._taking:
            self._taking = None
        return [self._forget(found), _report(snapshot, why)]

    def saved(self, event: e.SnapshotSaved) -> list[e.Instruction]:
        """Report a snapshot that lies with the broker, or could not be brought there."""
        snapshot = event.snapshot
        said = broker_pb2.Saved(run=snapshot.run, term=snapshot.term, step=snapshot.step)
        if event.blob is not None:
            said.blob.CopyFrom(event.blob)
        else:
            said.reason.CopyFrom(common_pb2.Reason(code="blob", text=event.why))
        return [e.Tell(broker_pb2.PeerMessage(saved=said))]

    def _surplus(self, new: SnapshotId) -> list[e.Instruction]:
        """What of a holder lies here beyond its bound, now that one more is whole."""
        alike = sorted(s for s in self.held if _alike(s, new))
        named = self._plan.of_set(new.holder)
        gone = [s for s in alike[1:-_NEWEST] if s != named]
        why = f"{_NEWEST} newer ones of {new.holder} lie here"
        messages = [self.held[s][0] for s in gone]
        drops = [self._forget(s) for s in gone]
        return [*drops, *(_report(m, why) for m in messages)]

    def _give(self, snapshot: SnapshotId, to: str) -> list[e.Instruction]:
        return self._gifts.give(snapshot, to, self._plan.assign.term)

    def acknowledged(self, key: FrameKey) -> list[e.Instruction]:
        """A part that was given is there, or never will be."""
        return self._gifts.acknowledged(key)

    # ------------------------------------------------------------ copies

    def expects(self, key: FrameKey) -> bool:
        """Whether a part of a snapshot is to be kept. A holder's own of the present term may come
        from any that has a link for it: it may hear of new keepers before they do."""
        plan, assign = self._plan, self._plan.assign
        if (key.run, key.term, key.destination) != (assign.run, assign.term, self.peer):
            return False
        try:
            found = SnapshotId.of_frame(key)
        except TensorSpecError:
            return False
        coming = self._coming.get(found)
        if found in self.held or (coming is not None and coming.refused):
            return False
        if plan.gets(found, key.source):
            return True
        own = (found.term, found.holder) == (assign.term, key.source)
        if not own or found.step < self._needed or not plan.spans_of(key.source):
            return False
        newest = max(((s.step, s.round) for s in self._coming_of(found)), default=(0, 0))
        return (found.step, found.round) >= newest and key.source in plan.counterparts

    def _coming_of(self, alike: SnapshotId) -> Iterator[SnapshotId]:
        """Copies of the same holder under the same plan that are on their way."""
        return (s for s in self._coming if _alike(s, alike))

    def arrived(self, key: FrameKey) -> list[e.Instruction]:
        """A part lies here. When all do, the broker hears of it."""
        if not self.expects(key):
            return self.stray(key)
        found = SnapshotId.of_frame(key)
        out: list[e.Instruction] = [e.Release(key)]
        out += [self._forget(s) for s in [*self._coming_of(found)] if s != found]
        coming = self._coming.setdefault(found, _Coming(key.hop))
        if self._most_parts and key.hop > self._most_parts:
            size = (key.hop - 1) * PART_BYTES
            what = f"a snapshot of over {size / 1e9:.3g} GB"
            most = self._most_parts * PART_BYTES / 1e9
            return self.refused(key, f"{what} came: {self.peer} offers {most:.3g} GB of its host")
        if key.hop != coming.parts:
            return self.refused(key, f"a part of {key.hop} came, the first was of {coming.parts}")
        coming.came.add(key.microbatch)
        if len(coming.came) < coming.parts:
            return out
        del self._coming[found]
        snapshot = self._plan.message(found)
        self.held[found] = snapshot, key.hop
        if found.term == BLOCKS:
            return out
        out += [e.KeepSnapshot(snapshot, key.hop), _report(snapshot)]
        return out + self._surplus(found)

    def refused(self, key: FrameKey, why: str) -> list[e.Instruction]:
        """A part could not be kept, or an own one not be read."""
        if key.source == self.peer:
            found = SnapshotId.of_frame(key)
            gone = self.failed(self.held[found][0], why) if found in self.held else []
            return gone + self.acknowledged(key)  # it will not be: its slot is free
        if not self.expects(key):
            return self.stray(key)
        found = SnapshotId.of_frame(key)
        drop, report = self._forget(found), _report(self._plan.message(found), why)
        self._coming[found] = _Coming(key.hop, refused=why)
        return [e.Release(key), drop, report]

    def stray(self, key: FrameKey) -> list[e.Instruction]:
        """Nobody waits for this part, or no longer: it may lie here all the same."""
        out: list[e.Instruction] = [e.Release(key)]
        try:
            found = SnapshotId.of_frame(key)
        except TensorSpecError:
            return out
        wanted = {*self.held, *self._awaited, self._taking}
        wanted |= {s for s, coming in self._coming.items() if not coming.refused}
        if key.destination != self.peer or found in wanted:
            return out
        return [*out, e.DropSnapshot(found)]

    # ------------------------------------------------------------ the end of a run

    def forget(self, run: str) -> list[e.Instruction]:
        """The run has ended: nobody goes on from it."""
        return [self._forget(s) for s in [*self._here(run)]]

    def newest(self, most: int) -> list[broker_pb2.Snapshot]:
        """Return the snapshots that lie here, the newest last; at most so many."""
        here = sorted(self.held, key=lambda s: (s.step, s.term))
        return [self.held[s][0] for s in here[-most:]]

    def untold(self, told: Container[SnapshotId], most: int) -> list[e.Instruction]:
        """Reports of the newest that lie here, at most so many; without those that were told."""
        return [_report(s) for s in self.newest(most) if SnapshotId.of(s) not in told]

    def __repr__(self) -> str:
        return f"<SnapshotManager {len(self.held)} snapshots, {len(self._coming)} on their way>"


def _alike(a: SnapshotId, b: SnapshotId) -> bool:
    """Whether two are of one holder, under the same plan."""
    return (a.run, a.term, a.holder) == (b.run, b.term, b.holder)


def takes(order: broker_pb2.SnapshotOrder) -> bool:
    """Return whether a snapshot is ordered. A checkpoint of a client's peer has no step in it: no
    round of clients is a step of the peer's."""
    return bool(order.step or order.upload)


def _report(snapshot: broker_pb2.Snapshot, why: str = "") -> e.Tell:
    report = broker_pb2.SnapshotReport(snapshot=snapshot, held=not why)
    if why:
        report.reason.CopyFrom(common_pb2.Reason(code="snapshot", text=why))
    return e.Tell(broker_pb2.PeerMessage(snapshot=report))
