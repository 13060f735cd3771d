"""Runs that a rule ends before their length does (`train.stop`), in the simulated world: the first
steps of a plain loop, and its weights; also when a peer is lost, or the broker starts again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.client.models import models
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.job.training import Stop
from shoal.proto import broker_pb2
from shoal.proto.broker_pb2 import DONE, RUNNING, RunEvent
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain import oracle
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.clients.test_federated_world import assert_expected, job_of, world_of
from shoal.tests.sim.played_rounds import Rounds, sites, sync_of
from shoal.tests.sim.recovery.test_recovery import JOB

STEPS = 40


@pytest.fixture(scope="module")
def lab(laboratory: Callable[..., Any]) -> Any:
    args = {**JOB["model"]["args"], "dropout": 0.0}
    # AdamW makes whole steps of gradients that are rounding alone, but for an eps above them.
    train = {**JOB["train"], "steps": STEPS, "eval_every": 3, "eps": 1e-4}
    model = {**JOB["model"], "args": args}
    return laboratory(Job.from_table({**JOB, "name": "stops", "model": model, "train": train}))


def run_of(
    lab: Any, stop: dict[str, Any], hurt: str = "", flops_per_s: float = 50e9
) -> tuple[Any, Any, int]:
    """Play the job with this rule on peers of such a speed. `hurt`: behind the event that it ends
    by, the peer of this name is lost, or the "broker" starts again. Returns what came out, its
    events, and the number of steps that were done by that event."""
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
    world = lab.world([PeerSpec(name=f"p{i}", flops_per_s=flops_per_s) for i in range(3)])
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


CALM = {"loss": 0.0, "no_better_for": STEPS, "time": "100d"}


@pytest.fixture(scope="module")
def calm(lab: Any) -> list[RunEvent]:
    """The events of the job with a rule that finds nothing."""
    got, events, _ = run_of(lab, CALM)
    assert len(got.losses) == STEPS
    assert not any(e.HasField("finishing") for e in events)
    return list(events)


def assert_ended(lab: Any, got: Any, events: Any, done: int, equal_training: Any) -> None:
    """It ended soon behind `done` steps, as the first steps of a plain loop."""
    last = [e.state for e in events if e.HasField("state")][-1]
    weights = [e.weights for e in events if e.HasField("weights")][-1]
    assert len(got.losses) == last.step == last.steps == weights.step
    assert done < last.steps < STEPS, "some steps behind it, and long before the end"
    assert [e.finishing.step for e in events if e.HasField("finishing")] == [last.steps]
    assert sum("it ends: " in e.note and "train.stop" in e.note for e in events) == 1
    assert_first_steps(lab, got, equal_training)


@pytest.mark.parametrize(
    ("hurt", "flops_per_s"),
    [
        ("", 50e9),
        ("broker", 1e4),  # its steps take four minutes, those of others milliseconds
        *(pytest.param(h, 50e9, marks=pytest.mark.slow) for h in ("p0", "p1")),
        pytest.param("broker", 1e5, marks=pytest.mark.slow),
    ],
)
def test_it_ends_soon_behind_the_evaluation_with_the_weights_of_then(
    lab: Any, hurt: str, flops_per_s: float, equal_training: Any
) -> None:
    got, events, done = run_of(lab, {"no_better_for": 2, "loss": 5.6}, hurt, flops_per_s)
    assert done == 3, "the first evaluation"
    assert_ended(lab, got, events, done, equal_training)


@pytest.mark.slow
def test_without_the_broker_peers_go_on_and_it_ends_as_soon_as_it_is_there(
    lab: Any, equal_training: Any
) -> None:
    got, events, done = run_of(lab, {"no_better_for": 2, "loss": 5.6}, "broker")
    assert done < len(got.losses) == STEPS, "they are through before it is"
    assert [e.state for e in events if e.HasField("state")][-1].phase == DONE
    assert_first_steps(lab, got, equal_training)


@pytest.mark.parametrize("hurt", ["", *(pytest.param(h, marks=pytest.mark.slow) for h in ("p0",))])
def test_its_time_is_over_behind_the_first_step_that_ends_later(
    lab: Any, calm: list[RunEvent], hurt: str, equal_training: Any
) -> None:
    began = next(e.at_s for e in calm if e.HasField("state") and e.state.phase == RUNNING)
    lasted = [e.at_s - began for e in calm if e.HasField("step")]
    wanted = (lasted[4] + lasted[5]) / 2
    got, events, done = run_of(lab, {"time": f"{wanted:.9f}s"}, hurt)
    assert done == 6
    assert_ended(lab, got, events, done, equal_training)


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


@pytest.mark.parametrize(
    ("stop", "method"),
    [
        ({"loss": 5.6}, "noloco"),
        *(
            pytest.param(stop, method, marks=pytest.mark.slow)
            for stop, method in (
                ({"time": "1s"}, "noloco"),
                ({"no_better_for": 1, "loss": 5.6}, "saps"),
                ({"time": "1s"}, "streaming-diloco"),
                ({"loss": 5.6}, "sparse-loco"),
            )
        ),
    ],
)
def test_so_does_one_of_any_method(rounds: Rounds, stop: dict[str, Any], method: str) -> None:
    train = {"steps": 90, "batch": 24, "eval_every": 3, "eval_batches": 1, "stop": stop}
    sync = sync_of(method) | ({"every": 6} if method == "streaming-diloco" else {})
    world, run = rounds.play(sites(*[1e7] * 4), train=train, sync=sync, plan={"replicas": 4})
    kinds = [e.WhichOneof("kind") for e in world.events(run)]
    found = kinds.index("finishing")
    assert kinds.count("finishing") == 1
    assert kinds.count("round_done") <= kinds[:found].count("round_done") + 2 < 90 // 3
    rounds.assert_expected(world, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "hurt"),
    [({"loss": 1.08}, ""), ({"time": "0.2s"}, ""), ({"loss": 1.08}, "broker")],
)
def test_so_does_one_of_clients(
    laboratory: Callable[..., Any], tmp_path: Path, stop: dict[str, Any], hurt: str
) -> None:
    job = job_of(tmp_path, "fedavg", rounds=20)
    train = replace(job.train, eval_every=1, stop=Stop(**stop))
    lab = laboratory(replace(job, name=f"clients that stop {stop}", train=train))
    world = world_of(lab)
    run, checks, away = world.submit(lab.spec), world.observe, list[str]()

    def observe(seen: Any) -> None:
        checks(seen)
        alive = world.broker.alive
        if hurt and alive and not away and world.broker.machine.runs[run].record.stop.why:
            away.append(run)
            world.after(0.0, lambda: world.restart_broker(1.0))

    world.observe = observe
    world.finish(run)
    kinds = [e.WhichOneof("kind") for e in world.events(run)]
    found = kinds.index("finishing")
    assert kinds.count("round_done") <= kinds[:found].count("round_done") + 2 < 20
    assert_expected(lab, world, run)
