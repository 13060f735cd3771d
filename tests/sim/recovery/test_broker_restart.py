"""The broker dies in the middle of everything, and nobody's training is any different (I10).

The oracle is the same world without a death: losses, norms and exported weights must be the same,
bit for bit, each step committed once, and events numbered without a gap.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.broker.events import MakePlan, Persist, Started
from shoal.broker.validate import validate
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.orders import Orders
from shoal.tests.sim.played import Played, ask

JOB = Job.from_table(
    {
        "version": 1,
        "name": "restart",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 8},
        "train": {"steps": 4, "batch": 4, "microbatch": 2, "lr": 1e-2, "eval_every": 2},
    }
)
POINTS = 120


@dataclass
class Restarted(Played):
    brokers: list[int] = field(default_factory=list)
    """The numbers of the broker's own records."""
    starts: list[int] = field(default_factory=list)
    """The numbers of the first records of the processes that came after the first one."""

    @property
    def story(self) -> list[bytes]:
        """Every event without its times and those of its peers."""
        found = []
        for event in self.events:
            kept = RunEvent()
            kept.CopyFrom(event)
            kept.at_s = 0.0
            if kept.HasField("step"):
                kept.step.seconds = 0.0
            found.append(kept.SerializeToString(deterministic=True))
        return found


class Lab:
    """Plays the job again and again; what is a function of its arguments is worked out once."""

    def __init__(self, laboratory: Any) -> None:
        self.laboratory = laboratory(JOB)
        self.orders = Orders()
        n = len(self.laboratory.graph.operators)
        p0, p1 = PeerId("p0"), PeerId("p1")
        slots = (StageSlot(0, n // 2, (p0,)), StageSlot(n // 2, n, (p1,)))
        plan = Plan(slots, ((Visit(0, p0), Visit(1, p1)),) * 2, 2)
        self.spec = broker_pb2.RunSpec()
        self.spec.CopyFrom(self.laboratory.spec)
        self.spec.plan.CopyFrom(plan_to_proto(plan))
        self.calm = self.play()
        assert self.calm.end.phase == DONE

    def play(self, *kill_at: int, away_s: float = 1.0, **options: Any) -> Restarted:
        """The broker dies at the records with these numbers, counted from the submission on."""
        world = self.laboratory.world(2, log=False, **options)
        world.orders = self.orders
        monitor = Monitor(world)
        world.until(lambda: len(world.broker.machine.members.pool) == 2)
        run = world.submit(self.spec)
        played = Restarted(world, run)
        also = world.observe

        def observe(seen: Observed) -> None:
            also(seen)
            if run not in world.broker.ended:
                played.records += 1
                if seen.who == BROKER:
                    played.brokers.append(played.records)
                if isinstance(seen.record, Started):
                    played.starts.append(played.records)
                if played.records in kill_at:
                    world.restart_broker(away_s)

        world.observe = observe
        monitor.finish(run)
        return played

    def assert_same(self, played: Restarted, where: str = "") -> None:
        played.assert_like(self.calm, where)
        numbers = [e.number for e in played.events]
        assert numbers == list(range(len(numbers))), f"{where}: gaps in {numbers}"


@pytest.fixture(scope="module")
def lab(laboratory: Any, plans_once: None) -> Lab:
    return Lab(laboratory)


def test_clients_see_the_same_events_when_it_dies_while_training(lab: Lab) -> None:
    first = next(i for i, e in enumerate(lab.calm.events) if e.HasField("step"))
    at = lab.calm.records * 2 // 3
    played = lab.play(at)
    assert played.world.broker.machine.decided.starts == 2
    assert 0 < first < len(played.story)
    assert played.story == lab.calm.story


@pytest.mark.parametrize(
    "part", [pytest.param(k, marks=pytest.mark.slow) if k % 2 else k for k in range(8)]
)
def test_it_may_die_at_any_moment(lab: Lab, part: int) -> None:
    """Before each event that it handles and each instruction that it carries out, and at evenly
    spaced moments of everybody else's."""
    count = lab.calm.records
    moments = {1 + i * count // POINTS for i in range(POINTS)} | set(lab.calm.brokers)
    for at in sorted(moments)[part::8]:
        lab.assert_same(lab.play(at), f"killed at record {at} of {count}")


@pytest.mark.parametrize("away_s", [0.0, 1.0])
def test_it_may_die_again_as_it_begins(lab: Lab, away_s: float) -> None:
    """Before the process that came after a death handles its first event, and before it carries out
    the first instructions: also where it comes at once, so that nothing happens in between."""
    brokers = lab.calm.brokers
    for at in (brokers[0], brokers[len(brokers) // 2], brokers[-1]):
        first = lab.play(at, away_s=away_s).starts[0]
        for again in range(first, first + 3):
            where = f"killed at records {at} and {again}, away for {away_s} s"
            played = lab.play(at, again, away_s=away_s)
            lab.assert_same(played, where)
            assert len(played.starts) == 2, where


def test_a_process_that_dies_before_it_wrote_down_an_end_tells_nobody(lab: Lab) -> None:
    """The end of a run that was interrupted too often, which its third process decides."""
    world, lives = lab.laboratory.world(2, log=False), 1
    monitor = Monitor(world)
    world.until(lambda: len(world.broker.machine.members.pool) == 2)
    run = world.submit(lab.laboratory.spec)
    also = world.observe

    def observe(seen: Observed) -> None:
        nonlocal lives
        also(seen)
        lives += isinstance(seen.record, Started)
        if isinstance(seen.record, {1: MakePlan, 2: MakePlan, 3: Persist}.get(lives, ())):
            world.restart_broker()

    world.observe = observe
    monitor.finish(run)
    assert lives == 4, "the process that wrote it down tells it"
    assert "ended 2 times while it planned" in world.broker.ended[run].reason.text


@pytest.mark.parametrize(("at", "again"), [(424, 580)])
def test_two_deaths_that_were_wrong_once(lab: Lab, at: int, again: int) -> None:
    """By the count of records at that time, the second one as the process began."""
    lab.assert_same(lab.play(at, again), f"killed at records {at} and {again}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_it_may_die_at_every_moment_and_once_more_later(lab: Lab, part: int) -> None:
    """Three thousand worlds: each moment alone, and with a second death in the same breath, soon,
    when all is well again, or as the next process begins."""
    count = lab.calm.records
    for at in range(1 + part, count, 20):
        alone = lab.play(at)
        lab.assert_same(alone, f"killed at record {at} of {count}")
        spans = ((1, 10), (10, 100), (100, 400))
        for again in (
            *(at + least + (at * 7919) % (most - least) for least, most in spans),
            alone.starts[0],
        ):
            lab.assert_same(lab.play(at, again), f"killed at records {at} and {again} of {count}")


def test_a_holder_that_does_not_come_back_within_a_lease_is_lost(lab: Lab) -> None:
    world = lab.laboratory.world(2, log=False)
    monitor = Monitor(world)
    run = world.submit(lab.spec)
    monitor.until(lambda: any(e.HasField("step") for e in world.events(run)))
    world.restart_broker()
    world.kill("p1")
    restarted = world.now + 1.0
    monitor.finish(run)
    text = "p1 did not come back within a lease of 10 s"
    noticed = next(e for e in world.events(run) if text in e.state.reason.text)
    assert noticed.state.reason.code == "lost"
    lease_s = world.broker.machine.options.lease_s
    assert noticed.at_s - restarted == pytest.approx(lease_s, abs=0.1)
    assert world.broker.ended[run].phase == DONE  # on the peer that is left
    world.until(lambda: len(world.broker.machine.members.pool) == 1)


def test_a_peer_that_came_back_as_another_process_has_lost_its_part(lab: Lab) -> None:
    world = lab.laboratory.world(2, log=False)
    monitor = Monitor(world)
    run = world.submit(lab.spec)
    monitor.until(lambda: any(e.HasField("step") for e in world.events(run)))
    spec = world.peers["p1"].spec
    world.restart_broker()
    world.kill("p1")
    world.join(spec)
    monitor.finish(run)
    reasons = [e.state.reason.text for e in world.events(run)]
    assert any("it came back without the run" in text for text in reasons)
    assert world.broker.ended[run].phase == DONE


def test_who_kept_copies_keeps_them_and_takes_over(lab: Lab) -> None:
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(lab.spec)
    job = json.loads(spec.job)
    job["train"] |= {"steps": 60, "eval_every": 0}
    job["recovery"] = {"snapshot_every": 1}
    spec.job, spec.steps = Job.from_table(job).to_json(), 60
    world = lab.laboratory.world(3, log=False)
    monitor = Monitor(world)
    run = world.submit(spec)

    def keeps() -> bool:
        machine = world.broker.machine
        member = machine.members.members.get("p2")
        return member is not None and member.state == "assigned" and run in machine.runs

    monitor.until(lambda: keeps() and world.broker.machine.replica(run).record.committed > 2)
    world.restart_broker(0.1)
    monitor.until(lambda: world.broker.machine.decided.starts == 2)
    monitor.until(lambda: len(world.broker.machine.members.members) == 3)
    assert keeps(), "it is in the pool"
    assert world.broker.machine.replica(run).record.term == 1
    back = world.broker.machine.replica(run)
    assert back is not None
    at = back.record.committed
    monitor.until(
        lambda: (back.snapshots.cadence.whole or 0) > at
    )  # a set that was taken since then
    world.kill("p0")
    monitor.finish(run)
    text = "\n".join(e.state.reason.text for e in world.events(run))
    assert "stage 0 -> p2 (warm)" in text
    assert world.broker.ended[run].phase == DONE


def test_a_peer_comes_back_with_what_it_does_and_not_with_what_it_kept_before(lab: Lab) -> None:
    """It kept copies for one run, and holds a stage of another now."""

    def spec_of(steps: int, name: str) -> broker_pb2.RunSpec:
        spec = broker_pb2.RunSpec()
        spec.CopyFrom(lab.spec)
        job = json.loads(spec.job)
        job["train"] |= {"steps": steps, "eval_every": 0}
        spec.job, spec.steps, spec.name = Job.from_table(job).to_json(), steps, name
        return spec

    def stepped(run: str) -> bool:
        known = world.broker.machine.replica(run).record
        return known.running and known.committed > 2

    world = lab.laboratory.world(3, log=False)
    alone, operators = PeerId("p2"), len(lab.laboratory.graph.operators)
    plan = Plan((StageSlot(0, operators, (alone,)),), ((Visit(0, alone),),) * 2, 2)
    spec = spec_of(250, "its own")
    spec.plan.CopyFrom(plan_to_proto(plan))
    own = world.submit(spec)
    world.until(lambda: stepped(own))
    ask(world, own, "pause")
    world.until(lambda: len(world.broker.machine.members.pool) == 3)
    kept = world.submit(spec_of(250, "kept"))
    world.until(lambda: stepped(kept))
    assert world.broker.machine.replica(kept).record.plan.warm == ("p2",)
    ask(world, own, "resume")
    world.until(lambda: stepped(own))
    assert world.broker.machine.replica(kept).record.plan.warm == ("p2",), "the plan still names it"
    term = world.broker.machine.replica(own).record.term
    world.restart_broker(0.1)
    world.until(lambda: world.broker.machine.decided.starts == 2)
    world.until(lambda: len(world.broker.machine.members.members) == 3)
    validate(world.broker.machine)
    world.until(lambda: {own, kept} <= world.broker.ended.keys())
    validate(world.broker.machine)
    assert world.broker.ended[own].phase == DONE
    assert world.broker.ended[own].term == term, "it lost nobody"


def test_a_broker_that_is_away_for_long_finds_the_run_trained(lab: Lab) -> None:
    played = lab.play(lab.calm.records // 2, away_s=600.0)
    lab.assert_same(played)


def test_runs_after_a_restart_have_ids_of_their_own(lab: Lab) -> None:
    played = lab.play(lab.calm.records // 2)
    world = played.world
    again = world.submit(lab.spec)
    assert again != played.run
    assert world.finish(again)[-1].state.phase == DONE


def test_the_same_death_gives_the_same_world_i6(lab: Lab) -> None:
    at = lab.calm.records // 2
    first, second = lab.play(at), lab.play(at)
    assert [e.SerializeToString() for e in first.events] == [
        e.SerializeToString() for e in second.events
    ]
    assert first.world.broker.journal == second.world.broker.journal
