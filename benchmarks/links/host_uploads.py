"""Uploads of hosts whose uplinks are unlike, by BCRS (2408.14736), as real processes: a broker and
20 peers on shaped paths, each with data of its own.

    python benchmarks/links/host_uploads.py [--hosts 20] [--rounds 4] [--results int8]

Uplinks are 0.5 to 20 Mbit/s, evenly apart, and every way takes 25 ms; the broker measures all that
by itself, in the first round by its probes, and then by the uploads of rounds gone by. The least
ratio is 0.01, and the update has 7 million numbers, of which the slowest sends a hundredth in 5 to
6 s. All hosts train 8 samples in a step, and begin within a second: they share the machine's cores.
An upload lasts from when its host begins to when the last of its frames is acknowledged.

    uploads_spread       of those that are not clamped and add nothing up, the longest over the
                         shortest, less 1, in the median round after the first (bar 0.15)
    uploads_spread_first the same of the first round
    uploads_spread_all   of those that add up as well, after the first round: their own results, and
                         the contributions of all others, go through the same cores meanwhile
    uploads_seconds      the longest upload of those in uploads_spread
    exchange_seconds     from when a round closed to when it was committed, in the median round: all
                         numbers come back in it, which --results writes in a codec
    uploads_of_fedavg    how long the slowest would take for all numbers, by its uplink
    uploads_wait         how many threads stood ready and had no core, in the mean from when a round
                         closed to when it was committed; and for each round on standard error
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.benchmarks.table import Figure, arguments, report
from shoal.client import Client, connect
from shoal.client.front import SimulationFront
from shoal.client.runs.run import Run
from shoal.dag.rounds.wiring import GIVE
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.cluster import wait_for_peers
from shoal.sim.processes import LocalCluster
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.shaped.contention import snapshot, waited_s
from shoal.sim.shaped.forwarder import Forwarder
from shoal.sim.shaped.shaping import Shaping

LEAST, MOST, MBIT = 0.5, 20.0, 125_000
WIDTH, SAMPLES, RATIO = 2600, 8, 0.01
ELEMENTS = 64 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH + WIDTH * 10 + 10
MODEL = """
from torch import nn
from torch.nn.functional import cross_entropy

class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )

    def forward(self, x, y):
        return cross_entropy(self.layers(x), y)
"""
PEER = """\
[[peers]]
name = "h{i}"
place = "at-{i}"
up = "{up:.3f}Mbit"
down = "200Mbit"
device = {{ flops = 26e9, memory_bandwidth = "5.2GB/s", overhead = "19us" }}
"""
LINK = '[[links]]\nfrom = "at-{a}"\nto = "at-{b}"\nlatency = "25ms"\nbandwidth = "200Mbit"\n'


@dataclass(frozen=True, slots=True)
class Upload:
    """A host's contribution to a round: when it began and ended, how many of its numbers it had,
    and whether the host added up a part."""

    host: str
    began_s: float
    ended_s: float
    kept: int
    adds_up: bool


def uplinks(hosts: int) -> list[float]:
    """Return Mbit/s."""
    return [float(up) for up in np.linspace(LEAST, MOST, hosts)]


def scenario_of(folder: Path, hosts: int) -> Scenario:
    lines = ["version = 1", 'name = "uploads"', 'job = "job.toml"', '[broker]\nplace = "at-0"']
    lines += [PEER.format(i=i, up=up) for i, up in enumerate(uplinks(hosts))]
    places = [*map(str, range(hosts))]
    lines += [LINK.format(a=a, b=b) for i, a in enumerate(places) for b in places[i + 1 :]]
    path = folder / "scenario.toml"
    path.write_text("\n".join(lines))
    return Scenario.from_toml(path)


def job_of(folder: Path, hosts: int, rounds: int, results: str) -> Job:
    (folder / "model.py").write_text(MODEL)
    return Job.from_table(
        {
            **{"version": 1, "name": "uploads"},
            "model": {"factory": f"{folder}/model.py:Classifier", "args": {"width": WIDTH}},
            "data": {"where": "peer", "kind": "arrays", "source": "digits", "holdout": 0.0},
            "sync": {
                **{"kind": "federated", "method": "fedavg", "per_round": hosts},
                **{"local": {"steps": 1}, "compression": "bcrs"},
                "compression_options": {"least_ratio": RATIO},
            },
            "train": {
                **{"rounds": rounds, "batch": SAMPLES, "lr": 0.1, "optimizer": "sgd"},
                **{"momentum": 0.0, "schedule": "constant", "warmup": 0, "weight_decay": 0.0},
                **{"clip": 0.0, "eval_every": 0},
            },
            "codec": {"sync": results},
            "output": {"to": str(folder / "runs"), "every": 0},
        }
    )


def joined(cluster: LocalCluster, paths: Forwarder, folder: Path, hosts: int) -> None:
    """Have the hosts join, each with data of its own."""
    for i in range(hosts):
        own, rng = folder / f"h{i}", np.random.default_rng(i)
        own.mkdir()
        x = rng.normal(size=(SAMPLES, 64)).astype(np.float32)
        np.savez(own / "digits.npz", x=x, y=rng.integers(0, 10, SAMPLES))
        (own / "peer.toml").write_text(f'[data.digits]\npath = "{own / "digits.npz"}"\n')
        via = paths.write_via(f"h{i}", own / "via.json")
        flags = ["--port", str(paths.port(f"h{i}")), "--via", str(via), "--place", f"at-{i}"]
        trace = ["--trace", str(own / "trace.jsonl"), "--config", str(own / "peer.toml")]
        cluster.join(f"h{i}", [*flags, *trace])


def uploads(folder: Path, events: Sequence[RunEvent], run: str) -> list[list[Upload]]:
    """Return, by round, what each host gave."""
    [formed] = [e.formed for e in events if e.HasField("formed")]
    hosts = [replica.peers[0].rpartition("-")[0] for replica in formed.replicas]
    times, adders = dict[tuple[int, str], list[tuple[float, float]]](), set[tuple[int, str]]()
    for file in folder.glob("h*/trace.jsonl"):
        for record in map(json.loads, file.read_text().splitlines()):
            if record.get("role") != "round" or record["run"].partition(".")[0] != run:
                continue
            at = record["step"], file.parent.name
            if record["hop"] == GIVE:
                times.setdefault(at, []).append((record["start_s"], record["end_s"]))
            else:
                adders.add(at)
    begun = (e.round_begun for e in events if e.HasField("round_begun"))
    return [
        [
            Upload(host, *min_and_max(times[b.round, host]), w.kept[0], (b.round, host) in adders)
            for w in b.work
            for host in [hosts[w.replica]]
        ]
        for b in begun
    ]


def min_and_max(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return when the first began and the last ended."""
    return min(a for a, _ in times), max(b for _, b in times)


def spread(given: Sequence[Upload]) -> float:
    lasts = [u.ended_s - u.began_s for u in given]
    return max(lasts) / min(lasts) - 1


def figures(
    rounds: Sequence[Sequence[Upload]], waiting: Sequence[float], lasted: Sequence[float]
) -> list[Figure]:
    spreads, all_of, longest = list[float](), list[float](), list[float]()
    for number, (given, waited, s) in enumerate(zip(rounds, waiting, lasted, strict=True)):
        first = min(u.began_s for u in given)
        for u in sorted(given, key=lambda u: u.kept):
            print(
                f"{u.host}: {u.kept / ELEMENTS:.2%} of its numbers, from {u.began_s - first:.2f} "
                f"to {u.ended_s - first:.2f} s{', and adds up' * u.adds_up}",
                file=sys.stderr,
            )
        unclamped = [u for u in given if u.kept < ELEMENTS]
        senders = [u for u in unclamped if not u.adds_up]
        all_of.append(spread(unclamped))
        spreads.append(spread(senders))
        longest.append(max(u.ended_s - u.began_s for u in senders))
        print(
            f"round {number}: spread {spreads[-1]:.2f} of {len(senders)}, {all_of[-1]:.2f} of all "
            f"{len(unclamped)}, the longest {longest[-1]:.1f} s of {s:.1f}; {waited:.1f} "
            "threads waited",
            file=sys.stderr,
        )
    alone = 4 * ELEMENTS / (LEAST * MBIT)
    return [
        Figure("uploads_spread", statistics.median(spreads[1:] or spreads), "ratio", "lower"),
        Figure("uploads_spread_first", spreads[0], "ratio", "lower"),
        Figure("uploads_spread_all", statistics.median(all_of[1:] or all_of), "ratio", "lower"),
        Figure("uploads_seconds", statistics.median(longest[1:] or longest), "s", "lower"),
        Figure("exchange_seconds", statistics.median(lasted), "s", "lower"),
        Figure("uploads_of_fedavg", alone, "s", "lower"),
        Figure("uploads_wait", statistics.mean(waiting), "threads", "lower"),
    ]


def watched(run: Run, pid: int) -> tuple[list[RunEvent], list[float], list[float]]:
    """Return a run's events and, by round, how many threads of all below this process had no core
    from when the round closed to when it was committed, and how long that was."""
    events, waiting, lasted, since = (
        list[RunEvent](),
        list[float](),
        list[float](),
        (0.0, snapshot({})),
    )
    for event in run.watch():
        events.append(event)
        if event.HasField("round_planned"):
            since = time.monotonic(), snapshot({"all": pid})
        elif event.HasField("round_done"):
            waited = waited_s(since[1], snapshot({"all": pid}))["all"]
            lasted.append(time.monotonic() - since[0])
            waiting.append(waited / lasted[-1])
    return events, waiting, lasted


def wait_for_links(client: Client, hosts: int) -> None:
    """Wait until all hosts' ways out were measured, each to one other at least."""
    while True:
        known = client.describe().links
        measured = {link.source for link in known if link.bytes_per_s}
        if len(measured) == hosts:
            return
        time.sleep(1.0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--hosts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--results", default="none", help="what comes back is written in")
    parser.add_argument("--keep", type=Path, help="leave traces and logs in this new folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = asked.keep or Path(name)
        folder.mkdir(exist_ok=True)
        job = job_of(folder, asked.hosts, asked.rounds, asked.results)
        scenario = scenario_of(folder, asked.hosts)
        cluster = running.enter_context(LocalCluster(peers=[], folder=folder / "cluster"))
        shaping = Shaping.of_scenario(scenario)
        paths = running.enter_context(Forwarder(shaping, {"broker": cluster.address}))
        running.callback(cluster.stop)
        joined(cluster, paths, folder, asked.hosts)
        with connect(cluster.address) as client:
            wait_for_peers(cluster, SimulationFront(), asked.hosts)
            wait_for_links(client, asked.hosts)
            run = client.submit(job)
            events, waiting, lasted = watched(run, os.getpid())
        assert events[-1].state.phase == DONE, events[-1].state.reason.text
        found = figures(uploads(folder, events, run.id), waiting, lasted)
        report("uploads of hosts", found, asked.json)


if __name__ == "__main__":
    main()
