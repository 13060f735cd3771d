"""Members of rounds that are killed, as real processes: does every run come to its end, and to the
weights of a plain loop that is fed with the rounds that were committed?

    python benchmarks/sync/killed.py [--runs 40] [--first 0]     ten minutes and more

A broker and seven peers on loopback stay for all runs. Each run is drawn from its number: a method,
two replicas of two peers or four of one, and kills (SIGKILL) at any moment of any round. One peer
that trains is killed, and later, in half of the runs, the broker, which is started again on its
state. Killed peers come back after the run.

rounds_killed_right   share of the runs that did all of their steps, and came to those weights
rounds_killed_s       seconds of a run, the median
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shoal
from shoal.benchmarks.service.broker_killed import Watched
from shoal.benchmarks.soak.real import wait_for
from shoal.benchmarks.table import Figure, arguments, report
from shoal.client import Client, Run
from shoal.client.front import SimulationFront
from shoal.client.submission import prepare
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.proto.broker_pb2 import RunEvent
from shoal.sim.plain.plain_rounds import train_rounds
from shoal.sim.processes import LocalCluster

DRAWN: dict[str, dict[str, Any]] = {
    "diloco": {},
    "average": {"overlap": 1},
    "sparse-loco": {"density": 0.1, "decay": 1.0, "result_density": 0.1},
    "random-pairs": {},
    "saps-outer": {},
}
STEPS, EVERY, BATCH, SIZE = 40, 4, 16, 4
PEERS, FLAGS, PATIENCE_S = 7, ("--stretch", "12"), 120.0
ROUND_S = 0.5
"""About as long a round takes."""


def draw(number: int) -> tuple[Job, random.Random]:
    """The job of a run, and what decides its kills."""
    rng = random.Random(f"killed {number}")
    method = sorted(DRAWN)[number % len(DRAWN)]
    replicas = rng.choice((2, 4))
    gossip = method in ("random-pairs", "saps-outer")
    sync = {"kind": "gossip" if gossip else "local", "method": method, "every": EVERY}
    job = Job.from_table(
        {
            "version": 1,
            "name": "killed",
            "seed": number,
            "model": {
                "factory": "shoal.examples.gpt:gpt",
                "args": {"layers": 2, "width": 32, "heads": 2, "length": 32, "dropout": 0.0},
            },
            "data": {"kind": "text", "length": 32},
            "train": {
                **{"steps": STEPS, "batch": BATCH, "microbatch": SIZE, "lr": 0.05},
                **{"optimizer": "sgd", "eval_every": 0, "schedule": "constant", "warmup": 0},
            },
            "plan": {
                **{"replicas": replicas, "stages": 4 // replicas, "pipelines": 1},
                "scheduler": "uniform",
            },
            "sync": {**sync, "options": DRAWN[method]},
        }
    )
    return job, rng


def expected(job: Job, front: SimulationFront, events: Sequence[RunEvent]) -> dict[str, Tensor]:
    """What the plain loop comes to, of the rounds that were committed."""
    facts, count = front.prepared(job), BATCH // SIZE
    reader = Reader(facts.manifest, facts.shards.__getitem__, seed=job.seed, microbatches=count)
    with front.module(job) as module:
        return train_rounds(
            module, job, events, reader, microbatches=count, microbatch_size=SIZE, steps=STEPS
        ).shared


def rounds_of(watched: Watched) -> int:
    """How many were committed; -1 before the first one began."""
    if not any(e.HasField("round_begun") for e in watched.events):
        return -1
    return sum(e.HasField("round_done") for e in watched.events)


def until(met: Callable[[], bool], watched: Watched) -> None:
    end = time.monotonic() + PATIENCE_S
    while watched.is_alive() and not met() and time.monotonic() < end:
        watched.join(0.02)


def holders(client: Client, events: Sequence[RunEvent]) -> list[str]:
    """Names of those that the newest plan of each replica gives a stage to."""
    plans = {e.replica: e.plan for e in events if e.HasField("plan")}
    names = client.names()
    held = [peer for plan in plans.values() for stage in plan.stages for peer in stage.holders]
    return sorted({names.get(peer, peer) for peer in held})


class Field:
    """The processes that stay."""

    def __init__(self, cluster: LocalCluster, client: Client, folder: Path) -> None:
        self.cluster, self.client, self.folder = cluster, client, folder
        self.front, self.names = SimulationFront(), [f"peer-{i + 1}" for i in range(PEERS)]
        for name in self.names:
            cluster.join(name, FLAGS)
        wait_for(client, PEERS)

    def play(self, number: int) -> str:
        """What is wrong with a run, or nothing."""
        job, rng = draw(number)
        with prepare(job) as prepared:
            run = self.client.submit_prepared(prepared, self.folder)
            watched = Watched(run, STEPS)
            watched.start()
            done: list[str] = []
            moments = sorted(rng.randrange(STEPS // EVERY - 1) for _ in range(rng.randint(1, 2)))
            for moment, kills in zip(moments, (self._a_peer, self._the_broker), strict=False):
                until(lambda at=moment: rounds_of(watched) >= at, watched)  # type: ignore[misc]
                watched.join(rng.uniform(0.0, ROUND_S))
                if watched.is_alive():
                    done.append(f"{kills(rng, watched)} in round {rounds_of(watched)}")
            until(lambda: False, watched)
            problem = self._problem(job, run, watched)
        print(
            f"{number}: {job.sync.chosen}, {job.plan.replicas} replicas; killed "
            f"{', '.join(done) or 'nobody'}; {rounds_of(watched)} rounds: {problem or 'right'}",
            flush=True,
        )
        for name in self.names:
            if not self.cluster.runs(name):
                self.cluster.join(name, FLAGS)
        wait_for(self.client, len(self.names))
        return problem

    def _a_peer(self, rng: random.Random, watched: Watched) -> str:
        """One that trains; one of a run, as somebody must have the version."""
        name = rng.choice(holders(self.client, watched.events))
        self.cluster.send(name, signal.SIGKILL)
        return name

    def _the_broker(self, rng: random.Random, watched: Watched) -> str:
        self.cluster.restart_broker()
        return "the broker"

    def _problem(self, job: Job, run: Run, watched: Watched) -> str:
        if watched.is_alive():
            run.cancel()
            return f"it has not ended after {PATIENCE_S:g} s, {rounds_of(watched)} rounds"
        found = [p for p in watched.problems(None) if "steps, expected" not in p]
        if found:
            return "; ".join(found)
        got, wanted = run.weights(), expected(job, self.front, watched.events)
        apart = {n: ~torch.isclose(got[n], w, rtol=1e-3, atol=2e-5) for n, w in wanted.items()}
        ties = 0.002 if job.sync.chosen == "sparse-loco" else 0.0
        wrong = [n for n, a in apart.items() if int(a.sum()) > ties * a.numel()]
        return f"other weights than the plain loop: {', '.join(wrong)}" if wrong else ""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    right, seconds = 0, list[float]()
    with (
        tempfile.TemporaryDirectory() as name,
        LocalCluster(peers=[], folder=Path(name) / "cluster") as cluster,
        shoal.connect(cluster.address) as client,
    ):
        field = Field(cluster, client, Path(name))
        for number in range(args.first, args.first + args.runs):
            began = time.monotonic()
            right += not field.play(number)
            seconds.append(time.monotonic() - began)
        field.front.close()
    figures = [
        Figure("rounds_killed_right", right / args.runs, "ratio", "higher"),
        Figure("rounds_killed_s", statistics.median(seconds), "s", "lower"),
    ]
    report("sync killed", figures, args.json)
    return int(right < args.runs)


if __name__ == "__main__":
    sys.exit(main())
