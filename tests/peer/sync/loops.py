"""A plain loop over whole models in torch alone, with what a method makes of the gradients of all
holders in the middle: the oracle of methods with equal weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.peer.sync.optimizer import learning_rate

__all__ = ["Combine", "flat", "loop", "parted"]

Grads = Mapping[str, Tensor]
Combine = Callable[[int, Sequence[Grads]], Grads]
"""From a step, and what each holder's gradients add up to over its microbatches, to what takes the
place of their sum."""


def loop(
    module: nn.Module,
    train: Any,
    read: Any,
    holders: int,
    combine: Combine,
    after: Callable[[int, Grads], None] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Holder r has every microbatch m with m mod holders = r. Losses by step, and the weights."""
    model, count, size = copy.deepcopy(module).train(), train.microbatches, train.microbatch_size
    named = dict(model.named_parameters())
    if train.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            named.values(), betas=train.betas, eps=train.eps, weight_decay=train.weight_decay
        )
    else:
        optimizer = torch.optim.SGD(
            named.values(), momentum=train.momentum, weight_decay=train.weight_decay
        )
    losses = []
    for step in range(train.steps):
        found, owns = [], []
        for r in range(holders):
            own = {n: torch.zeros_like(p) for n, p in named.items()}
            for m in range(r, count, holders):
                batch = read.batch(step, m, size)
                loss = model(batch["x"], batch["y"])
                grads = torch.autograd.grad(loss, list(named.values()))
                for n, grad in zip(named, grads, strict=True):
                    own[n] += grad
                found.append((m, loss.item()))
            owns.append(own)
        total = combine(step, owns)
        for n, p in named.items():
            p.grad = total[n] / count
        nn.utils.clip_grad_norm_(list(named.values()), train.clip or 1e9)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        optimizer.step()
        losses.append(float(np.mean([loss for _, loss in sorted(found)])))
    return losses, {n: p.detach() for n, p in named.items()}


def flat(grads: Grads, names: Sequence[str]) -> Tensor:
    return torch.cat([grads[n].reshape(-1) for n in names])


def parted(vector: Tensor, like: Grads, names: Sequence[str]) -> dict[str, Tensor]:
    """The reverse."""
    found, at = {}, 0
    for n in names:
        found[n] = vector[at : at + like[n].numel()].view_as(like[n])
        at += like[n].numel()
    return found
