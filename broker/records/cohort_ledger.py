"""The ledger of work of federated training: places of each round's cohort in place of ranges of the
run's samples. The work of a round is committed with the round, whoever did it; what was not done of
it is nobody's any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...proto.broker_pb2 import RoundPosition
from .work_ledger import WorkLedger

__all__ = ["CohortLedger"]


class CohortLedger(WorkLedger):
    """Changes by events only. total, committed: rounds of the run."""

    def __init__(self, rounds: int) -> None:
        super().__init__(rounds, 1)

    @property
    def schedule(self) -> tuple[float, float]:
        """The round, and one: the learning rate's schedule counts rounds."""
        return float(self.committed), 1.0

    def position(self, round_: int) -> RoundPosition:
        """Where the run stands between two rounds: no round comes back."""
        return RoundPosition(round=round_, committed=self.committed, next=self.committed)

    def units(self, number: int) -> int:
        """Clients that a replica trains in the round."""
        return sum(r.count for r in self.given[number].cohort)

    def committed_with(self, numbers: Iterable[int]) -> int:
        """Rounds of the run that are committed with this one."""
        return self.committed + 1
