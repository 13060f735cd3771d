"""A perceptron of 2,410 parameters (64, 32, 10) on scikit-learn's handwritten digits, which clients
train on samples of their own.

python -m shoal.examples.resnet_digits examples/digits.npz     # write the data once
shoal sim examples/federated/office.toml --verify
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Perceptron", "perceptron"]

PIXELS, CLASSES = 64, 10


class Perceptron(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x (B, 1, 8, 8) in [0, 1], y (B,) digits. Returns the loss, and the accuracy as metric."""
        logits = self.layers(x.flatten(1))  # (B, 10)
        return {
            "loss": F.cross_entropy(logits, y),
            "accuracy": (logits.argmax(1) == y).float().mean(),
        }


def perceptron(width: int = 32) -> Perceptron:
    """A perceptron with so many hidden units."""
    return Perceptron(width)
