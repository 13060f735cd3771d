"""benchmarks/soak/soak.py: what its figures are made of, and short versions of its parts."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part() -> Any:
    """Gives a script of the folder as a module."""

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"shoal.benchmarks.soak.{name}")

    return load


def test_growth_is_that_of_the_line_through_the_middle_whatever_peaks_there_are(part: Any) -> None:
    growth = part("gauge").growth
    at = [10.0 * i for i in range(21)]
    leak = [100.0 + 0.1 * t for t in at]  # 20 % in 200 s
    assert growth(at, leak) == pytest.approx(0.2)
    flat = [100.0 + (i % 2) for i in range(21)]
    flat[7] = flat[15] = 500.0
    assert growth(at, flat) == pytest.approx(0.0, abs=0.01)


def test_a_process_is_read_and_one_that_is_gone_is_not(part: Any) -> None:
    held_by = part("gauge").held_by
    here = held_by(os.getpid(), 1.0)
    assert here.anonymous <= here.rss
    read, write = os.pipe()
    assert held_by(os.getpid(), 2.0).descriptors == here.descriptors + 2
    os.close(read)
    os.close(write)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert held_by(child.pid, 3.0) is None


def test_a_gauge_that_fails_is_not_taken_for_one_that_saw_the_whole(part: Any) -> None:
    def roles() -> dict[str, list[int]]:
        raise OSError("no such thing")

    with pytest.raises(RuntimeError, match="before the run"), part("gauge").Gauge(roles):
        pass


def test_a_reference_that_is_kept_is_counted(part: Any) -> None:
    reachable = part("virtual").reachable
    root: dict[str, list[bytes]] = {"kept": []}
    before, size = reachable(root)
    root["kept"].append(b"x" * 1000)
    after, more = reachable(root)
    assert after - before == {"bytes": 1}
    assert more - size > 1000


def test_a_loss_that_is_missing_or_no_number_is_far_apart(part: Any) -> None:
    apart = part("real").apart
    assert apart([1.0, 2.0], [1.0, 2.002]) == pytest.approx(1e-3, rel=1e-2)
    assert apart([1.0], [1.0, 2.0]) == float("inf")
    assert apart([1.0, float("nan")], [1.0, 2.0]) == float("inf")


def soaked(tmp_path: Path, *arguments: str) -> dict[str, float]:
    """The figures of a run of the script that has found no problem."""
    file = tmp_path / "figures.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "soak" / "soak.py"),
        *arguments,
        "--json",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    found = {figure["name"]: figure["value"] for figure in json.loads(file.read_text())}
    assert found["problems"] == 0
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_virtual_churn_leaves_the_machines_as_they_are(tmp_path: Path) -> None:
    found = soaked(tmp_path, "virtual", "--hours", "0.3")
    assert found["virtual_changes"] > 10
    assert found["virtual_peer_0_objects_growth"] < 0.02
    assert found["virtual_peer_1_objects_growth"] < 0.02


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_real_runs_come_through_signals_and_cut_links(tmp_path: Path) -> None:
    found = soaked(tmp_path, "chaos", "--runs", "3", "--seed", "7")
    assert found["chaos_equal_to_the_bit"] == 3


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_run_whose_holders_are_killed_loses_nothing(tmp_path: Path) -> None:
    found = soaked(tmp_path, "killed", "--minutes", "2", "--every", "20")
    assert found["killed_kills"] > 0
    assert found["killed_processes_left"] == 0


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_runs_while_peers_come_and_go_leave_no_process(tmp_path: Path) -> None:
    found = soaked(tmp_path, "real", "--minutes", "2", "--stretch", "4")
    assert found["real_runs"] >= 1
    assert found["real_processes_left"] == 0
