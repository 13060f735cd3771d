"""The local job of a federated round: clients of the round's cohort in place of steps of the plan.

The cohort of a round are the first `per_round` clients of a permutation that follows from (seed,
round); a replica trains those at the places that the broker has handed to it
(`RoundStart.cohort`), each from the version that the round began with, and its stages come to
their weighted mean. From there on a round goes as any other. Where each client's contribution
comes by itself (`Cohorts.by_client`), stages stay at the version, and what clients came to is here
until it is taken down; and where sums are masked, for snapshots, which other peers keep, have what
is in the stages. So do they where clients are to be hidden: what is given is the mean of what they
moved, each by no more than `clip`, which has no rounding of weights in it that clip does not bound;
and nothing that a peer says beside it follows from clients' data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...dag.execute.execute import StageExecutor
from ...dag.ir.graph import Graph
from ...dag.ir.random import step_key
from ...dag.rounds.cohorts import cohort_of, effective_lengths, places_of, state_number
from ...dag.rounds.vector import PIECE
from ...job import Training
from ...proto.broker_pb2 import ClientNumber
from ..data.manifest import DataError
from ..data.partition import Partition
from ..data.reader import Reader
from ..rounds.strategy import State
from ..sync.optimizer import learning_rate
from .client_evaluation import ClientEvaluation
from .client_states import ClientStates, RoundStates
from .client_steps import ClientSteps, OwnSamples
from .cohort import Cohort, Trained
from .control_variates import ControlVariates
from .shared_features import shared_features
from .sparse_updates import SparseUpdates
from .vhl_loss import virtual_data

__all__ = ["LocalCohort", "hidden_mean", "mean_of", "rows_of"]

MOST_COPIES, MOST_BYTES = 64, 256 << 20
"""Clients that are trained side by side at most, and bytes of their weights, gradients and
optimizers; one always is."""


class LocalCohort(ClientSteps):
    """Clients of one replica that is one peer with the whole model. `graph`: not bound. `executor`:
    what it has of the model, which comes to the mean. Work that a pipeline has begun it goes on
    with by steps."""

    def __init__(
        self,
        training: Training,
        graph: Graph,
        executor: StageExecutor,
        partition: Partition | OwnSamples,
        reader: Reader,
        microbatches: int,
        states: ClientStates,
    ) -> None:
        super().__init__(training, graph, partition, microbatches)
        self._executor, self._reader = executor, reader
        assert training.rounds is not None
        self._senders: Mapping[str, Tensor] = {}
        self._trained = [p.name for p in graph.parameters if p.trainable]
        self._updated = [b.name for b in graph.buffers if b.update]
        size = sum(p.numel() * p.element_size() for p in self._moving.values())
        controls = self._method.controls
        sparse = self._cohorts.sends.sparse + 2 * self._cohorts.sends.feedback
        size *= 2 + training.train.optimizer_slots + sparse + 2 * controls
        most = max(1, min(MOST_COPIES, MOST_BYTES // max(1, size)))
        self._cohort = Cohort(
            graph,
            training.train,
            most=most,
            mu=self._mu,
            virtual=virtual_data(graph, training),
            features=shared_features(graph, training, executor.device),
            device=executor.device,
        )
        self._graph, self._states, self._controls = graph, states, controls
        """Whether clients have control variates."""
        self._rows: dict[str, Tensor] = {}
        """By name, what each client came to, or the mean of that, or of what they moved."""
        self._evaluation: ClientEvaluation | None = None
        """None: the only client here has the held-out part of the data for that."""
        if isinstance(partition, Partition):
            self._evaluation = ClientEvaluation(
                graph,
                partition,
                seed=training.seed,
                batch=training.train.batch,
                most=most,
                device=executor.device,
            )

    @property
    def to_gradient(self) -> float:
        rate = learning_rate(self._training.train, self._start.round)
        steps = self._cohorts.local.steps
        return 1.0 / (steps * rate) if self._controls and steps and rate > 0 else 0.0

    def work(self, shared: Mapping[str, State]) -> float:
        """Train the clients of the round. Return the mean over them, by weight, of the squared norm
        of what each moved; 0 where clients, or what peers give, are to be hidden. A client that
        moved by what is no finite number is left out, unless all did; where clients are hidden it
        moves by nothing, and nobody hears of it. One whose state is not here has none. Raises
        DataError."""
        start, cohorts, seed = self._start, self._cohorts, self._training.seed
        self.left_out, self.lost = (), ()
        if start.steps:
            return super().work(shared)
        some, shares = self._clients(start)
        if not some:
            return 0.0
        places, numbers = places_of(start.cohort), [p.number for p in some]
        states = self._states_of(numbers)
        lost = states.lost if states else ()
        self.lost = tuple(p for p, n in zip(places, numbers, strict=True) if n in lost)
        plans = self._batches(some, int(start.round))
        held = {**self._executor.parameters, **self._executor.buffers}
        rate = learning_rate(self._training.train, start.round)

        def random_key(number: int, step: int) -> int:
            return step_key(seed, start.round * cohorts.clients + number, step)

        mine = [*zip(some, plans, strict=True)]
        controls, added = None, None
        if self._controls and states:
            controls = ControlVariates(self._graph, shared, states, self.to_gradient)
            added = partial(controls.corrections, device=self._executor.device)
        trained = self._cohort.work(held, mine, self._read, rate, random_key, start.round, added)
        rests = None if self._controls else states
        updates = self._updates(numbers, rests) if cohorts.sends.sparse else None
        told = start.weights if updates else shares
        weights = dict(zip(numbers, told, strict=True))
        squares: dict[int, float] = {}
        seen = self._measured(trained, squares)
        if cohorts.privacy is not None:
            clip, count = cohorts.privacy.clip, len(numbers)
            self._rows = hidden_mean(seen, self._moving, squares, clip=clip, count=count)
            return 0.0
        moves, began = self._normalised(numbers, weights)
        seen = _finite(seen, squares)
        if cohorts.by_client:
            rows = rows_of(seen, numbers)
            finite = [math.isfinite(squares[n]) for n in numbers]
            self._rows = {name: r[finite] for name, r in rows.items()}
        else:
            seen = updates.sent(seen) if updates else seen
            if controls:
                seen = controls.followed(seen, self._executor.parameters)
            mean = mean_of(seen, weights, moves, began)
            self._senders = updates.by_name() if updates and cohorts.sends.overlap else {}
            if cohorts.secure:
                self._rows = {
                    name: found.to("cpu", held[name].dtype).float().reshape(-1)
                    for name, found in mean.items()
                }
            else:
                with torch.no_grad():
                    for name in mean:
                        held[name].copy_(mean[name])
        there = {n: w for n, w in weights.items() if math.isfinite(squares[n])}
        if not there:
            self._diverge()
            return 0.0
        self.left_out = tuple(p for p, n in zip(places, numbers, strict=True) if n not in there)
        if cohorts.secure:
            return 0.0
        total = sum(squares[n] * (moves[n] ** 2 / w if moves else w) for n, w in there.items())
        return total / sum(there.values())

    def _states_of(self, numbers: Sequence[int]) -> RoundStates | None:
        """Return what these clients have kept; None: clients keep nothing. Raises DataError for
        what the broker cannot have meant."""
        start = self._start
        if not self._controls and not self._cohorts.sends.feedback:
            return None
        if len(start.trained) != len(numbers):
            raise DataError(
                f"round {start.round} says of {len(start.trained)} clients when they were trained: "
                f"expected that of {len(numbers)}"
            )
        trained = dict(zip(numbers, start.trained, strict=True))
        sizes = (self._executor.parameters[name].numel() for name in self._trained)
        behind = state_number(start.round, start.term)
        return RoundStates(self._states, trained, behind, sum(sizes))

    @property
    def _moving(self) -> dict[str, Tensor]:
        """What local steps change of the stage."""
        trained = {n: self._executor.parameters[n] for n in self._trained}
        return {**trained, **{n: self._executor.buffers[n] for n in self._updated}}

    def _diverge(self) -> None:
        """Give no finite number, for no client has moved by one."""
        for name, tensor in self._moving.items():
            if tensor.is_floating_point() and self._cohorts.by_client:
                self._rows[name] = torch.full((1, tensor.numel()), torch.nan)
            elif tensor.is_floating_point() and self._cohorts.secure:
                self._rows[name] = torch.full((tensor.numel(),), torch.nan)
            elif tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)

    def _measured(self, trained: Iterable[Trained], squares: dict[int, float]) -> Iterator[Trained]:
        """Pass clients on, and note the squared norm of what each moved; no number of those whose
        running statistics are none."""
        for some in trained:
            total = torch.zeros(len(some.participants), dtype=torch.float64)
            for name in self._trained:
                now, began = some.values[name].detach().flatten(1), self._executor.parameters[name]
                for at in _pieces(now.shape[1]):
                    moved = now[:, at] - began.detach().reshape(-1)[at]
                    total += moved.double().square().sum(1).cpu()
            for name in self._updated:
                if (values := some.values[name]).is_floating_point():
                    total += torch.where(values.isfinite().flatten(1).all(1), 0.0, torch.nan).cpu()
            squares |= zip(some.participants, total.tolist(), strict=True)
            yield some

    @property
    def kept_bytes(self) -> int:
        return 0

    def evaluate(self) -> list[ClientNumber]:
        """Return what the version in the stages comes to on clients' own held-out samples. Raises
        DataError."""
        if self._evaluation is None:
            return []
        held = {**self._executor.parameters, **self._executor.buffers}
        return self._evaluation.numbers(held, self._read)

    def _normalised(
        self, numbers: Sequence[int], weights: Mapping[int, int]
    ) -> tuple[Mapping[int, float], Mapping[str, Tensor]]:
        """Return what moves of these clients count for in the mean, and from where parameters move;
        nothing, unless the method normalises. A move is divided by the client's effective length,
        and multiplied by the largest of the round's cohort: then it is no smaller than it was, and
        clients of one length move as without. What is left to multiply the mean by, the round's
        plan says (`FederatedPolicy.scale`)."""
        cohorts, train = self._cohorts, self._training.train
        if not self._method.normalises:
            return {}, {}
        everybody = range(cohorts.per_round)
        cohort = cohort_of(cohorts.clients, self._training.seed, self._start.round, everybody)
        lengths = effective_lengths(
            [len(self._partition.train(n)) for n in cohort],
            train.batch,
            passes=cohorts.local.passes,
            steps=cohorts.local.steps,
            momentum=train.momentum,
        )
        by = dict(zip(cohort, lengths.max() / lengths, strict=True))
        began = {n: self._executor.parameters[n] for n in self._trained}
        return {n: weights[n] * by[n] for n in numbers}, began

    def clients(self, value: str) -> Tensor | None:
        if self._start.steps:
            return super().clients(value)
        return self._rows.pop(value.partition(":")[2], None)

    def _updates(self, numbers: Sequence[int], rests: RoundStates | None) -> SparseUpdates:
        """Return what takes down the updates of these clients, and keeps the `rests`. Raises
        DataError for what the broker cannot have meant."""
        start, base = self._start, {n: self._executor.parameters[n] for n in self._trained}
        elements = sum(t.numel() for t in base.values())
        told = len(start.kept), len(start.weights)
        if told != (len(numbers),) * 2 or not all(0 < k <= elements for k in start.kept):
            raise DataError(
                f"round {start.round} says of {told[0]} clients what they send, and of {told[1]} "
                f"what they weigh: expected that of {len(numbers)}, each 1 to {elements} numbers"
            )
        if 0 in start.weights:
            raise DataError(f"round {start.round} has a client that weighs nothing")
        return SparseUpdates(base, dict(zip(numbers, start.kept, strict=True)), rests)

    def senders(self, value: str) -> Tensor | None:
        """Return how many of the round's clients sent each number of a parameter, (elements,)
        float32; None where that makes no difference."""
        return self._senders.get(value.removeprefix("param:"))

    def _read(self, places: npt.NDArray[np.int64]) -> Mapping[str, Tensor]:
        found = self._reader.samples(places.reshape(-1))
        return {name: t.view(*places.shape, *t.shape[1:]) for name, t in found.items()}


def _finite(trained: Iterable[Trained], squares: Mapping[int, float]) -> Iterator[Trained]:
    """Pass on clients that moved by finite numbers. `squares`: as in `hidden_mean`."""
    for some in trained:
        there = [i for i, n in enumerate(some.participants) if math.isfinite(squares[n])]
        if len(there) == len(some.participants):
            yield some
        elif there:
            yield Trained(
                tuple(some.participants[i] for i in there),
                {name: values[there] for name, values in some.values.items()},
                tuple(some.steps[i] for i in there),
                some.losses[there],
            )


def rows_of(trained: Iterable[Trained], participants: Sequence[int]) -> dict[str, Tensor]:
    """Return, by name, what these participants came to, in this order: (participants, elements),
    float32, on the host; integers as two float32 with the bits of an int64."""
    found: dict[str, Tensor] = {}
    at = {number: i for i, number in enumerate(participants)}
    for some in trained:
        places = [at[n] for n in some.participants]
        for name, values in some.values.items():
            dtype = torch.float32 if values.is_floating_point() else torch.int64
            rows = values.detach().to("cpu", dtype).reshape(len(places), -1).view(torch.float32)
            if name not in found:
                found[name] = torch.empty(len(participants), rows.shape[1])
            found[name][places] = rows
    return found


def hidden_mean(
    trained: Iterable[Trained],
    began: Mapping[str, Tensor],
    squares: Mapping[int, float],
    *,
    clip: float,
    count: int,
) -> dict[str, Tensor]:
    """Return, by name, the mean of what participants moved away from `began`, (elements,), float32,
    on the host; each is shortened to a 2-norm of `clip` at most, and one that moved by what is no
    finite number counts as one that moved by nothing. `squares`: by participant, the squared norm
    of what it moved, of those that have come out of `trained`. `count`: of all.

    The mean is rounded to float32 and counts as often as there are participants: they get that much
    less than clip, so that one more or less never changes their sum by more."""
    sums = {n: torch.zeros_like(t).double() for n, t in began.items() if t.is_floating_point()}
    most = clip / (1.0 + count * 2.0**-22)
    for some in _finite(trained, squares):
        norms = torch.tensor([squares[n] for n in some.participants], dtype=torch.float64).sqrt()
        by = torch.where(norms <= most, 1.0, most / norms)
        for name, values in some.values.items():
            if values.is_floating_point():
                moved = values.detach().double() - began[name].detach().double()
                sums[name] += torch.tensordot(by.to(moved.device), moved, 1)
    return {n: (s / count).reshape(-1).to("cpu", torch.float32) for n, s in sums.items()}


def mean_of(
    trained: Iterable[Trained],
    weights: Mapping[int, int],
    moves: Mapping[int, float] | None = None,
    began: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return, by name, the weighted mean of what participants came to, in float64; of integers the
    largest. `weights`: by participant, above 0. `moves`: what each counts for in place of that
    where the tensor `began` as given, so that it is not the mean that this adds up to."""
    moves, began = moves or {}, began or {}
    sums: dict[str, Tensor] = {}
    total, moved = 0, 0.0
    for some in trained:
        mine = [weights[n] for n in some.participants]
        other = [moves[n] for n in some.participants] if began else []
        total, moved = total + sum(mine), moved + sum(other)
        for name, values in some.values.items():
            found = _added(values.detach(), other if name in began else mine)
            before = sums.get(name)
            if before is not None:
                whole = not values.is_floating_point()
                found = torch.maximum(before, found) if whole else before + found
            sums[name] = found
    for name, tensor in began.items():
        sums[name] += (total - moved) * tensor.detach().double()
    return {n: s.div_(total) if s.is_floating_point() else s for n, s in sums.items()}


def _added(values: Tensor, weights: Sequence[float]) -> Tensor:
    if not values.is_floating_point():
        return values.amax(0)
    by = torch.tensor(weights, dtype=torch.float64, device=values.device)
    rows = values.flatten(1)
    found = torch.empty(rows.shape[1], dtype=torch.float64, device=values.device)
    for at in _pieces(len(found)):
        found[at] = torch.tensordot(by, rows[:, at].double(), 1)
    return found.view(values.shape[1:])


def _pieces(elements: int) -> Iterator[slice]:
    """Yield parts of a tensor, so that no large one has a copy in float64."""
    for start in range(0, max(1, elements), PIECE):
        yield slice(start, start + PIECE)
