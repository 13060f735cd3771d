"""Collectives between real processes over shaped lines: four hosts as network namespaces, a whole
replica of a small GPT on each, seconds of a step by each collective beside the predicted ones.

    python benchmarks/links/collectives_real.py      # twenty minutes; needs root, and quiet

The lines are tc's token buckets, alike (`even`) and unlike (`mixed`: 80, 20, 20 and 5 Mbit/s up). A
row has what was predicted before the run and the median of the measured steps.

collective_real_choice_over_best   the worst, over lines, of what "auto" takes over the best named
collective_real_prediction_error   the worst |predicted / measured - 1| of what "auto" takes
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from shoal.benchmarks.links.hosts import Pool
from shoal.benchmarks.links.namespaces import usable
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.exchange.collectives import SUMS

HOSTS, WARM_UP, STEPS = 4, 2, 8
LINES = {"even": (20, 20, 20, 20), "mixed": (80, 20, 20, 5)}
"""Mbit/s up of each host."""
JOB = """\
version = 1
name = "collectives"
[model]
factory = "shoal.examples.gpt:gpt"
args = {{ layers = 4, width = 192, heads = 6, length = 64, dropout = 0.0 }}
[data]
length = 64
[train]
steps = {steps}
batch = 8
microbatch = 2
eval_every = 0
[recovery]
ladder = []
[plan]
replan = false
stages = 1
pipelines = 4
[sync]
collective = "{name}"
"""


def measured(lines: tuple[int, ...]) -> dict[str, tuple[float, float]]:
    """By collective, predicted and measured seconds of a step."""
    shapes = tuple(
        (f"qdisc add dev eth root tbf rate {mbit}mbit burst 64kb latency 200ms",) for mbit in lines
    )
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder, Pool(HOSTS, shapes, Path(folder)) as pool:
        pool.train([JOB.format(steps=4, name="auto")])  # speeds and links become known
        for name in ("auto", *SUMS):
            (row,) = pool.train([JOB.format(steps=STEPS, name=name)])
            found[name] = row["predicted"][0], statistics.median(row["seconds"][WARM_UP:])
            print(
                f"  {name:14} predicted {found[name][0]:.2f} s, {found[name][1]:.2f} s", flush=True
            )
    return found


def main() -> int:
    args = arguments(__doc__).parse_args()
    if why := usable():
        print(why)
        return 2
    choice = error = 0.0
    for name, lines in LINES.items():
        print(f"{name}: {', '.join(map(str, lines))} Mbit/s up", flush=True)
        found = measured(lines)
        predicted, seconds = found.pop("auto")
        choice = max(choice, seconds / min(s for _, s in found.values()))
        error = max(error, abs(predicted / seconds - 1))
    figures = [
        Figure("collective_real_choice_over_best", choice, "ratio", "lower"),
        Figure("collective_real_prediction_error", error, "ratio", "lower"),
    ]
    report("collectives_real", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
