"""Peers that their owners keep out of runs: members that are given nothing."""

from __future__ import annotations

from typing import Any

from shoal.broker.events import DescribeAsked, MakePlan, PlanReady
from shoal.proto.broker_pb2 import Availability, Goodbye, RunState
from shoal.proto.common_pb2 import Reason

PAUSED = Reason(code="paused", text="its owner has paused it")


def state_of(world: Any, peer: str) -> tuple[str, str]:
    (answer,) = (i.message for i in world.handle(DescribeAsked(world.request())))
    (found,) = (p for p in answer.peers if p.peer == peer)
    return found.membership, found.closed.text


def opening(world: Any, peer: str, closed: Reason | None = None) -> list[Any]:
    return world.say(peer, availability=Availability(closed=closed))


def reason(state: RunState) -> str:
    return state.reason.text


def test_a_resting_peer_is_not_planned_with_until_it_is_open_again(world) -> None:
    world.join("a")
    opening(world, "a", PAUSED)
    assert state_of(world, "a") == ("resting", "its owner has paused it")
    run, out = world.submit()
    assert not [i for i in out if isinstance(i, MakePlan)]
    assert reason(world.state(run)) == (
        "needs 1 peer, has 0 in the pool; 1 more rests: its owner has paused it"
    )
    ask = world.only(opening(world, "a"), MakePlan)
    assert [o.peer for o in ask.peers] == ["a"]
    assert state_of(world, "a") == ("pool", "")


def test_a_plan_for_a_peer_that_closed_meanwhile_is_made_again(world) -> None:
    world.join("a")
    world.join("b")
    run, out = world.submit()
    ask = world.only(out, MakePlan)
    opening(world, "a", PAUSED)
    again = world.only(world.handle(PlanReady(run, ask.version, world.plan("a"))), MakePlan)
    assert [o.peer for o in again.peers] == ["b"]


def test_a_holder_that_is_closed_holds_until_it_leaves_and_then_rests(world) -> None:
    run = world.start("a", "b")
    opening(world, "a", PAUSED)
    assert state_of(world, "a")[0] == "assigned"
    world.report("a", run, 0)
    world.say("a", goodbye=Goodbye(reason=PAUSED))
    hello = world.join("a", closed=PAUSED)
    assert world.kinds(hello, "a") == ["welcome"]
    assert state_of(world, "a") == ("resting", "its owner has paused it")


def test_closed_while_its_run_ended_it_rests_once_it_is_clean(world) -> None:
    run = world.start("a")
    opening(world, "a", PAUSED)
    world.cancel(run)
    assert state_of(world, "a")[0] == "draining"
    world.drained("a", run)
    assert state_of(world, "a")[0] == "resting"


def test_links_of_a_resting_peer_are_not_measured(make_world) -> None:
    world = make_world(probe_s=5.0)
    world.join("a", closed=PAUSED)
    out = world.join("b")
    assert "probe" not in world.kinds(out, "a") + world.kinds(out, "b")
    assert "probe" in world.kinds(opening(world, "a"), "a")
