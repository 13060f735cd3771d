"""The local job of a federated round: clients of the round's cohort in place of steps of the plan.

The cohort of a round are the first `per_round` clients of a permutation that follows from (seed,
round); a replica trains those at the places that the broker has handed to it
(`RoundStart.cohort`), each from the version that the round began with, and its stages come to
their weighted mean. From there on a round goes as any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...dag.execute.execute import StageExecutor
from ...dag.ir.graph import Graph
from ...dag.ir.random import step_key
from ...dag.plan.plan import Plan, PlanError
from ...dag.rounds.cohorts import cohort_of, places_of
from ...dag.transforms.virtual_classes import above_loss
from ...job import Training
from ...job.rounds import options_of
from ..data.manifest import DataError
from ..data.partition import Partition, partition_of
from ..data.reader import Reader
from ..rounds.local import LocalSteps
from ..sync.optimizer import learning_rate
from .batches import Participant, batches
from .cohort import Cohort, Trained
from .vhl_loss import VirtualData

__all__ = ["LocalCohort", "mean_of"]

MOST_COPIES, MOST_BYTES = 64, 256 << 20
"""Clients that are trained side by side at most, and bytes of their weights, gradients and
optimizers; one always is."""


class OwnSamples:
    """The only client of a peer whose data stays here: all `count` samples are its own."""

    def __init__(self, count: int) -> None:
        self._samples = np.arange(count)

    def train(self, client: int) -> npt.NDArray[np.int64]:
        """Return the numbers of all samples, whatever the client's number in the run is."""
        return self._samples


class LocalCohort(LocalSteps):
    """Clients of one replica that is one peer with the whole model. `graph`: not bound. `executor`:
    what it has of the model, which comes to the mean."""

    def __init__(
        self,
        training: Training,
        graph: Graph,
        executor: StageExecutor,
        partition: Partition | OwnSamples,
        reader: Reader,
    ) -> None:
        super().__init__(1, 1)
        assert training.rounds is not None
        assert training.rounds.cohorts is not None
        self._training, self._cohorts = training, training.rounds.cohorts
        self._executor, self._partition, self._reader = executor, partition, reader
        size = sum(p.numel() * p.element_size() for p in executor.parameters.values())
        size *= 2 + training.train.optimizer_slots
        most = max(1, min(MOST_COPIES, MOST_BYTES // max(1, size)))
        mu = getattr(options_of(training.rounds.method, training.rounds.options), "mu", 0.0)
        virtual = None
        if (vhl := self._cohorts.vhl) is not None:
            form = above_loss(graph)
            virtual = VirtualData(vhl, form, training.seed, training.train.batch)
        self._cohort = Cohort(
            graph, training.train, most=most, mu=mu, virtual=virtual, device=executor.device
        )

    @classmethod
    def of(
        cls,
        training: Training,
        plan: Plan,
        graph: Graph,
        executor: StageExecutor,
        reader: Reader,
    ) -> LocalCohort:
        """What trains clients under a plan, of the run's partition. Raises PlanError for a plan of
        which no peer has the whole model, SettingsError or DataError for a partition that cannot
        be."""
        if len(plan.stages) != 1 or len(plan.stages[0].holders) != 1:
            raise PlanError(f"{plan!r}: expected one stage on one peer, which trains clients")
        assert training.rounds is not None
        cohorts = training.rounds.cohorts
        assert cohorts is not None
        partition: Partition | OwnSamples
        if cohorts.partition.kind == "by-peer":
            partition = OwnSamples(reader.manifest.train)
        else:
            partition = partition_of(cohorts.partition, cohorts.labels, reader)
        return cls(training, graph, executor, partition, reader)

    def position(self, step: int) -> float:
        """Return where the round stands in the learning rate's schedule, which counts rounds."""
        return float(self._start.round)

    def work(self) -> None:
        """Train the clients of the round. Raises DataError."""
        start, cohorts, seed = self._start, self._cohorts, self._training.seed
        places = places_of(start.cohort)
        if not places:
            return
        own = isinstance(self._partition, OwnSamples)  # of those that are there, whoever they are
        if places[-1] >= (cohorts.clients if own else cohorts.per_round):
            raise DataError(
                f"round {start.round} has a client at place {places[-1]} of a cohort of "
                f"{cohorts.per_round}"
            )
        if own and len(places) > 1:
            raise DataError(f"round {start.round} has {len(places)} clients here: there is one")
        numbers = cohort_of(cohorts.clients, seed, start.round, places)
        some = [Participant(n, self._partition.train(n)) for n in numbers]
        plans = batches(
            some,
            seed=seed,
            round_=start.round,
            batch=self._training.train.batch,
            passes=cohorts.local.passes,
            steps=cohorts.local.steps,
        )
        weights = dict.fromkeys(numbers, 1)
        if cohorts.weight == "samples":
            weights = {p.number: len(p.samples) for p in some}
        held = {**self._executor.parameters, **self._executor.buffers}
        rate = learning_rate(self._training.train, start.round)

        def random_key(number: int, step: int) -> int:
            return step_key(seed, start.round * cohorts.clients + number, step)

        mine = [*zip(some, plans, strict=True)]
        trained = self._cohort.work(held, mine, self._read, rate, random_key, start.round)
        mean = mean_of(trained, weights)
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(mean[name])

    def _read(self, places: npt.NDArray[np.int64]) -> Mapping[str, Tensor]:
        found = self._reader.samples(places.reshape(-1))
        return {name: t.view(*places.shape, *t.shape[1:]) for name, t in found.items()}


def mean_of(trained: Iterable[Trained], weights: Mapping[int, int]) -> dict[str, Tensor]:
    """Return, by name, the weighted mean of what participants came to, in float64; of integers the
    largest. `weights`: by participant, above 0."""
    sums: dict[str, Tensor] = {}
    total = 0
    for some in trained:
        mine = [weights[n] for n in some.participants]
        total += sum(mine)
        for name, values in some.values.items():
            found = _added(values.detach(), mine)
            before = sums.get(name)
            if before is not None:
                whole = not values.is_floating_point()
                found = torch.maximum(before, found) if whole else before + found
            sums[name] = found
    return {n: s / total if s.is_floating_point() else s for n, s in sums.items()}


def _added(values: Tensor, weights: Sequence[int]) -> Tensor:
    if not values.is_floating_point():
        return values.amax(0)
    by = torch.tensor(weights, dtype=torch.float64, device=values.device)
    found: Tensor = torch.tensordot(by, values.double(), 1)
    return found
