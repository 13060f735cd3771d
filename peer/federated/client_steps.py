"""Clients of a replica that is a pipeline: trained one after the other, by steps of its plan.

A client begins with the version and a fresh optimizer. Its batches are those of `batches.py`, one
for each of its steps; which step is whose follows at every stage from what the broker has handed
out (`RoundStart.cohort`). A step of the plan always has the samples of a whole batch. Where a
client's batch has fewer, the microbatches behind them read its first samples again, and weigh
nothing.

Behind the last step of a client each stage adds what it came to, times the client's weight, to a
sum in float64, and goes back to the version (`RoundWork.stepped`). With a snapshot goes the sum so
far: so whatever is lost, a client that is trained again is in it once.

    sum@N   what clients came to in round N, by entry of the vector: (elements + 2,) float64, behind
            the elements their weight, and the weighted squared norm of what they moved
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...dag.analysis.samples import why_samples_meet
from ...dag.ir.graph import Graph
from ...dag.ir.operators import takes_key
from ...dag.permutation import Indices
from ...dag.rounds.cohorts import cohort_of, effective_lengths, places_of
from ...job import Training
from ...job.rounds import SUM_BYTES, method_of, options_of
from ...proto import broker_pb2
from ..data.manifest import DataError
from ..data.partition import Partition
from ..data.sampler import Sampler
from ..data.survey import Ignored
from ..rounds.local import SUM, LocalSteps
from ..rounds.methods.round_strategy import State
from .batches import Participant, batches

__all__ = ["ClientSampler", "ClientSteps", "OwnSamples", "check_labels", "why_not_in_steps"]


class OwnSamples:
    """The only client of a peer whose data stays here: all `count` samples are its own."""

    def __init__(self, count: int) -> None:
        self._samples = np.arange(count)

    def train(self, client: int) -> Indices:
        """Return the numbers of all samples, whatever the client's number in the run is."""
        return self._samples


@dataclass(frozen=True)
class _Cohort:
    """Steps of the round that `start` begins. batches: the samples of each step, (at most a batch,)
    int64. ends: by step, what the client weighs of which it is the last; 0: of none. lengths: by
    step, what its client's move counts for (`ClientSteps._by_length`)."""

    start: broker_pb2.RoundStart
    batches: list[Indices]
    ends: list[int]
    lengths: list[float]


class ClientSteps(LocalSteps):
    """Clients of one replica, by steps of its plan in `microbatches` microbatches."""

    def __init__(
        self,
        training: Training,
        graph: Graph,
        partition: Partition | OwnSamples,
        microbatches: int,
    ) -> None:
        super().__init__(microbatches, microbatches)
        rounds = training.rounds
        assert rounds is not None
        assert rounds.cohorts is not None
        self._why_not = why_not_in_steps(graph, rounds.method)
        self._method = method_of(rounds.method)
        self._training, self._cohorts, self._partition = training, rounds.cohorts, partition
        self._mu: float = getattr(options_of(rounds.method, rounds.options), "mu", 0.0)
        self._made: _Cohort | None = None
        self._sums: dict[str, Tensor] = {}
        self._sums_of = -1  # the round

    def begin(self, start: broker_pb2.RoundStart) -> None:
        super().begin(start)
        if start.round != self._sums_of:
            self._sums, self._sums_of = {}, int(start.round)

    def position(self, step: int) -> float:
        """Return where the round stands in the learning rate's schedule, which counts rounds."""
        return float(self._start.round)

    def place(self, step: int, microbatch: int) -> tuple[int, int]:
        """Return the same: what a client's batch has is a function of the replica's own steps."""
        return step, microbatch

    # ------------------------------------------------------------ clients and their steps

    def _clients(self, start: broker_pb2.RoundStart) -> tuple[list[Participant], list[int]]:
        """Return the clients of a round that are trained here, with their weights. Raises DataError
        for places that the cohort does not have."""
        cohorts, places = self._cohorts, places_of(start.cohort)
        own = isinstance(self._partition, OwnSamples)  # of those that are there, whoever they are
        most = cohorts.clients if own or self._method.buffered else cohorts.places
        if places and places[-1] >= most:
            raise DataError(
                f"round {start.round} has a client at place {places[-1]} of a cohort of {most}"
            )
        if own and len(places) > 1:
            raise DataError(f"round {start.round} has {len(places)} clients here: there is one")
        numbers = cohort_of(cohorts.clients, self._training.seed, start.round, places)
        some = [Participant(n, self._partition.train(n)) for n in numbers]
        weighs = cohorts.weight == "samples"
        return some, [len(p.samples) if weighs else 1 for p in some]

    def _batches(self, some: list[Participant], round_: int) -> list[list[Indices]]:
        local = self._cohorts.local
        return batches(
            some,
            seed=self._training.seed,
            round_=round_,
            batch=self._training.train.batch,
            passes=local.passes,
            steps=local.steps,
        )

    @property
    def _steps(self) -> _Cohort:
        """Return the steps of the round. Raises DataError where the broker says of another
        number."""
        start, made = self._start, self._made
        if made is not None and made.start is start:
            return made
        if self._why_not:
            raise DataError(f"the model is trained on one peer: {self._why_not}")
        some, weights = self._clients(start)
        each = self._batches(some, int(start.round))
        ends, lengths, by = list[int](), list[float](), self._by_length(int(start.round))
        for one, plan, weight in zip(some, each, weights, strict=True):
            ends += [*[0] * (len(plan) - 1), weight]
            lengths += [by.get(one.number, 1.0)] * len(plan)
        if len(ends) != start.steps:
            raise DataError(
                f"round {start.round} has {start.steps} steps: expected {len(ends)}, those of its "
                f"{len(some)} clients here"
            )
        whole = [batch for plan in each for batch in plan]
        self._made = made = _Cohort(start, whole, ends, lengths)
        return made

    def _by_length(self, round_: int) -> dict[int, float]:
        """Return what the move of each client of a round's cohort counts for beside its weight;
        nothing, unless the method normalises. A move is divided by the client's effective length,
        and multiplied by the largest of all that may be in the round: then it is no smaller than it
        was, and clients of one length move as without. What is left to multiply the mean by, the
        round's plan says (`FederatedPolicy.scale`)."""
        cohorts, train = self._cohorts, self._training.train
        if not self._method.normalises:
            return {}
        everybody = range(cohorts.places)
        cohort = cohort_of(cohorts.clients, self._training.seed, round_, everybody)
        lengths = effective_lengths(
            [len(self._partition.train(n)) for n in cohort],
            train.batch,
            passes=cohorts.local.passes,
            steps=cohorts.local.steps,
            momentum=train.momentum,
        )
        return dict(zip(cohort, (lengths.max() / lengths).tolist(), strict=True))

    def _at(self, step: int) -> int:
        """Return the number of an own step in the round. Raises DataError."""
        at = step - int(self._start.first_step)
        if not 0 <= at < len(self._steps.batches):
            raise DataError(f"step {step} is of no client of round {self._start.round}")
        return at

    def samples(self, step: int, microbatch: int, size: int) -> Indices:
        """Return the samples of a microbatch of `size`, (size,) int64: places in the data set.
        Raises DataError, also for a batch that whole microbatches do not divide."""
        batch = self._steps.batches[self._at(step)]
        if len(batch) % size:
            raise DataError(
                f"a client has a batch of {len(batch)} samples in step {step}: expected a multiple "
                f"of the {size} of a microbatch"
            )
        first = microbatch * size
        return batch[first : first + size] if first < len(batch) else batch[:size]

    def counts(self, step: int, microbatch: int) -> float:
        size = self._training.train.batch // self._microbatches
        return float(microbatch * size < len(self._steps.batches[self._at(step)]))

    def ends(self, step: int) -> int:
        return self._steps.ends[self._at(step)] if self._start.steps else 0

    def bend(self, step: int, parameter: Tensor, version: Tensor) -> None:
        """Draw a parameter back to the version (FedProx): its gradient is still the sum over the
        microbatches of a step."""
        if self._mu and parameter.grad is not None:
            weight = sum(self.counts(step, m) for m in range(self._microbatches))
            began = version.to(parameter.device).view(parameter.shape)
            with torch.no_grad():
                parameter.grad.add_(parameter - began, alpha=self._mu * weight)

    # ------------------------------------------------------------ what clients came to

    def add(self, value: str, now: Tensor, version: Tensor, step: int) -> None:
        weight, by = self.ends(step), self._steps.lengths[self._at(step)]
        came, began = now.double(), version.double()
        moved = float((by * (came - began)).square().sum())
        if by != 1.0:
            came = began + by * (came - began)
        ends = torch.tensor([weight, weight * moved], dtype=torch.float64)
        found = torch.cat([weight * came, ends])
        self._sums[value] = self._sums[value] + found if value in self._sums else found

    def work(self, shared: Mapping[str, State]) -> float:
        """Return the mean, by weight, of the squared norm of what clients moved of what is here."""
        if not self._sums:
            return 0.0
        total = sum(float(s[-1]) for s in self._sums.values())
        return total / sum(self._steps.ends)

    def clients(self, value: str) -> Tensor | None:
        """Return the weighted mean of what clients came to of an entry, and forget it: (elements,)
        float32. Raises DataError where not just these clients are in it."""
        found, wanted = self._sums.pop(value, None), sum(self._steps.ends)
        if found is None or int(found[-2]) != wanted:
            has = 0 if found is None else int(found[-2])
            raise DataError(f"round {self._start.round}: {value} has {has} of the weight {wanted}")
        return (found[:-2] / found[-2]).float()

    @property
    def kept_bytes(self) -> int:
        return SUM_BYTES

    def state(self) -> dict[str, Tensor]:
        return {f"{value}:{SUM}{self._sums_of}": found for value, found in self._sums.items()}

    def load(self, states: Mapping[str, Tensor]) -> None:
        for name, found in states.items():
            value, _, part = name.rpartition(":")
            if part.startswith(SUM) and part.removeprefix(SUM).isdecimal():
                self._sums_of = int(part.removeprefix(SUM))
                self._sums[value] = found.to("cpu", torch.float64, copy=True)


@dataclass(frozen=True, slots=True)
class ClientSampler(Sampler):
    """The samples of clients in place of the run's."""

    clients: ClientSteps

    def train(self, step: int, microbatch: int, size: int) -> Indices:
        """Return those of a microbatch of an own step. Raises DataError."""
        return self.clients.samples(step, microbatch, size)


def why_not_in_steps(graph: Graph, method: str) -> str:
    """Say why clients of a model cannot be trained by steps of a plan, in words; empty: they can,
    if the loss is a mean over samples. `graph`: not bound."""
    if any(b.update is not None for b in graph.buffers):
        return "it has running statistics of whole batches"
    if any(takes_key(op.target) for op in graph.operators):
        return "it draws random numbers (dropout), other ones than where a client has one peer"
    if graph.weight and method_of(method).normalises:
        return f"it weighs its losses, so a step may be none, and {method} counts them"
    if graph.weight and method == "fedprox":
        return "it weighs its losses, by how much the stages do not know that fedprox draws back"
    return ""


def check_labels(graph: Graph, ignored: Ignored) -> None:
    """Raise DataError where labels of a host, of which its submitter knows nothing, make the loss a
    mean over something else than samples. `graph`: not bound. `ignored`: of the host's data."""
    names = {*ignored.seen, *ignored.unknown}
    if why := why_samples_meet(graph, lambda op: op.name not in names):
        raise DataError(
            f"the data of this host has labels that the loss ignores, and its client is trained by "
            f"several peers, a few samples at a time: {why}; expected a model that returns "
            '{"loss", "weight"}, or the memory for the model on this host'
        )
