"""Scripted facts to one machine that ends, or that its owner closes; and actions in any order."""

from __future__ import annotations

import random
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.schedule.schedule import Action
from shoal.net.links.frame import FrameKey
from shoal.peer.core import events as e
from shoal.peer.core.machine import PeerMachine
from shoal.peer.core.options import OwnerLimits
from shoal.peer.core.part import Phase
from shoal.peer.hours import Hours
from shoal.proto import broker_pb2, common_pb2
from shoal.tests.peer.scripted import (
    FLOW,
    ME,
    NOBODY,
    OTHER,
    WELCOME,
    Make,
    assign,
    built,
    finish_step,
    frame,
    of,
    said,
    told,
)

# ---------------------------------------------------------------- the end


def test_a_stop_in_the_pool_says_goodbye_and_exits(member: Make) -> None:
    out = member().handle(e.StopAsked(), 1.0)
    assert len(told(out, "goodbye")) == 1
    assert out[-1].code == 0


def test_a_stop_while_running_waits_for_the_end_of_the_step(running: Make) -> None:
    one = running(drain_s=30.0)
    out = one.handle(e.StopAsked(), 0.5)
    assert told(out, "availability")[0].closed.code == "stopped"
    assert of(out, e.SetTimer) == [e.SetTimer("drain", 30.5)]
    one.handle(NOBODY, 0.6)
    out = finish_step(one)
    kinds = [i.message.WhichOneof("kind") for i in of(out, e.Tell)]
    assert kinds == ["step", "goodbye"]
    assert out[-1].code == 0
    assert all(c.step == 0 for c in of(out, e.Compute)), "no new step begins"


def test_a_stop_without_a_broker_waits_for_the_end_of_the_step(running: Make) -> None:
    one = running()
    one.handle(e.Detached("away"), 0.4)
    assert of(one.handle(e.StopAsked(), 0.5), e.ShowWaiting)[0].what == "the end of the step"
    assert finish_step(one)[-1].code == 0


def test_a_stop_waits_until_another_peer_has_its_part(running: Make) -> None:
    one = running(drain_s=30.0)
    one.handle(e.StopAsked(), 0.5)
    assert of(finish_step(one), e.Exit) == [], "it waits for the broker's word"
    reason = common_pb2.Reason(text="peer p9 to take its part at step 2")
    stay = broker_pb2.HandoverReply(run="r", term=1, within_s=90.0, reason=reason)
    out = one.handle(said(handover=stay), 1.0)
    assert out == [e.SetTimer("drain", 91.0), e.ShowWaiting(reason.text, 90.0)]
    one.validate()
    out = one.handle(said(leave=broker_pb2.Leave(run="r", term=2, goes_on=True)), 3.0)
    assert [i.message.WhichOneof("kind") for i in of(out, e.Tell)] == ["drained", "goodbye"]
    assert out[-1].code == 0


def test_it_waits_no_longer_than_the_broker_said_nor_than_its_own_bound(running: Make) -> None:
    one = running(hand_over_s=60.0)
    one.handle(e.StopAsked(), 0.5)
    stay = broker_pb2.HandoverReply(run="r", term=1, within_s=1e9)
    assert of(one.handle(said(handover=stay), 1.0), e.SetTimer) == [e.SetTimer("drain", 61.0)]
    assert of(one.handle(e.TimerFired("drain"), 61.0), e.Exit)[0].code == 0


def test_a_peer_that_hands_over_takes_part_in_the_next_term_of_its_run(running: Make) -> None:
    """Another one was lost meanwhile; it gives no other run anything."""
    one = running()
    one.handle(e.StopAsked(), 0.5)
    assert told(one.handle(assign(run="r-2"), 0.6), "fault")[0].reason.code == "draining"
    out = one.handle(assign(term=2), 0.7)
    assert of(out, e.Build)
    assert one.exit is None
    one.validate()


def test_a_step_on_hold_is_not_begun_until_it_is_free(running: Make) -> None:
    one = running()
    order = broker_pb2.SnapshotOrder(run="r", term=1, step=1, hold=1)
    one.handle(said(snapshot=order), 0.5)
    out = finish_step(one)
    assert [i.snapshot.step for i in of(out, e.TakeSnapshot)] == [1]
    assert not [c for c in of(out, e.Compute) if c.step == 1]
    assert of(one.handle(e.TimerFired("stall"), 1e4), e.Tell) == [], "it is not stuck"
    order = broker_pb2.SnapshotOrder(run="r", term=1)
    assert [c.step for c in of(one.handle(said(snapshot=order), 2.0), e.Compute)] == [1]


def test_a_hold_that_comes_too_late_is_missed(running: Make) -> None:
    one = running()
    finish_step(one)
    assert one.assignment is not None
    assert one.assignment.steps is not None
    assert one.assignment.steps.begun
    order = broker_pb2.SnapshotOrder(run="r", term=1, step=1, hold=1)
    out = one.handle(said(snapshot=order), 2.0)
    assert not told(out, "snapshot")[0].held
    assert not of(out, e.TakeSnapshot)


@pytest.mark.parametrize("event", [e.StopAsked(), e.StopAsked(now=True), e.TimerFired("drain")])
def test_a_second_stop_or_the_deadline_ends_it_at_once(running: Make, event: e.Event) -> None:
    one = running(drain_s=30.0)
    one.handle(e.StopAsked(), 0.5)
    assert of(one.handle(event, 30.5), e.Exit)[0].code == 0


def test_the_brokers_drain_waits_for_the_run(running: Make) -> None:
    one = running()
    assert one.handle(said(drain=broker_pb2.Drain()), 1.0) == []
    (fault,) = told(one.handle(assign(run="r-2"), 1.0), "fault")
    assert fault.reason.code == "draining"
    out = one.handle(said(leave=broker_pb2.Leave(run="r", term=1)), 2.0)
    assert [i.message.WhichOneof("kind") for i in of(out, e.Tell)] == ["drained", "goodbye"]
    assert out[-1].code == 0


# ---------------------------------------------------------------- closed by its owner


def looked(paused: bool = False, hour: int = 12, moved: int = 0) -> e.OwnerLooked:
    return e.OwnerLooked(datetime(2026, 11, 23, hour), paused, moved)


def test_a_closed_peer_says_so_and_stays_a_member(member: Make) -> None:
    one = member()
    (said_so,) = told(one.handle(looked(paused=True), 1.0), "availability")
    assert said_so.closed.code == "paused"
    assert one.handle(looked(paused=True), 2.0) == [], "said once"
    out = one.handle(assign(), 3.0)  # was on its way
    assert [i.message.WhichOneof("kind") for i in of(out, e.Tell)] == ["goodbye"]
    assert one.assignment is None
    one.handle(e.Detached("goodbye"), 3.0)
    assert told(one.handle(e.Attached(), 4.0), "hello")[0].closed.code == "paused"
    one.handle(WELCOME, 4.0)
    (said_so,) = told(one.handle(looked(), 5.0), "availability")
    assert not said_so.HasField("closed")


def test_closed_in_a_run_it_ends_the_step_and_leaves_and_comes_back(running: Make) -> None:
    one = running(drain_s=30.0)
    out = one.handle(looked(paused=True), 0.5)
    assert told(out, "availability")
    assert of(out, e.SetTimer) == [e.SetTimer("drain", 30.5)]
    one.handle(NOBODY, 0.6)
    out = finish_step(one)
    kinds = [i.message.WhichOneof("kind") for i in of(out, e.Tell)]
    assert kinds == ["step", "goodbye"]
    assert told(out, "goodbye")[0].reason.code == "paused"
    assert all(c.step == 0 for c in of(out, e.Compute)), "no new step begins"
    assert of(out, e.Discard) == [e.Discard("r", 1)]
    assert one.exit is None
    (timer,) = of(one.handle(e.Detached("goodbye"), 1.0), e.SetTimer)
    assert one.handle(e.TimerFired("connect"), timer.at) == [e.Connect()]
    hello = told(one.handle(e.Attached(), timer.at), "hello")[0]
    assert hello.closed.code == "paused"
    assert not hello.HasField("holding")


def test_opened_before_the_end_of_the_step_it_stays_in_the_run(running: Make) -> None:
    one = running()
    one.handle(looked(paused=True), 0.5)
    one.handle(looked(), 0.6)
    out = finish_step(one)
    assert not told(out, "goodbye")
    assert [c.step for c in of(out, e.Compute)][-1] == 1, "the next step begins"
    assert one.handle(e.TimerFired("drain"), 30.5) == []


def test_a_step_that_does_not_end_is_left_at_the_deadline(running: Make) -> None:
    one = running()
    one.handle(looked(paused=True), 0.5)
    out = one.handle(e.TimerFired("drain"), 30.5)
    assert told(out, "goodbye")
    assert one.assignment is None
    assert one.exit is None


def test_a_run_that_ends_while_it_closes_is_left_as_ever(running: Make) -> None:
    one = running()
    one.handle(looked(paused=True), 0.5)
    out = one.handle(said(leave=broker_pb2.Leave(run="r", term=1)), 1.0)
    assert [i.message.WhichOneof("kind") for i in of(out, e.Tell)] == ["drained"]
    assert one.handle(e.TimerFired("drain"), 30.5) == []


def test_the_owners_stop_counts_more_than_a_pause(running: Make) -> None:
    one = running()
    one.handle(looked(paused=True), 0.5)
    one.handle(e.StopAsked(), 0.6)
    assert one.handle(looked(), 0.65) == [], "it is closed until its end"
    one.handle(NOBODY, 0.7)
    assert finish_step(one)[-1].code == 0


def test_hours_and_traffic_close_it(member: Make) -> None:
    one = member(terms=OwnerLimits(hours=Hours.parse("22-08"), monthly_bytes=1000))
    for facts, code in (
        (looked(hour=21), "hours"),
        (looked(hour=22), ""),
        (looked(hour=7, moved=999), ""),
        (looked(hour=7, moved=1000), "monthly"),
        (looked(hour=8, moved=1000), "hours"),
    ):
        one.handle(facts, 1.0)
        assert (one.drain.shut.code if one.drain.shut else "") == code


def test_how_long_it_means_to_stay_is_counted_from_its_start() -> None:
    profile = broker_pb2.Profile(name="me", stay_s=100.0)
    one = PeerMachine(ME, "boot", profile)
    one.handle(e.Started(), 10.0)
    assert told(one.handle(e.Attached(), 10.0), "hello")[0].profile.stay_s == 100
    one.handle(e.Detached("away"), 40.0)
    assert told(one.handle(e.Attached(), 70.0), "hello")[0].profile.stay_s == 40
    one.handle(e.Detached("away"), 400.0)
    assert told(one.handle(e.Attached(), 400.0), "hello")[0].profile.stay_s == 1, "longer than said"


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_owner_does_when_a_closed_peer_begins_no_step(seed: int) -> None:
    """Pauses, hours and steps in any order: what a peer begins, it begins while it is open, or in
    the step in which it was closed."""
    rng = random.Random(seed)
    one = PeerMachine(ME, "boot", broker_pb2.Profile(device_memory_bytes=1000))
    script = [e.Started(), e.Attached(), WELCOME, assign(), built(steps=6), e.LinkUp(OTHER)]
    for event in (*script, e.DataReady("r", 1, 0), said(start=broker_pb2.Start(run="r", term=1))):
        one.handle(event, 0.0)
    closed_in = -1
    for _ in range(12):
        if one.assignment is None or one.assignment.phase is not Phase.RUNNING:
            break
        if rng.random() < 0.5:
            one.handle(looked(paused=rng.random() < 0.5), 1.0)
            one.handle(NOBODY, 1.0)
            shut = one.drain.shut is not None
            closed_in = -1 if not shut else one.assignment.step if closed_in < 0 else closed_in
            continue
        begun = [c.step for c in of(finish_step(one), e.Compute)]
        one.validate()
        if closed_in >= 0:
            assert all(step <= closed_in for step in begun)
            part = one.assignment  # its weights it may still store
            assert part is None or part.phase is Phase.EXPORTING, "it has left"


# ---------------------------------------------------------------- any order


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_actions_run_in_list_order_whatever_comes_when(seed: int) -> None:
    """Frames of two steps in any order, some twice, as far as another peer can be ahead; between
    them the results of the device. Every give is sent once."""
    rng = random.Random(seed)
    one = PeerMachine(ME, "boot", broker_pb2.Profile(device_memory_bytes=1000))
    script = [e.Started(), e.Attached(), WELCOME, assign(), built(), e.LinkUp(OTHER)]
    for event in (*script, said(start=broker_pb2.Start(run="r", term=1))):
        one.handle(event, 0.0)
    part = one.assignment
    assert part is not None
    waiting: list[e.FrameArrived | e.DataReady] = []
    for step in (0, 1):
        waiting.append(e.DataReady("r", 1, step))
        waiting += [e.FrameArrived(frame("h<1", step, microbatch=m)) for m in (0, 1)]
        waiting.append(e.FrameArrived(frame("norm/1-2", step)))
    ran: list[tuple[int, Action]] = []
    sent: list[FrameKey] = []
    flight: list[e.Compute] = []
    while waiting or flight:
        event: e.Event
        if flight and (not waiting or rng.random() < 0.4):
            order = flight.pop()
            event = e.Computed("r", 1, order.step, order.action)
        else:
            event = rng.choice(waiting)
            if isinstance(event, e.FrameArrived) and event.key.step > part.step + 1:
                continue  # nobody can be that far ahead
            if isinstance(event, e.DataReady) and event.step > part.step:
                continue  # not asked for yet
            if isinstance(event, e.DataReady) or rng.random() < 0.7:
                waiting.remove(event)
        for instruction in one.handle(event, 1.0):
            if isinstance(instruction, e.Compute):
                assert not flight, "two actions at once"
                flight.append(instruction)
                ran.append((instruction.step, instruction.action))
            if isinstance(instruction, e.SendFrame):
                sent.append(instruction.key)
        one.validate()
    assert ran == [(s, a) for s in (0, 1) for a in FLOW.actions(ME)]
    gives = [t for a in FLOW.actions(ME) for t in FLOW.gives(ME, a) if not t.is_local]
    assert len(sent) == len(set(sent)) == 2 * len(gives)
