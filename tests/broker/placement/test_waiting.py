"""A run that waits: for peers, for memory, for its turn."""

from __future__ import annotations

import pytest

from shoal.broker.events import (
    MakePlan,
    PlanFailed,
    PlanReady,
)
from shoal.proto.broker_pb2 import (
    BUILDING,
    FAILED,
    WAITING,
)
from shoal.proto.graph_pb2 import CORE


def test_a_run_waits_for_peers_and_says_for_how_many(world) -> None:
    run, _ = world.submit(world.spec(plan={"stages": 3}))
    assert "needs 3 peers (3 stages), has 0 in the pool" in world.state(run).reason.text
    world.join("a")
    assert "has 1 in the pool" in world.state(run).reason.text


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_a_run_is_planned_over_peers_in_the_order_of_joining(world, order: str) -> None:
    world.submit(world.spec(plan={"stages": 3}))
    out = [world.join(peer) for peer in order]
    assert [o.peer for o in world.only(out[-1], MakePlan).peers] == [*order]


def test_runs_get_peers_by_priority_then_first_come(world) -> None:
    first, _ = world.submit()
    second, _ = world.submit(world.spec(priority=1))
    third, _ = world.submit(world.spec(priority=1))
    ask = world.only(world.join("a"), MakePlan)
    assert ask.replica == second
    assert world.state(third).reason.text == f"waits behind run {second} (priority 1)"
    assert world.state(first).reason.text == f"waits behind run {second} (priority 1)"


def test_a_run_that_lacks_peers_altogether_is_overtaken_and_one_that_waits_is_not(world) -> None:
    world.start("a", recovery={"warm_spares": 0})
    world.join("b")
    big, _ = world.submit(world.spec(plan={"stages": 3}))
    small, out = world.submit()
    assert world.only(out, MakePlan).replica == small  # there are no three peers: nobody knows when
    world.cancel(small)
    world.cancel(big)
    middle, _ = world.submit(world.spec(plan={"stages": 2}))
    small, out = world.submit()
    assert not [i for i in out if isinstance(i, MakePlan)]
    assert f"waits behind run {middle}" in world.state(small).reason.text


def test_a_stale_plan_is_dropped_and_asked_for_again(world) -> None:
    world.join("a")
    world.join("b")
    run, out = world.submit()
    old = world.only(out, MakePlan)
    world.close("b")
    out = world.handle(PlanReady(run, old.version, world.plan("a", "b")))
    again = world.only(out, MakePlan)
    assert again.version > old.version
    assert [o.peer for o in again.peers] == ["a"]
    # The first answer, once more, is nobody's.
    out = world.handle(PlanReady(run, old.version, world.plan("a")))
    assert not [i for i in out if isinstance(i, MakePlan)]
    world.handle(PlanReady(run, again.version, world.plan("a")))
    assert world.state(run).phase == BUILDING


def test_a_newer_incarnation_is_not_the_peer_that_was_planned(world) -> None:
    world.join("a", counter=1)
    run, out = world.submit()
    world.join("a", counter=2)
    out = world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a")))
    assert world.only(out, MakePlan)
    assert world.state(run).phase == WAITING


def test_a_plan_that_lacks_only_unused_peers_stands(world) -> None:
    world.join("a")
    world.join("b")
    run, out = world.submit()
    world.close("b")
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a")))
    assert world.state(run).phase == BUILDING


NEEDS = "needs 2 GiB more: the model needs 3 GiB, the 1 stage offers 1 GiB"


def lacking(world, run, out, short_bytes=2 << 30):
    """The answer of a planner that found too little memory."""
    version = world.only(out, MakePlan).version
    return world.handle(PlanFailed(run, version, NEEDS, "memory", short_bytes))


@pytest.mark.parametrize("code", ["model", "plan", "internal"])
def test_no_plan_ends_the_run_when_no_peer_could_change_that(world, code) -> None:
    world.join("a")
    run, out = world.submit()
    world.handle(PlanFailed(run, world.only(out, MakePlan).version, "no such planner", code))
    assert world.state(run).phase == FAILED
    assert world.state(run).reason.text == "no such planner"


def test_a_run_that_shall_not_wait_ends_when_memory_is_short(world) -> None:
    world.join("a")
    run, out = world.submit(world.spec(recovery={"when_short": "fail"}))
    lacking(world, run, out)
    assert (world.state(run).phase, world.state(run).reason.text) == (FAILED, NEEDS)


def test_a_run_waits_for_memory_and_says_how_much_more(world) -> None:
    world.join("a")
    run, out = world.submit()
    out = lacking(world, run, out)
    assert world.state(run).phase == WAITING
    assert world.state(run).reason.text == NEEDS
    assert not [i for i in out if isinstance(i, MakePlan)], "the same peers have the same memory"
    world.close("a")
    ask = world.only(world.join("a", counter=2), MakePlan)  # it may offer more now
    lacking(world, run, [ask])
    ask = world.only(world.join("b"), MakePlan)
    assert [o.peer for o in ask.peers] == ["a", "b"]


def test_a_run_that_lacks_memory_waits_for_peers_that_work_elsewhere(world) -> None:
    busy = world.start("a", "b", recovery={"warm_spares": 0})
    world.join("c")
    run, out = world.submit()
    out = lacking(world, run, out)
    assert world.state(run).reason.text == f"{NEEDS}; 2 more peers work for other runs"
    # They have the memory, so nobody overtakes it.
    behind, out = world.submit()
    assert not [i for i in out if isinstance(i, MakePlan)]
    assert "waits behind" in world.state(behind).reason.text
    assert not [i for i in world.cancel(busy) if isinstance(i, MakePlan)], "not free yet"
    out = world.drained("a", busy)
    ask = world.only(out, MakePlan)
    assert (ask.replica, [o.peer for o in ask.peers]) == (run, ["a", "c"])


def test_a_run_that_lacks_more_memory_than_there_is_is_overtaken(world) -> None:
    world.start("a", recovery={"warm_spares": 0})
    world.join("b")
    run, out = world.submit(world.spec(priority=5))
    small, _ = world.submit()
    assert "waits behind" in world.state(small).reason.text
    out = lacking(world, run, out, short_bytes=9 << 30)
    assert world.only(out, MakePlan).replica == small
    assert world.state(run).reason.text.startswith(NEEDS)


def test_core_peers_are_not_offered_to_a_run_without_a_core_graph(world) -> None:
    world.join("a", operator_set=CORE)
    run, out = world.submit()
    assert not [i for i in out if isinstance(i, MakePlan)]
    assert "brings no core graph" in world.state(run).reason.text


def test_a_hand_written_plan_waits_for_its_peers_by_id_or_name(world) -> None:
    spec = world.spec()
    spec.plan.microbatch_size = 2
    for name in ("one", "b"):
        spec.plan.stages.add(start=0, stop=1, holders=[name])
    for _ in range(2):
        spec.plan.routes.add()
    run, _ = world.submit(spec)
    world.join("c")
    assert "one has not joined; b has not joined" in world.state(run).reason.text
    world.join("a", name="one")
    assert world.state(run).reason.text == "its plan needs 2 peers, has 1 of them: b has not joined"
    ask = world.only(world.join("b"), MakePlan)
    assert [o.peer for o in ask.peers] == ["a", "b"]
    world.join("x", name="one")  # ambiguous from now on, but the plan was asked before
    world.handle(PlanReady(run, ask.version, world.plan("a", "b")))
    assert world.state(run).phase == BUILDING
