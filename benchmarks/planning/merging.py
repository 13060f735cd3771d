"""Gradients that are exchanged beside the backward: four peers that each hold a whole model, whose
planner cuts it for that, beside the same peers with one stage, in the virtual world with ghosts.

    python benchmarks/planning/merging.py        # a minute

A GPT of GPT-2's size (12 layers, width 768; 85M parameters) on bytes; a step takes each peer 0.4 s,
and its line is so fast that the exchange of all gradients takes a quarter of that, as long, and
four times as long.

merged_over_whole_…        step time of the plan that was found over that with one stage a peer
merged_over_predicted_…    the same, as the plans' reports say
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from shoal.benchmarks.sync.worlds import Field, Played, lines
from shoal.benchmarks.table import Figure, arguments, report
from shoal.sim.ghost.device import Ghosts
from shoal.sim.virtual.spec import PeerSpec

PEERS, FLOPS, STEP_S = 4, 1.81e12, 0.4
SHARES: Mapping[str, float] = {"quarter": 0.25, "equal": 1.0, "four_times": 4.0}
"""By name, how long the exchange takes alone, of STEP_S."""
ARGS = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "dropout": 0.0}
PARAMETERS = 12 * 12 * 768**2
JOB: Mapping[str, Any] = {
    "version": 1,
    "name": "merging",
    "model": {"factory": "shoal.examples.gpt:gpt", "args": ARGS},
    "data": {"kind": "text", "length": 1024},
    "plan": {"pipelines": PEERS, "replan": False, "schedule": "1f1b", "recompute": False},
    "recovery": {"ladder": []},
    "train": {
        **{"steps": 12, "batch": PEERS, "microbatch": 1},
        **{"eval_every": 0, "schedule": "constant", "warmup": 0},
    },
}


def step_s(played: Played) -> float:
    """Median, without the first two."""
    times = [e.at_s for e in played.events if e.HasField("step")]
    return statistics.median(b - a for a, b in itertools.pairwise(times[2:]))


def main() -> int:
    args = arguments(__doc__).parse_args()
    figures = []
    names = [f"p{i}" for i in range(PEERS)]
    given_s = 4 * PARAMETERS * (PEERS - 1) / PEERS
    with Field(JOB) as field:
        for name, share in SHARES.items():
            line = 2 * given_s / (share * STEP_S)
            network = lines(names, dict.fromkeys(names, line), 0.0002)
            specs = [
                PeerSpec(name=n, place=n, flops_per_s=FLOPS, memory_bytes=64 << 30) for n in names
            ]
            found = {}
            for stages in (None, 1):
                played = field.play(
                    specs, network, device=Ghosts(), plan={"stages": stages} if stages else {}
                )
                event = next(e for e in played.events if e.HasField("plan"))
                found[stages] = step_s(played), event.report.predicted.step_s
                print(
                    f"exchange of {share:g} steps, {len(event.plan.stages)} stages a peer: "
                    f"{found[stages][0]:.3f} s a step, {found[stages][1]:.3f} s predicted",
                    flush=True,
                )
            for i, what in enumerate(("whole", "predicted")):
                ratio = found[None][i] / found[1][i]
                figures.append(Figure(f"merged_over_{what}_{name}", ratio, "ratio", "lower"))
    report("merging", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
