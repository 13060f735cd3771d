"""A race to one held-out loss: four hosts behind 50 Mbit/s, real processes, the same data.

    python benchmarks/sync/race.py        # ten minutes; needs root, and quiet

A byte GPT of 8 layers and width 256, 6.4M parameters, 4 samples of 64 bytes on each host in a step.
Hosts are network namespaces with token buckets both ways (`benchmarks/links/namespaces.py`), every
process has one thread. In turns:

shoal            four replicas, averaged in int8 each 10 steps while 5 more are made
plain            torch with an all-reduce of dense fp32 gradients each step (gloo)
hivemind         gradients averaged in fp16 each step by hivemind, whose groups form ahead
hivemind-local   local steps, parameters averaged likewise each 10

Each evaluates the same held-out samples behind each 10 steps, those that exchange gradients behind
each 5, on one of its hosts; time begins with the first step. Who has not come to the loss when its
time is over counts with that time, which flatters it.

sync_time_over_rival        shoal's time over the better one's of plain and hivemind
sync_time_over_local_rival  shoal's time over that of hivemind-local
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.benchmarks.links.hosts import Pool
from shoal.benchmarks.links.namespaces import PYTHON, Hosts, usable
from shoal.benchmarks.table import Figure, arguments, report
from shoal.client.front import SimulationFront
from shoal.job import Job
from shoal.peer.data.reader import Reader

HOSTS, EVERY, STEPS = 4, 10, 60
TARGET = 3.1
"""Nats per byte; a random model has 5.5, the frequencies of bytes alone come to 3.3."""
RIVAL_S = 170.0
"""No rival runs longer."""
LINE = "qdisc add dev {} root tbf rate 50mbit burst 64kb latency 200ms"
JOB = """\
version = 1
name = "race"
[model]
factory = "shoal.examples.gpt:gpt"
args = {{ layers = 8, width = 256, heads = 8, length = 64, dropout = 0.0 }}
[data]
length = 64
[train]
steps = {steps}
batch = 16
microbatch = 4
lr = 1e-3
schedule = "constant"
warmup = 0
weight_decay = 0.0
eval_every = {every}
eval_batches = 2
[recovery]
ladder = []
[plan]
replan = false
replicas = {hosts}
stages = 1
[codec]
sync = "int8:block=128"
[sync]
kind = "local"
method = "average"
every = {every}
options = {{ overlap = 5 }}
"""


@dataclass(frozen=True)
class Ran:
    """curve: (seconds, steps, held-out loss). compute_s, sync_s: of one step, by the clock."""

    name: str
    curve: list[tuple[float, int, float]]
    compute_s: float
    sync_s: float
    note: str = ""

    def seconds(self, target: float) -> float:
        """To the loss; if it never came to it, as long as it ran."""
        there = (s for s, _, loss in self.curve if loss <= target)
        return next(there, self.curve[-1][0] if self.curve else 0.0)

    def __str__(self) -> str:
        curve = ", ".join(f"{step}: {loss:.3f} at {s:.0f} s" for s, step, loss in self.curve)
        return (
            f"  {self.name:15} compute {self.compute_s:.2f} s a step, exposed {self.sync_s:.2f} s "
            f"a step{self.note}\n    {curve}"
        )


def text_of(steps: int) -> str:
    return JOB.format(steps=steps, every=EVERY, hosts=HOSTS)


def shoal(folder: Path) -> Ran:
    with Pool(HOSTS, [(LINE.format("eth"),)], folder) as pool:
        both_ways(pool.hosts)
        (row,) = pool.train([text_of(STEPS)])
    began = row["begun"][0]
    waited = sum(r[1] for r in row["rounds"])
    bytes_ = row["rounds"][-1][2] / HOSTS / 1e6
    return Ran(
        "shoal",
        [(at - began, step, loss) for at, step, loss in row["evaluated"]],
        statistics.median(row["compute"]),
        waited / STEPS,
        f", {bytes_:.1f} MB sent by each in a round",
    )


def rival(kind: str, folder: Path) -> Ran:
    """`folder` has race.pt."""
    names = tuple(f"h{i}" for i in range(1, HOSTS + 1))
    with Hosts(names) as hosts:
        for name in names:
            hosts.shape(name, LINE.format("eth"))
        both_ways(hosts)
        addresses = [hosts.address(name) for name in names]
        script = str(Path(__file__).with_name("rivals.py"))
        started = [
            hosts.start(
                *(name, PYTHON, script, kind, str(rank), str(folder)),
                *(str(EVERY if kind == "hivemind-local" else EVERY // 2), str(RIVAL_S)),
                *addresses,
                log=folder / f"{kind}-{name}.log",
                env={"OMP_NUM_THREADS": "1"},
            )
            for rank, name in enumerate(names)
        ]
        try:
            said, _ = started[0].communicate(timeout=RIVAL_S + 60)
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode()
    rows = [json.loads(line) for line in said.splitlines()]
    if not rows:
        raise RuntimeError(f"{kind}: {(folder / f'{kind}-h1.log').read_text()[-3000:]}")
    last = rows[-1]
    return Ran(
        kind,
        [(r["seconds"], r["step"], r["loss"]) for r in rows],
        last["compute_s"],
        last["sync_s"],
        f", {last['failed']} averages failed" if last["failed"] else "",
    )


def both_ways(hosts: Hosts) -> None:
    for name in hosts.names:
        hosts.shape_down(name, LINE.format(f"to-{name}"))


def write(folder: Path, target: float) -> None:
    """What rivals train, as Shoal would."""
    job = Job.from_toml(folder / "race.toml")
    front = SimulationFront()
    prepared, train = front.prepared(job), job.train
    reader = Reader(
        prepared.manifest,
        prepared.shards.__getitem__,
        seed=job.seed,
        microbatches=train.microbatches,
    )
    size = train.microbatch_size
    with front.module(job) as module:
        race = {
            "module": copy.deepcopy(module),
            "batches": [[reader.batch(s, m, size) for m in range(HOSTS)] for s in range(STEPS)],
            "held_out": [reader.held_out(m, size) for m in range(train.evaluation_microbatches)],
            "adamw": {"lr": train.lr, "betas": train.betas, "eps": train.eps, "weight_decay": 0.0},
            "clip": train.clip,
            "target": target,
        }
        torch.save(race, folder / "race.pt")
    front.close()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--target", type=float, default=TARGET, help="held-out loss")
    parser.add_argument("--only", nargs="*", default=["hivemind-local", "plain", "hivemind"])
    args = parser.parse_args()
    if why := usable():
        print(why)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "race.toml").write_text(text_of(STEPS))
        ran = {"shoal": shoal(folder)}
        print(ran["shoal"], flush=True)
        write(folder, args.target)
        for kind in args.only:
            try:
                ran[kind] = rival(kind, folder)
                print(ran[kind], flush=True)
            except RuntimeError as error:
                print(f"  {kind} did not run: {error}", flush=True)
            (folder / "first.json").unlink(missing_ok=True)
    seconds = {kind: r.seconds(args.target) for kind, r in ran.items()}
    figures = [
        Figure(f"sync_race_{kind.replace('-', '_')}_seconds", s, "s", "lower")
        for kind, s in seconds.items()
    ]
    dense = [seconds[kind] for kind in ("plain", "hivemind") if kind in seconds]
    if dense:
        ratio = seconds["shoal"] / min(dense)
        figures.append(Figure("sync_time_over_rival", ratio, "ratio", "lower"))
    if "hivemind-local" in seconds:
        ratio = seconds["shoal"] / seconds["hivemind-local"]
        figures.append(Figure("sync_time_over_local_rival", ratio, "ratio", "lower"))
    report("race", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
