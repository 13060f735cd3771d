"""Checkpoints of a run whose replicas train apart: when one is due, and who brings it.

It is of a version, which one replica brings to the broker when it begins the next round with it, or
when the last is made. The others hear nothing of it. One at a time, as in any run; one that did not
come to be is made up for at the next version.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...proto.broker_pb2 import RoundPosition
from ..events import Instruction
from ..runs.run import Run

__all__ = ["is_due", "save_last", "save_version"]


def is_due(run: Run, committed: int) -> bool:
    """Whether a version with so many microbatches is one of those that are kept."""
    every, steps = (
        run.submitted.requirements.output.every,
        committed // run.submitted.spec.microbatches,
    )
    return bool(every) and steps // every > _saved(run) // every


def save_version(run: Run, chosen: Sequence[int], at: RoundPosition) -> list[Instruction]:
    """Saves a version that these begin a round with, who hear of that behind this. `at`: before
    work of the round was handed out."""
    have = [n for n in chosen if run.replicas[n].record.committed]
    if not have or _under_way(run) or not is_due(run, at.committed):
        return []
    return run.replicas[have[-1]].snapshots.save(at)  # the first one evaluates


def save_last(run: Run, number: int, at: RoundPosition) -> list[Instruction]:
    """Saves the last version, from the replica that exports it; one that is still on its way is
    given up for that."""
    every, spec = run.submitted.requirements.output.every, run.submitted.spec
    replica = run.replicas[number]
    if not every or at.committed // spec.microbatches <= _saved(run):
        return []
    for other in run.replicas:
        other.record.checkpoints.given_up()
    return replica.snapshots.save(at)


def _saved(run: Run) -> int:
    """Steps that are in the newest checkpoint, be it the one that the run began from."""
    return run.checkpoint.step if run.checkpoint else run.submitted.spec.resumed.step


def _under_way(run: Run) -> bool:
    return any(r.record.checkpoints.coming is not None for r in run.replicas)
