"""Scripted facts to one machine: membership, terms, frames, faults. No step runs whole here."""

from __future__ import annotations

import pytest

from shoal.dag.schedule.flow import Role
from shoal.dag.schedule.schedule import Action
from shoal.net.links.frame import FrameKey
from shoal.peer.core import events as e
from shoal.peer.core.options import Timeouts
from shoal.peer.core.part import Phase
from shoal.proto import broker_pb2, common_pb2
from shoal.tests.peer.scripted import (
    ME,
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

# ---------------------------------------------------------------- membership


def test_it_connects_says_hello_and_sends_heartbeats(machine: Make) -> None:
    one = machine()
    assert one.handle(e.Started(), 0.0) == [e.Connect()]
    hello = told(one.handle(e.Attached(), 1.0), "hello")[0]
    assert (hello.peer, hello.boot, hello.counter, hello.version) == ("me", "boot", 4, 3)
    assert not hello.HasField("holding")
    out = one.handle(WELCOME, 1.0)
    assert len(told(out, "heartbeat")) == 1
    assert e.SetTimer("heartbeat", 4.0) in out
    assert len(told(one.handle(e.TimerFired("heartbeat"), 4.0), "heartbeat")) == 1
    assert repr(one) == "<Peer me member in the pool>"


def test_speeds_that_were_measured_anew_are_told_at_once_and_in_later_hellos(member: Make) -> None:
    one = member()
    speeds = broker_pb2.Speeds(product_flops_per_s=3e12, memory_bytes_per_s=4e9)
    assert told(one.handle(e.SpeedsMeasured(speeds), 1.0), "measured") == [speeds]
    one.handle(e.Detached("away"), 2.0)
    hello = told(one.handle(e.Attached(), 3.0), "hello")[0]
    assert hello.profile.speeds == speeds
    assert hello.profile.flops_per_s == 3e12


def test_a_missing_broker_is_tried_again_ever_more_slowly(machine: Make) -> None:
    one = machine()
    one.handle(e.Started(), 0.0)
    pauses, now = [], 0.0
    for _ in range(12):
        (timer,) = of(one.handle(e.Detached("b:1 refused"), now), e.SetTimer)
        pauses.append(timer.at - now)
        now = timer.at
        assert one.handle(e.TimerFired("connect"), now) == [e.Connect()]
    assert 0.3 < pauses[0] < 0.7
    assert pauses[0] < pauses[2] < pauses[4]
    assert max(pauses) <= 1.25 * one.options.backoff_max_s


def test_it_gives_up_on_a_missing_broker_when_it_is_told_to(machine: Make) -> None:
    one = machine(give_up_s=5.0)
    one.handle(e.Started(), 0.0)
    now, out = 0.0, []
    while one.exit is None:
        out = one.handle(e.Detached("b:1 refused the connection"), now)
        for timer in of(out, e.SetTimer):
            now = timer.at
            one.handle(e.TimerFired("connect"), now)
    assert now == pytest.approx(5.0)
    assert out[-1].code == 3
    assert "5 s" in out[-1].why
    assert "b:1 refused the connection" in out[-1].why


def test_before_the_first_welcome_it_gives_up_sooner(machine: Make) -> None:
    one = machine(first_s=5.0)
    one.handle(e.Started(), 0.0)
    assert of(one.handle(e.Detached("refused"), 0.0), e.SetTimer)
    assert one.handle(e.TimerFired("connect"), 5.0) == [e.Connect()]
    assert of(one.handle(e.Detached("refused"), 5.0), e.Exit)[0].code == 3


def test_one_that_was_a_member_waits_for_its_broker(member: Make) -> None:
    one = member(first_s=5.0)
    assert of(one.handle(e.Detached("refused"), 1.0), e.SetTimer)
    assert one.handle(e.TimerFired("connect"), 1000.0) == [e.Connect()]
    assert of(one.handle(e.Detached("refused"), 1000.0), e.SetTimer)


def test_a_broker_that_does_not_answer_hello_counts_as_missing(machine: Make) -> None:
    one = machine()
    one.handle(e.Started(), 0.0)
    (timer,) = of(one.handle(e.Attached(), 0.0), e.SetTimer)
    out = one.handle(e.TimerFired(timer.name), timer.at)
    assert [t.name for t in of(out, e.SetTimer)] == ["connect"]
    assert one.handle(e.Detached("the old stream"), timer.at) == []


def test_refused_for_good_ends_it_with_code_4(machine: Make) -> None:
    one = machine()
    one.handle(e.Started(), 0.0)
    one.handle(e.Attached(), 0.0)
    reason = common_pb2.Reason(code="incarnation", text="a newer process has this id")
    (out,) = one.handle(said(refused=broker_pb2.Refused(reason=reason)), 0.0)
    assert out.code == 4
    assert "a newer process has this id" in out.why
    assert one.handle(e.TimerFired("connect"), 9.0) == []


def test_refused_for_now_is_tried_again(machine: Make) -> None:
    one = machine()
    one.handle(e.Started(), 0.0)
    one.handle(e.Attached(), 0.0)
    out = one.handle(said(refused=broker_pb2.Refused(again=True)), 0.0)
    assert of(out, e.SetTimer)[0].name == "connect"
    assert one.handle(e.Detached("closed"), 0.1) == []


# ---------------------------------------------------------------- assignments and terms


def test_an_assignment_is_built_then_ready_then_started(member: Make) -> None:
    one = member()
    dials = [broker_pb2.DialOrder(peer=OTHER, address="h:1", generation=3)]
    out = one.handle(assign(dials=dials), 0.0)
    assert out[0] == e.Dial(OTHER, "h:1", 3)
    assert isinstance(out[1], e.Build)
    slots = ((OTHER, Role.SYNC, 2),)
    out = one.handle(built(slots=slots), 0.0)
    assert out[:2] == [e.Allow(OTHER, Role.SYNC, 2), e.Prefetch("r", 1, 0)]
    assert told(out, "ready")[0].device_bytes == 10
    one.handle(e.DataReady("r", 1, 0), 0.0)
    out = one.handle(said(start=broker_pb2.Start(run="r", term=1)), 0.0)
    assert [str(c.action) for c in of(out, e.Compute)] == ["F0@0"]
    assert e.Prefetch("r", 1, 1) in out


def test_the_first_step_waits_for_its_data(member: Make) -> None:
    one = member()
    for event in (assign(), built(), said(start=broker_pb2.Start(run="r", term=1))):
        assert not of(one.handle(event, 0.0), e.Compute)
    assert of(one.handle(e.DataReady("r", 1, 0), 0.0), e.Compute)


def test_a_newer_term_replaces_the_older_one(running: Make) -> None:
    one = running()
    out = one.handle(assign(term=2), 1.0)
    assert out[:2] == [e.HangUp(OTHER), e.Discard("r", 1)]
    assert isinstance(out[-1], e.Build)
    assert (out[-1].run, out[-1].term) == ("r", 2)


def test_nothing_of_an_older_term_has_an_effect_i3(running: Make) -> None:
    one = running()
    one.handle(assign(term=2), 1.0)
    late = Action.parse("F0@0")
    stale: list[e.Event] = [
        assign(term=1),
        assign(term=2),
        built(term=1),
        e.BuildFailed("r", 1, "late"),
        e.Computed("r", 1, 0, late),
        e.ComputeFailed("r", 1, 0, late, "late"),
        e.DataFailed("r", 1, 0, "late"),
        said(start=broker_pb2.Start(run="r", term=1)),
        said(export=broker_pb2.Export(run="r", term=1)),
        said(leave=broker_pb2.Leave(run="r", term=1)),
    ]
    for event in stale:
        assert one.handle(event, 2.0) == [], event
    for event in (e.FrameArrived(frame()), e.FrameRefused(frame(), "spec")):
        assert one.handle(event, 2.0) == [e.Release(frame())]
    assert one.late_frames == 2
    assert repr(one.assignment) == "<r term 2 building>"


def test_a_second_run_is_refused_while_one_is_active(running: Make) -> None:
    one = running()
    (fault,) = told(one.handle(assign(run="r-other"), 1.0), "fault")
    assert (fault.run, fault.reason.code) == ("r-other", "busy")
    assert one.assignment is not None
    assert one.assignment.run == "r"


def test_leave_frees_everything_and_the_next_run_can_come(running: Make) -> None:
    one = running()
    out = one.handle(said(leave=broker_pb2.Leave(run="r", term=1)), 1.0)
    assert out[:2] == [e.HangUp(OTHER), e.Discard("r", 1)]
    assert told(out, "drained")[0].run == "r"
    assert of(one.handle(assign(run="r-2"), 2.0), e.Build)
    assert one.handle(assign(run="r"), 2.0) == []


# ---------------------------------------------------------------- frames


def test_a_frame_of_the_next_step_waits_and_a_later_one_breaks_the_plan(running: Make) -> None:
    one = running()
    assert one.handle(e.FrameArrived(frame(step=1)), 0.1) == []
    (fault,) = told(one.handle(e.FrameArrived(frame(step=2)), 0.1), "fault")
    assert fault.reason.code == "frame"
    assert "step 2" in fault.reason.text


@pytest.mark.parametrize(
    "key",
    [
        frame("h<7"),
        frame(microbatch=9),
        frame()._replace(hop=3),
        frame()._replace(source="stranger"),
        frame()._replace(destination=OTHER, source=ME),
        frame()._replace(role=Role.ACTIVATION),
    ],
    ids=["port", "microbatch", "hop", "source", "not for us", "role"],
)
def test_a_frame_that_the_plan_does_not_name_is_refused_i4(running: Make, key: FrameKey) -> None:
    one = running()
    out = one.handle(e.FrameArrived(key), 0.1)
    assert out[0] == e.Release(key)
    assert told(out, "fault")[0].reason.code == "frame"
    assert of(out, e.Discard)
    assert one.handle(e.FrameArrived(key), 0.2) == [e.Release(key)], "the rest is only dropped"


@pytest.mark.parametrize("port", ["1/other", "2/other", "1/me", "nothing"])
def test_a_snapshot_that_nobody_waits_for_is_dropped_and_counted(running: Make, port: str) -> None:
    one = running()
    key = FrameKey("r", 1, 4, Role.SNAPSHOT, 0, 1, port, OTHER, ME)
    for event in (e.FrameArrived(key), e.FrameRefused(key, "the disk is full")):
        out = one.handle(event, 0.1)
        assert out[0] == e.Release(key)
        assert not of(out, e.Tell)
        assert not of(out, e.Discard)
    assert one.assignment is not None
    assert one.assignment.phase is Phase.RUNNING
    assert one.late_frames == 2


def test_a_consumed_frame_that_comes_again_is_dropped(running: Make) -> None:
    one = running()
    finish_step(one)
    assert one.assignment is not None
    assert one.assignment.step == 1
    again = frame("norm/1-2", step=0)
    assert one.handle(e.FrameArrived(again), 2.0) == [e.Release(again)]
    assert one.late_frames == 1


def test_a_doubled_frame_that_still_waits_keeps_its_tensor(running: Make) -> None:
    one = running()
    one.handle(e.FrameArrived(frame("norm/1-2")), 0.1)
    assert one.handle(e.FrameArrived(frame("norm/1-2")), 0.2) == []
    assert one.late_frames == 1


# ---------------------------------------------------------------- faults


FAULTS = [
    (e.ComputeFailed("r", 1, 0, Action.parse("F0@0"), "out of memory"), "compute"),
    (e.DataFailed("r", 1, 1, "shard 3 is not there"), "data"),
    (e.DataFailed("r", 1, 1, "OSError: no space left on device", "host"), "host"),
    (e.FrameRefused(frame(), "float32[3] for float32[2, 3]"), "frame"),
]


@pytest.mark.parametrize(("event", "code"), FAULTS, ids=[c for _, c in FAULTS])
def test_what_breaks_a_run_is_told_and_the_peer_goes_on(
    running: Make, event: e.Event, code: str
) -> None:
    one = running()
    out = one.handle(event, 1.0)
    (fault,) = told(out, "fault")
    assert fault.reason.code == code
    assert getattr(event, "why", "") in fault.reason.text
    assert of(out, e.Discard) == [e.Discard("r", 1)]
    assert of(out, e.HangUp) == [e.HangUp(OTHER)]
    assert one.handle(said(start=broker_pb2.Start(run="r", term=1)), 1.0) == []
    out = one.handle(said(leave=broker_pb2.Leave(run="r", term=1)), 2.0)
    assert [type(i) for i in out] == [e.Tell]
    assert of(one.handle(assign(run="r-2"), 2.0), e.Build)


def test_a_stage_that_does_not_fit_is_refused_with_both_numbers(member: Make) -> None:
    one = member(memory=1000)
    one.handle(assign(), 0.0)
    (fault,) = told(one.handle(built(device_bytes=2000), 0.0), "fault")
    assert fault.reason.code == "memory"
    assert "2000" in fault.reason.text
    assert "1000" in fault.reason.text


def test_an_assignment_without_a_stage_for_this_peer_is_refused(member: Make) -> None:
    plan = broker_pb2.Plan(stages=[broker_pb2.StageSlot(stop=2, holders=[OTHER])])
    assert told(member().handle(assign(plan=plan), 0.0), "fault")[0].reason.code == "plan"


def test_a_broken_link_is_reported_only_when_it_stays_down(running: Make) -> None:
    one = running(patience=Timeouts(link_s=30.0))
    out = one.handle(e.LinkDown(OTHER, "reset"), 10.0)
    assert not told(out, "link_status")[0].up, "perhaps its process has died"
    (timer,) = of(out, e.SetTimer)
    assert timer == e.SetTimer("link:other", 40.0)
    assert told(one.handle(e.LinkUp(OTHER), 20.0), "link_status")[0].up
    assert one.handle(e.TimerFired(timer.name), 40.0) == []
    one.handle(e.LinkDown(OTHER, "reset"), 50.0)
    out = one.handle(e.TimerFired(timer.name), 80.0)
    (fault,) = told(out, "fault")
    assert (fault.about, fault.reason.code) == (OTHER, "link")
    assert not of(out, e.Discard), "what follows is the broker's decision"


def test_a_link_that_never_came_up_is_reported_too(member: Make) -> None:
    one = member(patience=Timeouts(link_s=30.0))
    for event in (assign(), built(), e.DataReady("r", 1, 0)):
        one.handle(event, 0.0)
    out = one.handle(said(start=broker_pb2.Start(run="r", term=1)), 5.0)
    assert e.SetTimer("link:other", 35.0) in out
    assert told(one.handle(e.TimerFired("link:other"), 35.0), "fault")[0].about == OTHER


def test_a_wait_without_progress_ends_with_a_report_of_what_is_missing_i9(running: Make) -> None:
    one = running(patience=Timeouts(stall_s=100.0))
    assert of(one.handle(e.TimerFired("stall"), 100.0), e.SetTimer), "it computes: no stall"
    for text in ("F0@0", "F1@0"):
        one.handle(e.Computed("r", 1, 0, Action.parse(text)), 101.0)
    assert of(one.handle(e.TimerFired("stall"), 200.0), e.SetTimer), "it went on since"
    (fault,) = told(one.handle(e.TimerFired("stall"), 300.0), "fault")
    assert fault.about == OTHER
    assert "h<1 of microbatch 0 from other" in fault.reason.text
