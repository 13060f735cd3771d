"""A pause that somebody asked for: it stands until it is done, or somebody takes it back."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from shoal.broker.events import Answer, RunAsked, Tell
from shoal.proto.broker_pb2 import (
    BUILDING,
    DONE,
    EXPORTING,
    RUNNING,
    WAITING,
    Heartbeat,
    Holding,
    Ready,
    Snapshot,
    SnapshotReport,
    Span,
)

STEPS = 500


def ask(world: Any, run: str, wanted: Any) -> Any:
    request = world.request()
    out = world.handle(RunAsked(request, run, wanted))
    return world.only(out, Answer).message


def step(world: Any, run: str, number: int, *peers: str, term: int = 1) -> list[Any]:
    return [i for p in peers for i in world.report(p, run, number, term=term)]


def lies(world: Any, run: str, number: int, holder: str, *at: str, term: int = 1) -> list[Any]:
    """The snapshot of a holder, a or b, lies at these."""
    start = "ab".index(holder)
    snapshot = Snapshot(run=run, term=term, step=number, holder=holder)
    snapshot.spans.append(Span(start=start, stop=start + 1))
    report = SnapshotReport(snapshot=snapshot, held=True)
    return [i for p in at for i in world.say(p, snapshot=report)]


def held(out: list[Any]) -> int:
    """The step that nobody begins, as peers were last told."""
    orders = [i.message.snapshot for i in out if isinstance(i, Tell)]
    return next(o.hold for o in reversed(orders) if o.run)


def beat(world: Any, seconds: int, *peers: str) -> list[Any]:
    out: list[Any] = []
    for _ in range(seconds):
        out += world.wait(1)
        for peer in peers:
            out += world.say(peer, heartbeat=Heartbeat())
    return out


def is_paused(world: Any, run: str) -> bool:
    state = world.state(run)
    return (state.phase, state.reason.code, state.pausing) == (WAITING, "paused", False)


@pytest.fixture
def asked(world: Any) -> tuple[Any, str]:
    """A run on a and b, with c beside them that keeps copies; one step is done."""
    world.join("c")
    run = world.start("a", "b", steps=STEPS)
    assert world.machine.replica(run).record.plan.warm == ("c",)
    step(world, run, 0, "a", "b")
    state = ask(world, run, "pause")
    assert (state.phase, state.pausing, state.reason.code) == (RUNNING, True, "pausing")
    return world, run


def test_it_waits_for_the_copies_so_that_a_loss_costs_no_step(asked: Any) -> None:
    world, run = asked
    hold = world.machine.replica(run).snapshots.on_hold
    assert hold > 1
    for number in range(1, hold):
        step(world, run, number, "a", "b")
    for holder in "ab":
        lies(world, run, hold, holder, holder)
    assert world.state(run).phase == RUNNING, "a's lies at a alone"
    lies(world, run, hold, "a", "c")
    assert world.state(run).phase == RUNNING
    lies(world, run, hold, "b", "c")
    assert is_paused(world, run)
    assert world.state(run).reason.text.startswith(f"paused with {hold} steps: `shoal resume")
    for peer in "abc":
        world.drained(peer, run)
    world.close("a")
    world.join("d")
    found = world.machine.replica(run).snapshots.found()
    assert found is not None
    assert found.step == hold


def test_without_copies_it_is_put_aside_after_the_deadline_and_says_so(asked: Any) -> None:
    world, run = asked
    hold, number = world.machine.replica(run).snapshots.on_hold, 1
    for number in range(1, hold):
        step(world, run, number, "a", "b")
    for holder in "ab":
        lies(world, run, hold, holder, holder)
    out = beat(world, 310, "a", "b", "c")
    assert world.state(run).pausing, "the deadline has come"
    later = held(out)
    assert later > hold
    for number in range(hold, later):
        step(world, run, number, "a", "b")
    for holder in "ab":
        lies(world, run, later, holder, holder)
    assert is_paused(world, run)
    assert "not everybody has a copy of" in world.state(run).reason.text


def test_after_the_deadline_it_is_tried_again_until_a_set_is_whole(asked: Any) -> None:
    world, run = asked
    number = 1
    for _ in range(4):  # no snapshot comes at all
        hold = world.machine.replica(run).snapshots.on_hold
        while number < hold:
            step(world, run, number, "a", "b")
            number += 1
        until = world.timers[f"run:{run}"] - world.now  # longer, as steps are seen to take longer
        beat(world, max(310, int(until) + 2), "a", "b", "c")
        assert world.state(run).phase == RUNNING
        assert world.state(run).pausing
        assert world.machine.replica(run).snapshots.on_hold > hold


def test_it_outlives_the_broker(asked: Any) -> None:
    world, run = asked
    world.restart()
    assert world.state(run).pausing
    for peer in "abc":
        world.join(peer, holding=Holding(run=run, term=1, step=1))
    hold = world.machine.replica(run).snapshots.on_hold
    assert hold > 1
    for number in range(1, hold):
        step(world, run, number, "a", "b")
    for holder in "ab":
        lies(world, run, hold, holder, holder, "c")
    assert is_paused(world, run)
    world.restart()
    assert is_paused(world, run)


def test_it_outlives_a_broker_that_goes_while_a_loss_is_mended(asked: Any) -> None:
    world, run = asked
    world.close("a")
    assert world.state(run).phase == BUILDING
    assert world.state(run).pausing
    world.restart()
    assert is_paused(world, run)


def test_after_a_loss_that_nobody_mends_it_is_paused_and_not_planned(asked: Any) -> None:
    world, run = asked
    world.close("c")
    world.close("a")
    assert is_paused(world, run)
    text = world.state(run).reason.text
    assert text.startswith("peer a was lost at step 1")
    assert "`shoal resume" in text
    world.drained("b", run)
    world.join("d")
    assert is_paused(world, run)


def test_after_a_loss_that_is_mended_it_is_still_to_pause(asked: Any) -> None:
    world, run = asked
    world.close("a")
    assert world.state(run).phase == BUILDING
    for peer in "cb":
        world.say(peer, ready=Ready(run=run, term=2))
    assert (world.state(run).phase, world.state(run).pausing) == (RUNNING, True)
    assert world.machine.replica(run).snapshots.on_hold


def test_it_can_be_taken_back(asked: Any) -> None:
    world, run = asked
    hold = world.machine.replica(run).snapshots.on_hold
    state = ask(world, run, "resume")
    assert (state.phase, state.pausing) == (RUNNING, False)
    assert not world.machine.replica(run).snapshots.on_hold
    for number in range(1, hold + 5):
        step(world, run, number, "a", "b")
    world.restart()
    assert not world.state(run).pausing


def test_a_run_that_ends_before_it_can_stop_is_done(world: Any) -> None:
    world.join("c")
    run = world.start("a", "b", steps=2)
    step(world, run, 0, "a", "b")
    assert ask(world, run, "pause").pausing
    beat(world, 20, "a", "b", "c")
    step(world, run, 1, "a", "b")
    assert (world.state(run).phase, world.state(run).pausing) == (EXPORTING, False)
    for peer in "ab":
        world.export(peer, run, 2)
    assert world.state(run).phase == DONE


def test_asked_twice_is_asked_once(asked: Any) -> None:
    world, run = asked
    before = world.machine.runs[run].record.history.numbered
    assert ask(world, run, "pause").pausing
    assert world.machine.runs[run].record.history.numbered == before


@pytest.mark.parametrize("turned", [False, True])
def test_of_several_replicas_all_stop_or_none(world: Any, turned: bool) -> None:
    """One that could not go on from where it stops keeps the others running, in any order."""
    keeps = world.start("a", "b", steps=STEPS, recovery={"warm_spares": 0})
    loses = world.start("c", "d", steps=STEPS, recovery={"ladder": ["checkpoint"]})
    step(world, keeps, 0, "a", "b")
    step(world, loses, 0, "c", "d")
    run = copy(world.machine.runs[keeps])
    replicas = [world.machine.replica(name) for name in (keeps, loses)]
    run.replicas = tuple(reversed(replicas) if turned else replicas)
    before = [replica.record.state for replica in run.replicas]
    for wanted, why in ((run.pause, "takes no snapshots"), (run.unpause, "expected a paused one")):
        with pytest.raises(ValueError, match=why):
            wanted(world.now)
        assert [replica.record.state for replica in run.replicas] == before
