"""Replicas that train apart and meet in rounds, in the simulated world: through broker and peers,
against plain loops in torch that are fed with what was committed."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.broker import events as b
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played_rounds import LOCAL, Rounds, sites, sync_of


@pytest.mark.parametrize("method", LOCAL)
def test_the_version_is_that_of_a_plain_loop(rounds: Rounds, method: str) -> None:
    sync = sync_of(method)
    world, run = rounds.play(sites(1e9, 1e9, 1e9), sync=sync, plan={"replicas": 3})
    rounds.assert_expected(world, run)


@pytest.mark.parametrize("method", ["sparse-loco", "sparse-loco both ways"])
def test_over_two_stages_the_same_numbers_are_the_largest(rounds: Rounds, method: str) -> None:
    peers = [PeerSpec(name=f"p{i}", place=f"s{i // 2}") for i in range(4)]
    plan = {"replicas": 2, "stages": 2}
    world, run = rounds.play(peers, sync=sync_of(method), plan=plan)
    replicas = world.broker.machine.runs[b.RunId(run)].record.replicas
    assert [len(r.plan.stages) for r in replicas if r.plan] == [2, 2]
    rounds.assert_expected(world, run)


def test_who_is_faster_makes_more_steps_of_a_round(rounds: Rounds) -> None:
    world, run = rounds.play(sites(2e7, 6e7))
    begun = [e.round_begun for e in world.events(run) if e.HasField("round_begun")]
    steps = {w.replica: w.steps for w in begun[1].work}
    assert steps[1] >= 2 * steps[0]
    assert sum(steps.values()) == 6  # three of the run's, in two halves
    rounds.assert_expected(world, run)


def test_an_evaluation_is_waited_for_and_is_no_exchange(rounds: Rounds) -> None:
    """With it rounds take longer by what it takes; what is called exchange is what it was."""
    found = []
    for every in (0, 3):
        train = {"steps": 12, "eval_every": every, "eval_batches": 2}
        world, run = rounds.play(sites(2e7, 6e7), train=train)
        found.append([e.round_done for e in world.events(run) if e.HasField("round_done")])
    for plain, evaluated in zip(*found, strict=True):
        assert 0 < plain.exchange_s < plain.seconds
        assert evaluated.exchange_s == pytest.approx(plain.exchange_s, rel=0.01)
    assert found[1][1].seconds > found[0][1].seconds + 0.05


def test_what_is_said_at_the_end_are_the_steps_of_the_run(rounds: Rounds) -> None:
    """Each replica makes another number of steps by itself."""
    world, run = rounds.play(sites(2e7, 6e7))
    own = Counter(e.replica for e in world.events(run) if e.HasField("step"))
    state = [e.state for e in world.events(run) if e.HasField("state")][-1]
    assert state.step == rounds.job.train.steps == 8
    assert 8 not in own.values()
    assert state.reason.text == "8 steps are done"


def test_a_pipeline_of_weak_peers_stands_beside_a_strong_one(rounds: Rounds) -> None:
    """One replica is cut into two stages, the other is whole: their versions have one hash."""
    weak = [PeerSpec(name=f"p{i}", place="home", memory_bytes=140_000) for i in range(2)]
    strong = PeerSpec(name="q", place="rack", memory_bytes=1 << 30)
    world, run = rounds.play([*weak, strong])
    replicas = world.broker.machine.runs[b.RunId(run)].record.replicas
    assert [len(r.plan.stages) for r in replicas if r.plan] == [2, 1]
    rounds.assert_expected(world, run)


def test_evaluations_are_of_versions(rounds: Rounds) -> None:
    world, run = rounds.play(sites(1e9, 1e9))
    found = [e.evaluated for e in world.events(run) if e.HasField("evaluated")]
    assert [e.step for e in found] == [3, 6, 8]
    losses = [e.evaluation.loss for e in found]
    assert losses == sorted(losses, reverse=True)
