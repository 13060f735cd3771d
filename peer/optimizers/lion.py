"""Lion: the sign of a mixture of gradient and momentum (Chen et al. 2023, 2302.06675, algorithm 2).

    θ' = (1 - η·λ)·θ - η·sign(β₁·m + (1 - β₁)·g)        m' = β₂·m + (1 - β₂)·g

A sign forgets how large a number is: where mixture is almost 0, rounding decides which way a weight
goes, so runs with other sums of the same gradients part by 2·η in such places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay λ, as torch's optimizers are used. State by parameter:
    exp_avg, m."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. `closure`: as torch has it, never given."""
        assert closure is None, "gradients are there before a step"
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[parameter], parameter.grad
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                kept = state["exp_avg"]
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                way = kept.clone().mul_(first).add_(grad, alpha=1.0 - first).sign_()
                parameter.add_(way, alpha=-group["lr"])
                kept.mul_(second).add_(grad, alpha=1.0 - second)
