"""Routing every microbatch by itself (`scheduler = "swarm"`) beside the routes that `auto` plans.

    python benchmarks/planning/swarm.py [testbeds sets churn] [--json FILE]

testbeds  Samples/s of both as predicted, on the testbeds of `testbeds.py`, without compression.
sets      The same on a campus: peers whose speeds lie log-uniformly within a factor of ten, each
          with memory for two fifths of GPT-2 124M, links of 1 Gbit/s and 1 ms, 64 microbatches of
          one window in a step, or 256; geometric means over SEEDS sets.
churn     Worlds of ghosts with the machines of the broker and of the peers: peers of the scenario
          spot-day (four steady ones, twelve half as fast at two places) that come and go by its
          trace, six times as fast, or all of them by chance, each twice an hour for five minutes.
          Samples of committed steps over the time from the first step on. A GPT of 8 blocks and
          width 256, of which a peer has memory for two fifths; 32 microbatches of 8 windows a step;
          plans change while the run goes (plan.replan).
"""

from __future__ import annotations

import csv
import hashlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.benchmarks.planning.graphs import graph_of
from shoal.benchmarks.planning.testbeds import BATCH, request_of
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import cost
from shoal.dag.cost.network import uniform
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.plan.plan import PeerId
from shoal.examples.gpt import gpt
from shoal.job import Job
from shoal.job.units import ByteCount, Duration
from shoal.peer.data.manifest import Column, Manifest, Shard
from shoal.planner.base.interface import NoPlan, PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.schedulers import PLANNERS
from shoal.proto import broker_pb2, common_pb2
from shoal.sim.modelled.virtual_run import run_virtual
from shoal.sim.scenario.catalogue import find
from shoal.sim.scenario.scenario import SCENARIOS, Scenario

BOTH = ("auto", "swarm")
SEEDS = 3
SETS = ((8, 64), (16, 64), (32, 64), (16, 256))
"""Peers and microbatches."""
ROOM = 0.4
"""Memory of a peer, as a share of what the whole model needs."""


def samples_per_s(request: PlanRequest, name: str) -> float:
    """As predicted; 0: no plan."""
    began = time.process_time()
    try:
        plan, told = PLANNERS[name](replace(request, known_costs=request.costs))
    except NoPlan as error:
        print(f"    {name}: no plan: {error.reason[:90]}", flush=True)
        return 0.0
    found = len(plan.routes) * plan.microbatch_size / told.predicted.step_s
    print(
        f"    {name:<6} {found:9.3f} samples/s  {len(plan.peers):3} peers {len(plan.stages):3} "
        f"stages {plan.schedule:<11} {len(set(plan.routes)):3} ways  "
        f"{time.process_time() - began:5.1f} CPU s",
        flush=True,
    )
    return found


def testbeds() -> list[Figure]:
    figures = []
    for model in ("gpt2-124m", "gpt2-1.5b"):
        graph = graph_of(model).bind(BATCH[model][1])
        known = graph, cost(graph)
        for size in (8, 24, 48):
            scenario = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
            print(f"  testbed {size}, {model}", flush=True)
            ours, routed = (samples_per_s(request_of(scenario, model, known), n) for n in BOTH)
            name = f"swarm_over_auto_testbed{size}_{model.removeprefix('gpt2-')}"
            figures.append(Figure(name, routed / ours, "ratio", "higher"))
    return figures


def sets() -> list[Figure]:
    figures = []
    graph = graph_of("gpt2-124m").bind(1)
    costs = cost(graph)
    for count, microbatches in SETS:
        ratios = []
        for seed in range(SEEDS):
            print(f"  {count} peers, set {seed}, {microbatches} microbatches", flush=True)
            rng = random.Random(f"{count} {seed}")
            names = [PeerId(f"p{i}") for i in range(count)]
            offers = tuple(PeerOffer(p, flops_per_s=1e12 * 10 ** rng.random()) for p in names)
            request = PlanRequest(
                graph,
                offers,
                microbatches,
                1,
                options=PlannerOptions(),
                links=uniform(names, 0.001, 1.25e8),
                known_costs=costs,
            )
            room = int(ROOM * CostModel(request).stage_bytes(0, len(costs), 1))
            offers = tuple(replace(o, device_memory_bytes=room) for o in offers)
            ours, routed = (samples_per_s(replace(request, offers=offers), n) for n in BOTH)
            ratios.append(routed / ours)
        mean = statistics.geometric_mean(ratios)
        figures.append(
            Figure(f"swarm_over_auto_campus{count}_{microbatches}", mean, "ratio", "higher")
        )
    return figures


# -------------------------------------------------------------------- churn

LAYERS, WIDTH, LENGTH = 8, 256, 128
MICROBATCHES, SIZE = 32, 8
TRACES: dict[str, dict[str, Any]] = {
    "trace": {"limit": "20min", "faster": 6.0},
    "chance": {"limit": "20min", "fail_per_hour": 2.0},
}


def scenario_of(
    folder: Path, limit: str, faster: float = 1.0, fail_per_hour: float = 0
) -> Scenario:
    """The scenario spot-day with its trace so much faster, or with failures by chance of everybody
    in its place; who failed is back after five minutes."""
    found = Scenario.from_toml(find("spot-day"))
    churn = replace(found.churn, trace="trace.csv")
    if fail_per_hour:
        back = Duration("5min")
        churn = replace(found.churn, trace="", fail_per_hour=fail_per_hour, return_after=back)
    else:
        with (found.folder / found.churn.trace).open(newline="") as file:
            rows = list(csv.DictReader(file))
        lines = [f"{float(r['time']) / faster:.1f},{r['peer']},{r['state']}" for r in rows]
        (folder / "trace.csv").write_text("\n".join(["time,peer,state", *lines]) + "\n")
    return replace(found, churn=churn, folder=folder, limit=Duration(limit))


def played(scheduler: str, **trace: Any) -> tuple[float, str]:
    """Samples/s, and a sentence."""
    blobs = dict[str, bytes]()

    def blob(data: bytes) -> common_pb2.BlobRef:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return common_pb2.BlobRef(hash=name, size_bytes=len(data))

    with torch.device("meta"):
        module = gpt(LAYERS, WIDTH, WIDTH // 32, LENGTH, 0.0)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64, device="meta")
    graph = capture(module, {"x": tokens, "y": tokens}).graph
    bound = graph.bind(SIZE)
    judge = CostModel(PlanRequest(bound, (PeerOffer(PeerId("p")),), 1, SIZE))
    room = int(ROOM * judge.stage_bytes(0, judge.operators, 1))
    steps = 100_000
    batch = MICROBATCHES * SIZE
    job = Job.from_table(
        {
            "version": 1,
            "model": {"factory": "shoal.examples.gpt:gpt"},  # nobody calls it
            "data": {"kind": "text", "length": LENGTH},
            "train": {"steps": steps, "batch": batch, "microbatch": SIZE, "eval_every": 0},
            "plan": {"scheduler": scheduler},
        }
    )
    nothing = Shard("text", 10**7, 10**7, "0" * 64)  # nobody fetches it
    manifest = Manifest("text", (Column("text", "uint8"),), (nothing,), 10**7, 0, length=LENGTH)
    spec = broker_pb2.RunSpec(
        version=1,
        name=scheduler,
        job=job.to_json(),
        graph=blob(graph_to_bytes(graph)),
        data=blob(manifest.to_json().encode()),
        microbatches=MICROBATCHES,
        microbatch_size=SIZE,
        steps=steps,
    )
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        scenario = scenario_of(Path(folder), **trace)
        peers = tuple(replace(p, memory=ByteCount(f"{room >> 20}MiB")) for p in scenario.peers)
        scenario = replace(scenario, peers=peers)
        found = run_virtual(scenario, job, spec, blobs, Path(folder), ghost=True, check=False)
    at = [e.at_s for e in found.events if e.HasField("step")]
    plans = [e.plan for e in found.events if e.HasField("plan")]
    rate = (len(at) - 1) * batch / (float(scenario.limit) - at[0])
    widths = [len({h for s in p.stages for h in s.holders}) for p in plans]
    told = (
        f"{rate:.2f} samples/s, {len(at)} steps, {found.faults.churned} went or came, "
        f"{len(plans)} plans of {min(widths)} to {max(widths)} peers, "
        f"{time.process_time() - began:.0f} CPU s"
    )
    return rate, told


def churn() -> list[Figure]:
    figures = []
    for name, trace in TRACES.items():
        rates = {}
        for scheduler in BOTH:
            rates[scheduler], text = played(scheduler, **trace)
            print(f"  {name}, {scheduler}: {text}", flush=True)
            figures.append(Figure(f"churn_{name}_{scheduler}", rates[scheduler], "1/s", "higher"))
        ratio = rates["swarm"] / rates["auto"]
        figures.append(Figure(f"swarm_over_auto_churn_{name}", ratio, "ratio", "higher"))
    return figures


GROUPS: dict[str, Callable[[], list[Figure]]] = {
    "testbeds": testbeds,
    "sets": sets,
    "churn": churn,
}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    asked = parser.parse_args()
    if odd := set(asked.groups) - set(GROUPS):
        parser.error(f"{min(odd)!r}: expected some of {', '.join(GROUPS)}")
    figures: list[Figure] = []
    for group in asked.groups or GROUPS:
        print(group, flush=True)
        figures += GROUPS[group]()
    report("routed microbatches", figures, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
