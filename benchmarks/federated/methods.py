"""Federated methods on three sets of real data (`datasets.py`), in the virtual world of four peers.

    nice python benchmarks/federated/methods.py [--data digits] [--json FILE]    # a half hour
    nice python benchmarks/federated/methods.py --data mnist shakespeare         # hours; goes on

    data          clients, of these 10 a round     model                        seeds
    digits        100, Dirichlet .1 and .5         perceptron, 2,410 numbers    4
    mnist         100, likewise                    two convolutions, 13,066     4
    shakespeare   100 speakers                     GPT, two layers of 64        2

100 rounds (MNIST: 60), each client two passes over its samples in batches of 8 by SGD; SCAFFOLD,
which wants as many steps of all, four, about as many. What counts is the accuracy of the version on
samples that are held out (Shakespeare: its loss), as the mean of the last five evaluations, one in
every other round:

    fed_DATA_ALPHA_METHOD    after all rounds
    …_over_fedavg, …_half    the mean difference from FedAvg of the same seed, points, and half of
                             its 95 % interval (Student's t)
    …_at_equal_time          of the evaluations before the moment, by the modelled clock, at which
                             FedAvg ends its rounds

Peers have 20 Mbit/s up and 10 GFLOP/s. Rates: local 0.1, or 0.3 of Shakespeare; of servers those of
`METHODS`. Rows are kept in the cache (`--cache DIR`), and not made again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shoal.benchmarks.federated.datasets import SETS, held_out
from shoal.benchmarks.federated.elsewhere import CACHE
from shoal.benchmarks.table import Figure, arguments, report
from shoal.client.front import SimulationFront
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE
from shoal.sim.virtual.world import PeerSpec, World

ROOT = Path(__file__).resolve().parents[2]
PEERS, UP = 4, 2.5e6
T95 = {2: 12.706, 3: 4.303, 4: 3.182}
"""Student's t, 97.5 %, by number of seeds."""
_ADAPTIVE = {"lr": 0.03, "betas": [0.9, 0.99], "eps": 1e-3}
_STEPS = {"local": {"steps": 4}, "weight": "equal"}
_LINKS = {"client_links": {"up": "uniform:0.5Mbit,20Mbit", "latency": "uniform:50ms,200ms"}}
_SPARSE = {"compression_options": {"least_ratio": 0.05}}
METHODS: Mapping[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"options": {"mu": 0.1}},
    "fednova": {},
    "scaffold": _STEPS,
    "fedavgm": {"options": {"lr": 0.7, "momentum": 0.9}},
    "fedadam": {"options": _ADAPTIVE},
    "fedyogi": {"options": _ADAPTIVE},
    "fedadagrad": {"options": _ADAPTIVE},
    "topk": {"method": "fedavg", "compression": "topk", **_SPARSE},
    "topk+ef": {"method": "fedavg", "compression": "topk", "client_feedback": "ef", **_SPARSE},
    "bcrs": {"method": "fedavg", "compression": "bcrs", **_SPARSE, **_LINKS},
    "bcrs+opwa": {
        **{"method": "fedavg", "compression": "bcrs+opwa", **_LINKS},
        "compression_options": {"least_ratio": 0.05, "alpha": 0.0, "gamma": 3.0},
    },
    "vhl": {"method": "fedavg", "virtual_data": "vhl"},
    "vhl+generator": {
        **{"method": "fedavg", "virtual_data": "vhl"},
        "vhl": {"source": "generator"},
    },
    "fedimpro": {},
}
"""By name, what each has in [sync] beside what all have."""
_FAMILY = ("fedavg", "fedavgm", "fedadam", "fedyogi", "scaffold", "vhl", "bcrs+opwa")


@dataclass(frozen=True)
class Setting:
    """One column of the table: a set of data, divided in one way."""

    data: str
    alpha: float | None
    rounds: int
    seeds: int
    methods: Sequence[str]
    factory: str
    lr: float = 0.1

    @property
    def key(self) -> str:
        return f"{self.data}_{self.alpha}" if self.alpha else self.data

    @property
    def metric(self) -> str:
        return "loss" if self.data == "shakespeare" else "accuracy"

    def job(self, method: str, seed: int, file: Path, total: int) -> Job:
        kept = held_out[self.data]
        partition: dict[str, Any] = {"kind": "by-key", "key": "speaker"}
        if self.alpha:
            partition = {"kind": "dirichlet", "alpha": self.alpha, "clients": 100, "seed": seed}
            partition |= {"min_samples": 4}
        args = {"layers": 2, "width": 64, "heads": 4, "length": 64, "dropout": 0.0}
        return Job.from_table(
            {
                **{"version": 1, "name": f"{self.key} {method}", "seed": seed},
                "model": {"factory": self.factory, **({} if self.alpha else {"args": args})},
                "data": {
                    **{"kind": "arrays", "source": str(file)},
                    **{"holdout": (kept + 0.5) / total, "partition": partition},
                },
                "sync": {
                    **{"kind": "federated", "method": method, "per_round": 10},
                    **{"local": {"passes": 2}, **METHODS[method]},
                },
                "plan": {"replicas": PEERS, "scheduler": "uniform"},
                "train": {
                    **{"rounds": self.rounds, "batch": 8, "lr": self.lr, "optimizer": "sgd"},
                    **{"momentum": 0.0, "schedule": "constant", "warmup": 0, "weight_decay": 0.0},
                    **{"clip": 0.0 if self.alpha else 1.0, "eval_every": 2},
                    "eval_batches": kept // 8,
                },
            }
        )


_DIGITS = str(ROOT / "examples/federated_digits.py") + ":perceptron"
_MNIST = str(ROOT / "benchmarks/federated/models.py") + ":convolutions"
_TEXT = str(ROOT / "examples/gpt.py") + ":gpt"
SETTINGS = (
    *(Setting("digits", a, 100, 4, tuple(METHODS), _DIGITS) for a in (0.1, 0.5)),
    *(Setting("mnist", a, 60, 4, _FAMILY, _MNIST) for a in (0.1, 0.5)),
    Setting(
        "shakespeare",
        None,
        100,
        2,
        ("fedavg", "fedprox", "fednova", "fedavgm", "fedadam", "scaffold", "topk+ef"),
        _TEXT,
        lr=0.3,
    ),
)

Evaluations = list[tuple[float, float]]
"""(modelled seconds since the first round began, what the version came to), in order."""


def played(job: Job, metric: str) -> Evaluations:
    """Run a job in the virtual world. Raises RuntimeError where it fails."""
    front = SimulationFront()
    try:
        packed = front.pack(job)
        with tempfile.TemporaryDirectory() as folder:
            peers = [PeerSpec(name=f"p{i}", place=f"s{i}", up=UP) for i in range(PEERS)]
            world = World(peers, blobs=packed.blobs, folder=Path(folder), log=False)
            events = world.finish(world.submit(packed.spec))
    finally:
        front.close()
    if events[-1].state.phase != DONE:
        raise RuntimeError(events[-1].state.reason.text)
    began = next(e.at_s for e in events if e.HasField("round_begun"))
    ends = [e.at_s - began for e in events if e.HasField("round_done")]
    found = Evaluations()
    for e in (e for e in events if e.HasField("evaluated")):
        said = e.evaluated.evaluation
        value = said.loss if metric == "loss" else next(m.value for m in said.metrics)
        found.append((ends[e.evaluated.step - 1], value))
    return found


def rows(settings: Sequence[Setting], cache: Path) -> dict[tuple[str, str, int], Evaluations]:
    """By setting, method and seed, what a run came to; those that the cache has are not run."""
    file, found = cache / "methods.jsonl", dict[tuple[str, str, int], Evaluations]()
    cache.mkdir(parents=True, exist_ok=True)
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        found[row["setting"], row["method"], row["seed"]] = row["evaluations"]
    with tempfile.TemporaryDirectory() as folder:
        for setting, method, seed in _asked(settings):
            if (setting.key, method, seed) in found:
                continue
            npz = Path(folder) / f"{setting.data}.npz"
            if not npz.exists():
                np.savez(npz, **SETS[setting.data](cache))  # type: ignore[arg-type]
            with np.load(npz) as arrays:
                total = len(arrays["y"])
            made = played(setting.job(method, seed, npz, total), setting.metric)
            found[setting.key, method, seed] = made
            row = {"setting": setting.key, "method": method, "seed": seed, "evaluations": made}
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            print(f"{setting.key}, {method}, seed {seed}: {_last(made):.4g}", file=sys.stderr)
    return found


def _asked(settings: Sequence[Setting]) -> Iterator[tuple[Setting, str, int]]:
    for setting in settings:
        for seed in range(setting.seeds):
            for method in setting.methods:
                yield setting, method, seed


def _last(evaluations: Sequence[tuple[float, float]]) -> float:
    return statistics.mean(value for _, value in evaluations[-5:])


def figures(settings: Sequence[Setting], cache: Path) -> list[Figure]:
    found, table = list[Figure](), rows(settings, cache)
    for s in settings:
        unit = "nats" if s.metric == "loss" else "%"
        better: Literal["higher", "lower"] = "lower" if s.metric == "loss" else "higher"
        times = 1.0 if s.metric == "loss" else 100.0
        seeds = range(s.seeds)
        plain = [table[s.key, "fedavg", n] for n in seeds]
        for method in s.methods:
            runs = [table[s.key, method, n] for n in seeds]
            ended = [times * _last(run) for run in runs]
            name = f"fed_{s.key}_{method}"
            found.append(Figure(name, statistics.mean(ended), unit, better))
            if method == "fedavg":
                continue
            apart = [a - times * _last(b) for a, b in zip(ended, plain, strict=True)]
            half = T95[s.seeds] * statistics.stdev(apart) / s.seeds**0.5
            found.append(Figure(f"{name}_over_fedavg", statistics.mean(apart), unit, better))
            found.append(Figure(f"{name}_half", half, unit, "lower"))
            equal = []
            for run, other in zip(runs, plain, strict=True):
                inside = [e for e in run if e[0] <= other[-1][0]] or run[:1]
                equal.append(times * _last(inside))
            found.append(Figure(f"{name}_at_equal_time", statistics.mean(equal), unit, better))
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--data", nargs="+", choices=list(SETS), default=["digits"])
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [s for s in SETTINGS if s.data in args.data]
    report("federated methods", figures(chosen, args.cache), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
