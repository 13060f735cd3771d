"""What planning costs: seconds and memory for up to 1,000 peers and 2,000 operators.

    python benchmarks/planning/scheduler.py --only scale             the figures
    python benchmarks/planning/scale.py plot docs/planning-cost.png  the cost as a picture
    python benchmarks/planning/scale.py one auto 1000 2000 0  one case, in a process of its own

The clock starts at a request whose costs are known, and stops when the plan and all its text is
there. Planning is one thread that waits for nothing, so CPU seconds are what wall seconds would be
on a machine that does nothing else.

Graphs are a GPT of 5 blocks, captured once, whose third block is there as often as wanted. Networks
are synthetic, from a seed: clusters of some 16 peers, log-normal bandwidths (median 600 MB/s inside
a cluster, 12 MB/s between two), speeds (8 TFLOP/s) and uplinks (500 MB/s), memories of 4 to 24 GiB.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from shoal.benchmarks.table import Figure
from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import cost
from shoal.dag.cost.network import Network
from shoal.dag.ir.graph import Arg, Graph, Operator, Ref, map_arg
from shoal.dag.plan.plan import PeerId
from shoal.examples.gpt import gpt
from shoal.planner.base.interface import PeerOffer, Planner, PlanRequest
from shoal.planner.baselines.baselines import equal_compute, uniform
from shoal.planner.baselines.op_fence import op_fence
from shoal.planner.schedulers.auto import auto

PLANNERS: dict[str, Planner] = {
    "auto": auto,
    "op-fence": op_fence,
    "equal-compute": equal_compute,
    "uniform": uniform,
}
MICROBATCHES = 64
SEEDS = (0, 1, 2)
PEERS = (10, 30, 100, 300, 1000)
OPERATORS = (100, 500, 2000)


def graph_of(operators: int) -> Graph:
    """A GPT of width 768 and windows of 256 bytes with about that many operators, for microbatches
    of 4."""
    graph = _captured()
    third = [i for i, op in enumerate(graph.operators) if op.module.startswith("blocks.2")]
    start, stop = third[0], third[-1] + 1
    assert third == list(range(start, stop)), "a block's operators follow each other"
    copies = max(0, round((operators - len(graph.operators)) / len(third)))
    return _repeated(graph, start, stop, copies)


@cache
def _captured() -> Graph:
    with torch.device("meta"):
        module = gpt(5, 768, 12, 256, 0.0)
    text = torch.zeros(4, 256, dtype=torch.int64, device="meta")
    return capture(module, {"x": text, "y": text}).graph.bind(4)


def _repeated(graph: Graph, start: int, stop: int, copies: int) -> Graph:
    """The graph with so many more copies of operators [start, stop) behind them, each with
    parameters of its own. They are a link of a chain: what follows reads one of their values, and
    they one of what came before, in the same place."""
    block = graph.operators[start:stop]
    made = {v for op in block for v in op.values}
    before = {v for op in graph.operators[:start] for v in op.values}
    taken = {v for op in block for v in op.reads if v in before}
    given = {v for op in graph.operators[stop:] for v in op.reads if v in made}
    assert len(taken) == len(given) == 1, f"no link of a chain: takes {taken}, gives {given}"
    (entry,), (result,) = taken, given
    own = {v for op in block for v in op.reads if v.startswith("param:")}
    parameters = list(graph.parameters)
    operators = list(graph.operators[:stop])
    last = result

    def named(value: str, n: int) -> str:
        head, dot, rest = value.partition(".")
        return f"{head}_again{n}{dot}{rest}"

    for n in range(copies):
        rename = {v: named(v, n) for v in made} | {entry: last}
        rename |= {v: f"param:again{n}.{v.removeprefix('param:')}" for v in own}
        parameters += [
            replace(p, name=f"again{n}.{p.name}")
            for p in graph.parameters
            if f"param:{p.name}" in own
        ]
        operators += [_renamed(op, f"{op.name}_again{n}", rename) for op in block]
        last = rename[result]
    behind = {result: last}
    operators += [_renamed(op, op.name, behind) for op in graph.operators[stop:]]
    return replace(graph, parameters=tuple(parameters), operators=tuple(operators))


def _renamed(op: Operator, name: str, values: dict[str, str]) -> Operator:
    def change(arg: Arg) -> Arg:
        return Ref(values.get(arg.value, arg.value)) if isinstance(arg, Ref) else arg

    return replace(
        op,
        name=name,
        args=tuple(map_arg(a, change) for a in op.args),
        kwargs=tuple((k, map_arg(a, change)) for k, a in op.kwargs),
    )


def network_of(peers: int, seed: int = 0) -> Network:
    """See the module."""
    rng = np.random.default_rng(seed)
    clusters = max(1, peers // 16)
    at = rng.integers(0, clusters, peers)
    rate = np.exp(rng.normal(np.log(12e6), 1.0, (clusters, clusters)))
    np.fill_diagonal(rate, np.exp(rng.normal(np.log(600e6), 0.7, clusters)))
    delay = rng.uniform(0.01, 0.12, (clusters, clusters))
    np.fill_diagonal(delay, 5e-4)
    grid = np.ix_(at, at)
    bandwidth = np.minimum(rate, rate.T)[grid] * np.exp(rng.normal(0, 0.3, (peers, peers)))
    latency_s = np.minimum(delay, delay.T)[grid]
    end = np.exp(rng.normal(np.log(500e6), 1.0, peers))
    names = tuple(PeerId(f"p{i}") for i in range(peers))
    return Network(names, latency_s, np.minimum(bandwidth, bandwidth.T), end, end.copy())


def request_of(peers: int, graph: Graph, seed: int = 0) -> PlanRequest:
    """With the costs that the graph's operators have."""
    rng = np.random.default_rng(seed)
    network = network_of(peers, seed)
    offers = tuple(
        PeerOffer(
            name,
            name,
            device_memory_bytes=int(rng.choice([4, 8, 16, 24])) * 2**30,
            flops_per_s=float(np.exp(rng.normal(np.log(8e12), 0.7))),
        )
        for name in network.peers
    )
    return PlanRequest(graph, offers, MICROBATCHES, 4, links=network, known_costs=cost(graph))


def one(planner: str, peers: int, operators: int, seed: int = 0) -> dict[str, float]:
    """Plans one case here; `gib` is the process's peak of memory."""
    graph = graph_of(operators)
    began = time.process_time()
    cost(graph)
    costing = time.process_time() - began
    request = request_of(peers, graph, seed)
    began, wall = time.process_time(), time.perf_counter()
    plan, report = PLANNERS[planner](request)
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - began,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "cost_s": costing,
        "operators": len(graph.operators),
        "step_s": report.predicted.step_s,
        "used": len(plan.peers),
    }


def apart(planner: str, peers: int, operators: int, seed: int) -> dict[str, float]:
    """The same in a process of its own, for its peak of memory."""
    command = [sys.executable, __file__, "one", planner, *map(str, (peers, operators, seed))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"    {planner} seed {seed}: {found}", flush=True)
    return found


def scale(cases: int) -> list[Figure]:
    """`auto` and `op-fence` on 1,000 peers and 2,000 operators; the worst of the seeds."""
    ours = [apart("auto", 1000, 2000, seed) for seed in SEEDS]
    fence = [apart("op-fence", 1000, 2000, seed) for seed in SEEDS]

    def worst(found: list[dict[str, float]], key: str) -> float:
        return max(f[key] for f in found)

    ratio = max(a["step_s"] / b["step_s"] for a, b in zip(ours, fence, strict=True))
    return [
        Figure("plan_1000x2000_seconds", worst(ours, "seconds"), "s", "lower"),
        Figure("plan_1000x2000_cpu_seconds", worst(ours, "cpu_seconds"), "s", "lower"),
        Figure("plan_1000x2000_gib", worst(ours, "gib"), "GiB", "lower"),
        Figure("plan_1000x2000_auto_over_op_fence", ratio, "ratio", "lower"),
        Figure("op_fence_1000x2000_cpu_seconds", worst(fence, "cpu_seconds"), "s", "lower"),
        Figure("cost_2000_seconds", worst(ours, "cost_s"), "s", "lower"),
    ]


def plot(file: Path, planners: list[str]) -> None:
    """CPU seconds over peers, a line for each number of operators, a panel for each planner."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(planners), figsize=(1 + 5 * len(planners), 4.4), sharey=True, squeeze=False
    )
    requests = {(p, n): request_of(p, graph_of(n)) for n in OPERATORS for p in PEERS}
    for panel, planner in zip(panels[0], planners, strict=True):
        for operators, marker in zip(OPERATORS, "os^", strict=True):
            seconds = []
            for peers in PEERS:
                began = time.process_time()
                PLANNERS[planner](requests[peers, operators])
                seconds.append(time.process_time() - began)
                print(planner, peers, operators, f"{seconds[-1]:.2f} s", flush=True)
            count = len(requests[PEERS[0], operators].graph.operators)
            panel.plot(PEERS, seconds, marker=marker, label=f"{count:,} operators")
        panel.axhline(10, color="gray", linestyle=":", linewidth=1)
        panel.set(xscale="log", yscale="log", xlabel="peers on offer")
        panel.set_title(f"{planner}, one of {os.cpu_count()} cores, {MICROBATCHES} microbatches")
        panel.set_xticks(PEERS, [f"{p:,}" for p in PEERS])
        panel.set_yticks((0.1, 0.3, 1, 3, 10, 30), ("0.1", "0.3", "1", "3", "10", "30"))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("CPU seconds of planning")
    panels[0][-1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    match sys.argv[1:]:
        case ["one", planner, peers, operators, seed]:
            print(json.dumps(one(planner, int(peers), int(operators), int(seed))))
        case ["plot", file, *planners]:
            plot(Path(file), planners or ["op-fence", "auto"])
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
