"""What virtual data (VHL) and features of all clients (FedImpro) do to federated averaging:
scikit-learn's digits over ten clients.

    nice python benchmarks/federated/vhl.py [--rounds 20] [--json FILE]        # four minutes
    nice python benchmarks/federated/vhl.py --alpha 0.1 --arms fedimpro        # some of it

A perceptron (64, 64, 10), Dirichlet 0.1 and 0.5 per class over clients, five of ten clients a
round, two passes in batches of 32, SGD at 0.05 with momentum 0.9. A fifth is held out; accuracy is
the mean of the last five rounds. Splits, starting weights, cohorts and batches are those of the
seed in each arm, so that what a seed says of an arm is its difference from FedAvg. Of four seeds:
the mean, and half of the 95 % interval (Student's t with three degrees of freedom).

fedavg    without
vhl       with its usual weights, and both contrasts in the first of the two passes
entropy   without contrasts
light     with a tenth of the contrasts' weights
warm      at a temperature of 0.5 in place of 0.07
full      with noise that is drawn in the shape of samples, and not repeated
few       with 8 samples of noise in a step, and not 32
generator with noise of an untrained network
fedimpro  with features of all, by its usual options; what the last linear reads
free      the same, of whatever deviation features have
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import shoal
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.capture.capture import capture
from shoal.dag.ir.graph import Graph
from shoal.dag.rounds.cohorts import cohort_of
from shoal.dag.transforms.feature_statistics import above_features, with_statistics
from shoal.dag.transforms.virtual_classes import above_loss, with_classes
from shoal.job import Train
from shoal.job.clients.local_work import FedImproOptions, LocalWork, VhlOptions
from shoal.peer.federated.batches import Participant, batches
from shoal.peer.federated.cohort import Cohort
from shoal.peer.federated.local_cohort import mean_of
from shoal.peer.federated.shared_features import SharedFeatures
from shoal.peer.federated.vhl_loss import VirtualData

CLIENTS, PER_ROUND, PASSES, BATCH, SEEDS = 10, 5, 2, 32, (0, 1, 2, 3)
T95 = 3.182
"""Student's t, 97.5 %, three degrees of freedom."""
USUAL = VhlOptions(calibrate=LocalWork(passes=1))
ARMS: Mapping[str, VhlOptions | FedImproOptions | None] = {
    "fedavg": None,
    "vhl": USUAL,
    "entropy": replace(USUAL, l1=0.0, l2=0.0),
    "light": replace(USUAL, l1=0.1, l2=0.01),
    "warm": replace(USUAL, temperature=0.5),
    "full": replace(USUAL, noise=(1, 8, 8)),
    "few": replace(USUAL, batch=8),
    "generator": replace(USUAL, source="generator"),
    "fedimpro": FedImproOptions(),
    "free": FedImproOptions(most_std=0.0),
}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        right = (logits.argmax(1) == y).float().mean()
        return {"loss": F.cross_entropy(logits, y), "right": right}


def digits(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is trained on, and what is held out."""
    found = load_digits()
    x = torch.from_numpy((found.images[:, None] / 16).astype(np.float32))
    y = torch.from_numpy(found.target.astype(np.int64))
    order = np.random.default_rng(seed).permutation(len(y))
    parts = order[len(y) // 5 :], order[: len(y) // 5]
    return tuple({"x": x[at], "y": y[at]} for at in parts)  # type: ignore[return-value]


@cache
def captured() -> Graph:
    return capture(Perceptron(), {n: t[:2] for n, t in digits(0)[0].items()}).graph


def accuracy(
    alpha: float, seed: int, rounds: int, arm: VhlOptions | FedImproOptions | None
) -> float:
    torch.manual_seed(seed)
    model, (own, held_out) = Perceptron(), digits(seed)
    split = shoal.partition(
        own["y"].numpy(), kind="dirichlet", alpha=alpha, clients=CLIENTS, seed=seed
    )
    graph = captured()
    version = {n: p.detach() for n, p in model.named_parameters()}
    virtual, features = None, None
    if isinstance(arm, VhlOptions):
        graph = with_classes(graph, 10)
        more = {p.name: p.spec.sizes for p in graph.parameters if p.name not in version}
        version |= {name: torch.zeros(sizes) for name, sizes in more.items()}
        virtual = VirtualData(arm, above_loss(graph), seed, BATCH)
    if isinstance(arm, FedImproOptions):
        graph, shapes = with_statistics(graph, arm.share)
        version |= {name: torch.zeros(shape) for name, shape in shapes.items()}
        above, device = above_features(graph, arm.share), torch.device("cpu")
        features = SharedFeatures(arm, above, seed=seed, batch=BATCH, device=device)
    train = Train(
        steps=rounds,
        batch=BATCH,
        optimizer="sgd",
        lr=0.05,
        momentum=0.9,
        schedule="constant",
        warmup=0,
        clip=0.0,
        weight_decay=0.0,
    )
    cohort = Cohort(graph, train, virtual=virtual, features=features)

    def read(places: NDArray[np.int64]) -> dict[str, Tensor]:
        return {n: t[torch.from_numpy(places)] for n, t in own.items()}

    last = []
    for round_ in range(rounds):
        numbers = cohort_of(CLIENTS, seed, round_, range(PER_ROUND))
        some = [Participant(n, split.train(n)) for n in numbers]
        plans = batches(some, seed=seed, round_=round_, batch=BATCH, passes=PASSES)
        made = cohort.work(version, [*zip(some, plans, strict=True)], read, round_=round_)
        weights = {p.number: len(p.samples) for p in some}
        version = {n: t.float() for n, t in mean_of(made, weights).items()}
        if round_ >= rounds - 5:
            names = {n: version[n] for n, _ in model.named_parameters()}
            last.append(float(functional_call(model, names, (), held_out)["right"]))
    return statistics.mean(last)


def figures(rounds: int, alphas: Sequence[float], arms: Sequence[str]) -> list[Figure]:
    torch.set_num_threads(1)
    found = []
    for alpha in alphas:
        by_arm = {
            name: [accuracy(alpha, seed, rounds, ARMS[name]) for seed in SEEDS]
            for name in dict.fromkeys(("fedavg", *arms))
        }
        print(f"# alpha {alpha}: {by_arm}", file=sys.stderr)
        plain = by_arm.pop("fedavg")
        key = f"vhl_digits_{alpha}"
        found.append(Figure(f"{key}_fedavg", 100 * statistics.mean(plain), "%", "higher"))
        for name, values in by_arm.items():
            apart = [100 * (a - b) for a, b in zip(values, plain, strict=True)]
            half = T95 * statistics.stdev(apart) / len(apart) ** 0.5
            found.append(Figure(f"{key}_{name}", 100 * statistics.mean(values), "%", "higher"))
            mean = statistics.mean(apart)
            found.append(Figure(f"{key}_{name}_over_fedavg", mean, "points", "higher"))
            found.append(Figure(f"{key}_{name}_half_interval", half, "points", "lower"))
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.1, 0.5])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    args = parser.parse_args()
    found = figures(args.rounds, args.alpha, args.arms)
    report("virtual data on digits", found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
