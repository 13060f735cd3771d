"""What evaluations between two rounds came to.

Where all have one version, one replica evaluates it, and only the one that was asked is believed.
Where each has weights or samples of its own, every replica evaluates what it goes on with, none
changes anything for that, and what is told is the mean of what they came to. Nothing is decided by
what they say: it is shown, with the number of the replica that said it.
"""

from __future__ import annotations

from collections.abc import Collection

from ...proto.broker_pb2 import Evaluation, NamedNumber, VersionEvaluated
from ..policies.policy import RoundPolicy
from ..records.rounds import RoundRecord

__all__ = ["Evaluations", "mean_of"]


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
