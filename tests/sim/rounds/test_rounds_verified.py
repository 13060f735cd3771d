"""`--verify` of a run whose replicas train apart: every local step against the plain loop."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from shoal import cli
from shoal.job import Job
from shoal.job.rounds import GOSSIP, LOCAL
from shoal.proto.broker_pb2 import RunEvent
from shoal.sim.following import Following
from shoal.sim.options import BUILTIN
from shoal.sim.plain import plain_rounds
from shoal.sim.plain.plain_rounds import METHODS
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.plain.round_oracle import Round
from shoal.sim.report import Summary
from shoal.sim.verify import verify
from shoal.tests.sim.played_rounds import Rounds, sites


def verified(
    rounds: Rounds, events: list[RunEvent], job: Job | None = None, *, draws: bool = False
) -> tuple[Summary, list[str]]:
    """The summary, and what was said."""
    job = job or rounds.lab.job
    prepared = rounds.lab.prepared
    summary = Summary(name="x", world="w", seed=0)
    followed = Following(summary, {})
    for event in events:
        followed.see(event)
    followed.finish(1)

    @contextmanager
    def module(job: Job) -> Iterator[nn.Module]:
        yield copy.deepcopy(rounds.lab.module)

    facts: Any = SimpleNamespace(random=draws, reader=prepared.reader, job=job)
    said: list[str] = []
    front: Any = SimpleNamespace(module=module)
    verify(job, followed, facts, front, lambda job: [], said.append)
    return summary, said


def test_every_local_step_is_that_of_the_plain_loop_and_a_wrong_one_is_named(
    rounds: Rounds,
) -> None:
    world, run = rounds.play(sites(1e9, 1e9))
    events = list(world.events(run))
    summary, _ = verified(rounds, events)
    assert (summary.exit, summary.verified_against) == (0, "plain loop of rounds")
    assert summary.max_loss_difference is not None
    assert summary.max_loss_difference < 1e-4
    wrong = next(e for e in events if e.HasField("step") and (e.replica, e.step.step) == (1, 4))
    wrong.step.outcome.loss += 0.5
    summary, _ = verified(rounds, events)
    assert summary.exit == 1
    assert "the loss of round 1, replica 1, in its step 1 is" in summary.error


def test_replicas_that_planning_decided_on_are_verified(rounds: Rounds) -> None:
    auto: dict[str, Any] = {"sync": {"kind": "auto"}, "plan": {"replicas": "auto"}}
    world, run = rounds.play(sites(2e6, 2e6), **auto)
    job = Job.from_json(rounds.spec(**auto).job)
    assert job.undecided
    summary, _ = verified(rounds, list(world.events(run)), job)
    assert (summary.exit, summary.replicas) == (0, 2)
    assert summary.verified_against == "plain loop of rounds"


def test_where_the_graph_draws_masks_it_says_so(rounds: Rounds) -> None:
    world, run = rounds.play(sites(1e9, 1e9))
    summary, said = verified(rounds, list(world.events(run)), draws=True)
    assert summary.max_loss_difference is None
    assert said == ["not verified: the graph draws masks, and a plain loop draws others"]


SCENARIO = f"""
version = 1
job = "{BUILTIN}"
mode = "virtual"
[[peers]]
name = "p{{1..4}}"
place = "home"
device = {{ flops = 2e6, memory_bandwidth = "2GB/s", overhead = "20us" }}
[[faults]]
do = "kill"
who = ["p1"]
at_step = 12
[job_overrides.model]
args = {{ layers = 2, width = 8, heads = 1, length = 8, dropout = 0.0 }}
[job_overrides.data]
length = 8
[job_overrides.train]
steps = 60
batch = 12
microbatch = 2
lr = 0.05
optimizer = "sgd"
eval_every = 0
[job_overrides.sync]
kind = "local"
every = 10
[job_overrides.recovery]
warm_spares = 0
[job_overrides.plan]
replicas = 3
stages = 1
pipelines = 1
"""


@pytest.mark.slow
def test_a_simulation_in_which_a_replica_is_lost_left_out_and_late_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody keeps copies of its stages, so another peer takes the version from the others."""
    (tmp_path / "site.toml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)

    def simulated() -> dict[str, Any]:
        words = "sim", "site.toml", "--verify", "--quiet", "--json", "out.json"
        result = CliRunner().invoke(cli.app, words)
        found: dict[str, Any] = json.loads(Path("out.json").read_text())
        assert result.exit_code == found["exit"], result.output
        return found

    found = simulated()
    assert [r["round"] for r in found["rounds"] if r["left_out"]], "nobody was left out"
    assert [r["round"] for r in found["rounds"] if r["joined"]], "nobody came late"
    assert (found["error"], found["verified_against"]) == ("", "plain loop of rounds")
    assert found["max_loss_difference"] < 1e-4

    def weighed(*args: Any, **sizes: Any) -> list[Round]:
        rounds = committed_rounds(*args, **sizes)
        at = next(i for i, r in enumerate(found["rounds"]) if r["left_out"])
        first, *others = rounds[at].members
        wrong = replace(first, weight=2 * first.weight), *others
        return [*rounds[:at], replace(rounds[at], members=wrong), *rounds[at + 1 :]]

    monkeypatch.setattr(plain_rounds, "committed_rounds", weighed)
    assert "--verify: the loss of round" in simulated()["error"]


def test_there_is_a_plain_loop_for_every_method() -> None:
    assert METHODS.keys() == LOCAL.keys() | GOSSIP.keys()
