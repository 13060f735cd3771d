"""What planning costs: CPU seconds and memory for up to 1,000 peers and 2,000 operators.

    python benchmarks/scheduler.py --only scale             the figures
    python benchmarks/scale.py plot docs/planning-cost.png  the cost over peers and operators
    python benchmarks/scale.py one op-fence 1000 2000       one case, in a process of its own

Planning is one thread that waits for nothing, so its CPU seconds are its wall seconds on a machine
that is not shared. The clock starts at a request whose costs are known. Networks are synthetic:
clusters of some 16 peers, log-normal bandwidths (median 600 MB/s inside a cluster, 12 MB/s between
two), speeds (8 TFLOP/s) and uplinks (500 MB/s), memories of 4 to 24 GiB, a fixed seed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from table import Figure

from shoal.broker.scheduler.auto import auto
from shoal.broker.scheduler.baselines import equal_compute, uniform
from shoal.broker.scheduler.interface import PeerOffer, Planner, PlanRequest
from shoal.broker.scheduler.op_fence import op_fence
from shoal.dag.capture import capture
from shoal.dag.cost import cost
from shoal.dag.graph import Graph
from shoal.dag.network import Network
from shoal.dag.plan import PeerId
from shoal.examples.gpt import gpt

PLANNERS: dict[str, Planner] = {
    "auto": auto,
    "op-fence": op_fence,
    "equal-compute": equal_compute,
    "uniform": uniform,
}
MICROBATCHES = 32
PEERS = (10, 30, 100, 300, 1000)
OPERATORS = (100, 500, 2000)


def graph_of(operators: int) -> Graph:
    """A GPT of width 768 and windows of 256 bytes with about that many operators, for microbatches
    of 4."""

    def captured(layers: int) -> Graph:
        with torch.device("meta"):
            module = gpt(layers, 768, 12, 256, 0.0)
        text = torch.zeros(4, 256, dtype=torch.int64, device="meta")
        return capture(module, {"x": text, "y": text}).graph

    few, more = len(captured(1).operators), len(captured(2).operators)
    return captured(max(1, round((operators - few) / (more - few)) + 1)).bind(4)


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


def one(planner: str, peers: int, operators: int) -> dict[str, float]:
    """Plans one case here. Seconds are CPU seconds, memory is the process's peak."""
    graph = graph_of(operators)
    began = time.process_time()
    cost(graph)
    costing = time.process_time() - began
    request = request_of(peers, graph)
    began, wall = time.process_time(), time.perf_counter()
    plan = PLANNERS[planner](request)
    return {
        "seconds": time.process_time() - began,
        "wall_s": time.perf_counter() - wall,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "cost_s": costing,
        "operators": len(graph.operators),
        "step_s": plan.predicted.step_s,
        "used": len(plan.peers),
    }


def apart(planner: str, peers: int, operators: int) -> dict[str, float]:
    """The same in a process of its own, for its peak of memory."""
    command = [sys.executable, __file__, "one", planner, str(peers), str(operators)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def scale(cases: int) -> list[Figure]:
    """`auto` and `op-fence` on 1,000 peers and 2,000 operators."""
    ours, fence = (apart(name, 1000, 2000) for name in ("auto", "op-fence"))
    return [
        Figure("plan_1000x2000_seconds", ours["seconds"], "s", "lower"),
        Figure("plan_1000x2000_gib", ours["gib"], "GiB", "lower"),
        Figure("plan_1000x2000_step_s", ours["step_s"], "s", "lower"),
        Figure("op_fence_1000x2000_seconds", fence["seconds"], "s", "lower"),
        Figure("op_fence_1000x2000_gib", fence["gib"], "GiB", "lower"),
        Figure("op_fence_1000x2000_step_s", fence["step_s"], "s", "lower"),
        Figure("cost_of_2000_operators_seconds", fence["cost_s"], "s", "lower"),
    ]


def plot(file: Path, planners: list[str]) -> None:
    """CPU seconds over peers, a line for each number of operators, a panel for each planner."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(planners), figsize=(1 + 4 * len(planners), 4), sharey=True, squeeze=False
    )
    requests = {}
    for operators in OPERATORS:
        graph = graph_of(operators)
        for peers in PEERS:
            requests[peers, operators] = request_of(peers, graph)
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
        panel.set(title=planner, xscale="log", yscale="log", xlabel="peers on offer")
        panel.set_xticks(PEERS, [f"{p:,}" for p in PEERS])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("CPU seconds of planning")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    match sys.argv[1:]:
        case ["one", planner, peers, operators]:
            print(json.dumps(one(planner, int(peers), int(operators))))
        case ["plot", file, *planners]:
            plot(Path(file), planners or ["op-fence", "auto"])
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
