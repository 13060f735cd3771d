"""Clients of federated training on one ghost: what `peer/federated/local_cohort.py` does, on
hashes. Each client of the round that is trained here changes all that is trained, by a hash of its
own (`round_hashes.trained`). Steps of a pipeline leave nothing: which of them are whose client's,
ghosts without samples do not know."""

from __future__ import annotations

from collections.abc import Mapping

from ...dag.rounds.cohorts import cohort_of, places_of
from ...job import Training
from ...peer.rounds.local import LocalSteps
from ...peer.rounds.methods.round_strategy import State
from .hashes import MASK
from .round_hashes import trained
from .stage_hash import HeldHash

__all__ = ["GhostClients"]


class GhostClients(LocalSteps):
    """Clients of a round. `held`: by stage, whose hashes they change; `values`: those that
    are exchanged."""

    def __init__(
        self, training: Training, held: Mapping[int, HeldHash], values: frozenset[str]
    ) -> None:
        super().__init__(1, 1)
        self._training, self._held, self._values = training, held, values

    def position(self, step: int) -> float:
        """Return the round, which the learning rate's schedule counts."""
        return float(self._start.round)

    def place(self, step: int, microbatch: int) -> tuple[int, int]:
        """Return the same: clients' samples are not the run's."""
        return step, microbatch

    def ends(self, step: int) -> int:
        """Return 1 behind the last step of the round: stages go back to the version there."""
        return int(step + 1 == self._start.first_step + self._start.steps)

    def work(self, shared: Mapping[str, State]) -> float:
        """Train the clients of the round."""
        rounds, start = self._training.rounds, self._start
        assert rounds is not None
        assert rounds.cohorts is not None
        places = places_of(start.cohort)
        numbers = cohort_of(rounds.cohorts.clients, self._training.seed, start.round, places)
        for held in self._held.values():
            for at, value in enumerate(held.linear.standing):
                if value in self._values:
                    moved = sum(trained(value, start.round, n) for n in numbers)
                    held.put(at, (int(held.state[at]) + moved) & MASK)
        return 0.0
