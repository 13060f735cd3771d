"""The broker is killed at random points of a run, by SIGKILL, and started again on its state.

    python benchmarks/service/broker_killed.py [--kills 50] [--seed 1] [--json FILE]

Real processes with identities and mutual TLS: a broker, two peers, a client that watches. Runs of
the same small job follow each other; in each the broker dies several times: three times of four at
a random time after a step, else at a random time after its start, so that it also dies while it
plans, while peers build and while they export. Every run is compared with one that nobody disturbed
(losses and weights to the bit, each step once, events without a gap) and with the plain loop in one
process. Re-attachment is what the broker's own log says: from its start to the last of the peers.
Ends with an error where anything differs.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.benchmarks.table import Figure, arguments, report

if TYPE_CHECKING:
    from shoal.client import Run
    from shoal.job import Job
    from shoal.proto.broker_pb2 import RunEvent

STEPS = 240
MICROBATCH = 4
PEERS = 2
KILLS_OF_A_RUN = 6
LEASE_S = 10.0
PATIENCE_S = 120.0
COMPARED = 32
"""Steps that are compared with the plain loop; later on training itself makes rounding grow."""
JOB = {
    "version": 1,
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 2, "width": 32, "heads": 2, "length": 32, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 32},
    "train": {"steps": STEPS, "batch": 8, "microbatch": MICROBATCH, "lr": 1e-2, "eval_every": 0},
    "plan": {"stages": 2, "pipelines": 1, "scheduler": "uniform"},
}
_LINE = re.compile(r"^(\S+ \S+) \w+ \S+ (broker_started|peer_joined|stream_refused) ?(.*)$")


class Watched(threading.Thread):
    """Every event of a run, as one client sees them through all the deaths."""

    def __init__(self, run: Run, steps: int = STEPS) -> None:
        super().__init__(daemon=True)
        self.steps = steps
        self.events: list[RunEvent] = []
        self.error: Exception | None = None
        self._run = run

    def run(self) -> None:
        try:
            for event in self._run.watch():
                self.events.append(event)
        except Exception as error:
            self.error = error

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(e.step.step, e.step.outcome.loss) for e in self.events if e.HasField("step")]

    @property
    def weights(self) -> list[list[str]]:
        found = [e.weights.files for e in self.events if e.HasField("weights")]
        return [[file.blob.hash for file in files] for files in found]

    def progress(self, patience_s: float) -> None:
        """Waits until one more step is committed, or the run has ended."""
        seen, end = len(self.losses), time.monotonic() + patience_s
        while self.is_alive() and len(self.losses) == seen and time.monotonic() < end:
            self.join(0.05)

    def phase(self) -> str:
        from shoal.proto.broker_pb2 import Phase

        states = [e.state for e in self.events if e.HasField("state")]
        return Phase.Name(states[-1].phase).lower() if states else "submitted"

    def problems(self, calm: Watched | None) -> list[str]:
        """What is not as it must be."""
        found = [] if self.error is None else [f"watching failed: {self.error!r}"]
        numbers = [e.number for e in self.events]
        if self.phase() != "done":
            states = [e.state.reason.text for e in self.events if e.HasField("state")]
            found.append(f"it ended as {self.phase()}: {states[-1] if states else ''}")
        if numbers != list(range(len(numbers))):
            found.append("events with a gap or twice")
        if [step for step, _ in self.losses] != list(range(self.steps)):
            found.append(f"{len(self.losses)} steps, expected each of {self.steps} once")
        if calm is not None and self.losses != calm.losses:
            found.append("other losses than undisturbed")
        if calm is not None and self.weights != calm.weights:
            found.append("other weights than undisturbed")
        return found


def single_process(job: Job) -> list[float]:
    """Losses of the plain loop."""
    import torch

    from shoal.client.front import SimulationFront
    from shoal.peer.data.reader import Reader
    from shoal.sim.plain import oracle

    torch.set_num_threads(1)  # as the peers; more wait for each other where cores are taken
    front = SimulationFront()
    try:
        facts, batches = front.prepared(job), job.train.batch // MICROBATCH
        reader = Reader(
            facts.manifest, facts.shards.__getitem__, seed=job.seed, microbatches=batches
        )
        with front.module(job) as module:
            return oracle.train(
                module,
                lambda step, m: reader.batch(step, m, MICROBATCH),
                job.train,
                steps=STEPS,
                microbatches=batches,
            ).losses
    finally:
        front.close()


def reattached(log: str) -> tuple[list[float], int]:
    """Seconds from each start of the broker, but the first, until the last of the peers had come;
    starts before whose end not all had come are left out. How many streams were refused."""
    began: float | None = None
    joined: set[str] = set()
    found: list[float] = []
    refused = 0
    for line in log.splitlines():
        if not (match := _LINE.match(line)):
            continue
        at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if match[2] == "broker_started":
            began, joined = at, set()
        elif match[2] == "stream_refused":
            refused += 1
        elif began is not None:
            joined.add(match[3].split()[0])
            if len(joined) == PEERS:
                found.append(at - began)
                began = None
    return found[1:], refused


def measure(kills: int, seed: int, folder: Path) -> list[Figure]:
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
    import shoal
    from shoal.client.submission import prepare
    from shoal.job import Job
    from shoal.sim.processes import LocalCluster

    rng, job = random.Random(seed), Job.from_table(JOB)
    away: list[float] = []
    phases: dict[str, int] = {}
    problems: list[str] = []
    done = runs = 0
    with (
        LocalCluster(peers=PEERS, folder=folder / "cluster", secure=True) as cluster,
        shoal.connect(cluster.address) as client,
        prepare(job) as prepared,
    ):

        def submit() -> Watched:
            found = Watched(client.submit_prepared(prepared, folder))
            found.start()
            return found

        calm, began = submit(), time.monotonic()
        calm.join()
        lasts_s = time.monotonic() - began
        problems += calm.problems(None)
        while done < kills and not problems:
            watched, runs = submit(), runs + 1
            for _ in range(KILLS_OF_A_RUN):
                if rng.random() < 0.75:  # a run that is planned anew each time would never train
                    watched.progress(PATIENCE_S)
                watched.join(rng.uniform(0.0, lasts_s / KILLS_OF_A_RUN))
                if not watched.is_alive() or done == kills:
                    break
                phase = watched.phase()
                phases[phase] = phases.get(phase, 0) + 1
                at = time.monotonic()
                cluster.restart_broker()
                away.append(time.monotonic() - at)
                done += 1
                print(
                    f"kill {done} in run {runs}, {phase}, after {len(watched.losses)} steps; "
                    f"away for {away[-1]:.1f} s",
                    flush=True,
                )
            watched.join()
            problems += [f"run {runs}: {p}" for p in watched.problems(calm)]
            cluster.check()
        log = cluster.log("broker", 10**6)
    back, refused = reattached(log)
    if "did not come back" in log or "Traceback" in log:
        problems.append("the broker's log has a lost holder or a traceback")
    if problems:
        raise SystemExit("\n".join(problems))
    pairs = zip(calm.losses, single_process(job), strict=True)
    apart = max(abs(a - b) for (step, a), b in pairs if step < COMPARED)
    return [
        Figure("broker_kills", done, "kills", "higher"),
        Figure("runs_with_kills", runs, "runs", "higher"),
        *(Figure(f"killed_while_{k}", n, "kills", "higher") for k, n in sorted(phases.items())),
        Figure("steps_lost_or_doubled", 0, "steps", "lower"),
        Figure(f"max_loss_difference_to_single_process_{COMPARED}_steps", apart, "", "lower"),
        Figure("away_median", statistics.median(away), "s", "lower"),
        Figure("reattached_starts", len(back), "starts", "higher"),
        Figure("reattached_median", statistics.median(back), "s", "lower"),
        Figure("reattached_worst", max(back), f"s of a lease of {LEASE_S:g}", "lower"),
        Figure("streams_refused", refused, "streams", "lower"),
    ]


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        figures = measure(options.kills, options.seed, Path(where))
    report("broker killed", figures, options.json)
