"""A run whose microbatches are routed one by one (`scheduler = "swarm"`): the broker plans it, and
it trains as the plain loop does, also when holders die or join."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.dag.cost.speed import Speeds
from shoal.dag.plan.plan import Plan
from shoal.dag.schedule.convert_plan import plan_from_proto
from shoal.job import Job
from shoal.peer.core import events as p
from shoal.proto.broker_pb2 import DONE, RunEvent, RunSpec
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import PeerSpec, World

JOB: dict[str, Any] = {
    "version": 1,
    "name": "swarm",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 2, "width": 16, "heads": 2, "length": 8, "dropout": 0.1},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"scheduler": "swarm", "stages": 2},
    "train": {
        **{"steps": 6, "batch": 24, "microbatch": 2, "lr": 1e-2},
        **{"eval_every": 3, "eval_batches": 1},
    },
}
SPEEDS = (2e6, 3e6, 3e6, 3e6, 2e6, 2e6)


def peer(name: str, flops: float, **more: Any) -> PeerSpec:
    return PeerSpec(name=name, hardware=Speeds.of_flops(flops, 1e-6), **more)


def six() -> list[PeerSpec]:
    return [peer(f"p{i}", speed) for i, speed in enumerate(SPEEDS)]


@pytest.fixture(scope="module")
def lab(laboratory: Callable[..., Any]) -> Any:
    return laboratory(Job.from_table(JOB))


def play(
    lab: Any, peers: list[PeerSpec], at: int = -1, dies: str = "", **tables: Any
) -> tuple[World, list[RunEvent], int]:
    """The world, its events, and how many of its records had a peer compute."""
    spec = RunSpec()
    spec.CopyFrom(lab.spec)
    job = Job.from_table(json.loads(spec.job) | tables)
    spec.job, spec.steps = job.to_json(), job.train.steps or 0
    world = lab.world(peers, log=False)
    monitor, also, computed = Monitor(world, tolerance=1e-5), world.observe, 0

    def observe(seen: Observed) -> None:
        nonlocal computed
        also(seen)
        if isinstance(seen.record, p.Compute):
            computed += 1
            if computed == at:
                world.kill(dies)

    world.observe = observe
    events = monitor.finish(world.submit(spec), 36000.0)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    return world, events, computed


def losses(events: list[RunEvent]) -> list[float]:
    return [e.step.outcome.loss for e in events if e.HasField("step")]


def plans(events: list[RunEvent]) -> list[Plan]:
    return [plan_from_proto(e.plan) for e in events if e.HasField("plan")]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_losses_and_weights_are_those_of_the_plain_loop(
    laboratory: Callable[..., Any], equal_training: Callable[..., None], schedule: str
) -> None:
    model = {**JOB["model"], "args": {**JOB["model"]["args"], "dropout": 0.0}}
    asked = {**JOB["plan"], "schedule": schedule}
    table = JOB | {"name": f"swarm {schedule}", "model": model, "plan": asked}
    lab = laboratory(Job.from_table(table))
    world = lab.world(six())
    run = world.submit(lab.spec)
    equal_training(lab.finish(world, run), lab.plain())
    plan = plans(world.events(run))[-1]
    assert [len(s.holders) for s in plan.stages] == [3, 3]
    assert len(set(plan.routes)) > 3, "not pipelines side by side"
    speed = dict(zip([f"p{i}" for i in range(6)], SPEEDS, strict=True))
    for k in range(2):
        done = Counter(route[k].peer for route in plan.routes)
        for a, b in itertools.permutations(done, 2):
            assert done[a] / speed[a] <= (done[b] + 1) / speed[b], "shares follow speeds"


@pytest.mark.slow
def test_a_holder_may_die_at_any_moment(lab: Any) -> None:
    """Its siblings do its microbatches; the losses are those of the world without a death."""
    _, calm, count = play(lab, six())
    for k in range(1, 6):
        _, events, _ = play(lab, six(), count * k // 6, f"p{k}")
        assert losses(events) == pytest.approx(losses(calm), rel=1e-5), k
        assert [e.step.step for e in events if e.HasField("step")] == list(range(6))
        after = plans(events)[-1]
        assert f"p{k}" not in after.peers
        assert [s.stop for s in after.stages] == [s.stop for s in plans(calm)[0].stages]


def test_a_stage_that_loses_all_its_holders_is_taken_by_one_of_another(lab: Any) -> None:
    few = [peer("p0", 1e6), peer("p1", 1e6), peer("p2", 1e6)]
    _, calm, count = play(lab, few)
    before = plans(calm)[0]
    alone = next(s.holders[0] for s in before.stages if len(s.holders) == 1)
    _, events, _ = play(lab, few, count // 2, alone)
    assert losses(events) == pytest.approx(losses(calm), rel=1e-5)
    after = plans(events)[-1]
    assert sorted(after.peers) == sorted({"p0", "p1", "p2"} - {alone})
    assert [s.stop for s in after.stages] == [s.stop for s in before.stages]


@pytest.mark.slow
def test_a_newcomer_joins_the_stage_that_carries_least_and_nobody_else_moves(lab: Any) -> None:
    train = {**JOB["train"], "steps": 150, "eval_every": 0}
    three = [peer("p0", 2e6), peer("p1", 1e6), peer("p2", 1e6)]
    _, calm, _ = play(lab, three, train=train)
    joined = [*three[:2], peer("p2", 1e6, joins_s=5.0)]
    _, events, _ = play(lab, joined, train=train)
    assert losses(events) == pytest.approx(losses(calm), rel=1e-4)
    first, last = plans(events)[0], plans(events)[-1]
    assert [s.stop for s in last.stages] == [s.stop for s in first.stages]
    slow = next(k for k, s in enumerate(first.stages) if s.holders == ("p1",))
    assert set(last.stages[slow].holders) == {"p1", "p2"}
    assert last.stages[1 - slow].holders == ("p0",)
    reasons = [e.state.reason.text for e in events if e.HasField("state")]
    assert any("faster for" in text for text in reasons)


@pytest.mark.slow
def test_the_simulation_verifies_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(
        """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = { layers = 2, width = 16, heads = 2, length = 8, dropout = 0.0 }
[data]
length = 8
[train]
steps = 5
batch = 12
microbatch = 1
[plan]
scheduler = "swarm"
stages = 2
"""
    )
    Path("home.toml").write_text(
        """
version = 1
job = "job.toml"
mode = "virtual"
[[peers]]
name = "a{1..3}"
place = "eu"
device = { flops = 1e9, memory_bandwidth = "1GB/s" }
[[peers]]
name = "b{1..2}"
place = "eu"
device = { flops = 3e9, memory_bandwidth = "3GB/s" }
[[faults]]
do = "kill"
who = ["b1"]
at_step = 2
"""
    )
    words = ["sim", "home.toml", "--verify", "--quiet", "--json", "out.json"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(Path("out.json").read_text())
    assert (result.exit_code, found["exit"], found["steps"]) == (0, 0, 5), result.output
    assert found["verified_against"] == "single process"
    assert found["max_loss_difference"] < 1e-5
