"""A model for pipeline_codecs.py whose values are large for what it computes: bytes become wide
vectors, gates go over them element by element, and only a few of their elements reach the head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WideStream", "wide_stream"]

VOCABULARY = 256
# Shapes: B batch, T positions, D width, H what the head reads.


class Gate(nn.Module):
    """A scale and a shift of each element, and a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x_btd: Tensor) -> Tensor:
        return F.gelu(x_btd * self.scale + self.shift)


class WideStream(nn.Module):
    """The loss of next bytes, from this byte alone."""

    def __init__(self, width: int, gates: int, head: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.gates = nn.Sequential(*(Gate(width) for _ in range(gates)))
        self.width, self.head = width, nn.Linear(head, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, t = x.shape
        x_btd = self.gates(self.embed(x))
        x_bth = x_btd.view(b, t, self.head.in_features, -1).mean(-1)
        return F.cross_entropy(self.head(x_bth).flatten(0, 1), y.flatten())


def wide_stream(width: int = 2048, gates: int = 6, head: int = 16) -> WideStream:
    return WideStream(width, gates, head)
