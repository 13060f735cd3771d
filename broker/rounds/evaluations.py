"""What evaluations between two rounds came to.

Where all have one version, one replica evaluates it, and only the one that was asked is believed.
In gossip each has a version of its own: every replica evaluates what it goes on with, none changes
anything for that, and what is told is the mean of what they came to. Nothing is decided by what
they say: it is shown, with the number of the replica that said it.
"""

from __future__ import annotations

from collections.abc import Collection

from ...proto.broker_pb2 import Evaluation, NamedNumber, VersionEvaluated
from ..records.rounds import RoundRecord

__all__ = ["Evaluations", "mean_of"]


class Evaluations:
    """Collects those of the round under way; not durable. `microbatches`: of one step of the
    run."""

    def __init__(self, record: RoundRecord, microbatches: int) -> None:
        self._record, self._microbatches = record, microbatches
        self._come: dict[int, dict[int, Evaluation]] = {}
        """By round that begins with it, then by replica."""
        self._told = -1
        """The newest round whose evaluation was told."""
        self._asked: tuple[int, set[int]] = -1, set()
        """A round, and who was asked for the evaluation that is due in it; more than one only where
        another began again meanwhile."""

    def _ask(self) -> None:
        """Notes whom the round under way has evaluate."""
        record = self._record
        asked = self._asked[1] if self._asked[0] == record.round else set[int]()
        self._asked = record.round, asked | {*record.evaluators}

    def add(self, replica: int, round: int, found: Evaluation) -> bool:
        """Keeps the first one of a replica that was asked for it, in the round under way. Returns
        whether it was kept."""
        record = self._record
        if round != record.round or round <= self._told:
            return False
        self._ask()
        # Nobody is asked behind the last round: each evaluates what stays, and the first is told.
        if not record.over and replica not in self._asked[1]:
            return False
        come = self._come.setdefault(round, {})
        return come.setdefault(replica, found) is found

    def told(self, *, closes: bool = False) -> VersionEvaluated | None:
        """Returns the evaluation of the round under way, once: as soon as every replica that
        evaluates has said so; `closes`: of those that have, since the round ends."""
        self._ask()
        at, record = self._record.round, self._record
        found = self._come.get(at, {})
        whole = found.keys() >= {*record.evaluators} if record.gossips else bool(found)
        if not found or not (closes or whole):
            return None
        apart = record.gossips and not record.over  # what stays at the end is one version
        self._told = at
        self._come = {n: come for n, come in self._come.items() if n > at}
        return VersionEvaluated(
            round=at,
            step=record.committed // self._microbatches,
            evaluation=mean_of(found.values()),
            replicas=len(found) if apart else 0,
            replica=0 if apart else next(iter(found)),
        )


def mean_of(found: Collection[Evaluation]) -> Evaluation:
    """Return the plain mean of evaluations on the same samples; of a metric over those with it."""
    numbers: dict[str, list[float]] = {}
    for each in found:
        for metric in each.metrics:
            numbers.setdefault(metric.name, []).append(metric.value)
    means = [NamedNumber(name=n, value=sum(v) / len(v)) for n, v in numbers.items()]
    loss, weight = (
        sum(x) / len(found) for x in zip(*((e.loss, e.weight) for e in found), strict=True)
    )
    return Evaluation(loss=loss, weight=weight, metrics=means)
