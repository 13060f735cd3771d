"""Placement alone on three testbeds (sim/scenarios/testbed-*.toml): no compression, no skipping.

    python benchmarks/testbeds.py [--json FILE] [--testbeds 8 24 48] [--models …] [--redraws 20]

Step seconds are those of the event calculation by which all planners are judged, with the same
number of microbatches for all. `speedup_<testbed>_<planner>` is the best single peer's step time
over the planner's, the geometric mean of the models, and `…_worst` its least over the re-drawn
networks of all models. A planner without a plan counts as 0. Every case is printed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from graphs import MODELS, graph_of
from table import Figure, arguments, report

from shoal.broker.scheduler.alternatives import ALONE, alone
from shoal.broker.scheduler.interface import NoPlan, PlanOptions, PlanRequest
from shoal.broker.scheduler.judge import Judge
from shoal.broker.scheduler.planners import PLANNERS
from shoal.dag.cost import OperatorCost, cost
from shoal.dag.graph import Graph
from shoal.sim.redraw import redraw
from shoal.sim.scenario import SCENARIOS, Scenario

NAMES = ("uniform", "equal-compute", "op-fence", "auto")
BATCH = {"gpt2-124m": (16, 2), "gpt2-1.5b": (16, 1), "resnet-101": (16, 8)}
"""Microbatches of a step and their size."""

Known = tuple[Graph, tuple[OperatorCost, ...]]


def request_of(scenario: Scenario, model: str, known: Known) -> PlanRequest:
    microbatches, size = BATCH[model]
    graph, costs = known
    return PlanRequest(
        graph,
        scenario.offers(),
        microbatches,
        size,
        options=PlanOptions(),
        links=scenario.network(),
        known_costs=costs,
    )


def speedups(request: PlanRequest, say: Callable[[str], None]) -> dict[str, float]:
    """Of every planner over the best single peer."""
    best = alone(Judge(request))
    if not best.step_s:
        say(f"    {ALONE}: {best.text}")
    found: dict[str, float] = {}
    for name in NAMES:
        began = time.process_time()
        options = replace(request.options, scheduler=name)
        try:
            plan = PLANNERS[name](replace(request, options=options, known_costs=request.costs))
        except NoPlan as error:
            found[name] = 0.0
            say(f"    {name}: no plan: {error.reason[:100]}")
            continue
        step = plan.predicted.step_s
        found[name] = best.step_s / step if best.step_s else math.inf
        say(
            f"    {name:<14} {step:9.3f} s/step  {found[name]:6.2f}x of {best.step_s:.3f} s alone"
            f"  {len(plan.peers):3d} peers {len(plan.stages):3d} stages {plan.schedule:<11}"
            f" {time.process_time() - began:6.1f} s of planning"
        )
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--testbeds", nargs="+", type=int, default=[8, 24, 48], metavar="N")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--redraws", type=int, default=20)
    options = parser.parse_args()
    known: dict[str, Known] = {}
    for model in options.models:
        graph = graph_of(model).bind(BATCH[model][1])
        known[model] = graph, cost(graph)
    figures: list[Figure] = []
    for size in options.testbeds:
        stated = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
        first: dict[str, list[float]] = {name: [] for name in NAMES}
        worst = dict.fromkeys(NAMES, math.inf)
        for model in options.models:
            print(f"{stated.name} {model}", flush=True)
            for name, value in speedups(request_of(stated, model, known[model]), print).items():
                first[name].append(value)
                worst[name] = min(worst[name], value)
            for seed in range(1, options.redraws + 1):
                drawn = redraw(stated, seed)
                found = speedups(request_of(drawn, model, known[model]), lambda line: None)
                for name, value in found.items():
                    worst[name] = min(worst[name], value)
                shown = "  ".join(f"{name} {value:.2f}x" for name, value in found.items())
                print(f"    redrawn {seed:2d}: {shown}", flush=True)
        for name in NAMES:
            mean = statistics.geometric_mean(first[name]) if all(first[name]) else 0.0
            key = f"speedup_testbed{size}_{name.replace('-', '_')}"
            figures.append(Figure(key, mean, "ratio", "higher"))
            figures.append(Figure(f"{key}_worst", worst[name], "ratio", "higher"))
        for other in ("uniform", "equal-compute"):
            ratios = [
                a / b if b else math.inf for a, b in zip(first["auto"], first[other], strict=True)
            ]
            key = f"auto_over_{other.replace('-', '_')}_testbed{size}"
            figures.append(Figure(key, statistics.geometric_mean(ratios), "ratio", "higher"))
    report("placement alone", figures, options.json)


if __name__ == "__main__":
    main()
