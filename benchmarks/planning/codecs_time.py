"""Step time under compression on the testbeds (sim/scenarios/testbed-*.toml).

    python benchmarks/planning/codecs_time.py [--json FILE] [--testbeds 8] [--models …] [--ratio 9]

Each testbed and model is planned without compression, by equal-compute and by `auto`. Then links
get codecs: `lossless`, uniform top-k of activations and their gradients on all links, AdaTopK of
the same, AdaTopK of parameter gradients as well, and `auto` with an error budget of 0.01. Three
step times each, by the event calculation that judges all plans, with the seconds that codecs take:

    equal-compute   the placement of equal-compute, as it is: a plain pipeline over all peers
    placed dense    the placement that `auto` finds without compression, as it is
    planned         what `auto` plans with the codecs, since compression changes where cutting pays

`speedup_<testbed>_<codec>` is the best single peer's step over the planned one, the geometric mean
of the models that some peer can train alone; `…_over_none_<where>` the uncompressed step over the
compressed one. FusionLLM (2410.12707) reports 1.45 to 9.39 for scheduler and AdaTopK together over
its baselines on testbeds of its own: `…_over_equal_compute` compares with ours of that kind. What
codecs do to learning is benchmarks/learning/learning.py's to say: nothing here says that a step is
as good.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from shoal.benchmarks.planning.graphs import MODELS, graph_of
from shoal.benchmarks.planning.testbeds import BATCH, Known, request_of
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.cost.cost import cost
from shoal.dag.plan.report import PlanWithReport
from shoal.planner.base.interface import CodecOptions, NoPlan, PlannerOptions, PlanRequest
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.alternatives import alone
from shoal.planner.schedulers.coded import plan_with_codecs, with_codecs
from shoal.planner.schedulers.schedulers import PLANNERS
from shoal.sim.scenario.scenario import SCENARIOS, Scenario

FUSIONLLM = (1.45, 9.39)


def asked(ratio: float) -> dict[str, CodecOptions]:
    """What is planned with, by name."""
    text = f"topk:ratio={ratio:g},values=bf16"
    return {
        "none": CodecOptions(),
        "lossless": CodecOptions(activation="lossless", activation_grad="lossless"),
        "uniform-topk": CodecOptions(activation=text, activation_grad=text),
        "adatopk": CodecOptions(activation="adatopk", activation_grad="adatopk", ratio=ratio),
        "adatopk-all": CodecOptions(
            activation="adatopk", activation_grad="adatopk", sync="adatopk", ratio=ratio
        ),
        "auto": CodecOptions(
            activation="auto", activation_grad="auto", sync="auto", error_budget=0.01
        ),
    }


WHERE = ("equal-compute", "placed dense", "planned")
Steps = dict[str, dict[str, float]]
"""Seconds by what is asked for and where; 0: there is no plan."""


def describe(planned: PlanWithReport) -> str:
    plan = planned.plan
    uses = [use for link in planned.report.predicted.links for use in link.codecs]
    sent, dense = sum(u.bytes for u in uses), sum(u.dense_bytes for u in uses)
    codecs = {u.codec for u in uses if u.codec != "raw/1"}
    text = f"{len(plan.peers)} peers {len(plan.stages)} stages {plan.schedule}"
    if sent and codecs:
        text += f", {dense / sent:.3g}x fewer bytes, {len(codecs)} codecs"
        text += f", error up to {max(u.error for u in uses):.2g}"
    return text


def found_by(request: PlanRequest, scheduler: str) -> PlanWithReport | None:
    """Without compression."""
    try:
        return PLANNERS[scheduler](replace(request, options=PlannerOptions(scheduler=scheduler)))
    except NoPlan as error:
        print(f"    {scheduler}: no plan: {error.reason[:100]}")
        return None


def seconds_of(request: PlanRequest, ratio: float) -> tuple[float, Steps]:
    """Of the best single peer's step, and of all others."""
    best = alone(CostModel(request))
    print(f"    best single peer {best.step_s:.3f} s/step  {best.text[:90]}")
    simple, dense = found_by(request, "equal-compute"), found_by(request, "auto")
    steps: Steps = {}
    for name, codecs in asked(ratio).items():
        began = time.process_time()
        wanted = replace(request, options=PlannerOptions(codecs=codecs))
        judge = CostModel(wanted)

        def auto(form: PlanRequest) -> PlanWithReport:  # the dense plan is the same for all codecs
            if form.links is request.links and dense is not None:
                return dense
            return PLANNERS["auto"](form)

        plans = [with_codecs(judge, plan) if plan else None for plan in (simple, dense)]
        plans.append(plan_with_codecs(wanted, auto) if dense else None)
        row = {
            w: p.report.predicted.step_s if p else 0.0 for w, p in zip(WHERE, plans, strict=True)
        }
        steps[name] = row
        shown = "  ".join(f"{w} {s:9.3f} s" for w, s in row.items())
        known = best.step_s and row["planned"]
        over = f"{best.step_s / row['planned']:6.2f}x of alone" if known else "alone: none can"
        text = describe(plans[2]) if plans[2] else "no plan"
        print(
            f"    {name:<13} {shown}  {over}  "
            f"({time.process_time() - began:.0f} s of planning)  {text}",
            flush=True,
        )
    return best.step_s, steps


def mean(pairs: list[tuple[float, float]]) -> float:
    """Geometric, of the ratios of the pairs where both are known; 0: none is."""
    ratios = [a / b for a, b in pairs if a and b]
    return statistics.geometric_mean(ratios) if ratios else 0.0


def figures_of(testbed: str, found: list[tuple[float, Steps]], names: list[str]) -> list[Figure]:
    figures = []
    for name in names:
        key = f"{testbed}_{name.replace('-', '_')}"
        values = {f"speedup_{key}": [(alone_s, s[name]["planned"]) for alone_s, s in found]}
        values[f"{key}_over_equal_compute"] = [
            (s["none"]["equal-compute"], s[name]["planned"]) for _, s in found
        ]
        for where in WHERE:
            values[f"{key}_over_none_{where.replace(' ', '_').replace('-', '_')}"] = [
                (s["none"][where], s[name][where]) for _, s in found
            ]
        figures += [Figure(k, mean(pairs), "ratio", "higher") for k, pairs in values.items()]
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--testbeds", nargs="+", type=int, default=[8, 24, 48], metavar="N")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ratio", type=float, default=100.0, help="of top-k")
    options = parser.parse_args()
    known: dict[str, Known] = {}
    for model in options.models:
        graph = graph_of(model).bind(BATCH[model][1])
        known[model] = graph, cost(graph)
    figures: list[Figure] = []
    for size in options.testbeds:
        scenario = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
        found: list[tuple[float, Steps]] = []
        for model in options.models:
            print(f"{scenario.name} {model}", flush=True)
            found.append(seconds_of(request_of(scenario, model, known[model]), options.ratio))
        figures += figures_of(f"testbed{size}", found, list(asked(options.ratio)))
    report("compression", figures, options.json)
    low, high = FUSIONLLM
    print(f"FusionLLM's system and method together, on its testbeds: {low} to {high}")


if __name__ == "__main__":
    main()
