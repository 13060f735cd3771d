"""A model with running statistics and counters in two blocks, for jobs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["net"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(2)
        )
        self.outer = nn.Linear(8, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inner(x).flatten(0, 1)
        for block in self.blocks:
            h = h + block(h).tanh()
        return F.cross_entropy(self.outer(h), y.flatten())


def net() -> nn.Module:
    return Net()
