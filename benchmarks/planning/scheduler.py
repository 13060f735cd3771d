"""How good the plans are: against the provable optimum, the literature's cases and the baselines.

    python benchmarks/planning/scheduler.py [--json FILE] [--only optimality ...] [--cases N]

One function for each group of figures; all numbers of a group come from one run. Step seconds are
those of the event calculation that all planners are judged by, search times are CPU seconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from shoal.benchmarks.planning.exact import prove
from shoal.benchmarks.planning.published import dtfm_figures, skippipe_figures
from shoal.benchmarks.planning.scale import scale
from shoal.benchmarks.steps.truth import figures as truth_figures
from shoal.benchmarks.table import Figure, arguments, report
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.auto import choose
from shoal.planner.search.search import SearchSpace
from shoal.tests.planner.cases import random_case

CASES = 200


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--cases", type=int, default=CASES, help="random cases of optimality")
    options = parser.parse_args()
    figures: list[Figure] = []
    for name in options.only:
        figures += GROUPS[name](options.cases)
    report("scheduler", figures, options.json)
    return 0


def optimality(cases: int) -> list[Figure]:
    """`auto` held to one pipeline, one schedule and no recomputation, against the proven best
    (exact.py): step seconds over the optimum's, minus 1. Cases in which nothing fits do not count,
    and both must say so."""
    gaps, ours, theirs, many = [], [], [], 0
    for seed in range(cases):
        request = random_case(seed)
        schedule = request.options.schedule
        assert schedule != "auto"
        start = time.process_time()
        proof = prove(CostModel(request), schedule)
        theirs.append(time.process_time() - start)
        space = SearchSpace(pipelines=1, schedules=(schedule,), recompute=(False,), repeats=False)
        start = time.process_time()
        chosen = choose(CostModel(request), space)
        ours.append(time.process_time() - start)
        found = chosen.best is not None and chosen.best.fits
        assert found == (proof.best is not None), f"case {seed}: one of them finds no plan"
        if chosen.best is not None and proof.best is not None:
            gaps.append(chosen.best.seconds / proof.seconds - 1)
            many += len(proof.best.peers) > 1
    return [
        Figure("auto_gap_mean", statistics.mean(gaps), "ratio", "lower"),
        Figure("auto_gap_worst", max(gaps), "ratio", "lower"),
        Figure("auto_gap_cases", len(gaps), "cases", "higher"),
        Figure("auto_gap_cases_of_several_peers", many, "cases", "higher"),
        Figure("auto_optimal_cases", sum(g < 1e-9 for g in gaps), "cases", "higher"),
        Figure("auto_small_seconds_mean", statistics.mean(ours), "s", "lower"),
        Figure("auto_small_seconds_max", max(ours), "s", "lower"),
        Figure("exact_small_seconds_mean", statistics.mean(theirs), "s", "lower"),
        Figure("exact_small_seconds_max", max(theirs), "s", "lower"),
    ]


GROUPS: dict[str, Callable[[int], list[Figure]]] = {
    "optimality": optimality,
    "dtfm": lambda cases: dtfm_figures(),
    "skippipe": lambda cases: skippipe_figures(),
    "scale": scale,
    "truth": lambda cases: list(truth_figures()),
}


if __name__ == "__main__":
    sys.exit(main())
