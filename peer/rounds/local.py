"""Local steps of a replica: which samples they are trained on, and where in the learning rate's
schedule they stand. Both are the run's, and the broker says which of them are whose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...proto import broker_pb2
from ..data.manifest import DataError

__all__ = ["SUM", "LocalSteps"]

SUM = "sum@"
"""In snapshots, of an entry of the vector: what local steps keep beside the stages, and of which
round."""


class LocalSteps:
    """Local steps of one replica. A step of it has `microbatches`, one of the run `of_run`, all of
    one size. Another thread may ask while the next round begins."""

    def __init__(self, microbatches: int, of_run: int) -> None:
        self._microbatches, self._of_run = microbatches, of_run
        self._start = self._before = broker_pb2.RoundStart()
        self.left_out: tuple[int, ...] = ()
        """Places of the round's cohort, of clients that `work` trained and that do not count."""
        self.lost: tuple[int, ...] = ()
        """Places of the round's cohort, of clients whose state is not here any more."""
        self.losses: tuple[float, ...] = ()
        """What clients came to that `work` trained and that count, in the order of their places:
        the mean loss of their steps; none where it is not told."""
        self.skipped = 0
        """Steps of clients of the round that overflowed under fp16; 0 where it is not told."""

    def begin(self, start: broker_pb2.RoundStart) -> None:
        """From here on, steps are of this round; those that were ahead of it stay as they were."""
        self._before, self._start = self._start, start

    def counts(self, step: int, microbatch: int) -> float:
        """Return what a microbatch of an own step counts for: 1, or 0 for one that only fills up a
        step. Raises DataError."""
        return 1.0

    def bend(self, step: int, parameter: Tensor, version: Any) -> None:
        """Add to the gradient of a parameter what the method draws it by to the version,
        (elements,) float32: there all microbatches of an own step are added up."""

    def ends(self, step: int) -> int:
        """Return what a client weighs that ends with an own step; 0: none does."""
        return 0

    def add(self, value: str, now: Any, version: Any, step: int) -> None:
        """Take down what the client that ends with an own step came to of an entry of the vector:
        `now`, like `version`, as the algebra has them."""

    @property
    def to_gradient(self) -> float:
        """What a client's move of the round is times to be a mean gradient; 0: it is none."""
        return 0.0

    def set_aside(self) -> None:
        """Keep what `work` came to in the stages, which go back to the version: the round has more
        clients. Who keeps nothing trains them all again."""

    def work(self, shared: Mapping[str, Mapping[str, Any]]) -> float:
        """Do what is still to be done of the round before it is taken down: nothing, once the steps
        of the plan are done. `shared`: by entry of the vector, what all replicas share. Return the
        mean square of what clients moved."""
        return 0.0

    def evaluate(self) -> list[broker_pb2.ClientNumber]:
        """Return what the version in the stages comes to on clients' own samples: steps of a plan
        have no clients."""
        return []

    def clients(self, value: str) -> Tensor | None:
        """Return what each client came to of an entry of the vector, and forget it: (clients,
        elements), float32, on the host, integers as the vector has them; None: what the stages
        have is all that there is."""
        return None

    def senders(self, value: str) -> Tensor | None:
        """Return how many clients sent each number of an entry, (elements,) float32; None where
        that makes no difference."""
        return None

    @property
    def kept_bytes(self) -> int:
        """Bytes that it keeps of each number of an entry."""
        return 0

    def state(self) -> Mapping[str, Any]:
        """Return what it goes on from beside the stages, as VALUE:sum@ROUND; nobody may write to
        it."""
        return {}

    def load(self, states: Mapping[str, Any]) -> None:
        """Go on from copies of what `state` gave, here or at other holders."""

    def _of(self, step: int) -> broker_pb2.RoundStart:
        """What a step follows: holders of one replica may hear of a round in different steps."""
        start = self._start
        return self._before if step < start.first_step + start.late else start

    def place(self, step: int, microbatch: int) -> tuple[int, int]:
        """(step, microbatch) of the run that a microbatch of an own step is: what samples and masks
        are functions of. Raises DataError."""
        start = self._of(step)
        at = (step - start.first_step) * self._microbatches + microbatch
        for samples in (*start.samples, *start.ahead_samples) if at >= 0 else ():
            if at < samples.count:
                return divmod(samples.first + at, self._of_run)
            at -= samples.count
        raise DataError(
            f"microbatch {microbatch} of step {step} is none of round {start.round}, which has "
            f"{sum(s.count for s in start.samples)} from step {start.first_step} on, "
            f"{self._microbatches} in each"
        )

    def position(self, step: int) -> float:
        """Steps of the run before this own one, in the learning rate's schedule."""
        start = self._of(step)
        return start.start + start.length * (step - start.first_step) / max(1, start.steps)
