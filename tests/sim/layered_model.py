"""A model each of whose blocks takes more than what goes through them: the first embedding once
more, a part of a table of per-layer embeddings, a window and a factor of its own, a mask, and a row
of one parameter that all share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["layered"]

LAYERS, WIDTH, LENGTH = 4, 8, 8


class LayeredBlock(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, h_btd: Tensor, first_btd: Tensor, own_btld: Tensor, there_bt: Tensor, rows_ld: Tensor
    ) -> Tensor:
        x_btd = self.norm(h_btd) + own_btld[:, :, self.at] + rows_ld[self.at]
        steps = torch.arange(LENGTH)
        near_tt = (steps[:, None] - steps[None]).abs() <= (1, 4)[self.at % 2]
        seen_btt = (near_tt & there_bt[:, None]) | torch.eye(LENGTH, dtype=torch.bool)
        scores_btt = (x_btd @ x_btd.transpose(1, 2)).masked_fill(~seen_btt, -1e9)
        mixed_btd = torch.softmax(scores_btt * (0.5 / (self.at + 1)), -1) @ x_btd
        return h_btd + first_btd + self.up(mixed_btd)


class LayeredModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.own = nn.Embedding(256, WIDTH), nn.Embedding(256, LAYERS * WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rows = nn.Parameter(torch.randn(LAYERS, WIDTH))
        self.layers = nn.ModuleList(LayeredBlock(i) for i in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h_btd = self.bytes(x)
        first_btd = self.first(h_btd)
        own_btld = self.own(x).view(*x.shape, LAYERS, WIDTH)
        for layer in self.layers:
            h_btd = layer(h_btd, first_btd, own_btld, x > 40, self.rows)
        return F.cross_entropy(self.head(h_btd).flatten(0, 1), y.flatten())


def layered() -> nn.Module:
    """The model over bytes in windows of LENGTH."""
    return LayeredModel()
