"""Replicas that go on with local steps while a round is exchanged, in the simulated world, against
plain loops that are fed with what was committed."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.broker import events as b
from shoal.proto.broker_pb2 import RoundWork
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played_rounds import Rounds, outcome, sites


def sync(overlap: int | str, method: str = "diloco", **more: Any) -> dict[str, Any]:
    return {"method": method, "options": {"overlap": overlap}, **more}


def begun(world: World, run: str) -> list[list[RoundWork]]:
    return [list(e.round_begun.work) for e in world.events(run) if e.HasField("round_begun")]


@pytest.mark.parametrize("method", ["diloco", "average"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_version_is_that_of_a_plain_loop(rounds: Rounds, replicas: int, method: str) -> None:
    train = {"steps": 11, "eval_every": 0}
    world, run = rounds.play(
        sites(*[1e9] * replicas), sync=sync(2, method), plan={"replicas": replicas}, train=train
    )
    rounds.assert_expected(world, run)
    found = begun(world, run)
    assert [[(w.late, w.steps, w.ahead) for w in works] for works in found] == [
        [(0, 3, 2)] * replicas,
        [(2, 3, 2)] * replicas,
        [(2, 3, 0)] * replicas,  # the last round has two steps, which are not all ahead
        [(0, 2, 0)] * replicas,
    ]


def test_what_is_ahead_follows_the_speed_of_a_replica(rounds: Rounds) -> None:
    world, run = rounds.play(sites(2e7, 6e7), sync=sync(4, every=6), train={"steps": 24})
    rounds.assert_expected(world, run)
    ahead = {w.replica: w.ahead for w in begun(world, run)[1]}
    assert ahead[1] >= 2 * ahead[0] > 0


def test_pipelines_of_other_cuts_land_in_one_step(rounds: Rounds) -> None:
    weak = [PeerSpec(name=f"p{i}", place="home", memory_bytes=200_000) for i in range(2)]
    strong = PeerSpec(name="q", place="rack", memory_bytes=1 << 30)
    world, run = rounds.play([*weak, strong], sync=sync(2))
    replicas = world.broker.machine.runs[b.RunId(run)].record.replicas
    assert [len(r.plan.stages) for r in replicas if r.plan] == [2, 1]
    rounds.assert_expected(world, run)


def test_evaluations_are_of_versions_while_steps_go_on(rounds: Rounds) -> None:
    found = []
    for overlap in (0, 2):
        world, run = rounds.play(sites(1e9, 1e9), sync=sync(overlap))
        rounds.assert_expected(world, run)
        told = [e.evaluated for e in world.events(run) if e.HasField("evaluated")]
        assert [e.step for e in told] == [3, 6, 8]
        found.append(told[0].evaluation.loss)
    assert found[0] == found[1]  # nothing came late before the first one


def test_without_overlap_nothing_changes(rounds: Rounds) -> None:
    one, other = (
        rounds.play(sites(1e9, 1e9), sync={"method": "diloco", "options": options})
        for options in ({}, {"overlap": 0})
    )
    hashes = [
        [e.round_done.hash for e in w.events(run) if e.HasField("round_done")]
        for w, run in (one, other)
    ]
    assert hashes[0] == hashes[1]
    assert outcome(*one) == outcome(*other)


def test_by_itself_it_is_as_long_as_the_last_exchange_was(rounds: Rounds) -> None:
    world, run = rounds.play(
        sites(1e7, 1e7), sync=sync("auto", every=6), train={"steps": 24, "eval_every": 0}
    )
    rounds.assert_expected(world, run)
    ahead = [works[0].ahead for works in begun(world, run)]
    assert ahead[0] == ahead[-1] == 0
    assert all(0 < n <= 3 for n in ahead[1:-1])
