"""AdamW with moments in 8 bits, the boring way: whole tensors, the formulas of 2110.02861, block
after block, and every number as the nearest one of a table."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdamW8bit"]

BLOCK = 256
LEAST = 4096
"""Elements below which a parameter's moments stay as they are."""


class AdamW8bit(torch.optim.Optimizer):
    """Decoupled weight decay, moments between two steps as (indices, largest of each block)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, decay, (b1, b2) = group["lr"], group["weight_decay"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                wide = p.double() if p.dtype == torch.float64 else p.float()
                grad, small = p.grad.to(wide.dtype), p.numel() < LEAST
                t = s["t"] = s.get("t", 0) + 1
                m, v = torch.zeros_like(wide), torch.zeros_like(wide)
                if t > 1:
                    m, v = s["m"], s["v"]
                    if not small:
                        m, v = _read(m, _table(True), wide), _read(v, _table(False), wide)
                m, v = torch.lerp(m, grad, 1 - b1), v * b2 + (1 - b2) * grad * grad
                below = v.sqrt() / math.sqrt(1 - b2**t) + group["eps"]
                p.copy_(wide * (1 - lr * decay) - lr / (1 - b1**t) * (m / below))
                if small:
                    s["m"], s["v"] = m, v
                else:
                    s["m"], s["v"] = _written(m, _table(True)), _written(v, _table(False))


def _table(signed: bool) -> Tensor:
    """Return 256 numbers: 0, 1, and in each of seven decades below 1 middles of equal parts."""
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for k in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (k + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 / 10 ** (6 - k)
        found += [middles, -middles] if signed else [middles]
    return torch.cat(found).sort().values.float()


def _written(moment: Tensor, table: Tensor) -> list[tuple[Tensor, float]]:
    kept = []
    for block in moment.flatten().split(BLOCK):
        most = float(block.abs().max().float())
        shares = block / most if most else block
        table = table.to(shares)
        above = torch.searchsorted(table, shares).clamp(1, 255)
        low, high = table[above - 1], table[above]
        index = torch.where(shares - low <= high - shares, above - 1, above)
        if table[0] == 0:  # of second moments none comes to nothing
            index = torch.where(shares > 0, index.clamp(min=1), 0)
        kept.append((index, most))
    return kept


def _read(kept: list[tuple[Tensor, float]], table: Tensor, like: Tensor) -> Tensor:
    table = table.to(like)
    return torch.cat([table[index] * most for index, most in kept]).view_as(like)
