"""Runs that a rule ends before their length does (`train.stop`), in the simulated world: the first
steps of a plain loop, and its weights; also when a peer is lost, or the broker starts again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from shoal.client.models import models
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain import oracle
from shoal.tests.sim.played_rounds import Rounds, sites
from shoal.tests.sim.recovery.test_recovery import JOB

STEPS = 40


@pytest.fixture(scope="module")
def lab(laboratory: Callable[..., Any]) -> Any:
    args = {**JOB["model"]["args"], "dropout": 0.0}
    train = {**JOB["train"], "steps": STEPS, "eval_every": 3}
    model = {**JOB["model"], "args": args}
    return laboratory(Job.from_table({**JOB, "name": "stops", "model": model, "train": train}))


def run_of(lab: Any, stop: dict[str, Any], hurt: str = "") -> tuple[Any, Any, int]:
    """Play the job with this rule. `hurt`: behind the event that it ends by, the peer of this name
    is lost, or the "broker" starts again. Returns what came out, its events, and the number of
    steps that were done by that event."""
    n = len(lab.graph.operators)
    p0, p1 = PeerId("p0"), PeerId("p1")
    slots = (StageSlot(0, n // 2, (p0,)), StageSlot(n // 2, n, (p1,)))
    routes = ((Visit(0, p0), Visit(1, p1)),) * 2
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(lab.spec)
    spec.plan.CopyFrom(plan_to_proto(Plan(slots, routes, 2, evaluation_routes=routes)))
    table = json.loads(spec.job)
    table["train"] |= {"stop": stop}
    spec.job = Job.from_table(table).to_json()
    world = lab.world(3)
    Monitor(world)
    world.until(lambda: len(world.broker.machine.members.pool) == 3)
    run, done, checks = world.submit(spec), list[int](), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if done or not world.broker.alive:
            return
        record = world.broker.machine.runs[run].record
        if record.stop.why:
            done.append(record.replicas[0].committed)
            if hurt == "broker":
                world.after(0.0, lambda: world.restart_broker(1.0))
            elif hurt:
                world.kill(hurt)

    world.observe = observe
    got = lab.finish(world, run)
    return got, world.events(run), done[0] if done else STEPS


def assert_first_steps(lab: Any, got: Any, equal_training: Any) -> None:
    module, train, reader = copy.deepcopy(lab.module), lab.job.train, lab.reader()
    with models.ready(module, lab.job):
        seen = oracle.train(
            module,
            lambda step, m: reader.batch(step, m, train.microbatch_size),
            train,
            steps=len(got.losses),
            microbatches=train.microbatches,
            lasting=STEPS,
        )
    got.weights = {k: t for k, t in got.weights.items() if k in module.state_dict()}
    wanted = copy.copy(got)
    wanted.losses, wanted.weights = seen.losses, dict(module.state_dict())
    equal_training(got, wanted)


@pytest.mark.parametrize(
    "hurt",
    ["", *(pytest.param(h, marks=pytest.mark.slow) for h in ("broker", "p0", "p1"))],
)
def test_it_ends_soon_behind_the_evaluation_with_the_weights_of_then(
    lab: Any, hurt: str, equal_training: Any
) -> None:
    got, events, done = run_of(lab, {"no_better_for": 2, "loss": 5.6}, hurt)
    last = [e.state for e in events if e.HasField("state")][-1]
    weights = [e.weights for e in events if e.HasField("weights")][-1]
    assert len(got.losses) == last.step == last.steps == weights.step
    if hurt == "broker":  # without it peers go on, here to the end
        assert done < last.steps <= STEPS
    else:
        assert done < last.steps < STEPS, "some steps behind it, and long before the end"
        assert [e.finishing.step for e in events if e.HasField("finishing")] == [last.steps]
        assert any("it ends: " in e.note and "train.stop" in e.note for e in events)
    assert_first_steps(lab, got, equal_training)


def test_a_rule_that_finds_nothing_changes_nothing(lab: Any) -> None:
    got, events, _ = run_of(lab, {"loss": 0.0, "no_better_for": STEPS, "time": "100d"})
    assert len(got.losses) == STEPS
    assert not any(e.HasField("finishing") for e in events)


def test_a_run_in_rounds_ends_with_the_round_under_way(rounds: Rounds) -> None:
    train = {"steps": 30, "eval_every": 3, "eval_batches": 2, "stop": {"loss": 5.7}}
    world, run = rounds.play(sites(1e9, 1e9), train=train)
    events = world.events(run)
    kinds = [e.WhichOneof("kind") for e in events]
    assert kinds.count("finishing") == 1
    found = [
        e.evaluated.evaluation.loss
        for e in events[: kinds.index("finishing")]
        if e.HasField("evaluated")
    ]
    assert found[-1] <= 5.7
    assert all(loss > 5.7 for loss in found[:-1])
    assert kinds.count("round_done") < 30 // 3
    rounds.assert_expected(world, run)
