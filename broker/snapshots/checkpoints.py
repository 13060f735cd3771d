"""The checkpoints of a run: when one is due, and which are complete.

A checkpoint is a set of snapshots that lies with the broker, every `every` steps and after the last
one, whatever else the run does to survive; with "auto" whenever steps of half an hour are behind
the one before, and none at the end, where the weights are. Every holder brings its own there,
beside the training. One at a time: while it is on its way, no other is begun, and one that is due
is left out. Of replicas that train apart it is of a version, and `broker/rounds/versions.py` says
when one is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.routes import routes_digest
from ...planner.requests.run_spec import HASH
from ...proto.broker_pb2 import (
    Checkpoint,
    CheckpointFile,
    RoundPosition,
    RunSpec,
    Saved,
)
from .sets import SnapshotSet, spans_of, spans_to_proto

__all__ = ["AUTO_S", "Checkpoints", "as_set"]

AUTO_S = 1800.0
"""With `every = "auto"`, steps that take so long lie between two checkpoints: what a run may lose
where nobody keeps copies."""

_LEAD = 8
"""Steps before a checkpoint's at which it may be ordered: everybody hears of it in time."""
_MOST_LATE = 64


class Checkpoints:
    """Says when one run's next checkpoint is due, and keeps its complete ones. `every` 0: none are
    made. `kept`: the newest `keep` complete ones, the newest last; they change by the run's events
    only."""

    def __init__(self, every: int | Literal["auto"], keep: int, first: int = 0) -> None:
        """`first`: steps that were done before, of a run that goes on from another's checkpoint."""
        self.every, self._keep = every, keep
        self.kept: list[Checkpoint] = []
        self._coming: Checkpoint | None = None
        self._step = 0
        """Of its snapshots: a replica that trains apart counts steps of its own."""
        self._missing: dict[PeerId, CheckpointFile] = {}
        self._untaken: dict[PeerId, None] = {}
        self._next = first + (every == "auto")  # None of a step before this one is begun.
        self._late = 0
        """How much further ahead they are ordered, because somebody was past the step before."""
        self._overdue = False
        """One was ordered too late: the next need not wait for its step."""

    def add(self, found: Iterable[Checkpoint]) -> None:
        """Add checkpoints that are complete; older ones than are kept go."""
        self.kept += found
        del self.kept[: -self._keep]
        if self.kept:  # after a restart of the broker, too
            self._next = max(self._next, self.kept[-1].step + 1)

    def newest(self, committed: int | None = None) -> Checkpoint | None:
        """The newest complete checkpoint, of at most `committed` steps if that is given; None:
        there is none."""
        found = (c for c in reversed(self.kept) if committed is None or c.step <= committed)
        return next(found, None)

    @property
    def coming(self) -> int | None:
        """The step of the snapshots of the one that is on its way."""
        return None if self._coming is None else self._step

    def due(self, committed: int, steps: int, step_s: float = 0.0) -> int | None:
        """The step of the one to begin now, if one is due. `step_s`: seconds of a step; 0: not
        known."""
        if not self.every or self._coming is not None:
            return None
        if self.every == "auto":
            since = committed - (self._next - 1)
            step = committed + 1 + self._late
            due = self._overdue or since * step_s >= AUTO_S
            return step if due and step < steps else None
        if self._next > steps:
            return None
        after = max(committed + 1 + self._late, self._next)
        if not self._overdue:
            after = -(-after // self.every) * self.every
        step = min(after, steps)  # after the last nothing changes any more
        return step if step <= committed + max(_LEAD, 1 + self._late) else None

    def begin(
        self,
        run: str,
        term: int,
        step: int,
        spec: RunSpec,
        plan: Plan,
        inexact_from: int = 0,
        rounds: RoundPosition | None = None,
    ) -> None:
        """Begin one that was ordered from all holders of a plan. `rounds`: of the version that is
        in it."""
        self._overdue, self._step = False, step
        whole = 1 if spec.client_sizes else spec.microbatches  # of federated training, a round
        self._coming = Checkpoint(
            run=run,
            term=term,
            step=step if rounds is None else rounds.committed // whole,
            job=spec.job,
            graph=spec.graph,
            data=spec.data,
            operators=plan.stages[-1].stop,
            microbatch_size=plan.microbatch_size,
            head_parts=plan.head_parts,
            inexact_from=inexact_from,
            routes=routes_digest(plan, step),
            rounds=rounds,
        )
        self._next = step + 1
        self._untaken = dict.fromkeys(plan.peers)
        spans = spans_of(plan)
        self._missing = {
            peer: CheckpointFile(holder=peer, spans=spans_to_proto(spans[peer]))
            for peer in plan.peers
        }

    @property
    def untaken(self) -> bool:
        """Whether somebody has yet to take the snapshot for the one that is on its way."""
        return self._coming is not None and bool(self._untaken)

    def taken(self, peer: PeerId, step: int) -> None:
        """A holder has its snapshot of a step."""
        if step == self.coming:
            self._untaken.pop(peer, None)

    def awaits(self, peer: PeerId) -> bool:
        """Whether the one that is on its way lacks this holder's part."""
        return self._coming is not None and peer in self._missing

    def saved(self, peer: PeerId, message: Saved) -> Checkpoint | None:
        """A holder's part is with the broker; the checkpoint, if it is complete now."""
        coming = self._coming
        if coming is None or (message.term, message.step) != (coming.term, self._step):
            return None
        if peer not in self._missing or not HASH.fullmatch(message.blob.hash):
            return None
        file = self._missing.pop(peer)
        file.blob.CopyFrom(message.blob)
        coming.files.append(file)
        if self._missing:
            return None
        coming.files.sort(key=lambda f: [(s.start, s.stop, f.holder) for s in f.spans])
        self.given_up()
        return coming

    def again(self) -> None:
        """A holder may not have heard of the one that is on its way, or could not say what came of
        it: another is made in its place, as soon as may be."""
        if self._coming is not None:
            self._next = self._step
            self.given_up()
            self._overdue = True

    def given_up(self, late: bool = False) -> None:
        """The one that is on its way will not be complete; `late`: it was ordered too late."""
        self._coming, self._missing, self._untaken = None, {}, {}
        self._overdue = late
        if late:
            self._late = min(_MOST_LATE, 2 * self._late + 1)

    def __repr__(self) -> str:
        return f"<Checkpoints of steps {[c.step for c in self.kept]}, coming {self.coming}>"


def as_set(found: Checkpoint) -> SnapshotSet:
    """A checkpoint as what a term goes on from; nothing of it lies at peers."""
    return SnapshotSet(found.term, found.step, {}, found)
