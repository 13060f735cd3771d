"""What gossip over few coordinates does to learning: scikit-learn's digits, dealt evenly to 14.

    python benchmarks/gossip/digits.py [--rate 0.3] [--batch 16]        # two minutes

A perceptron of 2,410 parameters (64, 32, 10), 1,500 steps of SGD on a few of one's own samples
each, then an exchange. Every step is a round: `saps` as it is by default over links of U(0, 5), and
the masks of the round, of 1 in c coordinates. Accuracy on a fifth that is held out, of the mean of
all replicas; two seeds. Beside them:

dense     the mean of all gradients each step
peers_…   the mean accuracy of single replicas, without the average
alone     of replicas that never exchange; their mean is of no use
"""

from __future__ import annotations

import statistics
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from shoal.benchmarks.gossip.mixing import matrix, pairs_of_rounds
from shoal.benchmarks.table import Figure, arguments, report
from shoal.compression.sparse.masks import SharedMask

PEERS, STEPS, SEEDS = 14, 1500, (0, 1)
SHAPES = {"0.weight": (64, 32), "0.bias": (1, 32), "1.weight": (32, 10), "1.bias": (1, 10)}

Weights = dict[str, Tensor]
"""By name (peers, rows, columns)."""


def uniform(n: int, seed: int) -> NDArray[np.float64]:
    """(n, n) rates of U(0, 5), symmetric, 0 on the diagonal."""
    upper = np.triu(np.random.default_rng(seed).uniform(0, 5, (n, n)), 1)
    return np.asarray(upper + upper.T)


def figures(rate: float = 0.3, batch: int = 16) -> list[Figure]:
    """`batch`: samples of each replica in a step."""
    torch.set_num_threads(1)  # no tensor is worth a second one
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        for name, c in (("dense", 0), ("c1", 1), ("c10", 10), ("c100", 100), ("alone", None)):
            together, single = trained(seed, c, rate, batch)
            if name != "alone":
                found.setdefault(name, []).append(together)
            found.setdefault("alone" if name == "alone" else f"peers_{name}", []).append(single)
    return [
        Figure(f"saps_digits_{name}", statistics.mean(values), "share", "higher")
        for name, values in found.items()
    ]


def trained(seed: int, c: int | None, rate: float, batch: int) -> tuple[float, float]:
    """Accuracy of the mean of all, and the mean of theirs. `c`: 0 for dense, None for alone."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = (torch.from_numpy(x) for x in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=generator)
    images, labels = images[order].float() / 16, labels[order]
    test = len(labels) // 5
    own = (len(labels) - test) // PEERS
    dealt = slice(test, test + own * PEERS)
    x_PSF, y_PS = images[dealt].view(PEERS, own, 64), labels[dealt].view(PEERS, own)  # noqa: N806
    one = {
        name: torch.randn(shape, generator=generator) * (shape[0] > 1) * (2 / shape[0]) ** 0.5
        for name, shape in SHAPES.items()
    }
    weights = {name: w.expand(PEERS, *w.shape).clone() for name, w in one.items()}
    who = [f"replica-{i:02}" for i in range(PEERS)]
    rounds = pairs_of_rounds("saps", seed, range(STEPS), who, uniform(PEERS, seed)) if c else ()
    for step in range(STEPS):
        picked = torch.randint(own, (PEERS, batch), generator=generator)
        rows = torch.arange(PEERS)[:, None]
        gradients = _gradients(weights, x_PSF[rows, picked], y_PS[rows, picked])
        for name, gradient in gradients.items():
            weights[name] -= rate * (gradient.mean(0) if c == 0 else gradient)
        if c:
            partner = torch.from_numpy(matrix(who, rounds[step])).fill_diagonal_(0).argmax(1)
            mask = SharedMask(seed, step, 1 / c)
            for name, w_P in weights.items():  # noqa: N806
                flat = w_P.view(PEERS, -1)
                at = mask.positions(name, flat.shape[1])
                flat[:, at] = (flat[:, at] + flat[partner][:, at]) / 2
    mean = {name: w.mean(0, keepdim=True) for name, w in weights.items()}
    x, y = images[:test], labels[:test]
    single = _logits(weights, x.expand(PEERS, -1, -1)).argmax(2) == y
    return float((_logits(mean, x[None])[0].argmax(1) == y).float().mean()), float(
        single.float().mean()
    )


def _logits(weights: Weights, x: Tensor) -> Tensor:
    """(peers, samples, 10)"""
    hidden = torch.relu(x @ weights["0.weight"] + weights["0.bias"])
    return hidden @ weights["1.weight"] + weights["1.bias"]


def _gradients(weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """Of the mean loss of each replica."""
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    logits = _logits(leaves, x)
    loss = cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=float, default=0.3, help="of SGD")
    parser.add_argument("--batch", type=int, default=16, help="samples of each in a step")
    asked = parser.parse_args()
    report("digits", figures(asked.rate, asked.batch), asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
