"""Sums of rounds that are added up again before anything is committed: a wrong one that all got
alike is found with the share that is drawn, and nobody who is honest is ever left out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shoal.broker.events import Tell
from shoal.net.identity.receipts import another_sum, proves, read_receipt
from shoal.peer.core.events import AddAgain
from shoal.proto.broker_pb2 import LieProved, RoundDone
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.identities import check_named
from shoal.sim.virtual.world import World
from shoal.tests.sim.lying_devices import Lie, devices
from shoal.tests.sim.played_rounds import Rounds, outcome, sites

pytestmark = pytest.mark.usefixtures("plans_once")

THREE = sites(1e7, 1e7, 1e7)
FIRST = 1
"""The first round with a lie."""


def tables(audit: float, **sync: Any) -> dict[str, Any]:
    return {
        "plan": {"replicas": 3, "stages": 1},
        "train": {"steps": 6, "eval_every": 0},
        "sync": {"kind": "local", "every": 3, "audit": audit, **sync},
    }


@pytest.fixture(autouse=True)
def _all_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.broker.policies.segments.UNDIVIDED", 64)


def done_of(world: World, run: str) -> list[RoundDone]:
    return [e.round_done for e in world.events(run) if e.HasField("round_done")]


def lies_of(world: World, run: str) -> list[LieProved]:
    return [e.lie for e in world.events(run) if e.HasField("lie")]


def members(world: World, run: str) -> list[list[int]]:
    return [[m.replica for m in d.members] for d in done_of(world, run)]


def assert_sum_is_wrong(found: LieProved, adder: str) -> None:
    """The log tells who signed what: others have signed another sum of the same contributions."""
    by, said = read_receipt(found.first, check_named)
    assert (by, found.peer, found.HasField("second")) == (adder, adder, False)
    told = [read_receipt(s, check_named) for s in found.sums]
    assert len({(r.hash, r.heard) for _, r in told}) == 1
    assert len({by for by, _ in told}) == len(told) > 1
    assert all(other != adder and another_sum(said, r) for other, r in told)


@pytest.mark.parametrize(
    "sync",
    [
        {"audit": 1.0},
        pytest.param({"audit": 1.0, "method": "sparse-loco"}, marks=pytest.mark.slow),
        pytest.param({"audit": 0.0}, marks=pytest.mark.slow),
    ],
    ids=["diloco", "side by side", "off"],
)
def test_where_all_are_honest_all_is_as_without(rounds: Rounds, sync: dict[str, Any]) -> None:
    """Though every segment is added up again, or none is."""
    again = list[str]()

    def look(world: World, seen: Observed) -> None:
        match seen.record:
            case AddAgain():
                again.append(seen.who)

    world, run = rounds.play(THREE, signs=True, device=devices(), also=look, **tables(**sync))
    assert world.broker.ended[run].reason.text == "6 steps are done", outcome(world, run)
    assert {d.attempt for d in done_of(world, run)} == {1}
    assert not [e.note for e in world.events(run) if e.note]
    assert not lies_of(world, run)
    assert bool(again) == bool(sync["audit"])
    rounds.assert_expected(world, run)


def test_a_wrong_sum_for_all_alike_is_found_where_it_is_added_up_again(rounds: Rounds) -> None:
    """It is in no version, and who signed it is out for good."""
    lie = Lie("p1", "wrong", first=FIRST)
    world, run = rounds.play(THREE, signs=True, device=devices(lie), **tables(1.0))
    assert lie.told
    [found] = lies_of(world, run)
    assert found.round == FIRST
    assert_sum_is_wrong(found, "p1")
    inside = members(world, run)
    assert inside == [[0, 1, 2]] * FIRST + [[0, 2]] * (len(inside) - FIRST)
    rounds.assert_expected(world, run)


def test_who_says_that_right_sums_are_wrong_is_left_out(rounds: Rounds) -> None:
    lie = Lie("p1", "accuses", first=FIRST)
    world, run = rounds.play(THREE, signs=True, device=devices(lie), **tables(1.0))
    assert lie.told
    assert not lies_of(world, run)
    inside = members(world, run)
    assert all({0, 2} <= set(m) for m in inside), outcome(world, run)
    assert not all(1 in m for m in inside)
    rounds.assert_expected(world, run)


@pytest.mark.slow
def test_who_gives_others_than_before_to_be_added_up_again_has_signed_both(rounds: Rounds) -> None:
    lie = Lie("p1", "again", first=FIRST)
    world, run = rounds.play(THREE, signs=True, device=devices(lie), **tables(1.0))
    assert lie.told
    [found] = lies_of(world, run)
    assert proves(found.first, found.second, check_named) == "p1" == found.peer
    assert all({0, 2} <= set(m) for m in members(world, run)), outcome(world, run)
    rounds.assert_expected(world, run)


@pytest.mark.parametrize("kind", ["hides", pytest.param("mute", marks=pytest.mark.slow)])
def test_who_does_not_help_is_to_blame_and_no_honest_one(rounds: Rounds, kind: str) -> None:
    lie = Lie("p1", kind, first=FIRST)
    world, run = rounds.play(THREE, signs=True, device=devices(lie), **tables(1.0))
    assert lie.told
    assert not lies_of(world, run)
    assert all({0, 2} <= set(m) for m in members(world, run)), outcome(world, run)
    rounds.assert_expected(world, run)


def test_a_broker_that_starts_again_meanwhile_has_another_attempt_made(rounds: Rounds) -> None:
    begun = list[bool]()

    def restart(world: World, seen: Observed) -> None:
        match seen.record:
            case Tell(message=message) if message.HasField("round_audit") and not begun:
                begun.append(True)
                world.after(0.0, lambda: world.restart_broker(1.0))

    world, run = rounds.play(THREE, signs=True, device=devices(), also=restart, **tables(1.0))
    assert begun
    assert next(d.attempt for d in done_of(world, run)) == 2
    assert world.broker.ended[run].reason.text == "6 steps are done", outcome(world, run)
    rounds.assert_expected(world, run)


@pytest.mark.slow
def test_random_liars_leave_by_chance_and_nobody_else_does(rounds: Rounds) -> None:
    """Half of the segments are drawn: of four liars, each with a wrong sum a round for four rounds,
    two or more are never found once in 50 times."""
    found, seeds, longer = 0, range(4), {**tables(0.5), "train": {"steps": 15, "eval_every": 0}}
    for seed in seeds:
        who = random.Random(seed).choice([1, 2])  # the first adds up a segment without parts
        lie = Lie(f"p{who}", "wrong", first=FIRST)
        world, run = rounds.play(THREE, signs=True, device=devices(lie), seed=seed, **longer)
        assert lie.told
        lies = lies_of(world, run)
        assert {one.peer for one in lies} <= {lie.who}
        found += len(lies)
        honest = {0, 1, 2} - {who}
        assert all(honest <= set(m) for m in members(world, run)), outcome(world, run)
    assert found >= 3
