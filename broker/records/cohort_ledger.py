"""The ledger of work of federated training: places of each round's cohort in place of ranges of the
run's samples. The work of a round is committed with the round, whoever did it; what was not done of
it is nobody's any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...job.clients.client_privacy import SPARE_SUMS
from ...proto.broker_pb2 import RoundBegun, RoundDone, RoundPosition
from ...proto.journal_pb2 import RoundsKept
from .work_ledger import WorkLedger

__all__ = ["CohortLedger"]


class CohortLedger(WorkLedger):
    """Changes by events only. total, committed: rounds of the run.

    Where clients are hidden there is a budget of noisy sums. Each attempt at an exchange takes one,
    for of an attempt that comes to nothing some have the sum, perhaps. A round begins only while
    SPARE_SUMS are left for attempts beside its first: so a run in which many were made again has
    fewer rounds."""

    def __init__(self, rounds: int, budget: int = 0) -> None:
        """`budget`: noisy sums that may be made; 0: there is no noise, and no end of sums."""
        super().__init__(rounds, 1)
        self._budget = budget

    @property
    def schedule(self) -> tuple[float, float]:
        """The round, and one: the learning rate's schedule counts rounds."""
        return float(self.committed), 1.0

    def position(self, round_: int) -> RoundPosition:
        """Where the run stands between two rounds: no round comes back."""
        return RoundPosition(round=round_, committed=self.committed, next=self.committed)

    def finish(self) -> None:
        """The run is to end early: with the round under way or, if none is, the next one, since
        nobody has the version of a run that has made none."""
        self.finishing = True
        self._end_with(1)

    @property
    def rounds_left(self) -> int:
        return 0

    @property
    def spent(self) -> bool:
        """Whether no sum may be made any more."""
        return 0 < self._budget <= self.sums

    def begin(self, begun: RoundBegun) -> None:
        """Replicas have got work, or go on with it; those that have no client any more, as others
        train theirs, have none."""
        super().begin(begun)
        for work in begun.work:
            if not work.cohort:
                self.past[work.replica] = self.given.pop(work.replica)

    def planned(self) -> None:
        """Another attempt begins: as many may see its sum as will."""
        self.sums += bool(self._budget)

    def done(self, done: RoundDone) -> None:
        super().done(done)
        self._end_early()

    def restore(self, kept: RoundsKept) -> None:
        super().restore(kept)
        self._end_early()

    def _end_early(self) -> None:
        """Have no round behind this one where the budget has none."""
        if self._budget and self.sums + SPARE_SUMS >= self._budget:
            self._end_with(int(self.begun))

    def units(self, number: int) -> int:
        """Clients that a replica trains in the round."""
        return sum(r.count for r in self.given[number].cohort)

    def committed_with(self, numbers: Iterable[int]) -> int:
        """Rounds of the run that are committed with this one."""
        return self.committed + 1
