"""Error feedback that steps ahead: holders exchange updates in place of gradients, and each trains
where its own unsent ones would bring it.

    u = the optimizer's update from this holder's own gradient, at x      sent: C(c·u + e)
    W' = W - Σ sent / M                                                   x' = W' - e' / M

W the weights, equal at all holders bit for bit; x where this holder takes its gradient; e what its
codec did not send yet; c the microbatches that it did, of M in a step. So what a lossy codec delays
is not missing in the gradients of who made it: with top-k of 1 % that is a hundred steps. W is what
is evaluated, exported, and kept in snapshots.

`p = η·g + e` of error feedback (Karimireddy et al. 2019, 1901.09847, algorithm 2) with the
optimizer's update as η·g, and the step ahead of Xu et al. 2020 (2008.05823), of which this takes
the part that the mean of all holders will move by. Each holder has an optimizer state of its own,
and its gradient is clipped by the norm of its stage's, for nobody knows the whole one yet. Of a
tied parameter the i-th holders of its stages add up their gradients first, and the sums of all
holders' updates, which codecs made different, become their mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .norm import square_of
from .strategy import Holder, Strategy

__all__ = ["StepAheadEF"]


class StepAheadEF(Strategy):
    """Steps ahead of the exchange, with error feedback, for one holder of a stage."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        self._home: dict[str, Tensor] = {}
        """W, while x is in the parameters."""
        self._squares: dict[str, float] = {}

    @property
    def size_bytes(self) -> int:
        """With W beside the parameters."""
        copies = sum(p.numel() * p.element_size() for p in self.trained.values())
        return super().size_bytes + copies

    @torch.no_grad()
    def before_forward(self) -> None:
        """From W to x, once in a step."""
        if self._home:
            return
        unsent = self.holder.unsent()
        self._home = {name: p.detach().clone() for name, p in self.trained.items()}
        for name, p in self.trained.items():
            if name in unsent:
                p.sub_(unsent[name].to(p.device, p.dtype), alpha=1 / self.holder.count)

    @torch.no_grad()
    def on_gradient(self, step: int) -> None:
        """Turns this holder's accumulated gradients into c·u."""
        own, self._squares = self.holder.own, {}
        if not own:
            return  # others did all microbatches
        grads = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        each = [square_of(g) for g in grads.values()]
        squares = torch.stack(each).tolist() if each else []
        self._squares = dict(zip(grads, squares, strict=True))
        norm = math.sqrt(sum(squares)) / own
        before = {name: self.trained[name].detach().clone() for name in grads}
        self.holder.optimizer.step(step, weight=own, norm=norm)
        for name, place in before.items():
            grads[name].copy_(place.sub_(self.trained[name])).mul_(own)

    def square(self, names: Iterable[str]) -> Tensor:
        """What this holder's own gradients of the step say of those of all."""
        total = sum(self._squares.get(name, 0.0) for name in names)
        total *= (self.holder.count / max(1, self.holder.own)) ** 2
        return torch.tensor(total, dtype=torch.float64)

    @torch.no_grad()
    def update(self, step: int, *, weight: float, norm: float) -> None:
        """From x to W', by what all holders sent."""
        for name, p in self.trained.items():
            if self._home:  # who did no microbatch never left
                p.copy_(self._home[name])
            if p.grad is not None:
                p.sub_(p.grad, alpha=1 / self.holder.count)
        self._home = {}

    def weights(self) -> Mapping[str, Tensor]:
        return self._home

    def state_tensors(self) -> dict[str, Tensor]:
        return {}

    def own_tensors(self) -> dict[str, Tensor]:
        return self.holder.optimizer.state_tensors()
