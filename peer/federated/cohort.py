"""Local work of a cohort: participants that share a peer, trained side by side.

Copies of the model are stacked, one for each participant, and make their steps together: one
forward and backward of all (`dag/execute/model_copies.py`) and one update of all, with an optimizer
that begins fresh. A participant that has ended is left behind where the stack ends: those with more
steps stand first. So each comes to what it would have come to by itself, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from ...dag.execute.model_copies import CopiesForward, ModelCopies
from ...dag.ir.graph import Graph
from ...dag.permutation import Indices
from ...job import Train
from ..optimizers.loss_scaler import LossScaler
from ..sync.optimizer import StageOptimizer, clip_factor
from .batches import Participant
from .shared_features import Distribution, SharedFeatures
from .vhl_loss import VirtualData

__all__ = ["Cohort", "Trained", "as_rows"]

AHEAD_BYTES = 16 << 20
"""Of inputs that are read before their step."""
Corrections = Callable[[Sequence[int]], Mapping[str, Tensor]]
"""By numbers of participants, what is added to their gradients: by parameter, (participants,
numbers)."""
Key = Callable[[int, int], int]
"""By number of a participant and of its step, the key of random numbers (`dag/ir/random.py`)."""
Read = Callable[[Indices], Mapping[str, Tensor]]
"""Samples by their places in the data set, any shape (*places,): inputs by argument, each
(*places, ...)."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What some participants came to, in the order of `participants`. values: by name, of trained
    parameters and of buffers that steps update, (participants, *shape). steps, losses:
    (participants,) each; steps are those that were made, without those whose batch has no sample
    that counts; losses are the mean over them. skipped: of these of all, those that overflowed."""

    participants: tuple[int, ...]
    values: dict[str, Tensor]
    steps: tuple[int, ...]
    losses: Tensor
    skipped: int = 0


def as_rows(values: Tensor) -> Tensor:
    """Return what copies have of a tensor, (copies, *shape), as (copies, numbers): of a scalar
    one."""
    return values.unsqueeze(-1).flatten(1)


@dataclass(frozen=True, slots=True)
class _Round:
    """What all participants of a round are trained with; as of `Cohort.work`, and what is known of
    features."""

    version: Mapping[str, Tensor]
    train: Train
    read: Read
    key: Key
    number: int
    corrections: Corrections | None
    known: Distribution | None


class _ApartError(Exception):
    """Copies of which not all make a step: in the batch of one no sample counts, or its scaled
    gradients overflow. Its optimizer must not count one, and another scale of losses be its own, so
    copies train one after the other."""


class Cohort:
    """Trains participants on one device. `most`: participants that are trained at once."""

    def __init__(
        self,
        graph: Graph,
        train: Train,
        *,
        most: int = 64,
        mu: float = 0.0,
        virtual: VirtualData | None = None,
        features: SharedFeatures | None = None,
        scales_loss: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """`mu`: how strongly participants are drawn back to the version (FedProx). `virtual`: noise
        that they train on as well, where `graph` has classes for it. `features`: of all clients, on
        which they train what lies above their own. `scales_loss`: as [train] says, by a scale that
        begins anew with each participant."""
        self._graph, self._train, self._most, self._mu = graph, train, most, mu
        self._virtual, self._device = virtual, torch.device(device)
        self._features, self._scales_loss = features, scales_loss
        self._copies = (
            ModelCopies(virtual.form.graph, device, virtual.form.reads)
            if virtual
            else ModelCopies(graph, device)
        )

    def work(
        self,
        version: Mapping[str, Tensor],
        cohort: Sequence[tuple[Participant, Sequence[Indices]]],
        read: Read,
        rate: float | None = None,
        key: Key = lambda number, step: number << 32 | step,
        round_: int = 0,
        corrections: Corrections | None = None,
    ) -> Iterator[Trained]:
        """`version`: parameters and buffers by name, that all begin from. `cohort`: participants
        with the samples of each of their steps. `rate`: the learning rate of all steps; None: as
        [train] has it of each. `key`: of what is random in a participant's step. `round_`: of
        which the noise hangs besides. `corrections`: of gradients, before they are clipped. Yields
        up to `most` of them at once."""
        train = self._train
        if rate is not None:
            train = replace(train, lr=rate, schedule="constant", warmup=0)
        known = self._features.begin(version, round_) if self._features else None
        one = _Round(version, train, read, key, round_, corrections, known)
        longest = sorted(cohort, key=lambda one: -len(one[1]))
        for first in range(0, len(longest), self._most):
            some = longest[first : first + self._most]
            try:
                yield self._together(one, some)
            except _ApartError:
                for alone in some:
                    yield self._together(one, [alone])

    def _together(
        self, one: _Round, cohort: Sequence[tuple[Participant, Sequence[Indices]]]
    ) -> Trained:
        bends = one.corrections([p.number for p, _ in cohort]) if one.corrections else {}
        scaler = LossScaler(one.train.loss_scale) if self._scales_loss else None
        stack = _Stack(self._graph, one, len(cohort), self._device, self._mu, bends, scaler)
        weighs, device = bool(self._graph.weight), self._device
        losses = torch.zeros(len(cohort), dtype=torch.float64, device=device)
        counts = torch.tensor([len(plan) for _, plan in cohort], device=device).double()
        plans = [plan for _, plan in cohort]
        alike = len({len(batch) for plan in plans for batch in plan}) == 1
        ahead = _ahead(plans, one.read) if alike and len({*map(len, plans)}) == 1 else None
        for step in range(max(map(len, plans))):
            active = sum(len(plan) > step for plan in plans)
            stack.keep(active)
            some = [p for p, _ in cohort[:active]]
            if ahead is not None:
                found = self._run(one, stack, None, next(ahead), some, step)
            else:
                places = [plan[step] for plan in plans[:active]]
                found = self._step(one, stack, places, some, step)
            if weighs and len(cohort) > 1 and not bool(found.weights.all()):
                raise _ApartError
            stack.update(found)
            if weighs:
                known = found.weights != 0
                losses[:active] += torch.where(known, found.losses, 0.0)
                counts[:active] -= (~known).double()
            else:
                losses[:active] += found.losses
        return Trained(
            tuple(p.number for p, _ in cohort),
            stack.values(),
            tuple(int(made) for made in counts.tolist()),
            (losses / counts).cpu(),
            stack.skipped,
        )

    def _step(
        self,
        one: _Round,
        stack: _Stack,
        places: Sequence[Indices],
        some: Sequence[Participant],
        step: int,
    ) -> CopiesForward:
        """One forward and backward of all active copies, by batches of one size."""
        by_size = sorted(range(len(places)), key=lambda i: -len(places[i]))
        groups = [[*g] for _, g in groupby(by_size, key=lambda i: len(places[i]))]
        made = []
        for group in groups:
            which = None if len(groups) == 1 else torch.tensor(group, device=self._device)
            inputs = one.read(np.stack([places[i] for i in group]))
            made.append(self._run(one, stack, which, inputs, [some[i] for i in group], step))
        return made[0] if len(made) == 1 else _joined(made, [i for g in groups for i in g])

    def _run(
        self,
        one: _Round,
        stack: _Stack,
        which: Tensor | None,
        inputs: Mapping[str, Tensor],
        mine: Sequence[Participant],
        step: int,
    ) -> CopiesForward:
        """One forward and backward of these copies, on noise or features of all as well where there
        are some."""
        loss_of, features = None, self._features
        if self._virtual:
            inputs, loss_of = self._virtual.beside(inputs, mine, one.number, step, self._device)
        takes_key = self._copies.takes_key or (features is not None and features.takes_key)
        keys = [one.key(p.number, step) for p in mine] if takes_key else []
        standing = stack.of(which)
        made = self._copies.run(*standing, inputs, keys, loss_of, stack.scale)
        if features is None or one.known is None:
            return made
        drawn = features.drawn(one.known, mine, one.number, step)
        return features.beside(made, *standing, drawn, keys, one.number)


def _ahead(plans: Sequence[Sequence[Indices]], read: Read) -> Iterator[Mapping[str, Tensor]]:
    """Yield the inputs of each step, (copies, batch, ...), of plans that are all of one size: read
    for several steps at once, as many as `AHEAD_BYTES` hold."""
    steps = np.stack([np.stack(plan) for plan in plans], 1)
    first = read(steps[0])
    yield first
    size = max(1, sum(t.numel() * t.element_size() for t in first.values()))
    several = max(1, AHEAD_BYTES // size)
    for at in range(1, len(steps), several):
        some = steps[at : at + several]
        found = read(some)
        for i in range(len(some)):
            yield {name: t[i] for name, t in found.items()}


def _joined(made: Sequence[CopiesForward], order: Sequence[int]) -> CopiesForward:
    """Groups of copies as one, `order` says of each row which copy it is."""
    back = torch.tensor(order).argsort()

    def whole(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts])[back]

    grads: dict[str, Tensor | None] = {}
    for name in made[0].grads:
        parts = [m.grads[name] for m in made]
        known = [p for p in parts if p is not None]
        grads[name] = whole(known) if len(known) == len(parts) else None
    return CopiesForward(
        grads,
        whole([m.losses for m in made]),
        whole([m.weights for m in made]),
        {},
        {name: whole([m.statistics[name] for m in made]) for name in made[0].statistics},
    )


class _Stack:
    """Copies of a model, their optimizer, and which of them still make steps."""

    def __init__(
        self,
        graph: Graph,
        one: _Round,
        copies: int,
        device: torch.device,
        mu: float,
        bends: Mapping[str, Tensor],
        scaler: LossScaler | None,
    ) -> None:
        """`scaler`: of losses, of all copies: they overflow together, or train one by one."""
        self._bends, self._scaler = bends, scaler
        self.skipped = 0
        """Steps of all copies, so far, that overflowed."""
        self._graph, self._train, self._active, self._steps = graph, one.train, copies, 0
        version = one.version
        self._mu, self._began = mu, {n: t.detach().to(device) for n, t in version.items()}

        def stacked(name: str, moves: bool) -> Tensor:
            own = version[name].detach().to(device)
            every = own.expand(copies, *own.shape)
            return every.clone() if moves else every

        # What no operator reads is in no stage.
        trainable = {p.name: p.trainable for p in graph.parameters if p.name in version}
        self._trainable = trainable
        self._parameters = {n: stacked(n, moves) for n, moves in trainable.items()}
        self._rules = {b.name: b.update for b in graph.buffers if b.update}
        buffers = (b.name for b in graph.buffers if b.name in version)
        self._buffers = {n: stacked(n, n in self._rules) for n in buffers}
        self._apart = [self._alone(i) for i in range(copies)] if one.train.whole else []
        self._begin({})

    def _alone(self, copy: int) -> tuple[dict[str, nn.Parameter], StageOptimizer]:
        """One copy's parameters, as they stand in the stack, and an optimizer of its own, where an
        update is no function of each number by itself."""
        leaves = {n: nn.Parameter(p[copy], self._trainable[n]) for n, p in self._parameters.items()}
        return leaves, StageOptimizer(self._train, leaves)

    def _begin(self, state: Mapping[str, Tensor]) -> None:
        """The optimizer of those that are active: copies share its steps, and nothing else."""
        self._leaves = {
            n: nn.Parameter(p[: self._active], self._trainable[n])
            for n, p in self._parameters.items()
        }
        self._optimizer = StageOptimizer(self._train, {} if self._apart else self._leaves)
        self._optimizer.load_state_tensors(state)

    def keep(self, active: int) -> None:
        """From here on only the first so many make steps."""
        if active == self._active:
            return
        state = self._optimizer.state_tensors()
        self._active = active
        self._begin({n: t[:active] if t.dim() else t for n, t in state.items()})

    def of(self, which: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers of these copies; None: of all that are active."""
        buffers = {n: b[: self._active] for n, b in self._buffers.items()}
        if which is None:
            return dict(self._leaves), buffers
        chosen = {
            n: p.detach()[which].requires_grad_(p.requires_grad) for n, p in self._leaves.items()
        }
        return chosen, {n: b[which] for n, b in buffers.items()}

    @property
    def scale(self) -> float:
        """What losses of the next step are multiplied with."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @torch.no_grad()
    def update(self, found: CopiesForward) -> None:
        """One step of the optimizer by each copy's own mean gradient, clipped by its own norm; none
        where scaled gradients of all copies overflow. Raises _ApartError where those of some do."""
        grads = {n: g for n, g in found.grads.items() if g is not None}
        # Of one copy, whether a sample of its batch counts.
        counts = float(bool(found.weights.any())) if self._graph.weight else 1.0
        weights = found.weights if self._graph.weight else None
        if self._scaler is not None:
            weights = self.scale * (torch.ones_like(found.losses) if weights is None else weights)
            finite = [as_rows(g.isfinite()).all(1) for g in grads.values()]
            sound = torch.stack(finite).all(0).tolist() if finite else [True]
            if any(sound) and not all(sound):
                raise _ApartError
            if counts:
                self._scaler.update(overflowed=not all(sound))
                self.skipped += 0 if all(sound) else self._active
            grads = grads if all(sound) else {}  # which leaves all as it is
        if weights is not None:
            weights = torch.where(weights == 0, 1.0, weights)
        for name, grad in grads.items():
            if weights is not None:
                grads[name] = grad / weights.to(grad.dtype).view(-1, *(1,) * (grad.dim() - 1))
            if self._mu:
                grads[name] = grads[name] + self._mu * (self._leaves[name] - self._began[name])
            if name in self._bends:
                grads[name] = grads[name] + self._bends[name][: self._active].view_as(grads[name])
        if self._train.clip > 0 and grads:
            squares = sum(
                (as_rows(g.double()).square().sum(1) for g in grads.values()),
                torch.zeros(self._active, dtype=torch.float64, device=found.losses.device),
            )
            factors = [clip_factor(n, self._train.clip) for n in squares.sqrt().tolist()]
            if any(f != 1 for f in factors):
                by = torch.tensor(factors, device=found.losses.device)
                for name, grad in grads.items():
                    grads[name] = grad * by.to(grad.dtype).view(-1, *(1,) * (grad.dim() - 1))
        for copy, (leaves, optimizer) in enumerate(self._apart[: self._active]):
            for name, leaf in leaves.items():
                leaf.grad = grads[name][copy] if name in grads else None
            optimizer.step(self._steps, weight=counts, norm=0.0)
        if not self._apart:
            for name, leaf in self._leaves.items():
                leaf.grad = grads.get(name)
            self._optimizer.step(self._steps, weight=counts, norm=0.0)
        self._steps += 1
        for name, rule in self._rules.items():
            buffer = self._buffers[name][: self._active]
            if rule.rule == "add":
                buffer.add_(rule.factor if buffer.is_floating_point() else int(rule.factor))
            else:
                value = found.statistics[name].double()
                buffer.copy_((1 - rule.factor) * buffer.double() + rule.factor * value)

    def values(self) -> dict[str, Tensor]:
        """Parameters and buffers of all copies, without those that stay as they are."""
        trained = {n: p for n, p in self._parameters.items() if self._trainable[n]}
        return {**trained, **{n: self._buffers[n] for n in self._rules}}
