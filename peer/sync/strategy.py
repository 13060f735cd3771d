"""A strategy inside a step: what a holder of a stage makes of its own gradients before they are
exchanged with the other holders, and what it makes of their sum.

    before_forward      before each of its microbatches
    on_gradient         its gradients are all there; what it leaves in them is what it gives
    (the exchange)      all holders' are added up (`dag/exchange/`)
    update              the sum is in the gradients; becomes the stage's update

A new one is a file that overrides some of these, a line in `strategies.py`, and one in
`dag/plan/strategies.py` for what plans must know of it. What it goes on from is in `state_tensors`,
by name, and so in snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .norm import square_of
from .optimizer import StageOptimizer
from .vector import Layout

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


class Strategy:
    """The plain mean, which the others are variations of: gradients are added up, and every holder
    makes the same update of the sum."""

    own_state: ClassVar[bool] = False
    """Whether `state_tensors` differ from one holder of the stage to the next."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.trained = {name: holder.parameters[name] for name, _ in holder.layout.parameters}

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept from step to step beside parameters and their gradients."""
        return self.holder.optimizer.state_bytes

    def before_forward(self) -> None:
        """Called before each forward pass of training."""

    def on_gradient(self, step: int) -> None:
        """Called when this holder's gradients are accumulated, sums over its microbatches, before
        it gives them to others."""

    def squares(self, names: Iterable[str]) -> list[Tensor]:
        """float64 scalars whose sum is the squared 2-norm of the gradients of these parameters,
        summed over all microbatches of the step, before clipping."""
        grads = (self.trained[name].grad for name in names)
        return [square_of(grad) for grad in grads if grad is not None]

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
        """What it goes on from, as PARAMETER:PART; its own tensors, which nobody may write to."""
        return self.holder.optimizer.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from copies of what `state_tensors` gave; names of others' are passed over."""
        self.holder.optimizer.load_state_tensors(tensors)
