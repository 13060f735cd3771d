"""Members are lost while steps of the next round go on, and the broker too: what is committed is
what a plain loop makes of it, samples count once, versions are equal (I2, I11)."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.dag.plan.action import Kind
from shoal.peer.core.events import Compute
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import World
from shoal.tests.sim.played import ask
from shoal.tests.sim.played_rounds import Rounds, assert_same_versions, outcome, sites

pytestmark = pytest.mark.usefixtures("plans_once")

SYNC: dict[str, Any] = {"every": 4, "options": {"overlap": 3}}
TABLES: dict[str, Any] = {
    "plan": {"replicas": 3, "stages": 1},
    "train": {"steps": 14},
    "sync": SYNC,
}
FOUR = sites(1e7, 1e7, 1e7, 1e7)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 12))]
)
def test_a_member_dies_at_any_moment(rounds: Rounds, part: int) -> None:
    rounds.play(FOUR, **TABLES)
    for at in rounds.moments(3, part, 12):
        name = f"p{at % 3}"
        world, run = rounds.play(FOUR, {at: name}, **TABLES)
        rounds.assert_expected(world, run, what=f"{name} at record {at}")


@pytest.mark.parametrize("kind", [Kind.CONTRIBUTE, Kind.EXCHANGE, Kind.APPLY, Kind.LAND, Kind.SHOW])
def test_a_stage_of_a_pipeline_is_lost_between_contribution_and_landing(
    rounds: Rounds, kind: Kind
) -> None:
    """A keeper takes its part, or the replica takes the version from the other one."""
    tables = TABLES | {"plan": {"replicas": 2, "stages": 2}}
    peers, dead = sites(*[1e7] * 6), []

    def die(world: World, seen: Observed) -> None:
        match seen.record:
            case Compute(step=1, action=action) if action.kind is kind and not dead:
                dead.append(seen.who)
                world.after(0.0, lambda: world.kill(seen.who))

    world, run = rounds.play(peers, also=die, **tables)
    assert dead
    rounds.assert_expected(world, run)


@pytest.mark.slow
def test_the_broker_dies_behind_records_of_its_journal(rounds: Rounds) -> None:
    calm, run = rounds.play(FOUR[:3], **TABLES)
    wanted = calm.events(run)
    for number in range(13, rounds.written + 1, 3):
        world, run = rounds.play(FOUR[:3], also=rounds.broker_dies(number), **TABLES)
        rounds.assert_expected(world, run, what=f"record {number}")
        assert_same_versions(world.events(run), wanted, f"record {number}: {outcome(world, run)}")


def test_a_run_is_paused_while_steps_are_ahead_and_goes_on(rounds: Rounds) -> None:
    world, run = rounds.start(FOUR, **TABLES)
    world.until(lambda: any(e.round_planned.round == 1 for e in world.events(run)), 600)
    ask(world, run, "pause")
    record = world.broker.machine.runs[run].record  # type: ignore[index]
    world.until(lambda: all(r.paused for r in record.replicas), 600)
    ask(world, run, "resume")
    rounds.monitor.finish(run, 3600.0)
    rounds.assert_expected(world, run)


def test_who_comes_late_takes_the_version_and_is_ahead_from_then_on(rounds: Rounds) -> None:
    """In place of one that is gone."""
    world, run = rounds.start(FOUR[:3], **TABLES | {"train": {"steps": 60}})
    world.until(lambda: any(e.round_done.round == 1 for e in world.events(run)), 600)
    world.kill(world.broker.machine.runs[run].record.replicas[2].peers[0])
    world.until(lambda: any(e.round_done.round == 3 for e in world.events(run)), 600)
    world.join(FOUR[3])
    rounds.monitor.finish(run, 3600.0)
    rounds.assert_expected(world, run)
    begun = [e.round_begun for e in world.events(run) if e.HasField("round_begun")]
    late = [w.late for r in begun for w in r.work if w.replica == 2 and w.term > 1]
    assert late[0] == 0 < late[1]
