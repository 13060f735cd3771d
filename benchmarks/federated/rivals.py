"""Federated methods beside Flower's and pfl-research's own, on one problem (`problem.py`).

    python benchmarks/federated/rivals.py [--json FILE] [--rows NAME …] [--seeds 2] [--cache DIR]

They get the same clients, starting weights, cohorts of each round, and samples of each step; ours
is the virtual world, with the machines of a broker and four peers. The environments of the others
are made in the cache when they are first needed (a minute each, 1.4 and 1.2 GB), and what they
came to is kept there, so that a run that was ended goes on.

    fed_vs_flower_weights_…   the largest difference of a weight after five rounds, 10 of 100
                              clients in each, over all seeds; fed_vs_flower_weights of all methods
    fed_vs_pfl_points_…       of the mean accuracy of rounds 91 to 100, percentage points, over all
                              seeds; fed_vs_pfl_points of all methods

FedAdam of Flower 1.42 corrects the bias of its moments, at one round more than there were; ours and
the paper's (Reddi et al. 2021, algorithm 2) do not. So that its own code is compared otherwise as
it is, Flower's rate of each round is divided by the factor of that correction. FedAdagrad of Flower
has no first moment: beta 0 is 0 in both. SCAFFOLD of pfl 0.6 has control variates of the other
sign (what a client came to, less what it began with), and adds c - c_i to gradients all the same;
so that all else of it is compared as it is, c and c_i change places there. `scaffold_as_it_is` is
without that, and stated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.benchmarks.federated.elsewhere import CACHE, FLOWER, PFL, Framework, Theirs
from shoal.benchmarks.federated.problem import Method, Played, Problem
from shoal.benchmarks.table import Figure, arguments, report

FEW, MANY, LAST = 5, 100, 10
"""Rounds against Flower; rounds against pfl, and of these those whose accuracy counts."""


@dataclass(frozen=True)
class Row:
    """A method of ours, and what it is called elsewhere. undo_bias: see FedAdam, above."""

    ours: Method
    framework: Framework
    theirs: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    undo_bias: bool = False
    label: str = ""
    """What the row is called in place of the method."""
    stated: bool = False
    """Whether it is no part of the worst."""

    @property
    def name(self) -> str:
        return self.label or self.ours.name

    @property
    def task(self) -> dict[str, Any]:
        common = {"key": self.name, "arguments": dict(self.arguments)}
        if self.framework is FLOWER:
            return {**common, "strategy": self.theirs, "undo_bias": self.undo_bias}
        return {**common, "algorithm": self.theirs}


def _adaptive(name: str, theirs: str, beta_1: float = 0.9, *, undo_bias: bool = False) -> Row:
    options = {"lr": 0.03, "betas": [beta_1, 0.99], "eps": 1e-3}
    given = {"eta": 0.03, "tau": 1e-3}
    if beta_1:
        given |= {"beta_1": beta_1, "beta_2": 0.99}
    return Row(Method(name, options), FLOWER, theirs, given, undo_bias)


def _robust(aggregate: str, theirs: str, given: Mapping[str, Any] | None = None) -> Row:
    sync = {"aggregate": aggregate, "weight": "equal"}
    if given:
        sync["byzantine"] = "20%"
    return Row(Method("fedavg", sync=sync), FLOWER, theirs, given or {}, label=aggregate)


SCAFFOLD = Method("scaffold", sync={"local": {"steps": 10}, "weight": "equal"})
_OPTION_2 = {"population": 100, "use_gradient_as_control_variate": False}
ROWS = (
    Row(Method("fedavg"), FLOWER, "FedAvg"),
    Row(
        Method("fedavgm", {"lr": 0.7, "momentum": 0.9}),
        FLOWER,
        "FedAvgM",
        {"server_learning_rate": 0.7, "server_momentum": 0.9},
    ),
    _adaptive("fedadam", "FedAdam", undo_bias=True),
    _adaptive("fedyogi", "FedYogi"),
    _adaptive("fedadagrad", "FedAdagrad", 0.0),
    Row(Method("fedprox", {"mu": 0.1}), PFL, "FedProx", {"mu": 0.1}),
    Row(SCAFFOLD, PFL, "SCAFFOLD", _OPTION_2),
    Row(SCAFFOLD, PFL, "SCAFFOLD as it is", _OPTION_2, label="scaffold_as_it_is", stated=True),
    _robust("median", "FedMedian"),
    _robust("trimmed-mean", "FedTrimmedAvg", {"beta": 0.2}),
    _robust("krum", "Krum", {"num_malicious_clients": 2}),
    _robust("multi-krum", "Krum", {"num_malicious_clients": 2, "num_clients_to_keep": 8}),
)


def largest_difference(ours: Played, theirs: Theirs, order: Sequence[str]) -> float:
    """Of a weight; `order`: names of ours in the order of theirs."""
    return max(
        float(np.abs(ours.weights[name].numpy() - other).max())
        for name, other in zip(order, theirs.weights, strict=True)
    )


def points_apart(ours: Played, theirs: Theirs) -> float:
    """Percentage points between the mean accuracies of the last rounds."""
    mine = [a for _, a in sorted(ours.accuracies.items())][-LAST:]
    return 100 * abs(float(np.mean(mine)) - float(np.mean(theirs.accuracies[-LAST:])))


def compared(rows: Sequence[Row], seed: int, cache: Path) -> dict[str, float]:
    """By row, how far ours is from theirs."""
    found: dict[str, float] = {}
    for framework, rounds in ((FLOWER, FEW), (PFL, MANY)):
        mine = [r for r in rows if r.framework is framework]
        if not mine:
            continue
        with Problem(clients=100, per_round=10, rounds=rounds, seed=seed) as problem:
            order = [*problem.start()]
            theirs = framework.play(problem, [r.task for r in mine], cache)
            for row in mine:
                ours = problem.play(row.ours, evaluate=framework is PFL)
                other = theirs[row.name]
                if framework is FLOWER:
                    found[row.name] = largest_difference(ours, other, order)
                else:
                    found[row.name] = points_apart(ours, other)
                print(f"seed {seed}, {row.name}: {found[row.name]:.3g}", file=sys.stderr)
    return found


def figures(rows: Sequence[Row], seeds: int, cache: Path) -> list[Figure]:
    each = [compared(rows, seed, cache) for seed in range(seeds)]
    found: list[Figure] = []
    for framework, name, unit in (
        (FLOWER, "fed_vs_flower_weights", ""),
        (PFL, "fed_vs_pfl_points", "points"),
    ):
        worst = {r.name: max(one[r.name] for one in each) for r in rows if r.framework is framework}
        found += [Figure(f"{name}_{row}", value, unit, "lower") for row, value in worst.items()]
        if counted := [worst[r.name] for r in rows if r.name in worst and not r.stated]:
            found.append(Figure(name, max(counted), unit, "lower"))
    return found


def main() -> int:
    parser = arguments(__doc__)
    names = [r.name for r in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=2, help="how many, from 0")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # no tensor is worth a second one
    rows = [r for r in ROWS if r.name in asked.rows]
    report("rivals", figures(rows, asked.seeds, asked.cache), asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
