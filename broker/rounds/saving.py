"""Checkpoints of a run whose replicas train apart: when one is due, and who brings it; and who
brings the weights of the last version.

A checkpoint is of a version, which one replica brings to the broker when it begins the next round
with it, or when the last is made. The others hear nothing of it. One at a time, as in any run; one
that did not come to be is made up for at the next version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...proto.broker_pb2 import DONE, EXPORTING, BrokerMessage, RoundPosition, RoundStart
from ..events import Instruction, Tell
from ..runs.replica import Replica
from ..runs.run import Run
from ..snapshots.checkpoints import AUTO_S

__all__ = ["finish", "is_due", "last_start", "save_version"]


def is_due(run: Run, committed: int) -> bool:
    """Whether a version with so many microbatches is one of those that are kept."""
    steps = committed // run.submitted.spec.microbatches
    match _every(run):
        case "auto":
            step_s = max(r.record.round_step_s for r in run.replicas)
            return (steps - _saved(run)) * step_s >= AUTO_S
        case every:
            return bool(every) and steps // every > _saved(run) // every


def _every(run: Run) -> int | Literal["auto"]:
    wish = run.submitted.requirements
    saves = wish.sync.kind == "local" and not wish.sync.apart
    return wish.output.every if saves else 0


def save_version(run: Run, chosen: Sequence[int], at: RoundPosition) -> list[Instruction]:
    """Saves a version that these begin a round with, who hear of that behind this. `at`: before
    work of the round was handed out."""
    have = [n for n in chosen if run.replicas[n].record.committed]
    if not have or _under_way(run) or not is_due(run, at.committed):
        return []
    return run.replicas[have[-1]].snapshots.save(at)  # the first one evaluates


def _save_last(run: Run, number: int, at: RoundPosition) -> list[Instruction]:
    """Saves the last version, from the replica that exports it; one that is still on its way is
    given up for that."""
    every, spec = _every(run), run.submitted.spec
    replica = run.replicas[number]
    if every in (0, "auto") or at.committed // spec.microbatches <= _saved(run):
        return []
    for other in run.replicas:
        other.record.checkpoints.given_up()
    return replica.snapshots.save(at)


def finish(run: Run, now: float) -> list[Instruction]:
    """Every sample is committed: a replica with the version brings the weights; when it has, the
    others are done."""
    replicas, record = run.replicas, run.record.rounds
    assert record is not None, f"run {run.id} has no rounds"
    phases = [r.record.phase for r in replicas]
    out: list[Instruction] = []
    if DONE in phases:
        text = f"{record.round} rounds are done; another replica has brought the weights"
        for replica in replicas:
            if not replica.record.ended:
                out += replica.lifecycle.done(text, now)
        return out
    if EXPORTING in phases:
        _let_wait(run, replicas[phases.index(EXPORTING)], now)
        return []
    have = record.holders
    running = (r for r in replicas if r.record.running)
    first = next((r for r in running if have.get(r.record.number) == r.record.term), None)
    if first is None:
        text = "every replica with the last version was lost before it had brought its weights"
        return run.fail("round", text, now)
    message = BrokerMessage(round_start=last_start(run, first))
    out = _save_last(run, first.record.number, record.position)
    out += [Tell(m.stream, message) for m in first.context.holders()]
    out += first.lifecycle.export(now)
    _let_wait(run, first, now)
    return out


def last_start(run: Run, replica: Replica) -> RoundStart:
    """What the replica that brings the weights is told: no steps are left."""
    record = run.record.rounds
    assert record is not None, f"run {run.id} has no rounds"
    return RoundStart(
        run=replica.id,
        term=replica.record.term,
        round=record.round,
        first_step=replica.record.committed,
        start=record.total / run.submitted.spec.microbatches,
        evaluate=run.submitted.requirements.eval_every > 0,
    )


def _let_wait(run: Run, first: Replica, now: float) -> None:
    """Who has the version too is wanted when the one that brings it is lost."""
    for replica in run.replicas:
        if replica is not first:
            replica.context.waits_until = first.lifecycle.deadline.of_phase or now


def _saved(run: Run) -> int:
    """Steps that are in the newest checkpoint, be it the one that the run began from."""
    return run.checkpoint.step if run.checkpoint else run.submitted.spec.resumed.step


def _under_way(run: Run) -> bool:
    return any(r.record.checkpoints.coming is not None for r in run.replicas)
