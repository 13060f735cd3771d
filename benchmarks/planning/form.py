"""Replicas that the planner forms (planner/replicas/): how good, and how fast.

    python benchmarks/planning/form.py [--json FILE] [--only gap scale testbeds] [--cases 40]

gap       random cases of up to five peers: samples/s of the search over those of the best of all
          divisions of the peers, for any number of replicas and for each; rounds of 20 steps and
          fp32, so that exchanges weigh
scale     1,000 peers with 4 to 24 GiB in islands of some 16 (scale.py), GPT-2 1.5B, a batch of
          1,024; the worst of three seeds
testbeds  the testbeds of 8, 24 and 48 peers with GPT-2 124M and 1.5B: samples/s over those of one
          replica, in the formation's own prediction; prints what is formed

Elsewhere a round is 100 steps, and contributions are 8 bits a parameter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shoal.benchmarks.planning.graphs import graph_of
from shoal.benchmarks.planning.scale import SEEDS
from shoal.benchmarks.planning.scale import request_of as synthetic
from shoal.benchmarks.planning.testbeds import request_of
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.cost.cost import cost
from shoal.planner.replicas.beside import ONE_REPLICA
from shoal.planner.replicas.division import Judge
from shoal.planner.replicas.form import form
from shoal.planner.replicas.formation import Formation
from shoal.planner.replicas.pace import Paces
from shoal.planner.replicas.search import every_division, searched
from shoal.sim.scenario.scenario import SCENARIOS, Scenario
from shoal.tests.planner.cases import random_case

EVERY = 100
BYTES = 1.0
SHORT, DENSE = 20, 4.0
"""Rounds and bytes of the random cases."""
BATCH = 1024
MICROBATCHES = 64
"""Of a testbed's step."""


def gap(cases: int) -> list[Figure]:
    """1 - ours / best."""
    gaps: list[float] = []
    for seed in range(cases):
        request = random_case(seed, operators=8, peers=5, held=False)
        judge = Judge(Paces(request), SHORT, DENSE)
        most: dict[int | None, float] = {}
        for groups in every_division(range(len(request.offers))):
            found = judge.of(groups)
            if found is not None and judge.allows(len(found.peers)):
                for key in (None, len(found.peers)):
                    most[key] = max(most.get(key, 0.0), found.samples_per_s)
        for count, value in most.items():
            ours = searched(Judge(Paces(request), SHORT, DENSE), count)
            gaps.append(1 - (ours[0].samples_per_s / value if ours else 0.0))
    print(f"{len(gaps)} searches in {cases} cases")
    return [
        Figure("form_gap_mean", float(np.mean(gaps)), "ratio", "lower"),
        Figure("form_gap_worst", max(gaps), "ratio", "lower"),
    ]


def scale(cases: int) -> list[Figure]:
    graph = graph_of("gpt2-1.5b").bind(1)
    wall, cpu, counts = [], [], []
    for seed in SEEDS:
        request = replace(synthetic(1000, graph, seed), microbatches=BATCH, microbatch_size=1)
        began, used = time.perf_counter(), time.process_time()
        found = form(request, None, EVERY, BYTES)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
        counts.append(len(found.replicas))
        print(
            f"seed {seed}: {counts[-1]} replicas of {1000 - len(found.left_out)} peers, "
            f"{found.samples_per_s:.1f} samples/s, {wall[-1]:.1f} s, {cpu[-1]:.1f} CPU s",
            flush=True,
        )
    return [
        Figure("form_1000_seconds", max(wall), "s", "lower"),
        Figure("form_1000_cpu_seconds", max(cpu), "s", "lower"),
        Figure("form_1000_replicas", min(counts), "replicas", "higher"),
    ]


def testbeds(cases: int) -> list[Figure]:
    figures = []
    for size in (8, 24, 48):
        scenario = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
        for model in ("gpt2-124m", "gpt2-1.5b"):
            graph = graph_of(model).bind(1)
            request = request_of(scenario, model, (graph, cost(graph)))
            request = replace(request, microbatches=MICROBATCHES, microbatch_size=1)
            began = time.process_time()
            found = form(request, None, EVERY, BYTES)
            took = time.process_time() - began
            print(f"\n{scenario.name} {model}, {took:.1f} CPU s", flush=True)
            print("\n".join([*found.reasons, *(" + ".join(r.peers) for r in found.replicas)]))
            name = f"form_testbed{size}_{model.replace('-', '_').replace('.', '_')}"
            figures.append(Figure(f"{name}_over_one", _over_one(found), "ratio", "higher"))
            figures.append(Figure(f"{name}_cpu_seconds", took, "s", "lower"))
    return figures


def _over_one(found: Formation) -> float:
    """1 where one replica is what is formed, or where none can be made."""
    one = next((a for a in found.alternatives if a.name == ONE_REPLICA), None)
    if one is None or not one.step_s:
        return 1.0
    return found.samples_per_s * one.step_s / found.round.batch


PARTS: dict[str, Callable[[int], list[Figure]]] = {
    "gap": gap,
    "scale": scale,
    "testbeds": testbeds,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", type=int, default=40)
    options = parser.parse_args()
    figures = [figure for name in options.only for figure in PARTS[name](options.cases)]
    report("replicas that are formed", figures, options.json)


if __name__ == "__main__":
    main()
