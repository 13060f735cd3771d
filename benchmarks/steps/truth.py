"""Whether plans tell the truth: predicted against measured seconds of a step of real processes, and
predicted against allocated bytes of stages, alone and where replicas meet in rounds.

    python benchmarks/steps/truth.py [--json FILE] [--only steps|memory] [--cases …] [--steps N]

Steps: for each case a fresh broker and peers on this machine, one thread each; the peers measure
their speeds when they join and probe their links, and the prediction is what the plan itself says.
Measured is the median of the steps' seconds without the first WARM_UP. The job then runs again on
the same peers: its plan knows what the first run's reports corrected. Nothing else may run on the
machine meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.benchmarks.steps import truth_memory, truth_rounds
from shoal.benchmarks.table import Figure, arguments, report
from shoal.client import Client, connect
from shoal.client.prepared import Prepared
from shoal.client.submission import prepare
from shoal.job import Job
from shoal.proto.broker_pb2 import PlanReport
from shoal.sim.processes import LocalCluster

__all__ = ["figures"]

WARM_UP = 3
"""Steps at the beginning that are not counted: first allocations, connections."""
STEPS = 13
DIGITS = "digits.npz"
"""In the place of a path: pictures of the size of digits, made here."""


@dataclass(frozen=True, slots=True)
class Case:
    """A job on so many peers."""

    name: str
    peers: int
    model: dict[str, Any]
    data: dict[str, Any]
    train: dict[str, Any]
    plan: dict[str, Any]


def _gpt(
    name: str, peers: int, width: int, batch: int, size: int, *, layers: int = 4, **plan: Any
) -> Case:
    args = {"layers": layers, "width": width, "heads": width // 32, "length": 64, "dropout": 0.0}
    return Case(
        name,
        peers,
        {"factory": "shoal.examples.gpt:gpt", "args": args},
        {"length": 64},
        {"batch": batch, "microbatch": size},
        plan,
    )


def _resnet(name: str, peers: int, width: int, batch: int, size: int, **plan: Any) -> Case:
    return Case(
        name,
        peers,
        {"factory": "shoal.examples.resnet_digits:resnet", "args": {"width": width, "blocks": 2}},
        {"kind": "arrays", "source": DIGITS},
        {"batch": batch, "microbatch": size, "optimizer": "sgd", "lr": 0.05},
        plan,
    )


def cases() -> tuple[Case, ...]:
    """2 to 6 peers; small and larger stages; every schedule; one pipeline and two."""
    even, equal = "equal-compute", "uniform"
    return (
        _gpt("gpt-256, 2 peers, 1f1b", 2, 256, 32, 4, scheduler=even, stages=2, schedule="1f1b"),
        _gpt("gpt-384, 2 peers, gpipe", 2, 384, 16, 4, scheduler=equal, stages=2, schedule="gpipe"),
        _gpt("gpt-128, 3 peers, 1f1b", 3, 128, 48, 8, scheduler=even, stages=3, schedule="1f1b"),
        _gpt("gpt-256, 4 peers, 1f1b", 4, 256, 32, 4, scheduler=equal, stages=4, schedule="1f1b"),
        _gpt(
            "gpt-192, 2 pipelines of 2, 1f1b",
            4, 192, 32, 4, scheduler=even, stages=2, pipelines=2, schedule="1f1b",
        ),
        _gpt(
            "gpt-192, 2 peers, interleaved",
            2, 192, 32, 4, scheduler=even, stages=4, schedule="interleaved",
        ),
        _resnet("resnet-32, 2 peers, 1f1b", 2, 32, 256, 32, scheduler=even, stages=2),
        _resnet("resnet-16, 3 peers, gpipe", 3, 16, 256, 32, scheduler=equal, stages=3),
        _gpt("gpt-128, 6 peers, 1f1b", 6, 128, 64, 8, layers=6, scheduler=even, stages=6),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: seconds of a step as its plan predicted them and as they were, and the peers' compute
    seconds of a step, summed, likewise."""

    name: str
    predicted_s: float
    measured_s: float
    predicted_compute_s: float
    measured_compute_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)

    def __str__(self) -> str:
        off = self.predicted_s / self.measured_s - 1
        return (
            f"{self.name:42s} predicted {self.predicted_s * 1e3:7.1f} ms, "
            f"measured {self.measured_s * 1e3:7.1f} ms ({off:+.1%}); computing "
            f"{self.predicted_compute_s * 1e3:.1f}, {self.measured_compute_s * 1e3:.1f} ms"
        )


def outcomes(wanted: Sequence[str], steps: int) -> Iterator[tuple[Outcome, Outcome]]:
    """Of each case the first run and the one after it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        x = rng.random((1024, 1, 8, 8), dtype=np.float32)
        np.savez(folder / DIGITS, x=x, y=rng.integers(0, 10, 1024))
        for case in cases():
            if wanted and not any(w in case.name for w in wanted):
                continue
            with prepare(_job(case, folder, steps)) as prepared:
                first, second = _twice(case, prepared, folder)
            yield first, second


def _job(case: Case, folder: Path, steps: int) -> Job:
    data = {k: str(folder / DIGITS) if v == DIGITS else v for k, v in case.data.items()}
    return Job.from_table(
        {
            "version": 1,
            "name": "truth",
            "model": case.model,
            "data": data,
            "train": {"steps": steps, "eval_every": 0, **case.train},
            "plan": {"replan": False, "recompute": False, **case.plan},
        }
    )


def _twice(case: Case, prepared: Prepared, folder: Path) -> tuple[Outcome, Outcome]:
    """On fresh peers, and on the same ones again."""
    with (
        LocalCluster(peers=case.peers, threads=1) as cluster,
        connect(cluster.address) as client,
    ):
        while len(client.describe().peers) < case.peers:
            cluster.check()
            time.sleep(0.1)
        first = _run(case.name, client, prepared, folder)
        print(first, flush=True)
        second = _run(f"{case.name}, again", client, prepared, folder)
        print(second, flush=True)
    return first, second


def _run(name: str, client: Client, prepared: Prepared, folder: Path) -> Outcome:
    report, seconds, computing = PlanReport(), [], []
    for event in client.submit_prepared(prepared, folder).watch():
        if event.HasField("plan"):
            report = event.report
        elif event.HasField("step") and event.step.step >= WARM_UP:
            seconds.append(event.step.seconds)
            computing.append(event.step.compute_s)
    return Outcome(
        name,
        report.predicted.step_s,
        statistics.median(seconds),
        sum(p.compute_s for p in report.predicted.peers),
        statistics.median(computing),
    )


def figures(only: str = "", wanted: Sequence[str] = (), steps: int = STEPS) -> Iterator[Figure]:
    """`only`: "steps" or "memory"; empty: both."""
    if only != "memory":
        found = list(outcomes(wanted, steps))
        first, second = ([pair[i].error for pair in found] for i in (0, 1))
        yield Figure("step_time_error_median", statistics.median(first), "ratio", "lower")
        yield Figure("step_time_error_worst", max(first), "ratio", "lower")
        yield Figure("step_time_error_corrected", statistics.median(second), "ratio", "lower")
        yield Figure("step_time_cases", len(found), "cases", "higher")
    if only != "steps":
        worst, median, count = truth_memory.summary(truth_memory.outcomes(say=print))
        yield Figure("memory_error_worst", worst, "ratio", "lower")
        yield Figure("memory_error_median", median, "ratio", "lower")
        yield Figure("memory_cases", count, "cases", "higher")
        worst, median, count = truth_memory.summary(truth_rounds.outcomes(say=print))
        yield Figure("round_memory_error_worst", worst, "ratio", "lower")
        yield Figure("round_memory_error_median", median, "ratio", "lower")
        yield Figure("round_memory_cases", count, "cases", "higher")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("steps", "memory"), default="")
    parser.add_argument("--cases", nargs="+", default=[], help="parts of names of step cases")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    options = parser.parse_args()
    found = list(figures(options.only, options.cases, options.steps))
    report("truth", found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
