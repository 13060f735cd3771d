"""Whether plans hold where links are shaped as real networks shape them: four hosts as network
namespaces, real processes, `auto`'s plan against four fixed ones.

    python benchmarks/links/plans.py [--json FILE] [--cases NAME …] [--rows FILE] [--fresh] [--cold]

Each shape trains the same job under every plan; a row has the step that was predicted before it
began and the median of the measured ones. Rows are kept in a file as they come, and what is there
is not measured again. All four peers share this machine's cores, which the planner knows (the
kernel's boot id), so the models are such that links decide. Two short runs before the first, of
the whole model on each peer and under `auto`, make speeds known as they are in a pool that has
trained before; --cold leaves them out.

plan_regret_worst              over shapes: the step of auto's plan over that of the best plan
plan_prediction_error_worst    over shapes: |predicted / measured - 1| of auto's plan
plan_prediction_error_any      the same over all plans

Needs root and Linux, and nothing else on the machine meanwhile; about half an hour.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.benchmarks.links.hosts import Pool
from shoal.benchmarks.links.namespaces import usable
from shoal.benchmarks.table import Figure, arguments, report

__all__ = ["CASES", "PLANS", "Case", "figures", "job"]

HOSTS = 4
WARM_UP, STEPS = 3, 11
ROWS = Path(tempfile.gettempdir()) / "shoal-links-plans.jsonl"

PLANS = {
    "auto": "",
    "4 stages": "stages = 4\npipelines = 1",
    "2 stages": "stages = 2\npipelines = 1",
    "2 replicas": "stages = 1\npipelines = 2",
    "alone": "stages = 1\npipelines = 1",
}
_WARM_UP = "stages = 1\npipelines = 4"
"""Every peer computes the whole model."""
_JOB = """\
version = 1
name = "links"
[model]
factory = "shoal.examples.gpt:gpt"
args = {{ layers = {layers}, width = {width}, heads = {heads}, length = {length}, dropout = 0.0 }}
[data]
length = {length}
[train]
steps = {steps}
batch = {batch}
microbatch = {microbatch}
eval_every = 0
[recovery]
ladder = []
[plan]
replan = false
{plan}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """Lines of tc for the hosts' uplinks, by turns, and the model that is trained there."""

    name: str
    uplinks: tuple[tuple[str, ...], ...]
    delay_s: float = 0.0
    layers: int = 8
    width: int = 256
    length: int = 64
    batch: int = 16
    microbatch: int = 4


def _tbf(mbit: int, burst: str) -> tuple[str, ...]:
    return (f"qdisc add dev eth root tbf rate {mbit}mbit burst {burst} latency 200ms",)


def _htb(mbit: int) -> tuple[str, ...]:
    limit = f"htb rate {mbit}mbit ceil {mbit}mbit burst 64k"
    return (
        "qdisc add dev eth root handle 1: htb default 1",
        f"class add dev eth parent 1: classid 1:1 {limit}",
    )


CASES = (
    Case("tbf_50mbit_128KiB", (_tbf(50, "128kb"),)),
    Case("tbf_8mbit_64KiB", (_tbf(8, "64kb"),), layers=6, width=128),
    Case("htb_30mbit", (_htb(30),)),
    Case("mixed", (_tbf(100, "1mb"), _tbf(20, "64kb")), width=192),
    Case("tbf_50mbit_5ms", (_tbf(50, "128kb"),), delay_s=0.005),
    Case("tbf_50mbit_50ms", (_tbf(50, "128kb"),), delay_s=0.05),
)


def job(case: Case, plan: str, steps: int = STEPS) -> str:
    """The job.toml of a case under a plan of PLANS."""
    return _JOB.format(
        layers=case.layers,
        width=case.width,
        heads=case.width // 32,
        length=case.length,
        batch=case.batch,
        microbatch=case.microbatch,
        steps=steps,
        plan=PLANS.get(plan, _WARM_UP),
    )


def measured(case: Case, wanted: Sequence[str], *, cold: bool) -> Iterator[dict[str, Any]]:
    """A row for each of the plans."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(HOSTS, case.uplinks, Path(folder), delay_s=case.delay_s)
        with pool:
            if not cold:
                pool.train([job(case, "warm up", 5), job(case, "auto", 8)])
            for plan in wanted:
                (row,) = pool.train([job(case, plan)])
                yield {
                    "case": case.name,
                    "plan": plan,
                    "predicted_s": row["predicted"][0],
                    "step_s": statistics.median(row["seconds"][WARM_UP:]),
                    "compute_s": statistics.median(row["compute"][WARM_UP:]),
                    "stages": [(a, b, [p[:2] for p in ps]) for a, b, ps in row["plan"][0][0]],
                    "links": [(a[:2], b[:2], lat, rate) for a, b, lat, rate in row["links"]],
                }


def rows(cases: Sequence[Case], path: Path, *, cold: bool) -> list[dict[str, Any]]:
    """All rows of the cases; those in the file are not measured again."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for case in cases:
        done = {r["plan"] for r in found if r["case"] == case.name}
        left = [plan for plan in PLANS if plan not in done]
        for row in measured(case, left, cold=cold) if left else ():
            found.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            off = row["predicted_s"] / row["step_s"] - 1
            print(
                f"{row['case']:20s} {row['plan']:11s} predicted {row['predicted_s']:6.2f} s, "
                f"measured {row['step_s']:6.2f} s ({off:+.0%}), computing {row['compute_s']:.2f} s",
                flush=True,
            )
    names = {case.name for case in cases}
    return [row for row in found if row["case"] in names]


def figures(found: Sequence[dict[str, Any]]) -> list[Figure]:
    """Of rows; a shape without all of its plans says nothing of the regret."""
    regrets = []
    for name in dict.fromkeys(row["case"] for row in found):
        steps = {row["plan"]: row["step_s"] for row in found if row["case"] == name}
        if steps.keys() == PLANS.keys():
            regrets.append(steps["auto"] / min(steps.values()))
    errors = [(r["plan"], abs(r["predicted_s"] / r["step_s"] - 1)) for r in found]
    of_auto = [error for plan, error in errors if plan == "auto"]
    made = [
        Figure("plan_regret_worst", max(regrets, default=float("nan")), "ratio", "lower"),
        Figure("plan_prediction_error_worst", max(of_auto, default=float("nan")), "ratio", "lower"),
        Figure("plan_prediction_error_any", max(e for _, e in errors), "ratio", "lower"),
    ]
    return [figure for figure in made if figure.value == figure.value]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=[], help="parts of names of cases")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where rows are kept")
    parser.add_argument("--fresh", action="store_true", help="forgets the rows that are there")
    parser.add_argument("--cold", action="store_true", help="without a run beforehand")
    o = parser.parse_args()
    if why := usable():
        print(f"links_plans: {why}", file=sys.stderr)
        return 2
    if o.fresh:
        o.rows.unlink(missing_ok=True)
    wanted = [c for c in CASES if not o.cases or any(part in c.name for part in o.cases)]
    report("links_plans", figures(rows(wanted, o.rows, cold=o.cold)), o.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
