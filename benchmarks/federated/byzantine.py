"""What wrong clients do to learning under each aggregate: scikit-learn's digits.

    python benchmarks/federated/byzantine.py [--rounds 40] [--bad 20]      # three minutes

100 clients (Dirichlet 0.5 per client, or all alike), 20 of them in a round, 10 steps of SGD on 8 of
their own samples each; a perceptron of 2,410 parameters (64, 32, 10); accuracy on a fifth that is
held out, of the last five rounds; four seeds. Rounds are a plain loop here, all clients of one
stacked; what combines them is what peers run (`dag/rounds/combiners.py`). Of 100 clients 20 are
bad, always the same ones, so of a round 4 on average; rules are told of 6.

flipped   what they moved, the other way
scaled    ten times what they moved
random    normal numbers, ten times as large as honest ones are (root mean square)
alie      all the same: the honest mean, less as many standard deviations of each element as the
          middle bears with (Baruch et al. 2019, 1902.06156)
reversed  all the same: the honest mean, three times as large, the other way
far       the same, ten times as large
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.rounds.combiners import combined
from shoal.peer.data.partition import partition

CLIENTS, PER_ROUND, STEPS, BATCH, RATE, TOLD, SEEDS = 100, 20, 10, 8, 0.2, 6, (0, 1, 2, 3)
SHAPES = (64, 32), (1, 32), (32, 10), (1, 10)
SIZES = [a * b for a, b in SHAPES]
AGGREGATES = "mean", "median", "trimmed-mean", "krum", "multi-krum", "flag"
ATTACKS = "none", "flipped", "scaled", "random", "alie", "reversed", "far"
STUDENT = 3.182
"""95 % of Student's t with three degrees of freedom lie within."""


def figures(
    rounds: int, bad: int, kinds: Sequence[str], attacks: Sequence[str]
) -> Iterator[Figure]:
    """`bad`: of 100 clients; `kinds` of partition."""
    torch.set_num_threads(1)  # no tensor is worth a second one
    for kind in kinds:
        for attack in attacks:
            for rule in AGGREGATES:
                found = [trained(seed, rule, attack, rounds, bad, kind) for seed in SEEDS]
                name = f"byzantine_{kind}_{attack}_{rule}".replace("-", "_")
                half = STUDENT * statistics.stdev(found) / len(found) ** 0.5
                yield Figure(name, statistics.mean(found), "share", "higher")
                yield Figure(f"{name}_half_width", half, "share", "lower")


def trained(seed: int, rule: str, attack: str, rounds: int, bad: int, kind: str) -> float:
    """Return the mean accuracy of the last five rounds."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = (torch.from_numpy(x) for x in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=generator)
    images, labels = images[order].float() / 16, labels[order]
    test = len(labels) // 5
    x, y = images[test:], labels[test:]
    if kind == "iid":
        parts = partition(y.numpy(), kind="iid", clients=CLIENTS, seed=seed)
    else:
        parts = partition(
            y.numpy(),
            kind="dirichlet",
            clients=CLIENTS,
            alpha=0.5,
            convention="per-client",
            seed=seed,
        )
    own = [torch.from_numpy(np.array(parts.train(c))) for c in range(CLIENTS)]
    version = torch.cat(
        [
            (torch.randn(s, generator=generator) * (s[0] > 1) * (2 / s[0]) ** 0.5).flatten()
            for s in SHAPES
        ]
    )
    wrong = torch.randperm(CLIENTS, generator=generator)[:bad]
    accuracies = []
    for _ in range(rounds):
        cohort = torch.randperm(CLIENTS, generator=generator)[:PER_ROUND]
        weights = version.expand(PER_ROUND, -1)
        for _ in range(STEPS):
            lots = torch.rand(PER_ROUND, BATCH, generator=generator)
            at = torch.stack(
                [own[c][(u * len(own[c])).long()] for c, u in zip(cohort, lots, strict=True)]
            )
            weights = weights - RATE * _gradient(weights, x[at], y[at])
        moved = weights - version
        _attack(moved, torch.isin(cohort, wrong), attack, generator)
        version = version + (moved.mean(0) if rule == "mean" else combined(rule, [moved], TOLD)[0])
        right = _logits(version[None], images[None, :test])[0].argmax(1) == labels[:test]
        accuracies.append(float(right.float().mean()))
    return statistics.mean(accuracies[-5:])


def _attack(moved: Tensor, is_bad: Tensor, attack: str, generator: torch.Generator) -> None:
    """Put what bad clients send in place of what they moved; honest ones are known to them."""
    bad, honest = moved[is_bad], moved[~is_bad]
    if attack == "none" or not len(bad):
        return
    if attack == "flipped":
        found = -bad
    elif attack == "scaled":
        found = 10 * bad
    elif attack == "random":
        found = torch.randn(bad.shape, generator=generator) * 10 * honest.square().mean().sqrt()
    elif attack in ("reversed", "far"):
        found = (-3 if attack == "reversed" else -10) * honest.mean(0).expand_as(bad)
    else:
        needed = len(moved) // 2 + 1 - len(bad)
        share = torch.tensor((len(honest) - needed) / len(honest))
        z = torch.special.ndtri(share.clamp(0.5, 0.999))
        found = (honest.mean(0) - z * honest.std(0)).expand_as(bad)
    moved[is_bad] = found


def _logits(weights: Tensor, x: Tensor) -> Tensor:
    """(clients, samples, 10). `weights`: (clients, parameters)."""
    a, b, c, d = (
        w.view(len(weights), *s)
        for w, s in zip(torch.split(weights, SIZES, dim=1), SHAPES, strict=True)
    )
    return torch.relu(x @ a + b) @ c + d


def _gradient(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of the mean loss of each client."""
    leaf = weights.detach().requires_grad_()
    loss = cross_entropy(_logits(leaf, x).flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
    found: Tensor = torch.autograd.grad(loss, leaf)[0]
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--bad", type=int, default=20, help="of 100 clients")
    parser.add_argument("--kinds", nargs="+", default=("iid", "dirichlet"), help="of partition")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS)
    asked = parser.parse_args()
    found = figures(asked.rounds, asked.bad, asked.kinds, asked.attacks)
    report("byzantine", [*found], asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
