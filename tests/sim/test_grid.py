"""Grids of simulations: which there are, and that one that was interrupted goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.client.front import SimulationFront
from shoal.job import Job, SettingsError
from shoal.job.settings import plain
from shoal.sim import grid as grids
from shoal.sim.grid import Sweep
from shoal.sim.named_files import mark_of
from shoal.sim.options import Setting, SimOptions
from shoal.sim.report import Summary, write_json

NOBODY = cast("SimulationFront", None)


def options(folder: Path, **more: Any) -> SimOptions:
    return SimOptions(scenario="four-homes-gossip", world="virtual", report=folder, **more)


def test_every_combination_with_every_seed(tmp_path: Path) -> None:
    changes = ["train.lr=1e-3,2e-3", "sync.method=saps,noloco", "sync.options={}"]
    found = Sweep(options(tmp_path), changes, 2)
    assert [cell.folder.name for cell in found.cells] == [
        f"train.lr={lr}_sync.method={method}-seed-{seed}"
        for lr in ("1e-3", "2e-3")
        for method in ("saps", "noloco")
        for seed in (5, 6)
    ]
    assert found.cells[0].options.changes == (
        "train.lr=1e-3",
        "sync.method=saps",
        "sync.options={}",
    )


def test_one_setting_with_one_seed_is_no_grid(tmp_path: Path) -> None:
    found = Sweep(options(tmp_path), ['recovery.ladder=["sibling","snapshot"]'], 1)
    assert not found.several
    assert found.only.changes == ('recovery.ladder=["sibling","snapshot"]',)


def test_expectations_hold_where_the_job_is_the_same(tmp_path: Path) -> None:
    as_it_is = Setting.of(options(tmp_path)).scenario
    same = Setting.of(options(tmp_path, changes=("sync.every=4",))).scenario
    other = Setting.of(options(tmp_path, changes=("sync.every=8",))).scenario
    assert as_it_is
    assert same
    assert other
    assert same.expect == as_it_is.expect
    assert as_it_is.expect.loss_below is not None
    assert other.expect.loss_below is None


def test_a_grid_goes_on_with_what_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def simulated(given: SimOptions, front: SimulationFront) -> Summary:
        """Writes a report, and fails where the method is noloco and nothing else was run."""
        setting = Setting.of(given)
        assert given.report is not None
        failed = "noloco" in given.report.name and len(ran) < 2
        ran.append(given.report.name)
        point = dict(step=1, samples=4, sent_bytes=8, seconds=1.0, loss=2.0, held_out=None)
        summary = Summary(name="x", world="w", seed=setting.seed, job=plain(setting.job))
        summary = replace(summary, setting=setting.digest(), course=(point,), exit=int(failed))
        given.report.mkdir(parents=True, exist_ok=True)
        write_json(summary, given.report / "summary.json")
        return summary

    monkeypatch.setattr(grids, "simulated", simulated)
    said: list[str] = []
    changes = ["sync.method=saps,noloco", "sync.options={}"]
    assert Sweep(options(tmp_path), changes, 1).run(NOBODY, said.append) == 1
    assert Sweep(options(tmp_path), changes, 1).run(NOBODY, said.append) == 0
    assert Sweep(options(tmp_path, steps=8), changes, 1).run(NOBODY, said.append) == 0
    saps, noloco = (f"sync.method={m}-seed-5" for m in ("saps", "noloco"))
    assert ran == [saps, noloco, noloco, saps, noloco]  # what failed, and then all of other steps
    assert json.loads((tmp_path / "compare.json").read_text())["target"] == 2.0
    assert (tmp_path / "compare.png").is_file()


@pytest.mark.parametrize(
    ("factory", "seen"),
    [
        ("model.py:make", {"model.py", "beside.py", "t.txt", "u.txt"}),
        ("package.net:make", {"package/net.py", "package/more.py", "t.txt", "u.txt"}),
        ("shoal.examples.gpt:gpt", {"t.txt", "u.txt"}),
        ("no.such.module:f", {"t.txt", "u.txt"}),
        ("hf:hf", {"hf/config.json", "t.txt", "u.txt"}),
    ],
)
def test_results_of_another_model_or_data_are_not_taken(
    tmp_path: Path, factory: str, seen: set[str]
) -> None:
    """Whatever lies in the files that the job names is a part of what was run."""
    model, package = ("model.py", "beside.py"), ("package/net.py", "package/more.py")
    places = [*model, *package, "t.txt", "u.txt", "other.bin", "hf/config.json"]
    for folder in ("package", "hf"):
        (tmp_path / folder).mkdir()
    for place in places:
        if place != "u.txt":
            (tmp_path / place).write_text("1")
    (tmp_path / ".#model.py").symlink_to("somebody@somewhere")  # as an editor makes it
    data = {"kind": "text", "source": "*.txt"}
    job = Job(model={"factory": factory}, data=data, train={"steps": 1}, folder=tmp_path)
    found = set()
    for place in places:
        before = mark_of(job)
        assert before == mark_of(job)
        (tmp_path / place).write_text("22")
        if mark_of(job) != before:
            found.add(place)
    assert found == seen


def test_values_that_do_not_go_together_are_named_before_anything_runs(tmp_path: Path) -> None:
    changes = ["sync.method=powersgd,exact", "plan.pipelines=1,2", "codec.sync=none"]
    scenario = SimOptions(scenario="testbed-8", report=tmp_path / "grid")
    with pytest.raises(SettingsError) as refused:
        Sweep(scenario, changes, 3)
    first, *rest = str(refused.value).splitlines()
    assert first.startswith("1 of the grid's 4 settings cannot be, and none was run; leave their")
    (one,) = rest
    assert one.startswith("  sync.method=powersgd, plan.pipelines=1: `sync.method` is")
    assert not (tmp_path / "grid").exists()


def test_a_setting_that_cannot_run_is_said_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated(given: SimOptions, front: SimulationFront) -> Summary:
        assert given.report is not None
        if "noloco" in given.report.name:
            raise SettingsError("sync.method", "does not go with this model")
        setting = Setting.of(given)
        summary = Summary(name="x", world="w", seed=setting.seed, job=plain(setting.job))
        point = dict(step=1, samples=4, sent_bytes=8, seconds=1.0, loss=2.0, held_out=None)
        given.report.mkdir(parents=True, exist_ok=True)
        write_json(replace(summary, course=(point,)), given.report / "summary.json")
        return summary

    monkeypatch.setattr(grids, "simulated", simulated)
    said: list[str] = []
    changes = ["sync.method=noloco,saps,ring", "sync.options={}"]
    assert Sweep(options(tmp_path), changes, 1).run(NOBODY, said.append) == 1
    assert "sync.method=noloco, seed 5: REFUSED: `sync.method` does not go" in said[0]
    assert "sync.method=saps, seed 5: " in said[1]
    assert (tmp_path / "compare.json").is_file()
    with pytest.raises(SettingsError, match="does not go with this model"):
        Sweep(options(tmp_path), ["sync.method=noloco,saps", "sync.options={}"], 1).run(
            NOBODY, said.append
        )


@pytest.mark.parametrize(
    ("more", "changes", "says"),
    [
        ({"keep": Path("x")}, ["train.lr=1,2"], "--keep is of one simulation"),
        ({}, ["train.lr", "seed=1,2"], "expected KEY=VALUE"),
        ({}, ["train.rl=1,2"], "did you mean"),
        ({}, ["seed=" + ",".join(map(str, range(1001)))], "expected at most 1000"),
    ],
)
def test_what_is_no_grid_is_refused(
    tmp_path: Path, more: Any, changes: list[str], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        Sweep(options(tmp_path, **more), changes, 1)
