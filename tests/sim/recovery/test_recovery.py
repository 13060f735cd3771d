"""A holder dies, and the training is what it would have been (I1, I2).

The oracle is the same world without a death: losses, norms, evaluations and exported weights must
be the same, bit for bit, each step committed once. Deaths are numbered by the records of the world,
events and instructions, so that every moment has its number: each action of each phase, snapshots,
their copies on the way, hand-overs, and those of a recovery itself. A sample of them is tried here,
one of each kind with `-m slow`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.peer.core import events as p
from shoal.proto import broker_pb2
from shoal.proto.broker_pb2 import DONE, FAILED, RUNNING, WAITING
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.orders import Orders
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import Played, kind_of, sampled_by_kind

STEPS = 5
EVALUATED = {"eval_every": 2, "eval_batches": 1}
JOB: dict[str, Any] = {
    "version": 1,
    "name": "recovery",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.1},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"stages": 2},
    "train": {"steps": STEPS, "batch": 4, "microbatch": 2, "lr": 1e-2, **EVALUATED},
}
SAMPLE = 24


@dataclass
class Recovered(Played):
    """`begun`: the record at which the plan was there: a peer that a plan by hand names is waited
    for."""

    moments: list[tuple[str, str]] = field(default_factory=list)
    """Who did what at each record."""
    kinds: list[str] = field(default_factory=list)


class Lab:
    """Plays a job on p0 (stage 0), p1 (stage 1) and spares, again and again."""

    peers = 3
    job = JOB

    def __init__(self, laboratory: Any, **tables: Any) -> None:
        """`tables`: in place of the job's; they must not change the model."""
        self.laboratory = laboratory(Job.from_table(self.job))
        self.orders = Orders()
        n = len(self.laboratory.graph.operators)
        plan = self.plan_of(n)
        self.spec = broker_pb2.RunSpec()
        self.spec.CopyFrom(self.laboratory.spec)
        self.spec.plan.CopyFrom(plan_to_proto(plan))
        job = Job.from_table(json.loads(self.spec.job) | tables)
        self.spec.job, self.spec.steps = job.to_json(), job.train.steps or 0
        self.calm = self.play()
        assert self.calm.end.phase == DONE

    def plan_of(self, operators: int) -> Plan:
        p0, p1 = PeerId("p0"), PeerId("p1")
        middle = operators // 2
        slots = (StageSlot(0, middle, (p0,)), StageSlot(middle, operators, (p1,)))
        routes = ((Visit(0, p0), Visit(1, p1)),) * 2
        return Plan(slots, routes, 2, evaluation_routes=routes)

    def play(
        self,
        deaths: dict[int, str] | None = None,
        peers: int = 0,
        limit_s: float = 3600.0,
        damaged: str = "",
    ) -> Recovered:
        """deaths: by number of the record, who dies there; the own snapshots on another one's disk
        are `damaged` then."""
        peers = peers or self.peers
        world = self.laboratory.world(peers, log=False)
        world.orders = self.orders
        monitor = Monitor(world)
        world.until(lambda: len(world.broker.machine.members.pool) == peers)
        run = world.submit(self.spec)
        played = Recovered(world, run)
        also = world.observe

        def observe(seen: Observed) -> None:
            also(seen)
            if run not in world.broker.ended:
                played.records += 1
                if not played.begun and world.broker.alive:
                    played.begun = played.records * world.broker.machine.replica(run).record.term
                played.moments.append((seen.who, type(seen.record).__name__))
                played.kinds.append(kind_of(seen))
                if (name := (deaths or {}).get(played.records)) and world.peers[name].alive:
                    world.kill(name)
                    damage(world, damaged)

        world.observe = observe
        monitor.finish(run, limit_s)
        return played

    def assert_same(self, played: Recovered, where: str = "") -> None:
        played.assert_like(self.calm, where)


@pytest.fixture(scope="module")
def made(laboratory: Any, plans_once: None) -> Any:
    return partial(Lab, laboratory)


@pytest.fixture(scope="module")
def lab(made: Any) -> Lab:
    return made()


def damage(world: World, name: str) -> None:
    """One bit of each own snapshot that lies at a peer."""
    held = world.disks[name]._held if name else {}
    for parts in (parts for snapshot, parts in held.items() if snapshot.holder == name):
        spoilt = bytearray(parts[0])
        spoilt[-1] ^= 1
        parts[0] = memoryview(spoilt)


def sampled(played: Recovered, part: int, parts: int) -> range:
    """Every so manieth record, each part other ones."""
    every = max(parts, (played.records - played.begun) * parts // SAMPLE)
    return range(played.begun + part * every // parts, played.records, every)


@pytest.mark.parametrize("name", ["p0", "p1", "p2"])
def test_it_may_die_at_any_moment(lab: Lab, name: str) -> None:
    """p0 and p1 hold stages, p2 keeps their snapshots."""
    which = {"p0": 0, "p1": 1, "p2": 2}[name]
    for at in sampled(lab.calm, which, 3):
        lab.assert_same(lab.play({at: name}), f"{name} at {at} ({lab.calm.moments[at - 1]})")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["p0", "p1", "p2"])
def test_it_may_die_at_every_kind_of_moment(lab: Lab, name: str) -> None:
    """For each, 180 of about 800 moments: one of each kind."""
    begun = lab.calm.begun
    for i in sampled_by_kind(lab.calm.kinds[begun - 1 :], 1, turn=int(name[1])):
        at = begun + i
        lab.assert_same(lab.play({at: name}), f"{name} at {at} ({lab.calm.moments[at - 1]})")


@pytest.mark.parametrize("second", ["p0", "p2"])
def test_another_may_die_while_the_run_recovers(lab: Lab, second: str) -> None:
    """p1 dies in mid-run; then, at moments of the recovery, p0, or p2 which took p1's part."""
    first = lab.calm.records // 2
    once = lab.play({first: "p1"}, peers=5)
    assert "p2" in once.notes
    for at in range(first + 1, once.records, max(1, (once.records - first) // 5)):
        played = lab.play({first: "p1", at: second}, peers=5)
        lab.assert_same(played, f"{second} at {at} ({once.moments[at - 1]})")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("second", ["p0", "p2"])
def test_another_may_die_at_every_kind_of_moment_of_a_recovery(lab: Lab, second: str) -> None:
    """By turns: of about 700 moments, one of each kind at least."""
    first = lab.calm.records // 2
    once = lab.play({first: "p1"}, peers=5)
    for i in sampled_by_kind(once.kinds[first:-1], 300)[int(second[1]) // 2 :: 2]:
        at = first + 1 + i
        played = lab.play({first: "p1", at: second}, peers=5)
        lab.assert_same(played, f"{second} at {at} ({once.moments[at - 1]})")


def test_holders_and_keeper_at_once_go_back_to_the_starting_weights(lab: Lab) -> None:
    at = lab.calm.records * 2 // 3
    played = lab.play({at: "p0", at + 1: "p1", at + 2: "p2"}, peers=6)
    lab.assert_same(played)
    assert "from the starting weights" in played.notes


def test_a_damaged_snapshot_is_not_gone_on_from(lab: Lab) -> None:
    """p1 dies, and what p0 would go on from has a wrong bit: who keeps a copy goes on in its
    place."""
    at = lab.calm.records * 2 // 3
    assert "starting weights" not in lab.play({at: "p1"}, peers=5).notes
    played = lab.play({at: "p1"}, peers=5, damaged="p0")
    lab.assert_same(played)
    assert "has another hash" in played.notes
    assert "from the starting weights" not in played.notes


def test_without_enough_peers_it_pauses_and_goes_on_when_one_joins(lab: Lab) -> None:
    """p1 dies, and nobody is left to take its part: two stages on one peer are not asked for."""
    at = lab.calm.records // 2
    world = lab.laboratory.world(2, log=False)
    world.orders = lab.orders
    monitor = Monitor(world)
    run = world.submit(lab.spec)
    seen = 0

    def observe(record: Observed, also: Any = world.observe) -> None:
        nonlocal seen
        also(record)
        seen += 1
        if seen == at:
            world.kill("p1")

    world.observe = observe
    broker = world.broker.machine
    monitor.until(lambda: broker.runs[run].state.phase == RUNNING)
    monitor.until(lambda: broker.runs[run].state.phase == WAITING)
    world.after(60.0, lambda: world.join(PeerSpec(name="p9")))
    monitor.finish(run)
    played = Recovered(world, run)
    assert played.end.phase == DONE
    losses = [e.step.outcome.loss for e in played.events if e.HasField("step")]
    calm = [e.step.outcome.loss for e in lab.calm.events if e.HasField("step")]
    assert losses == pytest.approx(calm, rel=1e-5)  # another cut adds up in another order
    assert "needs 2 peers (2 stages), has 1 in the pool" in played.notes


def test_it_goes_on_after_everything_was_switched_off(lab: Lab) -> None:
    """The broker and every peer, in mid-run; later all start again with what is on their disks."""
    at = lab.calm.records * 3 // 4
    world = lab.laboratory.world(3, log=False)
    world.orders = lab.orders
    monitor = Monitor(world)
    run = world.submit(lab.spec)
    seen = 0

    def observe(record: Observed, also: Any = world.observe) -> None:
        nonlocal seen
        also(record)
        seen += 1
        if seen == at:
            for name in ("p0", "p1", "p2"):
                world.kill(name)
                again = PeerSpec(name=name)
                world.after(100.0, lambda again=again: world.join(again))
            world.restart_broker(90.0)

    world.observe = observe
    monitor.finish(run)
    played = Recovered(world, run)
    lab.assert_same(played)
    assert "going on at step" in played.notes
    assert "from the starting weights" not in played.notes


def test_a_run_that_shall_fail_when_it_is_short_does(made: Any) -> None:
    lab = made(recovery={"when_short": "fail"})
    played = lab.play({lab.calm.records // 2: "p1"}, peers=2)
    assert played.end.phase == FAILED
    assert "too few peers are left" in played.end.reason.text


def test_without_its_rungs_a_run_fails(made: Any) -> None:
    lab = made(recovery={"ladder": []})
    played = lab.play({lab.calm.records // 2: "p1"})
    assert played.end.phase == FAILED
    assert "its ladder has no checkpoint" in played.end.reason.text
    assert not any(what == p.TakeSnapshot.__name__ for _, what in played.moments)


@pytest.mark.parametrize(
    "codec",
    ["topk:ratio=4", "delta+topk:ratio=4", "int8"],
)
def test_codecs_with_a_memory_replay_the_same_bits(made: Any, codec: str) -> None:
    """States of both ends are in the snapshots: a lossy run is as exact as any."""
    lab = made(codec={"activation": codec, "activation_grad": codec})
    at = lab.calm.records // 2
    for name in ("p0", "p1"):
        played = lab.play({at: name})
        lab.assert_same(played, name)
        assert played.end.term == 2


def test_every_step_may_have_its_snapshot(made: Any) -> None:
    train = JOB["train"] | {"steps": 12}
    lab = made(recovery={"snapshot_every": 1}, train=train)
    taken = [m for m in lab.calm.moments if m[1] == "SnapshotTaken"]
    assert len(taken) >= 2 * 2  # an order and its answers take longer than a step here
    played = lab.play({lab.calm.records * 3 // 4: "p1"})
    lab.assert_same(played)
