"""A small model for tests of what is saved, copied and submitted."""

from __future__ import annotations

from torch import Tensor, nn


class Tied(nn.Module):
    """Two names of one weight, and a batch norm with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.norm(self.b(self.a(x))) - y).square().mean()
