"""A run goes on from a checkpoint, and is the run that it would have been.

The oracle is the same run without an interruption: losses, norms, evaluations and exported weights
must be the same, bit for bit, on other peers and over another cut too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shoal.broker import events as b
from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.proto.broker_pb2 import DONE, FAILED, RUNNING, WAITING, Checkpoint, RunEvent, RunSpec
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import ask

STEPS, EVERY = 6, 2
JOB: dict[str, Any] = {
    "version": 1,
    "name": "checkpoints",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.1},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"scheduler": "uniform", "stages": 2},
    "train": {"steps": STEPS, "batch": 4, "microbatch": 2, "lr": 1e-2, "eval_every": 2},
    "output": {"every": EVERY},
}
CODEC = {"activation": "delta+topk:ratio=4", "activation_grad": "delta+topk:ratio=4"}


class Lab:
    job = JOB

    def __init__(self, laboratory: Any) -> None:
        self.laboratory = laboratory(Job.from_table(self.job))

    def spec(self, resumed: Checkpoint | None = None, **tables: Any) -> RunSpec:
        spec = RunSpec()
        spec.CopyFrom(self.laboratory.spec)
        job = Job.from_table(json.loads(spec.job) | {"output": JOB["output"]} | tables)
        spec.job, spec.steps = job.to_json(), job.train.steps or 0
        if resumed is not None:
            spec.resumed.CopyFrom(resumed)
        return spec

    def world(self, peers: int | list[PeerSpec] = 3, saved: World | None = None) -> World:
        world: World = self.laboratory.world(peers, log=False, control_latency_s=0.001)
        if saved is not None:
            world.saved |= saved.saved
        return world


@pytest.fixture(scope="module")
def lab(laboratory: Callable[..., Any]) -> Lab:
    return Lab(laboratory)


@pytest.fixture(scope="module")
def calm(lab: Lab) -> World:
    world = lab.world()
    Monitor(world).finish(world.submit(lab.spec()), 3600.0)
    return world


PAUSED: dict[str, Any] = {"output": {}, "train": JOB["train"] | {"steps": 30}}


@pytest.fixture(scope="module")
def unpaused(lab: Lab) -> World:
    world = lab.world()
    world.finish(world.submit(lab.spec(**PAUSED)))
    return world


def only(world: World) -> str:
    (run,) = world.broker.ended
    return run


def steps(events: list[RunEvent], first: int = 0) -> list[tuple[Any, ...]]:
    done = [e.step for e in events if e.HasField("step") and e.step.step >= first]
    return [(s.step, s.outcome.SerializeToString(), s.evaluation.loss) for s in done]


def losses(events: list[RunEvent], first: int = 0) -> list[float]:
    done = [e.step for e in events if e.HasField("step") and e.step.step >= first]
    return [s.outcome.loss for s in done]


def weights(events: list[RunEvent], world: World) -> dict[str, bytes]:
    """By name, whoever exported them."""
    from safetensors import deserialize

    files = [f.blob.hash for e in events for f in e.weights.files]
    return {n: bytes(t["data"]) for f in files for n, t in deserialize(world.blobs[f])}


def checkpoints(events: list[RunEvent]) -> list[Checkpoint]:
    return [e.checkpoint for e in events if e.HasField("checkpoint")]


@pytest.mark.parametrize("share", [0.35, 0.5, 0.65, 0.8, 0.95])
@pytest.mark.parametrize("who", ["p1", "broker"])
def test_who_is_away_while_one_is_on_its_way_costs_no_hour(
    lab: Lab, who: str, share: float
) -> None:
    """A holder's stream breaks, or the broker starts again: another one is made in its place."""
    world, events = lab.world(), 0
    run = world.submit(lab.spec())
    monitor = Monitor(world)
    also = world.observe
    assert also is not None

    def observe(seen: Observed) -> None:
        nonlocal events
        also(seen)
        events += 1
        if events == int(share * 1868):  # of about as many
            breaks = world.restart_broker if who == "broker" else lambda: world.cut(who)
            world.after(0.0, breaks)

    world.observe = observe
    found = checkpoints(monitor.finish(run, 3600.0))
    assert events > share * 1868, "it ended before anything broke"
    assert world.now < 60.0
    made = [c.step for c in found]
    assert made[-1] == STEPS
    assert made == sorted(set(made)), "none is made twice"


def test_checkpoints_come_every_so_many_steps_and_at_the_end(calm: World) -> None:
    found = checkpoints(calm.events(only(calm)))
    assert [c.step for c in found] == [2, 4, 6]
    for checkpoint in found:
        assert [f.holder for f in checkpoint.files] == ["p0", "p1"]
        assert all(f.blob.hash in calm.saved for f in checkpoint.files)


def test_coded_snapshots_are_shorter_and_the_same(lab: Lab, calm: World) -> None:
    coded = {"codec": {"snapshot": "lossless"}}
    world = lab.world()
    Monitor(world).finish(world.submit(lab.spec(**coded)), 3600.0)
    events = world.events(only(world))
    assert steps(events) == steps(calm.events(only(calm)))
    (short,), (long,) = (
        [c for c in checkpoints(e) if c.step == 4] for e in (events, calm.events(only(calm)))
    )
    for coded_file, plain_file in zip(short.files, long.files, strict=True):
        assert coded_file.blob.size_bytes < 0.95 * plain_file.blob.size_bytes
    again = lab.world(saved=world)
    Monitor(again).finish(again.submit(lab.spec(short, **coded)), 3600.0)
    assert weights(again.events(only(again)), again) == weights(events, world)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("step", [2, 4])
def test_other_peers_go_on_from_it(lab: Lab, calm: World, stages: int, step: int) -> None:
    before = calm.events(only(calm))
    (found,) = (c for c in checkpoints(before) if c.step == step)
    peers = [PeerSpec(name=f"other-{i}") for i in range(stages + 1)]
    world = lab.world(peers, saved=calm)
    plan = {"scheduler": "uniform", "stages": stages}
    events = Monitor(world).finish(world.submit(lab.spec(found, plan=plan)), 3600.0)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    assert losses(events) == pytest.approx(losses(before, step), rel=1e-6)
    assert weights(events, world).keys() == weights(before, calm).keys()
    if stages == 2:  # other cuts add the parts of the norm in another order
        assert steps(events) == steps(before, step)
        assert weights(events, world) == weights(before, calm)


def test_what_goes_on_from_an_inexact_one_is_inexact(lab: Lab, calm: World) -> None:
    found = Checkpoint()
    found.CopyFrom(checkpoints(calm.events(only(calm)))[1])
    found.inexact_from = 3
    world = lab.world(saved=calm)
    events = Monitor(world).finish(world.submit(lab.spec(found)), 3600.0)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    assert events[-1].state.inexact_from == 3
    assert "not exact from step 3 on" in events[-1].state.reason.text
    assert {c.inexact_from for c in checkpoints(events)} == {3}


def test_codecs_go_on_with_what_they_held_back(lab: Lab) -> None:
    world = lab.world()
    tables = {"codec": CODEC, "train": JOB["train"] | {"eval_every": 0}}
    before = Monitor(world).finish(world.submit(lab.spec(**tables)), 3600.0)
    (found,) = (c for c in checkpoints(before) if c.step == 4)
    after = lab.world(saved=world)
    events = Monitor(after).finish(after.submit(lab.spec(found, **tables)), 3600.0)
    assert steps(events) == steps(before, 4)


def test_it_may_go_on_longer_and_otherwise(lab: Lab, calm: World) -> None:
    before = calm.events(only(calm))
    world = lab.world(saved=calm)
    train = JOB["train"] | {"steps": 9, "lr": 1e-3, "schedule": "constant", "warmup": 0}
    spec = lab.spec(checkpoints(before)[-1], train=train)
    events = Monitor(world).finish(world.submit(spec), 3600.0)
    assert [k for k, *_ in steps(events)] == [6, 7, 8]
    assert events[-1].state.step == 9
    assert {e.step.outcome.lr for e in events if e.HasField("step")} == {1e-3}


def test_without_any_snapshot_left_it_goes_back_to_the_last_one(lab: Lab, calm: World) -> None:
    """All peers and disks are gone; others come."""
    world = lab.world()
    run = world.submit(lab.spec())
    monitor = Monitor(world)
    world.until(lambda: len(checkpoints(world.events(run))) == 2)
    world.until(lambda: world.broker.machine.replica(run).record.committed >= 4)
    for name in ("p0", "p1", "p2"):
        world.kill(name)
    world.disks.clear()
    for i in range(3):
        world.join(PeerSpec(name=f"new-{i}"))
    events = monitor.finish(run, 3600.0)
    begun = [a.first_step for a in assigned(world)]
    assert begun[-1] == 4, "not from the starting weights"
    assert steps(events) == steps(calm.events(only(calm)))
    assert weights(events, world) == weights(calm.events(only(calm)), calm)


def assigned(world: World) -> list[broker_pb2.Assign]:
    parts = (p.machine.assignment for p in world.peers.values() if p.alive)
    return [part._assign for part in parts if part is not None]


def test_a_holder_that_dies_beside_it_leaves_no_half_checkpoint(lab: Lab, calm: World) -> None:
    world = lab.world()
    run = world.submit(lab.spec())
    monitor = Monitor(world)
    machine = world.broker.machine
    world.until(lambda: run in machine.runs and machine.replica(run).record.checkpoints.coming == 2)
    world.kill("p1")
    events = monitor.finish(run, 3600.0)
    assert events[-1].state.phase == DONE
    assert steps(events) == steps(calm.events(only(calm)))
    assert all(len(c.files) == 2 for c in checkpoints(events))
    assert [c.step for c in checkpoints(events)][-1] == STEPS


def test_checkpoints_outlive_the_broker(lab: Lab) -> None:
    world = lab.world()
    run = world.submit(lab.spec())
    world.until(lambda: len(checkpoints(world.events(run))) == 2)
    world.restart_broker()
    assert [c.step for c in world.broker.machine.replica(run).record.checkpoints.kept] == [2, 4]


def test_the_newest_are_kept(lab: Lab) -> None:
    world = lab.world()
    run = world.submit(lab.spec(output={"every": 1, "keep": 2}))
    world.finish(run)
    assert [c.step for c in world.broker.machine.replica(run).record.checkpoints.kept][-1] == STEPS
    assert len(world.broker.machine.replica(run).record.checkpoints.kept) == 2


def test_without_snapshots_there_are_checkpoints(lab: Lab) -> None:
    world = lab.world()
    run = world.submit(lab.spec(recovery={"ladder": ["checkpoint"]}))
    monitor = Monitor(world)
    world.until(lambda: len(checkpoints(world.events(run))) == 1)
    world.until(lambda: world.broker.machine.replica(run).record.committed >= 2)
    world.kill("p0")
    events = monitor.finish(run, 3600.0)
    assert [a.first_step for a in assigned(world)] == [2, 2]
    assert events[-1].state.phase == DONE
    assert [k for k, *_ in steps(events)] == list(range(STEPS))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: setattr(c, "step", STEPS), "train.steps is 6: expected more steps"),
        (lambda c: setattr(c, "term", 0), "no term"),
        (lambda c: setattr(c, "inexact_from", 9), "not exact from step 9 on: expected no later"),
        (lambda c: c.files.pop(), "every operator"),
        (
            lambda c: setattr(c.files[0].blob, "hash", "x"),
            "resumed.files[0] of the run has the hash",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    lab: Lab, calm: World, change: Callable[[Checkpoint], object], says: str
) -> None:
    found = Checkpoint()
    found.CopyFrom(checkpoints(calm.events(only(calm)))[0])
    change(found)
    spec = lab.spec(found)
    with pytest.raises(ValueError, match=says.replace("[", r"\[")):
        lab.world().submit(spec)


# ---------------------------------------------------------------- pauses


@pytest.mark.parametrize("restart", [False, True])
def test_a_paused_run_frees_its_peers_and_goes_on(lab: Lab, unpaused: World, restart: bool) -> None:
    world = lab.world()
    run = world.submit(lab.spec(**PAUSED))
    monitor = Monitor(world)
    world.until(lambda: len(steps(world.events(run))) == 2)
    assert isinstance(ask(world, run, "pause"), b.Answer)
    world.until(lambda: world.broker.machine.replica(run).record.paused)
    world.until(lambda: len(world.broker.machine.members.pool) == 3)
    if restart:
        world.restart_broker()
        world.until(lambda: len(world.broker.machine.members.pool) == 3)
    later = world.now + 60.0
    world.until(lambda: world.now > later)
    state = world.broker.machine.runs[run].state
    assert (state.phase, state.reason.code) == (WAITING, "paused")
    assert "shoal resume" in state.reason.text
    assert isinstance(ask(world, run, "resume"), b.Answer)
    events = monitor.finish(run, 3600.0)
    assert steps(events) == steps(unpaused.events(only(unpaused)))


@pytest.mark.parametrize("who", ["p0", "p1", "broker"])
def test_who_dies_as_soon_as_it_is_paused_or_before_costs_no_step(
    lab: Lab, unpaused: World, who: str
) -> None:
    """A holder dies in the moment in which the run is paused, whose copies lie elsewhere by then;
    or the broker dies between the question and the pause, which it has then all the same."""
    world = lab.world()
    run = world.submit(lab.spec(**PAUSED))
    monitor = Monitor(world)
    world.until(lambda: len(steps(world.events(run))) == 2)
    assert isinstance(ask(world, run, "pause"), b.Answer)
    assert not world.broker.machine.replica(run).record.paused
    if who == "broker":
        world.restart_broker(1.0)
    world.until(lambda: world.broker.alive and world.broker.machine.replica(run).record.paused)
    done = world.broker.machine.replica(run).record.committed
    assert 2 < done < 30
    if who != "broker":
        world.kill(who)
        world.join(PeerSpec(name="p9"))
    later = world.now + 60.0
    world.until(lambda: world.now > later)
    assert world.broker.machine.replica(run).record.paused
    assert isinstance(ask(world, run, "resume"), b.Answer)
    events = monitor.finish(run, 3600.0)
    assert assigned(world)[-1].first_step == done
    assert steps(events) == steps(unpaused.events(only(unpaused)))


def test_what_cannot_be_paused_or_resumed_says_so(lab: Lab, calm: World) -> None:
    done = only(calm)
    for wanted in ("pause", "resume"):
        answer = ask(calm, done, wanted)
        assert isinstance(answer, b.Reject)
        assert "is done" in answer.reason
    world = lab.world()
    run = world.submit(lab.spec(recovery={"ladder": ["checkpoint"]}))
    world.until(lambda: len(steps(world.events(run))) == 2)
    answer = ask(world, run, "pause")
    assert isinstance(answer, b.Reject)
    assert "recovery.ladder" in answer.reason
    assert world.broker.machine.replica(run).record.phase == RUNNING != FAILED
