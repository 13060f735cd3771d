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
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...dag.execute.execute import StageExecutor
from ...dag.ir.graph import Graph
from ...dag.ir.random import step_key
from ...dag.permutation import Indices
from ...dag.rounds.cohorts import places_of, state_number
from ...job import Training
from ...proto import broker_pb2
from ...proto.broker_pb2 import ClientNumber
from ..data.manifest import DataError
from ..data.partition import Partition
from ..data.reader import Reader
from ..rounds.methods.round_strategy import State
from ..sync.optimizer import learning_rate
from .batches import Participant
from .client_evaluation import ClientEvaluation
from .client_means import finite, hidden_mean, mean_of, pieces, rows_of
from .client_states import ClientStates, RoundStates
from .client_steps import ClientSteps, OwnSamples
from .cohort import Cohort, Trained, as_rows
from .control_variates import ControlVariates
from .shared_features import shared_features
from .sparse_updates import SparseUpdates
from .vhl_loss import virtual_data

__all__ = ["LocalCohort"]


@dataclass(frozen=True)
class _Aside:
    """What clients at `places` of the round's cohort came to, before more were to be trained: the
    mean by weight, by name, (elements,). total: of their weights. squares: the sum by weight of the
    squared norm of what each moved. skipped: steps of theirs that overflowed."""

    places: frozenset[int]
    mean: dict[str, Tensor]
    total: int
    squares: float
    skipped: int


MOST_COPIES, MOST_BYTES = 64, 256 << 20
"""Clients that are trained side by side at most, and bytes of their weights, gradients and
optimizers; one always is."""


class LocalCohort(ClientSteps):
    """Clients of one replica that is one peer with the whole model. `graph`: not bound. `executor`:
    what it has of the model, which comes to the mean. Work that a pipeline has begun it goes on
    with by steps. Raises SettingsError."""

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
        sparse = self._cohorts.own_positions + 2 * self._cohorts.sends.feedback
        size *= 2 + training.train.optimizer_slots + sparse + 2 * controls
        most = max(1, min(MOST_COPIES, MOST_BYTES // max(1, size)))
        self._cohort = Cohort(
            graph,
            training.train,
            most=most,
            mu=self._mu,
            virtual=virtual_data(graph, training),
            features=shared_features(graph, training, executor.device),
            scales_loss=training.scales_loss,
            device=executor.device,
        )
        privacy, numbers = self._cohorts.privacy, sum(p.numel() for p in self._moving.values())
        self._clip = privacy.shortened(numbers) if privacy is not None else 0.0
        """The 2-norm that a client's move has at most."""
        self._graph, self._states, self._controls = graph, states, controls
        """Whether clients have control variates."""
        self._rows: dict[str, Tensor] = {}
        """By name, what each client came to, or the mean of that, or of what they moved."""
        self._aside: _Aside | None = None
        self._losses = dict[int, float]()
        """By place of the round's cohort, what clients that count came to, where it is told."""
        self._came = (0, 0.0)
        """The total weight of the round's clients that count, and as in `_Aside` their squares."""
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

    def begin(self, start: broker_pb2.RoundStart) -> None:
        super().begin(start)
        if not start.more:
            self._aside, self._losses = None, {}

    def set_aside(self) -> None:
        mean = {n: t.detach().reshape(-1).clone() for n, t in self._moving.items()}
        self._aside = _Aside(
            frozenset(places_of(self._start.cohort)), mean, *self._came, self.skipped
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
        self.left_out, self.lost, self.losses = (), (), ()
        self.skipped = self._aside.skipped if self._aside else 0
        if start.steps:
            return super().work(shared)
        some, shares, places = self._new(start)
        if not some:
            return 0.0
        numbers = [p.number for p in some]
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
        updates = self._updates(numbers, rests) if cohorts.own_positions else None
        told = start.weights if updates else shares
        weights = dict(zip(numbers, told, strict=True))
        squares: dict[int, float] = {}
        losses: dict[int, float] = {}
        seen = self._measured(trained, squares, losses)
        if self._method.normalises or self._controls:
            seen = self._all_steps(seen, {p.number: len(plan) for p, plan in mine})
        if cohorts.privacy is not None:
            clip, count = self._clip, len(numbers)
            self._rows = hidden_mean(seen, self._moving, squares, clip=clip, count=count)
            return 0.0
        moves, began = self._normalised(numbers, weights)
        seen = finite(seen, squares)
        if cohorts.by_client:
            rows = rows_of(seen, numbers)
            sound = [math.isfinite(squares[n]) for n in numbers]
            self._rows = {name: r[sound] for name, r in rows.items()}
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
        if not there and self._aside is None:
            self._diverge()
            return 0.0
        self.left_out = tuple(p for p, n in zip(places, numbers, strict=True) if n not in there)
        if cohorts.told:
            at = zip(places, numbers, strict=True)
            self._losses |= {place: losses[n] for place, n in at if n in there}
            self.losses = tuple(self._losses[p] for p in sorted(self._losses))
        if cohorts.secure:
            return 0.0
        total = sum(squares[n] * (moves[n] ** 2 / w if moves else w) for n, w in there.items())
        self._add_aside(sum(there.values()), total)
        return self._came[1] / self._came[0]

    def _new(self, start: broker_pb2.RoundStart) -> tuple[list[Participant], list[int], list[int]]:
        """Return the clients of the round that are not trained yet, with their weights and places.
        Raises DataError."""
        some, shares = self._clients(start)
        places, done = places_of(start.cohort), self._aside.places if self._aside else frozenset()
        new = [i for i, place in enumerate(places) if place not in done]
        return [some[i] for i in new], [shares[i] for i in new], [places[i] for i in new]

    @torch.no_grad()
    def _add_aside(self, weight: int, squares: float) -> None:
        """Have the stages come to the mean of all clients of the round: of those that are in it
        now, of this weight, and of those before."""
        if (aside := self._aside) is not None:
            total = weight + aside.total
            for name, tensor in self._moving.items():
                now, before = tensor.reshape(-1), aside.mean.pop(name)
                if tensor.is_floating_point():
                    for at in pieces(len(now)):
                        sums = aside.total * before[at].double() + weight * now[at].double()
                        before[at] = sums / total
                else:
                    before = torch.maximum(before, now)
                tensor.copy_(before.view(tensor.shape))
            weight, squares = total, squares + aside.squares
        self._came = weight, squares

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

    def _measured(
        self, trained: Iterable[Trained], squares: dict[int, float], losses: dict[int, float]
    ) -> Iterator[Trained]:
        """Pass clients on, and note the squared norm of what each moved, the mean loss of its
        steps, and, where that may be told, how many overflowed; no number moved of those whose
        running statistics are none."""
        for some in trained:
            total = torch.zeros(len(some.participants), dtype=torch.float64)
            for name in self._trained:
                now, began = as_rows(some.values[name].detach()), self._executor.parameters[name]
                for at in pieces(now.shape[1]):
                    moved = now[:, at] - began.detach().reshape(-1)[at]
                    total += moved.double().square().sum(1).cpu()
            for name in self._updated:
                if (values := some.values[name]).is_floating_point():
                    total += torch.where(as_rows(values.isfinite()).all(1), 0.0, torch.nan).cpu()
            squares |= zip(some.participants, total.tolist(), strict=True)
            losses |= zip(some.participants, some.losses.tolist(), strict=True)
            if self._cohorts.privacy is None and not self._cohorts.secure:
                self.skipped += some.skipped
            yield some

    def _all_steps(
        self, trained: Iterable[Trained], wanted: Mapping[int, int]
    ) -> Iterator[Trained]:
        """Pass clients on that made the `wanted` steps, by number, which their move is divided by
        here and at others. Raises DataError for one that had a batch in which nothing counts."""
        for some in trained:
            for number, made in zip(some.participants, some.steps, strict=True):
                if made != wanted[number]:
                    raise DataError(
                        f"client {number} made {made} of {wanted[number]} steps in round "
                        f"{self._start.round}, as no sample counts in a batch of the others, and "
                        "fednova and scaffold divide what it moved by all of them: expected a "
                        "larger train.batch, or another sync.method"
                    )
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
        nothing, unless the method normalises."""
        if not (by := self._by_length(int(self._start.round))):
            return {}, {}
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

    def _read(self, places: Indices) -> Mapping[str, Tensor]:
        found = self._reader.samples(places.reshape(-1))
        return {name: t.view(*places.shape, *t.shape[1:]) for name, t in found.items()}
