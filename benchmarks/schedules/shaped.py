"""Schedules between four real processes, each at another place, over links of 50 Mbit/s and 20 ms.

    python benchmarks/schedules/shaped.py [--runs 5] [--json FILE]

`auto` cuts a byte GPT so small that computing is less than 30 % of a step into four stages, under
one schedule after the other; the runs take turns. Each is a `shoal sim` of real daemons over shaped
paths. A run that the machine disturbed, as its report says, is repeated at most twice; the last one
counts in any case, and is marked.

`shaped_1f1b_over_NAME`: the median step under the textbook's 1F1B over that under NAME;
`shaped_NAME_error`: how far the median step is from what the plan predicted;
`shaped_computing`: the share of the fastest schedule's step in which peers compute, their mean.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.benchmarks.table import Figure, arguments, report

SCHEDULES = ("gpipe", "1f1b", "listed", "zero-bubble")
BASE = "1f1b"
STAGES = 4
AGAIN = 2
MINUTES = 5

JOB = """\
version = 1
name = "small-gpt"
[model]
factory = "shoal.examples.gpt:gpt"
args = {{ layers = {layers}, width = {width}, heads = 4, length = 64, dropout = 0.0 }}
[data]
length = 64
[train]
steps = 12
batch = {batch}
microbatch = 2
eval_every = 0
[plan]
scheduler = "auto"
stages = {stages}
pipelines = 1
replan = false
recompute = false
schedule = "{schedule}"
"""

PEER = """\
[[peers]]
name = "{name}"
place = "at-{name}"
up = "50Mbit"
down = "50Mbit"
device = {{ flops = 20e9, memory_bandwidth = "4GB/s", overhead = "25us" }}
"""

LINK = """\
[[links]]
from = "at-{a}"
to = "at-{b}"
latency = "20ms"
bandwidth = "50Mbit"
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """Seconds of a step, its median and as predicted; the share of it in which peers compute, their
    mean; whether the machine left the processes alone."""

    step_s: float
    predicted_s: float
    computing: float
    valid: bool


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each schedule")
    asked = parser.parse_args()
    found: dict[str, list[Ran]] = {schedule: [] for schedule in SCHEDULES}
    for turn in range(asked.runs):
        for schedule, runs in found.items():
            runs.append(ran := undisturbed(schedule))
            print(
                f"{turn + 1} {schedule:<12} {ran.step_s:.3f} s, predicted {ran.predicted_s:.3f}; "
                f"computing {ran.computing:.0%}" + ("" if ran.valid else "  DISTURBED"),
                flush=True,
            )
    report("schedules over shaped links", figures(found), asked.json)


def figures(found: dict[str, list[Ran]]) -> list[Figure]:
    steps = {name: statistics.median(r.step_s for r in runs) for name, runs in found.items()}
    made = [
        Figure(f"shaped_{BASE}_over_{name.replace('-', '_')}", steps[BASE] / s, "ratio", "higher")
        for name, s in steps.items()
        if name != BASE
    ]
    for name, runs in found.items():
        predicted = statistics.median(r.predicted_s for r in runs)
        error = abs(steps[name] / predicted - 1)
        made.append(Figure(f"shaped_{name.replace('-', '_')}_error", error, "ratio", "lower"))
    fastest = min(steps, key=steps.__getitem__)
    computing = statistics.median(r.computing for r in found[fastest])
    return [*made, Figure("shaped_computing", computing, "ratio", "lower")]


def undisturbed(schedule: str) -> Ran:
    """Run it, and again while the machine was busy with something else; return the last."""
    for _ in range(AGAIN + 1):
        ran = run(schedule)
        if ran.valid:
            break
    return ran


def run(schedule: str) -> Ran:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scenario = write_scenario(folder, schedule)
        summary = folder / "summary.json"
        command = [sys.executable, "-m", "shoal.cli", "sim", str(scenario)]
        subprocess.run(
            [*command, "--real", "--quiet", "--json", str(summary)],
            check=True,
            timeout=60 * MINUTES,
            stdout=subprocess.DEVNULL,
        )
        return read(json.loads(summary.read_text()))


def write_scenario(
    folder: Path, schedule: str, *, batch: int = 32, layers: int = 4, width: int = 64
) -> Path:
    """Write a job and the four places beside it; return the scenario's file."""
    job = JOB.format(stages=STAGES, schedule=schedule, batch=batch, layers=layers, width=width)
    (folder / "job.toml").write_text(job)
    names = "abcd"[:STAGES]
    lines = ["version = 1", 'name = "four-places"', "seed = 7", 'job = "job.toml"']
    lines += [PEER.format(name=n) for n in names]
    lines += [LINK.format(a=a, b=b) for a in names for b in names if a < b]
    path = folder / "scenario.toml"
    path.write_text("\n".join(lines))
    return path


def read(summary: dict[str, Any]) -> Ran:
    return Ran(
        summary["step_s"],
        summary["predicted_step_s"],
        1 - summary["bubble_measured"],
        summary["timing_valid"],
    )


if __name__ == "__main__":
    main()
