"""Lies in rounds of peers that sign what they give: proved, or claimed without receipts, and who is
honest keeps its place. What is committed is what honest ones make of it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.broker.events import Publish
from shoal.net.identity.receipts import proves
from shoal.peer.core.events import ShowReceipts
from shoal.proto.broker_pb2 import LieProved, RoundDone
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.identities import check_named
from shoal.sim.virtual.world import World
from shoal.tests.sim.lying_devices import Lie, devices
from shoal.tests.sim.played_rounds import Rounds, outcome, sites, sync_of

pytestmark = pytest.mark.usefixtures("plans_once")

TABLES: dict[str, Any] = {"plan": {"replicas": 3, "stages": 1}, "train": {"steps": 12}}
THREE = sites(1e7, 1e7, 1e7)
FIRST = 1
"""The first round with a lie."""


@pytest.fixture(autouse=True)
def _all_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.broker.policies.segments.UNDIVIDED", 64)


def done_of(world: World, run: str) -> list[RoundDone]:
    return [e.round_done for e in world.events(run) if e.HasField("round_done")]


def lies_of(world: World, run: str) -> list[LieProved]:
    return [e.lie for e in world.events(run) if e.HasField("lie")]


@pytest.mark.parametrize("method", ["diloco", "saps"])
def test_where_all_are_honest_nobody_is_asked(rounds: Rounds, method: str) -> None:
    sync = sync_of(method)
    world, run = rounds.play(THREE, signs=True, device=devices(), sync=sync, **TABLES)
    assert world.broker.ended[run].reason.text == "12 steps are done", outcome(world, run)
    assert {d.attempt for d in done_of(world, run)} == {1}
    assert not [e.note for e in world.events(run) if e.note]
    assert not lies_of(world, run)
    if method != "saps":
        rounds.assert_expected(world, run)


@pytest.mark.parametrize("kind", ["sums", "gifts"])
def test_who_signs_two_things_leaves_with_the_proof_in_the_log(rounds: Rounds, kind: str) -> None:
    """Which anybody checks; and it is out for good, though the broker starts again."""
    lie = Lie("p1", kind, ["p2"], first=FIRST)

    def restart(world: World, seen: Observed) -> None:
        match seen.record:
            case Publish(event=event) if event.HasField("lie"):
                world.after(1.0, lambda: world.restart_broker(1.0))

    world, run = rounds.play(THREE, signs=True, device=devices(lie), also=restart, **TABLES)
    [found] = lies_of(world, run)
    assert lie.told
    assert (found.round, found.peer) == (FIRST, "p1")
    assert proves(found.first, found.second, check_named) == "p1"
    inside = [[m.replica for m in d.members] for d in done_of(world, run)]
    assert inside == [[0, 1, 2]] * FIRST + [[0, 2]] * (len(inside) - FIRST)
    assert not any(d.joined for d in done_of(world, run))
    at = next(i for i, e in enumerate(world.events(run)) if e.HasField("lie"))
    plans = [e.plan for e in world.events(run)[at:] if e.HasField("plan")]
    assert not any("p1" in s.holders for plan in plans for s in plan.stages)
    rounds.assert_expected(world, run)


@pytest.mark.parametrize("kind", ["got", "heard"])
def test_who_claims_what_it_cannot_show_is_left_out(rounds: Rounds, kind: str) -> None:
    lie = Lie("p1", kind, first=FIRST)
    world, run = rounds.play(THREE, signs=True, device=devices(lie), **TABLES)
    assert lie.told
    assert not lies_of(world, run)
    done = done_of(world, run)
    assert [(d.attempt, [m.replica for m in d.members]) for d in done][FIRST] == (2, [0, 2])
    assert all({0, 2} <= {m.replica for m in d.members} for d in done), outcome(world, run)
    assert not any(1 in [m.replica for m in d.members] for d in done[FIRST:])
    rounds.assert_expected(world, run)


def test_where_claims_are_too_many_for_a_message_there_are_none(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is asked for receipts."""
    monkeypatch.setattr("shoal.broker.rounds.exchange.MOST_CLAIMS", 8)
    asked = list[str]()

    def look(world: World, seen: Observed) -> None:
        match seen.record:
            case ShowReceipts():
                asked.append(seen.who)

    lie = Lie("p1", "sums", ["p2"], first=FIRST)
    world, run = rounds.play(THREE, signs=True, device=devices(lie), also=look, **TABLES)
    assert lie.told
    assert not asked
    assert not lies_of(world, run)
    done = done_of(world, run)
    assert len({d.hash for d in done}) == len(done)


@pytest.mark.parametrize("kind", ["empty", "another's"])
def test_without_receipts_it_is_a_dispute_and_the_honest_ones_stay(
    rounds: Rounds, kind: str
) -> None:
    lie = Lie("p1", kind, ["p2"], first=FIRST)
    world, run = rounds.play(THREE, signs=True, device=devices(lie), **TABLES)
    assert lie.told
    assert not lies_of(world, run)
    done = done_of(world, run)
    assert all({0, 2} <= {m.replica for m in d.members} for d in done), outcome(world, run)
    rounds.assert_expected(world, run)
