"""What the simulated world costs with ghosts: seconds and memory for up to 1,000 peers.

    python benchmarks/worlds/world.py [--json FILE] [--only small wide runs rounds hour] the figures
    python benchmarks/worlds/world.py plot docs/ghost-scale.png  cost per event over peers
    python benchmarks/worlds/world.py one 6 8 100 1                           one case: PIPELINES,
                                                                       MICROBATCHES, STEPS, RUNS

A case is a world of RUNS · PIPELINES · 8 peers of 1 TFLOP/s on links of 12.5 MB/s and 20 ms: a GPT
of 8 blocks (width 256, windows of 128 bytes, microbatches of 4) in 8 stages, each run over
PIPELINES pipelines with MICROBATCHES microbatches each. The plan is made by hand, a block a stage,
so that its shape is the one that is named. The broker's and the peers' own machines, the link
protocol and the modelled network run; only tensors are hashes. Every loss and every exported hash
is compared with the plain loop's, or the case fails.

The clock runs from the world's first peer to the last event of the last run. The world is one
thread that waits for nothing, so CPU seconds are what wall seconds would be on a machine that does
nothing else.

    small   48 peers: one run, 6 pipelines, 100 steps
    wide    1,000 peers: one run, 125 pipelines, 10 steps; the 125 holders of a stage exchange their
            gradients in 11 rows, 41,000 of the 57,000 frames of a step
    runs    1,000 peers: 125 runs of one pipeline each, 10 steps, at once and by one broker
    rounds  1,000 peers: one run, 125 replicas that train apart and meet in rounds (world_rounds.py)
    hour    20 peers at twelve places, an hour of the world's clock (world_hour.py)
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.events import RunId
from shoal.broker.options import BrokerOptions
from shoal.dag.capture.capture import capture
from shoal.dag.exchange.rows import MOST_ALL_TO_ALL
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.plan import PeerId, Plan, StageExchange, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.examples.gpt import gpt
from shoal.job import Job
from shoal.net.transports.memory import steady
from shoal.peer.data.manifest import Column, Manifest, Shard
from shoal.proto import broker_pb2, common_pb2
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import read_export

STAGES = 8
SIZE = 4
"""Samples of a microbatch."""
PLOTTED = (1, 2, 4, 8, 16)
"""Pipelines of one run in the plot."""


def main() -> int:
    match sys.argv[1:]:
        case ["one", pipelines, microbatches, steps, runs]:
            print(json.dumps(one(int(pipelines), int(microbatches), int(steps), int(runs))))
            return 0
        case ["plot", file]:
            plot(Path(file))
            return 0
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    options = parser.parse_args()
    figures: list[Figure] = []
    for name in options.only:
        figures += GROUPS[name]()
    report("world", figures, options.json)
    return 0


def small() -> list[Figure]:
    found = apart(6, 8, 100, 1)
    return [
        Figure("ghost_48_peers_seconds", found["seconds"], "s", "lower"),
        Figure("ghost_48_peers_cpu_seconds", found["cpu_seconds"], "s", "lower"),
        Figure("ghost_48_peers_us_per_event", found["us_per_event"], "us", "lower"),
    ]


def wide() -> list[Figure]:
    found = apart(125, 8, 10, 1)
    return [
        Figure("ghost_1000_peers_seconds", found["seconds"], "s", "lower"),
        Figure("ghost_1000_peers_cpu_seconds", found["cpu_seconds"], "s", "lower"),
        Figure("ghost_1000_peers_gib", found["gib"], "GiB", "lower"),
    ]


def runs() -> list[Figure]:
    found = apart(1, 8, 10, 125)
    return [
        Figure("ghost_1000_peers_125_runs_seconds", found["seconds"], "s", "lower"),
        Figure("ghost_1000_peers_125_runs_cpu_seconds", found["cpu_seconds"], "s", "lower"),
        Figure("ghost_1000_peers_125_runs_gib", found["gib"], "GiB", "lower"),
    ]


def rounds() -> list[Figure]:
    found = in_a_process(str(Path(__file__).with_name("world_rounds.py")), "125")
    return [
        Figure("ghost_1000_peers_125_replicas_seconds", found["seconds"], "s", "lower"),
        Figure("ghost_1000_peers_125_replicas_cpu_seconds", found["cpu_seconds"], "s", "lower"),
        Figure("ghost_1000_peers_125_replicas_gib", found["gib"], "GiB", "lower"),
    ]


def hour() -> list[Figure]:
    found = in_a_process(str(Path(__file__).with_name("world_hour.py")))
    return [
        Figure("virtual_hour_seconds", found["seconds"], "s", "lower"),
        Figure("virtual_hour_cpu_seconds", found["cpu_seconds"], "s", "lower"),
        Figure("virtual_hour_steps", found["steps"], "steps", "higher"),
    ]


GROUPS: dict[str, Callable[[], list[Figure]]] = {
    "small": small,
    "wide": wide,
    "runs": runs,
    "rounds": rounds,
    "hour": hour,
}


@cache
def graph_of() -> Graph:
    with torch.device("meta"):
        module = gpt(STAGES, 256, 8, 128, 0.0)
    text = torch.zeros(SIZE, 128, dtype=torch.int64, device="meta")
    return capture(module, {"x": text, "y": text}).graph


def plan_of(graph: Graph, names: list[str], microbatches: int) -> Plan:
    """A block a stage, each pipeline on eight names in a row, microbatches dealt out in turn."""
    first: dict[str, int] = {}
    for i, op in enumerate(graph.operators):
        if op.module.startswith("blocks."):
            first.setdefault(op.module.split(".")[1], i)
    starts = [0, *list(first.values())[1:], len(graph.operators)]
    pipelines = [names[i : i + STAGES] for i in range(0, len(names), STAGES)]
    return Plan(
        stages=tuple(
            StageSlot(
                starts[k],
                starts[k + 1],
                tuple(PeerId(p[k]) for p in pipelines),
            )
            for k in range(STAGES)
        ),
        exchanges=tuple(
            StageExchange(k, "two-level") for k in range(STAGES) if len(pipelines) > MOST_ALL_TO_ALL
        ),
        routes=tuple(
            tuple(Visit(k, PeerId(name)) for k, name in enumerate(pipelines[m % len(pipelines)]))
            for m in range(microbatches * len(pipelines))
        ),
        microbatch_size=SIZE,
    )


def one(pipelines: int, microbatches: int, steps: int, count: int = 1) -> dict[str, float]:
    """Runs one case here; `gib` is the process's peak of memory."""
    graph, blobs = graph_of(), dict[str, bytes]()

    def blob(data: bytes) -> common_pb2.BlobRef:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return common_pb2.BlobRef(hash=name, size_bytes=len(data))

    each = microbatches * pipelines
    train = {"steps": steps, "batch": each * SIZE, "microbatch": SIZE, "lr": 1e-3}
    model = {"factory": "shoal.examples.gpt:gpt", "args": {"layers": STAGES}}
    data = {"kind": "text", "length": 128}
    job = Job.from_table({"version": 1, "model": model, "data": data, "train": train})
    nothing = Shard("text", 1000, 1000, "0" * 64)  # nobody fetches it
    manifest = Manifest("text", (Column("text", "uint8"),), (nothing,), 1000, 0, length=128)
    names = [f"p{i}" for i in range(count * pipelines * STAGES)]
    specs = []
    for i in range(count):
        mine = names[i * pipelines * STAGES : (i + 1) * pipelines * STAGES]
        specs.append(
            broker_pb2.RunSpec(
                version=1,
                name=f"ghost-{i}",
                job=job.to_json(),
                graph=blob(graph_to_bytes(graph)),
                data=blob(manifest.to_json().encode()),
                microbatches=each,
                microbatch_size=SIZE,
                steps=steps,
                plan=plan_to_proto(plan_of(graph, mine, microbatches)),
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        began, wall = time.process_time(), time.perf_counter()
        world = World(
            [PeerSpec(name=name, flops_per_s=1e12) for name in names],
            blobs=blobs,
            folder=Path(folder),
            carry=steady(0.02, 12.5e6),
            broker_options=BrokerOptions(most_waiting=count + 1),
            device=Ghosts(),
            log=False,
        )
        submitted = [world.submit(spec) for spec in specs]
        last = RunId(submitted[-1])
        world.until(lambda: world.broker.machine.runs[last].state.step > 0)
        ready, events = time.process_time(), world.calls
        ended = [world.finish(run) for run in submitted]
        cpu_s, wall_s = time.process_time() - began, time.perf_counter() - wall
    running_s = began + cpu_s - ready
    wanted = expected(graph.bind(SIZE), job.seed, steps, each)
    for happened in ended:
        losses = [e.step.outcome.loss for e in happened if e.HasField("step")]
        assert losses == wanted.losses, happened[-1].state.reason.text
        files = [e.weights.files for e in happened if e.HasField("weights")][-1]
        assert read_export(world.blobs[f.blob.hash] for f in files) == wanted.weights
    return {
        "peers": len(names),
        "seconds": wall_s,
        "cpu_seconds": cpu_s,
        "ready_cpu_seconds": ready - began,
        "events": world.calls,
        "us_per_event": 1e6 * running_s / max(1, world.calls - events),
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "virtual_s": world.now,
    }


def apart(pipelines: int, microbatches: int, steps: int, count: int) -> dict[str, float]:
    """The same in a process of its own, for its peak of memory."""
    case = map(str, (pipelines, microbatches, steps, count))
    return in_a_process(__file__, "one", *case)


def in_a_process(*command: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
    return shown(json.loads(done.stdout.splitlines()[-1]))


def shown(found: dict[str, float]) -> dict[str, float]:
    print(f"    {found}", flush=True)
    return found


def plot(file: Path) -> None:
    """Microseconds of CPU per event, and events and CPU seconds of a step, over peers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    one_run = [shown(one(n, 8, 3, 1)) for n in PLOTTED]
    many = [shown(one(1, 8, 3, n)) for n in PLOTTED]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4))
    for found, label, marker in (
        (one_run, "one run, all holders of a stage exchange", "o"),
        (many, "as many runs as pipelines", "s"),
    ):
        peers = [f["peers"] for f in found]
        left.plot(peers, [f["us_per_event"] for f in found], marker=marker, label=label)
        right.plot(peers, [f["events"] for f in found], marker=marker, label=label)
    left.set(xlabel="peers", ylabel="µs of CPU per event", xscale="log", ylim=(0, None))
    right.set(xlabel="peers", ylabel="events of 3 steps and their start", xscale="log")
    right.set_yscale("log")
    for panel in (left, right):
        panel.set_xticks([8 * n for n in PLOTTED], [f"{8 * n:,}" for n in PLOTTED])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    left.legend(loc="lower left")
    left.set_title("cost of an event after the first step")
    right.set_title("events")
    figure.suptitle("Ghosts: 8 stages, 8 microbatches in each pipeline")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
