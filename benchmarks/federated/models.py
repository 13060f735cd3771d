"""Models of the table of methods (`methods.py`)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Convolutions", "convolutions"]


class Convolutions(nn.Module):
    """Two convolutions and one layer behind them, 13,066 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 5 * 5, 10)),
        )

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x (B, 1, 28, 28) in [0, 1], y (B,) digits. Returns loss and accuracy."""
        logits = self.layers(x)
        right = (logits.argmax(1) == y).float().mean()
        return {"loss": F.cross_entropy(logits, y), "accuracy": right}


def convolutions() -> Convolutions:
    """A network for MNIST."""
    return Convolutions()
