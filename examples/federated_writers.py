"""Handwritten digits of 3,600 writers, each a client with 20 samples in a hand of its own: at a
slant, in a size, off the middle, with a pen, and some digits more often than others. Made of
scikit-learn's digits, of which a fifth is in nobody's samples but the held-out ones.

python -m shoal.examples.federated_writers examples/writers.npz      # write the data once
shoal sim examples/federated/writers.toml
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["write_writers"]

EACH, CLASSES, HELD_OUT = 20, 10, 0.2
SLANT, SIZE, SHIFT, PEN = 0.5, 0.15, 0.2, 0.4
"""Of a writer, at most: radians, shares of the size and of half the picture, and the exponent."""
MIX = 0.5
"""Alpha of the Dirichlet distribution that a writer's digits come from."""


def write_writers(path: str | Path, writers: int = 3600, seed: int = 0) -> None:
    """Write x (samples, 1, 8, 8) in [0, 1], float32, y (samples,) and writer (samples,), int64, as
    an .npz file; the last tenth has hands of its own, and pictures that no other sample has.
    Raises ValueError where a tenth is no whole number of writers."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order, held = rng.permutation(len(labels)), int(HELD_OUT * len(labels))
    others, rest = divmod(writers, 9)  # a tenth of all
    if rest:
        raise ValueError(f"{writers} writers: expected a multiple of 9")
    parts = [
        _drawn(images, labels, order[held:], writers, rng),
        _drawn(images, labels, order[:held], others, rng),
    ]
    x, y = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    writer = np.concatenate([np.arange(writers), writers + np.arange(others)]).repeat(EACH)
    np.savez_compressed(path, x=x, y=y, writer=writer)


def _drawn(
    images: np.ndarray, labels: np.ndarray, mine: np.ndarray, writers: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures and labels of so many writers, EACH of every one."""
    of = [mine[labels[mine] == c] for c in range(CLASSES)]
    mixes = rng.dirichlet([MIX] * CLASSES, writers)
    y = np.concatenate([rng.choice(CLASSES, EACH, p=mix) for mix in mixes])
    at = np.array([rng.choice(of[c]) for c in y])
    x = torch.tensor(images[at] / 16).float().view(-1, 1, 8, 8)
    hands = torch.tensor(rng.uniform(-1, 1, (writers, 5))).float().repeat_interleave(EACH, 0)
    return _written(x, hands).numpy(), y.astype(np.int64)


def _written(x: Tensor, hands: Tensor) -> Tensor:
    """Return pictures (B, 1, 8, 8) as `hands` (B, 5) in [-1, 1] write them."""
    angle, size, left, up, pen = (hands * torch.tensor([SLANT, SIZE, SHIFT, SHIFT, PEN])).T
    size = 1 + size
    turned = torch.stack([angle.cos() * size, -angle.sin() * size, left], 1)
    tilted = torch.stack([angle.sin() * size, angle.cos() * size, up], 1)
    grid = functional.affine_grid(
        torch.stack([turned, tilted], 1), list(x.shape), align_corners=False
    )
    moved = functional.grid_sample(x, grid, align_corners=False)
    found: Tensor = moved.clamp(0, 1) ** (1 + pen).view(-1, 1, 1, 1)
    return found


if __name__ == "__main__":
    file = sys.argv[1] if len(sys.argv) > 1 else "writers.npz"
    write_writers(file)
    print(f"wrote the digits of 3,600 writers, and of others that are held out, to {file}")
