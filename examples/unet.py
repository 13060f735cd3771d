"""A U-Net that finds discs in noisy pictures of which only some pixels are labelled.

The loss is the mean over the labelled pixels, and their number is its weight: a step over any
microbatches then gives the gradient of the whole batch.

    python -m shoal.examples.unet discs.npz     # write the data once
    shoal train examples/unet.toml
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["UNet", "unet", "write_discs"]

# Shapes: B batch, C channels, H and W pixels. A label of -1 means: not labelled.


def _block(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GroupNorm(4, outside),
        nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.GroupNorm(4, outside),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Halves the picture `depth` times and comes back up, with a skip edge at every size."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.stem = _block(1, width)
        self.down = nn.ModuleList(_block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_block(a + b, a) for a, b in reversed(list(pairwise(widths))))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x (B, 1, H, W) picture, y (B, 1, H, W) in {0, 1} or -1. Loss, weight, and accuracy."""
        h_bchw = self.stem(x)
        skips = []
        for down in self.down:
            skips.append(h_bchw)
            h_bchw = down(F.max_pool2d(h_bchw, 2))
        for up in self.up:
            h_bchw = F.interpolate(h_bchw, scale_factor=2.0, mode="nearest")
            h_bchw = up(torch.cat([skips.pop(), h_bchw], 1))
        logits = self.head(h_bchw)  # (B, 1, H, W)

        known = (y >= 0).float()
        weight = known.sum()
        each = F.binary_cross_entropy_with_logits(logits, y.clamp(min=0), reduction="none")
        right = ((logits > 0) == (y > 0.5)).float()
        # A microbatch without a label has weight 0, and its loss must not be 0/0.
        count = weight.clamp(min=1.0)
        return {
            "loss": (each * known).sum() / count,
            "weight": weight,
            "accuracy": (right * known).sum() / count,
        }


def unet(width: int = 8, depth: int = 2) -> UNet:
    """A U-Net for pictures whose sides are multiples of 2**depth."""
    return UNet(width, depth)


def write_discs(path: Path, count: int = 1000, side: int = 32) -> int:
    """Writes x and y (N, 1, side, side) float32 as npz; returns N."""
    import numpy as np

    rng = np.random.default_rng(0)
    axis = np.arange(side, dtype=np.float32)
    row, column = np.meshgrid(axis, axis, indexing="ij")
    x = rng.normal(0.0, 0.7, (count, 1, side, side)).astype(np.float32)
    y = np.zeros((count, 1, side, side), np.float32)
    for i in range(count):
        for _ in range(rng.integers(1, 4)):
            at, radius = rng.uniform(4, side - 4, 2), rng.uniform(2, side / 5)
            y[i, 0][(row - at[0]) ** 2 + (column - at[1]) ** 2 < radius**2] = 1.0
    x += y
    labelled = rng.uniform(size=(count, 1, 1, 1)) > rng.uniform(size=y.shape)  # 0 to 100 % of each
    np.savez(path, x=x, y=np.where(labelled, y, -1.0).astype(np.float32))
    return count


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "discs.npz")
    print(f"{target}: {write_discs(target)} pictures")
