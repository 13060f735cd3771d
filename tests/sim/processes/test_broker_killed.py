"""A broker of a real process is killed in the middle of a run, and another one goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

import shoal
from shoal.client import Run
from shoal.client.submission import prepare
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.processes import LocalCluster

STEPS = 100
JOB = {
    "version": 1,
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 2, "width": 16, "heads": 2, "length": 16, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 16},
    "train": {"steps": STEPS, "batch": 8, "microbatch": 4, "lr": 1e-2, "eval_every": 0},
    "plan": {"stages": 2, "pipelines": 1, "scheduler": "uniform"},
}


def train(run: Run, see: Callable[[RunEvent], None] = lambda event: None) -> list[RunEvent]:
    """Every event of a run, watched by one client from its begin to its end."""
    events = []
    for event in run.watch():
        events.append(event)
        see(event)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    assert [e.number for e in events] == list(range(len(events)))
    return events


def losses(events: list[RunEvent]) -> list[tuple[int, float]]:
    return [(e.step.step, e.step.outcome.loss) for e in events if e.HasField("step")]


def files(events: list[RunEvent]) -> list[list[str]]:
    return [[f.blob.hash for f in e.weights.files] for e in events if e.HasField("weights")]


@pytest.mark.slow  # 40 s; its fast sibling under a virtual clock is test_broker_restart.py
@pytest.mark.process
@pytest.mark.timeout(300)
def test_training_goes_on_while_the_broker_is_killed_and_started_again(tmp_path: Path) -> None:
    with ExitStack() as open_now:
        cluster = open_now.enter_context(LocalCluster(peers=2, folder=tmp_path / "cluster"))
        client = open_now.enter_context(shoal.connect(cluster.address))
        prepared = open_now.enter_context(prepare(Job.from_table(JOB)))
        undisturbed = client.submit_prepared(prepared, tmp_path)  # waits for its peers
        plain = train(undisturbed)
        address, deaths = cluster.address, []

        def kill(event: RunEvent) -> None:
            if event.HasField("step") and event.step.step == 10:
                deaths.append(event.number)
                cluster.restart_broker()

        killed = train(client.submit_prepared(prepared, tmp_path), kill)
        assert deaths
        assert cluster.address == address
        assert [step for step, _ in losses(killed)] == list(range(STEPS)), "each step once"
        assert losses(killed) == losses(plain)
        assert files(killed) == files(plain)
        assert train(undisturbed) == plain, "what was told before is told again"
        assert all(a.at_s <= b.at_s for a, b in pairwise(killed))
        cluster.check()
        log = cluster.log("broker", 10_000)
    assert "broker_started start=2 runs=2" in log
    assert "Traceback" not in log
