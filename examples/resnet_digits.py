"""A small ResNet with batch norm on scikit-learn's handwritten digits.

python -m shoal.examples.resnet_digits digits.npz     # write the data once
shoal train examples/resnet_digits.toml
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ResNet", "resnet", "write_digits"]

# Shapes: B batch, C channels, H and W pixels.
CLASSES = 10


class Residual(nn.Module):
    """Two normalised convolutions beside an identity (or a strided 1x1) path."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.short = (
            nn.Identity()
            if stride == 1 and inside == outside
            else nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )
        )

    def forward(self, x_bchw: Tensor) -> Tensor:
        y_bchw = F.relu(self.norm1(self.conv1(x_bchw)))
        y_bchw = self.norm2(self.conv2(y_bchw))
        return F.relu(y_bchw + self.short(x_bchw))


class ResNet(nn.Module):
    """Three groups of residual blocks, each half as large and twice as wide as the one before."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        inside = width
        for group in range(3):
            for block in range(blocks):
                outside = width * 2**group
                layers.append(Residual(inside, outside, 2 if group and block == 0 else 1))
                inside = outside
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(inside, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x (B, 1, 8, 8) in [0, 1], y (B,) digits. Returns the loss, and the accuracy as metric."""
        h_bchw = F.relu(self.norm(self.stem(x)))
        for layer in self.layers:
            h_bchw = layer(h_bchw)
        logits = self.head(h_bchw.mean((2, 3)))  # (B, 10)
        return {
            "loss": F.cross_entropy(logits, y),
            "accuracy": (logits.argmax(1) == y).float().mean(),
        }


def resnet(width: int = 16, blocks: int = 2) -> ResNet:
    """A ResNet of 6·blocks + 2 layers whose first group has `width` channels."""
    return ResNet(width, blocks)


def write_digits(path: Path) -> int:
    """Writes x (N, 1, 8, 8) float32 and y (N,) int64 as npz, shuffled; returns N."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order] / 16.0).astype(np.float32)[:, None]
    np.savez(path, x=images, y=digits.target[order].astype(np.int64))
    return len(order)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "digits.npz")
    print(f"{target}: {write_digits(target)} digits")
