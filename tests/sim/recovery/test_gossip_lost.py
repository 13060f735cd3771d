"""Members of gossip are lost, and the broker too: what is committed is what a plain loop makes of
it, samples count once, and only the pair that lost somebody begins anew."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.broker.events import Publish
from shoal.broker.records.version_ledger import pairs_of
from shoal.job.rounds import GOSSIP
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import World
from shoal.tests.sim.played import ask
from shoal.tests.sim.played_rounds import Rounds, assert_same_versions, outcome, sites, sync_of

pytestmark = pytest.mark.usefixtures("plans_once", "masks_once")

TRAIN: dict[str, Any] = {"steps": 9, "eval_every": 6}
"""Three rounds: a pair and one alone, then all, then all."""
TABLES: dict[str, Any] = {"plan": {"replicas": 3, "stages": 1}, "train": TRAIN}
LARGE: dict[str, Any] = {
    "plan": {"replicas": 5, "stages": 1},
    "train": {"steps": 15, "batch": 40, "eval_every": 6},
}
FOUR = sites(1e7, 1e7, 1e7, 1e7)


@pytest.mark.parametrize(
    "method",
    ["saps", *(pytest.param(m, marks=pytest.mark.slow) for m in ("noloco", "random-pairs"))],
)
@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])
def test_a_member_dies_at_any_moment(rounds: Rounds, part: int, method: str) -> None:
    tables = TABLES | {"sync": sync_of(method)}
    rounds.play(FOUR, **tables)
    for at in rounds.moments(2, part, 4):
        name = f"p{at % 3}"
        world, run = rounds.play(FOUR, {at: name}, **tables)
        rounds.assert_expected(world, run, what=f"{name} at record {at}")


@pytest.mark.parametrize("method", ["saps", pytest.param("noloco", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 6))]
)
def test_a_holder_of_a_pipeline_dies_at_any_moment(rounds: Rounds, part: int, method: str) -> None:
    tables = TABLES | {"plan": {"replicas": 3, "stages": 2}, "sync": sync_of(method)}
    peers = sites(*[1e7] * 7)
    rounds.play(peers, **tables)
    for at in rounds.moments(2, part, 6):
        name = f"p{at % 6}"
        world, run = rounds.play(peers, {at: name}, **tables)
        rounds.assert_expected(world, run, what=f"{name} at record {at}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", GOSSIP)
def test_members_die_at_any_two_moments(rounds: Rounds, method: str) -> None:
    tables = LARGE | {"sync": sync_of(method)}
    peers = sites(*[1e7] * 7)
    rounds.play(peers, **tables)
    for deaths in rounds.two_deaths(20, 5):
        world, run = rounds.play(peers, deaths, **tables)
        rounds.assert_expected(world, run, what=deaths)


def test_other_pairs_stay_as_they_were_planned(rounds: Rounds) -> None:
    """Somebody dies as the pairs of the first round are told: its partner goes on alone."""
    gone: list[int] = []

    def die(world: World, seen: Observed) -> None:
        match seen.record:
            case Publish(run, event) if event.HasField("round_planned") and not gone:
                [first, *_] = event.round_planned.members
                gone.append(first.replica)
                record = world.broker.machine.runs[run].record
                world.kill(record.replicas[first.replica].peers[0])

    tables = TABLES | {"plan": {"replicas": 4, "stages": 1}, "train": LARGE["train"]}
    world, run = rounds.play(sites(*[1e7] * 4), also=die, **tables | {"sync": sync_of("ring")})
    done = next(e.round_done for e in world.events(run) if e.HasField("round_done"))
    attempts = {m.replica: m.attempt for m in done.members}
    assert attempts.keys() == {0, 1, 2, 3} - {*gone}
    assert sorted(attempts.values()) == [1, 1, 2]
    assert [len(pair) for pair in pairs_of(done.members)] == [2]
    rounds.assert_expected(world, run)


@pytest.mark.parametrize("share", [0.2, 0.45])
def test_a_run_is_paused_and_goes_on(rounds: Rounds, share: float) -> None:
    tables = TABLES | {"sync": sync_of("saps")}
    rounds.play(FOUR, **tables)
    at = rounds.moment(share)
    world, run = rounds.start(FOUR, **tables)
    world.until(lambda: rounds.records >= at, 600)
    ask(world, run, "pause")
    record = world.broker.machine.runs[run].record
    world.until(lambda: all(r.paused for r in record.replicas), 600)
    ask(world, run, "resume")
    rounds.monitor.finish(run, 3600.0)
    rounds.assert_expected(world, run)


@pytest.mark.slow
def test_the_broker_dies_behind_any_record_of_its_journal(rounds: Rounds) -> None:
    tables = TABLES | {"sync": sync_of("saps")}
    calm, run = rounds.play(FOUR[:3], **tables)
    wanted = calm.events(run)
    for number in range(1, rounds.written + 1, 4):
        world, run = rounds.play(FOUR[:3], also=rounds.broker_dies(number), **tables)
        rounds.assert_expected(world, run, what=f"record {number}")
        assert_same_versions(world.events(run), wanted, f"record {number}: {outcome(world, run)}")
