"""`shoal runs --json`: how runs and their replicas stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shoal import client as clients
from shoal.cli.base import app
from shoal.proto.broker_pb2 import RUNNING, Description, ReplicaState, RunState


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
