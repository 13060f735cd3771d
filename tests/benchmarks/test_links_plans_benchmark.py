"""benchmarks/links/plans.py: what its figures are made of, without a measurement."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from shoal.job import Job


@pytest.fixture
def bench() -> Any:
    return importlib.import_module("shoal.benchmarks.links.plans")


def row(case: str, plan: str, predicted_s: float, step_s: float) -> dict[str, Any]:
    return {"case": case, "plan": plan, "predicted_s": predicted_s, "step_s": step_s}


def test_every_case_is_a_job_under_every_plan(bench: Any, tmp_path: Path) -> None:
    for case in bench.CASES:
        for plan in bench.PLANS:
            path = tmp_path / "job.toml"
            path.write_text(bench.job(case, plan))
            assert Job.from_toml(path).plan.replan is False


def test_the_regret_is_of_the_worst_shape_and_of_whole_ones_only(bench: Any) -> None:
    found = [row("a", plan, 1.0, 2.0) for plan in bench.PLANS]
    found[0] = row("a", "auto", 1.9, 2.2)
    found += [row("b", "auto", 9.0, 10.0), row("b", "alone", 1.0, 1.0)]
    made = {f.name: f.value for f in bench.figures(found)}
    assert made["plan_regret_worst"] == pytest.approx(1.1)
    assert made["plan_prediction_error_worst"] == pytest.approx(1 - 1.9 / 2.2)
    assert made["plan_prediction_error_any"] == pytest.approx(0.5)


def test_rows_that_are_there_are_not_measured_again(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def measured(case: Any, wanted: list[str], *, cold: bool) -> Any:
        asked.append(list(wanted))
        return (row(case.name, plan, 1.0, 1.0) | {"compute_s": 1.0} for plan in wanted[:2])

    monkeypatch.setattr(bench, "measured", measured)
    path = tmp_path / "rows.jsonl"
    for _ in range(4):
        found = bench.rows(bench.CASES[:1], path, cold=False)
    plans = list(bench.PLANS)
    assert asked == [plans, plans[2:], plans[4:]]
    assert [r["plan"] for r in found] == plans
