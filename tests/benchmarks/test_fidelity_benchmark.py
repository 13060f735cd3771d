"""benchmarks/worlds/fidelity.py: what its figures are made of, without a measurement."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.shaped.shaping import Shaping


@pytest.fixture
def part() -> Any:
    """Gives a script of the folder as a module."""

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"shoal.benchmarks.worlds.{name}")

    return load


def test_the_rate_is_that_from_the_first_arrival_after_the_warm_up(part: Any) -> None:
    stream = part("shaped_ends").Stretch((0.0, 1.0, 2.0, 4.0), (0, 10, 30, 90))
    assert stream.rate(0.0) == 90 / 4
    assert stream.rate(1.5) == (90 - 30) / 2


def test_a_delay_that_is_off_by_the_bar_counts_as_the_bar(part: Any) -> None:
    error = part("fidelity").delay_error
    assert error(0.005, 0.001) == pytest.approx(0.05)  # 5 ms of 1 ms
    assert error(-0.01, 0.2) == pytest.approx(0.05)  # 5 % of 200 ms
    assert error(0.001, 0.02) == pytest.approx(0.01)


def test_a_pace_is_the_median_after_the_warm_up_without_the_time_scale(part: Any) -> None:
    worlds = part("shaped_worlds")
    seconds = [50.0] * worlds.WARM_UP + [2.0, 4.0, 3.0]
    events = [
        broker_pb2.RunEvent(step=broker_pb2.StepDone(step=i, seconds=s, compute_s=2 * s))
        for i, s in enumerate(seconds)
    ]
    assert worlds.Pace.of([broker_pb2.RunEvent(), *events], 2.0) == worlds.Pace(1.5, 3.0)


def test_errors_are_of_what_was_real(part: Any) -> None:
    worlds = part("shaped_worlds")
    found = worlds.Outcome("case", worlds.Pace(0.9, 2.2), worlds.Pace(1.0, 2.2), 1.1, 0.5, "")
    assert found.error == pytest.approx(0.1)
    assert "NOT A MEASUREMENT" not in str(found)


def test_only_measurements_make_figures(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fidelity, worlds = part("fidelity"), part("shaped_worlds")

    def outcome(virtual_s: float, why_not: str = "") -> Any:
        return worlds.Outcome(
            "case", worlds.Pace(virtual_s, 1.0), worlds.Pace(1.0, 1.0), 1.0, 0.5, why_not
        )

    found = [outcome(1.02), outcome(2.0, "the machine was busy"), outcome(0.9), outcome(1.04)]
    monkeypatch.setattr(worlds, "outcomes", lambda *_: found)
    figures = {f.name: f.value for f in fidelity.figures("worlds")}
    assert figures == {
        "fidelity_median_error": pytest.approx(0.04),
        "fidelity_worst_error": pytest.approx(0.1),
        "fidelity_cases": 3,
        "fidelity_left_out": 1,
    }
    monkeypatch.setattr(worlds, "outcomes", lambda *_: found[1:2])
    assert [f.name for f in fidelity.figures("worlds")] == ["fidelity_cases", "fidelity_left_out"]


def test_every_case_is_a_scenario_whose_paths_are_known(part: Any, tmp_path: Path) -> None:
    cases = part("shaped_worlds").CASES
    assert sorted(len(c.peers) for c in cases) == [2, 3, 4, 5, 6]
    for i, case in enumerate(cases):
        folder = tmp_path / str(i)
        folder.mkdir()
        scenario = Scenario.from_toml(case.write(folder, 2.0))
        job = scenario.adjusted(Job.from_toml(scenario.job_path))
        assert job.train.batch % job.train.microbatch_size == 0
        slowed, plain = Shaping.of_scenario(scenario), Shaping.of(scenario.wide())
        assert slowed == plain.scaled(2.0 * case.time_scale)
        assert len(slowed.names) == len(case.peers) + 1
        half = Scenario.from_toml(case.write(tmp_path / f"{i} slower", 2.0, 2.0))
        for fast, slow in zip(scenario.peers, half.peers, strict=True):
            assert slow.hardware.speeds.product == pytest.approx(fast.hardware.speeds.product / 2)
            assert slow.hardware.speeds.call_s == pytest.approx(2 * fast.hardware.speeds.call_s)
