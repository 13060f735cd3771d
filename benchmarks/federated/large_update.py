"""Clients whose update has a gigabyte, over real processes: a broker and two peers on loopback.

    python benchmarks/federated/large_update.py [--json FILE] [--mib 1024] [--rounds 3]

The model is a table with that many bytes of float32, and a head. Two clients have half of the
samples each and make one step with all of them in a round, so a version is a step of SGD with the
whole batch: the plain loop is that. Each round an update crosses the link in both directions.

    large_update_lost          clients that were left out of a round, or peers of a term
    large_update_difference    the largest difference of a weight from the plain loop's
    large_update_round_s       wall seconds of the last round
    large_update_peer_ratio    the largest resident set of a peer over the bytes of an update
    large_update_broker_mib    the largest resident set of the broker in the rounds
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.benchmarks.table import Figure, arguments, report
from shoal.client import connect
from shoal.job import Job
from shoal.proto.broker_pb2 import RunEvent
from shoal.sim.processes import LocalCluster, started_by

WIDTH, SAMPLES, RATE = 1024, 64, 0.5


class Table(nn.Module):
    """Two classes of rows of a table."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = functional.cross_entropy(self.head(self.table(x)), y)
        return loss


@dataclass
class Seen:
    """What a run told, when, and how much memory its processes had, bytes, in its rounds."""

    events: list[RunEvent]
    ends_s: list[float]
    peer: int
    broker: int


def job_of(folder: Path, module: Table, rounds: int) -> Job:
    generator, rows = np.random.default_rng(0), module.table.num_embeddings
    x = generator.choice(rows, SAMPLES, replace=False)
    np.savez(folder / "rows.npz", x=x, y=x % 2)
    return Job(
        model=module,
        data={
            **{"kind": "arrays", "source": str(folder / "rows.npz"), "holdout": 0.0},
            "partition": {"kind": "iid", "clients": 2},
        },
        train={
            **{"steps": rounds, "batch": SAMPLES // 2, "lr": RATE, "optimizer": "sgd"},
            **{"momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "eval_every": 0},
            **{"schedule": "constant", "warmup": 0},
        },
        sync={"kind": "federated", "method": "fedavg", "per_round": 2, "local": {"passes": 1}},
        plan={"replicas": 2},
        output={"to": str(folder / "runs")},
    )


def resident(pid: int) -> int:
    """Bytes that a process holds, 0 where it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096


def followed(cluster: LocalCluster, job: Job) -> tuple[Seen, dict[str, Tensor]]:
    """Train, and look at the processes at each event."""
    seen = Seen([], [], 0, 0)
    with connect(cluster.address) as client:
        run = client.submit(job)
        for event in run.watch():
            seen.events.append(event)
            for name, process in cluster.processes.items():
                each = max(map(resident, (process.pid, *started_by(process.pid))))
                if name != "broker":
                    seen.peer = max(seen.peer, each)
                elif not event.HasField("weights"):
                    seen.broker = max(seen.broker, each)
            if event.HasField("round_done"):
                seen.ends_s.append(time.monotonic())
        run.checked(seen.events[-1].state)
        return seen, dict(run.weights())


def plain(module: Table, data: Path, rounds: int) -> dict[str, Tensor]:
    """Return what steps with all samples come to."""
    arrays = {k: torch.from_numpy(v) for k, v in np.load(data).items()}
    for _ in range(rounds):
        module.zero_grad()
        module(**arrays).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=RATE)
    return dict(module.state_dict())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of an update")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.mib << 20
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        module = Table(size // (4 * WIDTH))
        job = job_of(Path(folder), module, options.rounds)
        with LocalCluster(peers=2) as cluster:
            seen, weights = followed(cluster, job)
        done = [e.round_done for e in seen.events if e.HasField("round_done")]
        assert len(done) == options.rounds, done
        lost = sum(2 - len(d.members) for d in done) + seen.events[-1].term - 1
        wanted = plain(module, Path(folder) / "rows.npz", options.rounds)
    worst = max(float((weights[n] - t).abs().max()) for n, t in wanted.items())
    figures = [
        Figure("large_update_lost", lost, "clients", "lower"),
        Figure("large_update_difference", worst, "of a weight", "lower"),
        Figure("large_update_round_s", seen.ends_s[-1] - seen.ends_s[-2], "s", "lower"),
        Figure("large_update_peer_ratio", seen.peer / size, "ratio", "lower"),
        Figure("large_update_broker_mib", seen.broker / 2**20, "MiB", "lower"),
    ]
    report("large update", figures, options.json)


if __name__ == "__main__":
    main()
