"""A strategy inside a step: what a holder of a stage makes of its own gradients before they are
exchanged with the other holders, and what it makes of their sum.

    before_forward      before each of its microbatches
    on_gradient         its gradients are all there; what it leaves in them is what it gives
    message             what it gives: as it stands, the gradients as a flat vector
    (the exchange)      all holders' are added up (`dag/exchange/`), in its own space if it has one
    take                the sum becomes gradients
    update              it is in the gradients; becomes the stage's update, and its own state

A new one is a file that overrides some of these, a line in `strategies.py`, and one in
`dag/plan/strategies.py` for what plans must know of it. What it goes on from is in `state_tensors`,
by name, where all holders have it alike, else in `own_tensors`, and so in snapshots. Before
`update` nothing of that changes: a step can begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...dag.plan.plan import PeerId
from ...dag.plan.strategies import StrategyChoice
from .gradient_vector import Layout, TensorSpace, add, grads_of, set_grads, vector_of
from .norm import square_of_all
from .optimizer import StageOptimizer

__all__ = ["Holder", "Strategy"]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One holder of a stage, as its strategy sees it."""

    layout: Layout
    """What is trained."""
    parameters: Mapping[str, nn.Parameter]
    optimizer: StageOptimizer
    own: int
    """How many of the step's microbatches it goes through."""
    count: int
    """How many the step has."""
    unsent: Callable[[], Mapping[str, Tensor]] = dict
    """What its codec did not send yet of the updates that it gave, by parameter; nothing of those
    of which it holds nothing back."""
    peer: PeerId
    holders: tuple[PeerId, ...]
    """Of the stage, this one among them, in the plan's order."""
    tied: frozenset[str]
    """Parameters that other stages have as well."""
    choice: StrategyChoice
    """The strategy with its options, as the plan has it."""
    momentum: float = 0.0
    """SGD's of the job, where the strategy has it in the optimizer's place."""
    seed: int = 0
    """The run's."""
    device: torch.device
    """Where messages are made."""


class Strategy:
    """The plain mean, which the others are variations of: gradients are added up, and every holder
    makes the same update of the sum."""

    keeps = 0
    """Numbers that are kept for each one that is trained, in the dtype of sums."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.trained = {name: holder.parameters[name] for name, _ in holder.layout.parameters}

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept from step to step beside parameters and their gradients."""
        numbers = self.keeps * sum(p.numel() for p in self.trained.values())
        return self.holder.optimizer.state_bytes + numbers * self.holder.layout.dtype.itemsize

    def before_forward(self) -> None:
        """Called before each forward pass of training."""

    def on_gradient(self, step: int) -> None:
        """Called when this holder's gradients are accumulated, sums over its microbatches, before
        it gives them to others."""

    def message(self, which: int) -> Tensor:
        """A fresh flat vector for one of the sums of a step, of the length that the plan knows."""
        grads = {name: p.grad for name, p in self.trained.items()}
        return vector_of(self.holder.layout, grads, self.holder.device)

    def space(self, bounds: Sequence[int]) -> TensorSpace:
        """Where messages are added up; `bounds` as there."""
        return TensorSpace(bounds, self.holder.device, self.add, self.relay)

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of messages, in the given order, a fresh tensor."""
        return add(parts)

    def relay(self, total: Tensor) -> Tensor:
        """Return what is handed on of a sum on its way back."""
        return total

    def take(self, which: int, total: Tensor) -> None:
        """What all holders' messages came to; after the last one it is in the gradients."""
        set_grads(self.trained, grads_of(self.holder.layout, total))

    def square(self, names: Iterable[str]) -> Tensor:
        """The squared 2-norm of the gradients of these parameters, summed over all microbatches of
        the step, before clipping: a float64 scalar."""
        grads = (self.trained[name].grad for name in names)
        return square_of_all((g for g in grads if g is not None), self.holder.device)

    @torch.no_grad()
    def update(self, step: int, *, weight: float, norm: float) -> None:
        """Ends the step with the sum of what all holders gave, which is in the gradients; it leaves
        them to the caller. `weight` is the step's Σ weight, `norm` the global 2-norm of the mean
        gradient before clipping."""
        self.holder.optimizer.step(step, weight=weight, norm=norm)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights that the stage's holders have in common, where they are not what is in the
        parameters."""
        return {}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state to go on from, as PARAMETER:PART; its own tensors, which nobody may
        write to."""
        return self.holder.optimizer.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from copies of what `state_tensors` gave; names of others' are passed over."""
        self.holder.optimizer.load_state_tensors(tensors)

    def own_tensors(self) -> dict[str, Tensor]:
        """As `state_tensors`, what the other holders have not alike."""
        return {}

    def load_own_tensors(self, of: Mapping[PeerId, Mapping[str, Tensor]]) -> None:
        """Goes on from what `own_tensors` gave of all that had some, which stand here under the
        names of those who took their places; after `load_state_tensors`. Who has none of its own,
        under another plan say, begins with some other holder's optimizer."""
        peers = [p for p in sorted(of) if p != self.holder.peer]
        for peer in (*reversed(peers), self.holder.peer):
            self.holder.optimizer.load_state_tensors(of.get(peer, {}))
