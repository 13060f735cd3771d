"""`shoal runs --json`: how runs and their replicas stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from shoal import client as clients
from shoal.cli.base import WRONG, app
from shoal.cli.runs import _detachable
from shoal.client.files.records import replacing
from shoal.proto.broker_pb2 import DONE, RUNNING, Description, Phase, ReplicaState, RunState


def test_a_run_says_how_each_of_its_replicas_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = ReplicaState(replica="r-1", phase=RUNNING, term=2, step=7)
    state = RunState(run="r-1", phase=RUNNING, term=2, step=7, steps=9, replicas=[replica])

    @contextmanager
    def connect(_: str | None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(address="here:1", describe=lambda: Description(runs=[state]))

    monkeypatch.setattr(clients, "connect", connect)
    found = json.loads(CliRunner().invoke(app, ["runs", "--json"]).output)
    (run,) = found["runs"] if isinstance(found, dict) else found
    assert (run["step"], run["steps"]) == (7, 9)
    assert run["replicas"] == [{"replica": "r-1", "phase": "running", "term": 2, "step": 7}]


@pytest.mark.parametrize(
    ("phase", "said"),
    [(RUNNING, "run r-1 ends soon, with its weights: shoal watch r-1"), (DONE, "run r-1 is done")],
)
def test_a_run_that_is_asked_to_finish_says_whether_it_has(
    monkeypatch: pytest.MonkeyPatch, phase: Phase, said: str
) -> None:
    state = RunState(run="r-1", phase=phase, round=3)

    @contextmanager
    def connect(_: str | None) -> Iterator[SimpleNamespace]:
        run = SimpleNamespace(finish=lambda: state)
        yield SimpleNamespace(run=lambda name, to: run)

    monkeypatch.setattr(clients, "connect", connect)
    assert CliRunner().invoke(app, ["finish", "r-1"]).output.strip() == said
    found = json.loads(CliRunner().invoke(app, ["finish", "r-1", "--json"]).output)
    assert (found["run"], found["round"]) == ("r-1", 3)


def test_a_disk_that_is_full_here_ends_with_where_the_weights_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, run = SimpleNamespace(address="here:1"), SimpleNamespace(id="r-1")
    target = tmp_path / "model.safetensors"
    with (
        pytest.raises(typer.Exit) as ended,
        _detachable(client, run),  # type: ignore[arg-type]
        replacing(target),
        open("/dev/full", "w") as full,
    ):
        full.write("weights")
    said = capsys.readouterr().err
    assert ended.value.exit_code == WRONG
    assert f"{target}: No space left" in said
    assert "shoal export r-1 --broker here:1 --to FOLDER" in said
    assert not list(tmp_path.iterdir())
