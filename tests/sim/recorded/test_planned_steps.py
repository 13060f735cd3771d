"""A plan that is searched for today is predicted to take at most as long as the recorded one, and
does when ghosts execute it.

Numbers are recorded, not plans: seconds of a step as predicted and as executed. Both follow from
exact operations and are the same on each processor, but for the last digits. Capturing the models
takes seconds, so all of it is slow; `test_fresh_plans.py` has small searches for every day.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.planner.schedulers.schedulers import plan as make_plan

from .ghost_steps import executed_s
from .planned_cases import CASES
from .records import read, write

FOLDER = Path(__file__).parent / "plans"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_takes_at_most_the_recorded_step(records: str, tmp_path: Path, name: str) -> None:
    request = CASES[name]()
    plan, report = make_plan(request)
    got = {
        "predicted_s": report.predicted.step_s,
        "executed_s": executed_s(request, plan, tmp_path),
    }
    if records == "anew":
        shape = f"{len(plan.stages)} stages, {len(plan.peers)} peers, {plan.schedule}"
        write(FOLDER, name, {**got, "plan": shape})
    wanted = read(FOLDER, name)
    for key, seconds in got.items():
        ratio = seconds / wanted[key]
        assert ratio <= 1 + 1e-9, (
            f"{key}: {ratio} times the recorded, of {wanted['plan']}, by {plan}"
        )
    assert got["executed_s"] == pytest.approx(got["predicted_s"], rel=0.05)


def test_every_record_is_of_a_case() -> None:
    assert len({*FOLDER.glob("*.json")}) == len(CASES)
