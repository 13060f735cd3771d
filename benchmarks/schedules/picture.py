"""One step under each schedule on one slow network, as planned, on one scale of time.

    python benchmarks/schedules/picture.py FILE.png

Four equal peers at four places, 20 ms and 50 Mbit/s between each two; a byte GPT of 8 blocks of
width 192 in four stages, eight microbatches of two windows. docs/planning.md has it.
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
    file = parser.parse_args().file
    plans = []
    for schedule in SCHEDULES:
        with tempfile.TemporaryDirectory() as folder:
            path = write_scenario(Path(folder), schedule, batch=16, layers=8, width=192)
            scenario = Scenario.from_toml(path)
            answer = preview_cluster(scenario, *draft(Job.from_toml(scenario.job_path)))
        if not answer.HasField("plan"):
            raise SystemExit(f"no plan under {schedule}: {answer.reason.text}")
        plans.append((schedule, answer.step))
    planned_timeline(plans, {}).png(file)


if __name__ == "__main__":
    main()
