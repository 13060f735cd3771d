"""What is had of the versions of a run whose replicas train apart: evaluations, checkpoints, and
the weights of the last one.

Where all have one version, one replica evaluates it, and only the one that was asked is believed.
Where each has weights or samples of its own, every replica evaluates what it goes on with, none
changes anything for that, and what is told is the mean of what they came to. Nothing is decided by
what they say: it is shown, with the number of the replica that said it.

A checkpoint is of a version, which one replica brings to the broker when it begins the next round
with it, or when the last is made. The others hear nothing of it. One at a time, as in any run; one
that did not come to be is made up for at the next version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...proto.broker_pb2 import (
    DONE,
    EXPORTING,
    BrokerMessage,
    Evaluation,
    NamedNumber,
    RoundPosition,
    RoundStart,
    VersionEvaluated,
)
from ..events import Instruction, Tell
from ..policies.policies import policy_of
from ..policies.policy import RoundPolicy
from ..records.rounds import RoundRecord
from ..runs.replica import Replica
from ..runs.run import Run

__all__ = ["Evaluations", "finish", "last_start", "mean_of", "save_version"]


class Evaluations:
    """Collects those of the round under way; not durable."""

    def __init__(self, rounds: RoundRecord, policy: RoundPolicy) -> None:
        self._rounds, self._policy = rounds, policy
        self._come: dict[int, Evaluation] = {}
        """By replica."""
        self._told = False
        self._asked = {*policy.evaluators(rounds)}
        """Replicas that were asked; more of a version that all have only where another one began
        again meanwhile."""

    def add(self, replica: int, found: Evaluation) -> bool:
        """Keeps the first one of a replica that was asked for it. Returns whether it was kept."""
        self._asked |= {*self._policy.evaluators(self._rounds)}
        # Nobody is asked behind the last round: each evaluates what stays, and the first is told.
        asked = self._rounds.work.over or replica in self._asked
        return asked and not self._told and self._come.setdefault(replica, found) is found

    def told(self, *, closes: bool = False) -> VersionEvaluated | None:
        """Returns the evaluation of the round under way, once: as soon as every replica that
        evaluates what is its own has said so; `closes`: of those that have, since the round
        ends."""
        found, one = self._come, self._policy.one_evaluation(self._rounds)
        whole = one or found.keys() >= {*self._policy.evaluators(self._rounds)}
        if self._told or not found or not (closes or whole):
            return None
        self._told = True
        return VersionEvaluated(
            round=self._rounds.versions.round,
            step=self._rounds.work.step,
            evaluation=mean_of(found.values()),
            replicas=0 if one else len(found),
            replica=next(iter(found)) if one else 0,
        )


def mean_of(found: Collection[Evaluation]) -> Evaluation:
    """Return the plain mean of evaluations of as many samples; of a metric over those with it.
    What clients came to is one version's, and stays as it is."""
    numbers: dict[str, list[float]] = {}
    for each in found:
        for metric in each.metrics:
            numbers.setdefault(metric.name, []).append(metric.value)
    means = [NamedNumber(name=n, value=sum(v) / len(v)) for n, v in numbers.items()]
    loss, weight = (
        sum(x) / len(found) for x in zip(*((e.loss, e.weight) for e in found), strict=True)
    )
    clients = next(iter(found)).clients
    return Evaluation(loss=loss, weight=weight, metrics=means, clients=clients)


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
