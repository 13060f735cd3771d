"""Placement alone on three testbeds (sim/scenarios/testbed-*.toml): no compression, no skipping.

    python benchmarks/planning/testbeds.py [--json FILE] [--testbeds 8] [--models …] [--redraws 20]

Step seconds are those of the event calculation by which all planners are judged, with the same
number of microbatches for all. `speedup_<testbed>_<planner>` is the best single peer's step time
over the planner's, the geometric mean of the models, and `…_worst` its least over the re-drawn
networks of all models. A planner without a plan counts as 0. A model that no single peer can train,
by any means, has no such ratio: it is printed and left out. Every case is printed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from shoal.benchmarks.planning.graphs import MODELS, graph_of
from shoal.benchmarks.planning.redraw import redraw
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.cost.cost import OperatorCost, cost
from shoal.dag.ir.graph import Graph
from shoal.planner.base.interface import NoPlan, PlannerOptions, PlanRequest
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.alternatives import ALONE, alone
from shoal.planner.schedulers.schedulers import PLANNERS
from shoal.sim.scenario.scenario import SCENARIOS, Scenario

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
        options=PlannerOptions(),
        links=scenario.network(),
        known_costs=costs,
    )


def seconds_of(request: PlanRequest, say: Callable[[str], None]) -> dict[str, float]:
    """Of a step by every planner, and by the best single peer (ALONE); 0: it does not fit."""
    best = alone(CostModel(request))
    if not best.step_s:
        say(f"    {ALONE}: {best.text}")
    found: dict[str, float] = {ALONE: best.step_s}
    for name in NAMES:
        began = time.process_time()
        options = replace(request.options, scheduler=name)
        try:
            plan, report = PLANNERS[name](
                replace(request, options=options, known_costs=request.costs)
            )
        except NoPlan as error:
            found[name] = 0.0
            say(f"    {name}: no plan: {error.reason[:100]}")
            continue
        step = report.predicted.step_s
        found[name] = step
        say(
            f"    {name:<14} {step:9.3f} s/step  {best.step_s / step:6.2f}x of"
            f" {best.step_s:.3f} s alone  {len(plan.peers):3d} peers"
            f" {len(plan.stages):3d} stages {plan.schedule:<11}"
            f" {time.process_time() - began:6.1f} s of planning"
        )
    return found


def _mean(ratios: list[float]) -> float:
    """Geometric; 0 when there is none, or one is 0."""
    return statistics.geometric_mean(ratios) if ratios and all(ratios) else 0.0


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
        stated_s: list[dict[str, float]] = []
        worst = dict.fromkeys(NAMES, math.inf)
        for model in options.models:
            print(f"{stated.name} {model}", flush=True)
            for seed in range(options.redraws + 1):
                drawn = redraw(stated, seed) if seed else stated
                say = (lambda line: None) if seed else print
                found = seconds_of(request_of(drawn, model, known[model]), say)
                if not seed:
                    stated_s.append(found)
                over = {n: found[ALONE] / found[n] if found[n] else 0.0 for n in NAMES}
                if found[ALONE]:
                    worst = {n: min(worst[n], over[n]) for n in NAMES}
                shown = "  ".join(f"{name} {value:.2f}x" for name, value in over.items())
                print(f"    {f'redrawn {seed}' if seed else 'stated'}: {shown}", flush=True)
        for name in NAMES:
            some = [s for s in stated_s if s[ALONE]]
            key = f"speedup_testbed{size}_{name.replace('-', '_')}"
            mean = _mean([s[ALONE] / s[name] if s[name] else 0.0 for s in some])
            figures.append(Figure(key, mean, "ratio", "higher"))
            figures.append(Figure(f"{key}_worst", worst[name], "ratio", "higher"))
        for other in ("uniform", "equal-compute"):
            key = f"auto_over_{other.replace('-', '_')}_testbed{size}"
            both = [s for s in stated_s if s[other] and s["auto"]]
            figures.append(
                Figure(key, _mean([s[other] / s["auto"] for s in both]), "ratio", "higher")
            )
    report("placement alone", figures, options.json)


if __name__ == "__main__":
    main()
