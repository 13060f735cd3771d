"""One step under each schedule on one slow network, as planned, on one scale of time.

    python benchmarks/schedules/picture.py FILE.png [--layers 8] [--width 192]

Four equal peers at four places, 20 ms and 50 Mbit/s between each two; a byte GPT in
four stages, eight microbatches of two windows. docs/planning.md has it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from shoal.benchmarks.schedules.shaped import write_scenario
from shoal.client.submission import draft
from shoal.job import Job
from shoal.sim.report.pictures.planned_timeline import planned_timeline
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.simulate import preview_cluster

SCHEDULES = ("gpipe", "1f1b", "listed", "zero-bubble")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.png")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    asked = parser.parse_args()
    plans = []
    for schedule in SCHEDULES:
        with tempfile.TemporaryDirectory() as folder:
            path = write_scenario(
                Path(folder),
                schedule,
                batch=16,
                microbatch=2,
                layers=asked.layers,
                width=asked.width,
            )
            scenario = Scenario.from_toml(path)
            answer = preview_cluster(scenario, *draft(Job.from_toml(scenario.job_path)))
        if not answer.HasField("plan"):
            raise SystemExit(f"no plan under {schedule}: {answer.reason.text}")
        plans.append((schedule, answer.step))
    planned_timeline(plans, {}).png(asked.file)


if __name__ == "__main__":
    main()
