"""Replicas that the planner forms, in the simulated world: how many there are, or whether there are
any, is decided once, and what they train is what plain loops of that many train."""

from __future__ import annotations

from typing import Any

from shoal.broker import events as b
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played_rounds import JOB, Rounds, sites


def formed(world: World, run: str) -> RunEvent:
    [event] = [e for e in world.events(run) if e.HasField("formed")]
    return event


def test_as_many_replicas_as_are_best(rounds: Rounds) -> None:
    world, run = rounds.play(sites(2e6, 2e6, 2e6), plan={"replicas": "auto"})
    told = formed(world, run).formed
    record = world.broker.machine.runs[b.RunId(run)].record
    assert [tuple(r.peers) for r in told.replicas] == [r.peers for r in record.replicas]
    assert len(told.replicas) == 3
    assert told.kind == "local"
    rounds.assert_expected(world, run)


def test_who_would_slow_a_round_stays_a_spare(rounds: Rounds) -> None:
    """A local step of the slow one takes longer than the others' round."""
    world, run = rounds.play(sites(4e6, 4e6, 1e4), plan={"replicas": "auto"})
    told = formed(world, run).formed
    assert [list(r.peers) for r in told.replicas] == [["p0"], ["p1"]]
    [spare] = told.left_out
    assert spare.peer == "p2"
    rounds.assert_expected(world, run)


def test_the_kind_that_is_recommended_is_taken(rounds: Rounds) -> None:
    """Computing takes most of the time, so replicas pay."""
    both: dict[str, Any] = {"plan": {"replicas": "auto"}, "sync": {"kind": "auto"}}
    world, run = rounds.play(sites(2e6, 2e6), **both)
    assert formed(world, run).formed.kind == "local"
    rounds.assert_expected(world, run)


def test_equal_weights_where_replicas_bring_nothing(laboratory: Any, equal_training: Any) -> None:
    """Exchanging takes longer than it saves: one plan, which trains what the plain loop does."""
    table = JOB | {"name": "equal", "sync": {"kind": "auto", "every": 3}, "plan": {}}
    lab = laboratory(Job.from_table(table))
    slow = [
        PeerSpec(name=f"p{i}", place=f"s{i}", flops_per_s=f, up=1e3, down=1e3)
        for i, f in enumerate((4e6, 1e6))
    ]
    world = lab.world(slow)
    run = world.submit(lab.spec)
    got = lab.finish(world, run)
    assert world.broker.ended[run].phase == DONE
    told = formed(world, run).formed
    assert told.kind == "allreduce"
    assert told.reasons[0].startswith("one replica with equal weights")
    assert world.broker.machine.runs[b.RunId(run)].record.rounds is None
    equal_training(got, lab.plain())
