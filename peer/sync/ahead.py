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
from torch import Tensor, nn

from .norm import squares_of
from .optimizer import StageOptimizer
from .vector import Layout

__all__ = ["StepAheadEF"]


class StepAheadEF:
    """Steps ahead of the exchange, with error feedback, for one holder of a stage; `own` of the
    step's `count` microbatches are its own.

    A step: `extrapolate`, forward and backward passes, `local_update`, the exchange of what is in
    the gradients then, `apply`."""

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        optimizer: StageOptimizer,
        *,
        own: int,
        count: int,
    ) -> None:
        self._trained = {name: parameters[name] for name, _ in layout.parameters}
        self._optimizer = optimizer
        self._own, self._count = own, count
        self._home: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    @property
    def away(self) -> bool:
        """Whether the parameters are x, not W."""
        return bool(self._home)

    def weights(self) -> Mapping[str, Tensor]:
        """W of what is trained, while it is not in the parameters."""
        return self._home

    @property
    def size_bytes(self) -> int:
        """Bytes of W beside the parameters."""
        return sum(p.numel() * p.element_size() for p in self._trained.values())

    @torch.no_grad()
    def extrapolate(self, unsent: Mapping[str, Tensor]) -> None:
        """From W to x. `unsent`: e by parameter; 0 where it is not named."""
        self._home = {name: p.detach().clone() for name, p in self._trained.items()}
        for name, p in self._trained.items():
            if name in unsent:
                p.sub_(unsent[name].to(p.device, p.dtype), alpha=1 / self._count)

    @torch.no_grad()
    def local_update(self, step: int) -> None:
        """Turns this holder's accumulated gradients, sums over its microbatches, into c·u."""
        self._squares = {}
        if not self._own:
            return  # others did all microbatches
        grads = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        self._squares = {n: squares_of([g], g.device).cpu() for n, g in grads.items()}
        norm = math.sqrt(sum(map(float, self._squares.values()))) / self._own
        before = {name: self._trained[name].detach().clone() for name in grads}
        self._optimizer.step(step, weight=self._own, norm=norm)
        for name, place in before.items():
            grads[name].copy_(place.sub_(self._trained[name])).mul_(self._own)

    def square(self, names: Iterable[str]) -> Tensor:
        """Σ over these parameters of what this holder's gradient of the last step says the squared
        norm of the sum of all holders' is, before clipping; a float64 scalar."""
        squares = [self._squares[name] for name in names if name in self._squares]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        return total * (self._count / max(1, self._own)) ** 2

    @torch.no_grad()
    def apply(self) -> None:
        """From x to W', by what is in the gradients: the sum of what all holders sent."""
        for name, p in self._trained.items():
            if self._home:  # who did no microbatch never left
                p.copy_(self._home[name])
            if p.grad is not None:
                p.sub_(p.grad, alpha=1 / self._count)
        self._home = {}
