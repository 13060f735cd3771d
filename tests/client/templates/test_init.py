"""Projects from templates: each runs as its README says, and nothing that is there is touched."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.client.front import SimulationFront
from shoal.client.templates import project
from shoal.client.templates.project import TEMPLATES, ProjectError, about, begin, next_line
from shoal.sim.simulate import SimOptions, simulate

ROOT = Path(project.__file__).parent


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["init", *arguments])


def test_each_folder_of_templates_is_one() -> None:
    assert {path.parent.name for path in ROOT.glob("*/job.toml")} == set(TEMPLATES)
    assert {path.name for path in ROOT.iterdir() if path.is_dir()} - {"__pycache__"} == set(
        TEMPLATES
    )


def test_the_list_says_what_each_is() -> None:
    lines = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(TEMPLATES)
    assert all(about(name) in line for name, line in zip(TEMPLATES, lines, strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_project_has_what_its_readme_names_and_the_next_line_is_said(
    name: str, tmp_path: Path
) -> None:
    said = run(str(tmp_path / "mine"), "--template", name)
    assert said.exit_code == 0, said.output
    assert said.stdout == f"next: cd {tmp_path / 'mine'} && {next_line(name)}\n"
    readme = (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in readme.splitlines() if line.startswith("| `")]
    named = [part.strip("` ") for row in rows for part in row.split(",")]
    assert named
    assert all((tmp_path / "mine" / part).exists() for part in named)
    for path in (tmp_path / "mine").rglob("*"):
        assert path.suffix != ".txt" or path.parent.name == "text"
        if path.suffix == ".py":
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    said = run(str(tmp_path), "--template", "classify")
    assert said.exit_code == 2
    assert "is there and not empty" in said.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    with pytest.raises(ProjectError, match="not empty"):
        begin(tmp_path / "notes", "classify")


def test_an_unknown_template_and_no_folder_are_refused(tmp_path: Path) -> None:
    assert "expected pretrain, finetune" in run(str(tmp_path / "x"), "--template", "chat").output
    assert run().exit_code == 2


def test_a_template_whose_packages_are_missing_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(project.NEEDS, "classify", ("no_such_package",))
    with pytest.raises(ProjectError, match=r'needs no_such_package: pip install "shoal\[hf\]"'):
        begin(tmp_path / "x", "classify")
    assert not (tmp_path / "x").exists()


def test_a_script_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "classify").mkdir(parents=True)
    (tmp_path / "here" / "classify" / "make_data.py.txt").write_text("raise OSError('no paint')")
    monkeypatch.setattr(project, "_HERE", tmp_path / "here")
    with pytest.raises(ProjectError, match=r"make_data\.py failed: OSError: no paint"):
        begin(tmp_path / "x", "classify")


def few_steps(name: str, folder: Path, steps: int) -> None:
    """Play its scenario in this process."""
    begin(folder, name)
    front = SimulationFront()
    options = SimOptions(scenario=str(folder / "scenario.toml"), steps=steps, quiet=True)
    try:
        assert simulate(options, front) == 0
    finally:
        front.close()


@pytest.mark.parametrize(
    "name",
    [
        name if name == "federated" else pytest.param(name, marks=pytest.mark.slow)
        for name in TEMPLATES
    ],
)
def test_a_template_trains(name: str, tmp_path: Path) -> None:
    few_steps(name, tmp_path / name, steps=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_commands_of_a_readme_run(name: str, tmp_path: Path) -> None:
    """Those before the network of its own, which tests of the tutorials have."""
    begin(tmp_path / name, name)
    readme = (tmp_path / name / "README.md").read_text(encoding="utf-8")
    shown = [line.strip() for line in readme.splitlines() if line.startswith("    shoal ")]
    here = [line for line in shown if line.split()[1] in ("sim", "compare")]
    assert here[0] == next_line(name)
    for line in here:
        command = f"{shlex.quote(sys.executable)} -m shoal.cli{line.removeprefix('shoal')}"
        done = subprocess.run(
            command, shell=True, cwd=tmp_path / name, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
