"""A four-stage run of real processes against the least that its computing takes on these cores.

    python benchmarks/steps/pipeline.py [--json FILE] [--peers 4] [--steps 30] [--only …]

The bound is total compute over cores: the plain loop's time per step on one thread, divided by the
number of cores. It knows neither bubbles nor messages, so 1.0 is out of reach. The plain loop runs
before and after the pipeline, so that a machine that drifts shows (`plain_drift`).

Then two stages with and without a codec: its seconds are in the step where something waits for
them, and beside the compute otherwise (pipeline_codecs.py).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from shoal.benchmarks.steps.pipeline_codecs import overlap, wait_for_peers
from shoal.benchmarks.table import Figure, arguments, report
from shoal.client import connect
from shoal.client.models import models
from shoal.client.prepared import Prepared
from shoal.client.submission import prepare
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.proto.broker_pb2 import StepDone
from shoal.sim.processes import LocalCluster

WARM_UP = 3
"""Steps at the beginning that are not counted: first allocations, connections."""


def job(steps: int) -> Job:
    """A byte-level GPT of 8 layers, width 256, whose step computes for about two seconds."""
    return Job.from_table(
        {
            "version": 1,
            "name": "pipeline",
            "model": {
                "factory": "shoal.examples.gpt:gpt",
                "args": {"layers": 8, "width": 256, "heads": 8, "length": 128, "dropout": 0.0},
            },
            "data": {"length": 128},
            "train": {"steps": steps, "batch": 32, "microbatch": 4, "eval_every": 0},
        }
    )


def plain_step_s(wanted: Job, reader: Reader, steps: int = 3) -> float:
    """Median seconds of a step of the plain loop, on one thread."""
    torch.set_num_threads(1)
    module, train = models.build(wanted), wanted.train
    optimizer = torch.optim.AdamW(module.parameters(), lr=train.lr)
    seconds = []
    for step in range(steps + 1):
        began = time.perf_counter()
        for m in range(train.microbatches):
            (module(**reader.batch(step, m, train.microbatch_size)) / train.microbatches).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def steps_of(cluster: LocalCluster, prepared: Prepared, folder: Path) -> list[StepDone]:
    """Every step of the job on the cluster, once all its peers have joined."""
    with connect(cluster.address) as client:
        wait_for_peers(cluster, client)
        run = client.submit_prepared(prepared, folder)
        return [event.step for event in run.watch() if event.HasField("step")]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=["bound", "codecs"], help="one of the two parts")
    options = parser.parse_args()
    figures: list[Figure] = []
    if options.only != "codecs":
        figures += bound(options.peers, options.steps)
    if options.only != "bound":
        figures += overlap(options.steps)
    report("pipelines of real processes", figures, options.json)


def bound(peers: int, steps: int) -> list[Figure]:
    """A step over the least that its computing takes."""
    cores = os.cpu_count() or 1
    wanted = job(steps)
    with prepare(wanted) as prepared, tempfile.TemporaryDirectory() as folder:
        reader = Reader(
            prepared.manifest,
            prepared.shards.__getitem__,
            seed=wanted.seed,
            microbatches=wanted.train.microbatches,
        )
        before = plain_step_s(wanted, reader)
        with LocalCluster(peers=peers, threads=1) as cluster:
            done = steps_of(cluster, prepared, Path(folder))
        after = plain_step_s(wanted, reader)
    step_s = statistics.median(step.seconds for step in done[WARM_UP:])
    compute_s = statistics.median(step.compute_s for step in done[WARM_UP:])
    bound_s = min(before, after) / cores
    return [
        Figure("step_s", step_s, "s", "lower"),
        Figure("plain_step_s", min(before, after), "s", "lower"),
        Figure("plain_drift", max(before, after) / min(before, after), "ratio", "lower"),
        Figure("compute_of_peers_s", compute_s, "s", "lower"),
        Figure("step_over_bound", step_s / bound_s, "ratio", "lower"),
    ]


if __name__ == "__main__":
    main()
