"""Runs as their clients see them, and what a broker that stops does with them."""

from __future__ import annotations

import pytest

from shoal.broker.events import (
    Answer,
    DescribeAsked,
    DrainAsked,
    MakePlan,
    PlanReady,
    Reject,
    RunAsked,
    RunId,
    RunSubmitted,
    StopAsked,
    StopServing,
    WatchAsked,
)
from shoal.proto.broker_pb2 import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    WAITING,
)

# ---------------------------------------------------------------- clients


def test_cancel_tells_the_peers_to_leave_and_answers_with_the_state(world) -> None:
    run = world.start("a")
    out = world.cancel(run)
    assert world.only(out, Answer).message.phase == CANCELLED
    assert world.kinds(out, "a") == ["leave"]
    assert world.only(world.cancel(run), Answer).message.phase == CANCELLED


def test_a_cancelled_run_gives_its_turn_to_the_next(world) -> None:
    world.join("a")
    first, out = world.submit()
    version = world.only(out, MakePlan).version
    second, _ = world.submit()
    assert world.only(world.cancel(first), MakePlan).replica == second
    world.handle(PlanReady(first, version, world.plan("a")))
    assert world.state(first).phase == CANCELLED


def test_an_unknown_run_is_not_found(world) -> None:
    for event in (RunAsked("q", RunId("r-0"), "cancel"), WatchAsked("q", RunId("r-0"), 0)):
        reject = world.only(world.handle(event), Reject)
        assert (reject.request, reject.code) == ("q", "NOT_FOUND")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: setattr(s, "version", 2), "version of the run is 2: expected 1"),
        (lambda s: setattr(s, "steps", 4), "steps of the run is 4, its job says 3"),
        (lambda s: setattr(s, "steps", 0), "steps of the run is 0"),
        (
            lambda s: setattr(s.graph, "hash", "../../etc"),
            "64 lowercase hexadecimal digits",
        ),
        (lambda s: setattr(s, "job", "{"), "not valid JSON"),
        (lambda s: setattr(s, "job", "[" * 100_000), "the job of the run is not valid"),
        (lambda s: setattr(s.plan, "microbatch_size", 2), "has no stage"),
    ],
)
def test_a_spec_that_contradicts_itself_is_rejected_with_the_reason(world, change, text) -> None:
    spec = world.spec()
    change(spec)
    reject = world.only(world.handle(RunSubmitted("q", spec)), Reject)
    assert reject.code == "INVALID_ARGUMENT"
    assert text in reject.reason


def test_open_runs_are_bounded(make_world) -> None:
    world = make_world(most_waiting=1)
    world.submit()
    reject = world.only(world.handle(RunSubmitted("q", world.spec())), Reject)
    assert reject.code == "RESOURCE_EXHAUSTED"


def test_ended_runs_are_forgotten_beyond_the_limit(make_world) -> None:
    world = make_world(kept_runs=2)
    runs = []
    for _ in range(5):
        run, _ = world.submit()
        world.cancel(run)
        runs.append(run)
    last, _ = world.submit()
    assert list(world.machine.runs) == [*runs[-2:], last]


def test_events_are_kept_up_to_a_bound_and_replayed_from_any_number(make_world) -> None:
    world = make_world(kept_events=4)
    run = world.start("a", steps=20)
    for step in range(10):
        world.report("a", run, step)
    watched = world.only(world.handle(WatchAsked("q", run, 0)), Answer).message
    assert (watched.first, len(watched.events), watched.over) == (10, 4, False)
    assert [e.number for e in watched.events] == [10, 11, 12, 13]
    assert [e.number for e in world.watched(run, 12).events] == [12, 13]
    assert world.watched(run, 99).events == ()


def test_describe_shows_peers_and_runs(world) -> None:
    run = world.start("a", recovery={"warm_spares": 0})
    world.join("b")
    world.now += 2
    answer = world.only(world.handle(DescribeAsked("q")), Answer).message
    assert [(p.peer, p.membership, p.run, p.silent_s) for p in answer.peers] == [
        ("a", "assigned", run, 2.0),
        ("b", "pool", "", 2.0),
    ]
    assert [(r.run, r.phase, r.steps) for r in answer.runs] == [(run, RUNNING, 3)]


@pytest.mark.parametrize(("stop", "ends"), [("8s", 8.0), ("1h", 20 * 2.0)])
def test_time_that_is_left_is_by_pace_or_by_the_rule_that_ends_the_run(world, stop, ends) -> None:
    def left_s() -> float:
        return world.only(world.handle(DescribeAsked("q")), Answer).message.runs[0].left_s

    world.now = 50.0
    run = world.start("a", steps=20, train={"stop": {"time": stop}})
    began = world.now
    for step in range(3):
        world.now += 2.0
        world.report("a", run, step)
        assert left_s() == pytest.approx(began + ends - world.now)
    states = [e.state for e in world.watched(run).events if e.HasField("state")]
    assert [s.stop_at_s - began for s in states if s.phase == RUNNING] == [
        8.0 if stop == "8s" else 3600.0
    ]
    world.now = began + 100.0  # a step takes longer than the run may
    assert left_s() == (0.0 if stop == "8s" else pytest.approx(17 * 2.0))
    world.cancel(run)
    assert left_s() == 0.0


# ---------------------------------------------------------------- leaving


def test_a_draining_broker_starts_nothing_and_stops_when_nothing_is_active(world) -> None:
    run = world.start("a", steps=1)
    waiting, _ = world.submit()
    assert not [i for i in world.handle(DrainAsked()) if isinstance(i, StopServing)]
    assert world.only(world.handle(RunSubmitted("q", world.spec())), Reject).code == "UNAVAILABLE"
    world.report("a", run, 0)
    assert [i for i in world.export("a", run, 1) if isinstance(i, StopServing)]
    assert world.state(run).phase == DONE
    world.drained("a", run)
    assert world.state(waiting).reason.code == "broker"


def test_a_broker_that_stops_ends_runs_and_streams(world) -> None:
    run = world.start("a")
    out = world.handle(StopAsked())
    assert world.state(run).phase == FAILED
    assert world.kinds(out, "a") == ["leave", "refused", "close"]
    assert world.told(out, "a")[1].refused.again
    assert [i for i in out if isinstance(i, StopServing)]


def test_the_same_events_give_the_same_instructions(make_world) -> None:
    def story() -> list[str]:
        world = make_world()
        found: list[str] = []
        handle = world.handle
        world.handle = lambda event: [*map(str, out := handle(event))] and out
        for peer in "abc":
            found += map(str, world.join(peer))
        run = world.start("a", "b", "c")
        for step in range(3):
            for peer in "cab":
                found += map(str, world.report(peer, run, step))
        for peer in "bca":
            found += map(str, world.export(peer, run, 3))
        return found

    assert story() == story()


def test_a_run_that_asks_for_more_warm_spares_than_there_are_says_so(world) -> None:
    for peer in "abc":
        world.join(peer)
    spec = world.spec(plan={"stages": 2}, recovery={"warm_spares": 2})
    run, _ = world.submit(spec)
    assert world.state(run).phase == WAITING
    text = world.state(run).reason.text
    assert "needs 2 peers and 2 more as warm spares (recovery.warm_spares), has 3" in text
    out = world.join("d")
    assert world.only(out, MakePlan).replica == run
