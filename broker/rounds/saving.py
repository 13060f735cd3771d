"""Checkpoints of a run whose replicas train apart: when one is due, and who brings it; and who
brings the weights of the last version.

A checkpoint is of a version, which one replica brings to the broker when it begins the next round
with it, or when the last is made. The others hear nothing of it. One at a time, as in any run; one
that did not come to be is made up for at the next version.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...proto.broker_pb2 import DONE, EXPORTING, BrokerMessage, RoundPosition, RoundStart
from ..events import Instruction, Tell
from ..policies.policies import policy_of
from ..runs.replica import Replica
from ..runs.run import Run

__all__ = ["finish", "last_start", "save_version"]


def save_version(run: Run, chosen: Sequence[int], at: RoundPosition) -> list[Instruction]:
    """Saves a version that these begin a round with, who hear of that behind this. `at`: before
    work of the round was handed out."""
    holders = run.rounds.versions.holders
    have = [n for n in chosen if holders.get(n) == run.replicas[n].record.term]
    under_way = any(r.record.checkpoints.coming is not None for r in run.replicas)
    due = policy_of(run.submitted).saves(run.record, run.rounds.work.step)
    if not have or under_way or not due:
        return []
    return run.replicas[have[-1]].snapshots.save(at)  # the first one evaluates


def _save_last(run: Run, replica: Replica) -> list[Instruction]:
    """Saves the last version, from the replica that exports it; one that is still on its way is
    given up for that."""
    every = policy_of(run.submitted).saves_every
    if every in (0, "auto") or run.rounds.work.step <= run.record.saved_step:
        return []
    for other in run.replicas:
        other.record.checkpoints.given_up()
    return replica.snapshots.save(run.rounds.position)


def finish(run: Run, now: float) -> list[Instruction]:
    """Every sample is committed: a replica with the version brings the weights; when it has, the
    others are done."""
    replicas, versions = run.replicas, run.rounds.versions
    phases = [r.record.phase for r in replicas]
    out: list[Instruction] = []
    if DONE in phases:
        text = f"{versions.round} rounds are done; another replica has brought the weights"
        for replica in replicas:
            if not replica.record.ended:
                out += replica.lifecycle.done(text, now)
        return out
    if EXPORTING in phases:
        _let_wait(run, replicas[phases.index(EXPORTING)], now)
        return []
    running = (r for r in replicas if r.record.running)
    have = (r for r in running if versions.holders.get(r.record.number) == r.record.term)
    first = next(have, None)
    if first is None:
        text = "every replica with the last version was lost before it had brought its weights"
        return run.fail("round", text, now)
    message = BrokerMessage(round_start=last_start(run, first))
    out = _save_last(run, first)
    out += [Tell(m.stream, message) for m in first.context.holders()]
    out += first.lifecycle.export(now)
    _let_wait(run, first, now)
    return out


def last_start(run: Run, replica: Replica) -> RoundStart:
    """What the replica that brings the weights is told: no steps are left."""
    return RoundStart(
        run=replica.id,
        term=replica.record.term,
        round=run.rounds.versions.round,
        first_step=replica.record.committed,
        start=run.rounds.work.length,
        evaluate=run.submitted.requirements.eval_every > 0,
    )


def _let_wait(run: Run, first: Replica, now: float) -> None:
    """Keep who has the version too: it is wanted when the one that brings it is lost."""
    for replica in run.replicas:
        if replica is not first:
            replica.context.waits_until = first.lifecycle.deadline.of_phase or now
