"""Scripted facts to one machine: membership, terms, faults, the end. No step runs whole here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.cut import cut, tied_groups
from shoal.dag.flow import Flow, Role
from shoal.dag.graph import Graph, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule import Action
from shoal.net.frame import FrameKey
from shoal.peer import events as e
from shoal.peer.assignment import Patience, Phase
from shoal.peer.hours import Hours
from shoal.peer.machine import PeerMachine
from shoal.peer.opening import Terms
from shoal.peer.options import PeerOptions
from shoal.proto import broker_pb2, common_pb2

ME, OTHER = PeerId("me"), PeerId("other")


def said(**kind: Any) -> e.BrokerSaid:
    return e.BrokerSaid(broker_pb2.BrokerMessage(**kind))


def told(instructions: Iterable[e.Instruction], kind: str) -> list[Any]:
    """The messages of one kind among what is told to the broker."""
    tells = [i.message for i in instructions if isinstance(i, e.Tell)]
    return [getattr(m, kind) for m in tells if m.WhichOneof("kind") == kind]


def of(instructions: Iterable[e.Instruction], kind: type) -> list[Any]:
    return [i for i in instructions if isinstance(i, kind)]


NOBODY = said(stay=broker_pb2.Stay(run="r", term=1))
"""Nobody takes the part of a peer that leaves."""
WELCOME = said(welcome=broker_pb2.Welcome(broker="b", lease_s=9, heartbeat_s=3))


def resumed(step: int) -> e.BrokerSaid:
    """The Welcome of a broker that was started again and goes on with the run."""
    holding = broker_pb2.Holding(run="r", term=1, step=step)
    return said(welcome=broker_pb2.Welcome(broker="b", lease_s=9, heartbeat_s=3, resumed=holding))


def two_stage_flow() -> Flow:
    """`me` holds stage 0, `other` stage 1; two microbatches. `other` is the hub."""
    spec, scalar = TensorSpec((2, 3), "float32"), TensorSpec((), "float32")
    graph = Graph(
        inputs=(),
        parameters=(Parameter("w0", spec), Parameter("w1", spec)),
        buffers=(),
        operators=(
            Operator("h", "aten.neg.default", (Ref("param:w0"),), (), (Output(spec, True),)),
            Operator(
                "loss", "aten.x.default", (Ref("h"), Ref("param:w1")), (), (Output(scalar, True),)
            ),
        ),
        loss="loss",
        batch=2,
    )
    route = (Visit(0, ME), Visit(1, OTHER))
    plan = Plan((StageSlot(0, 1, (ME,)), StageSlot(1, 2, (OTHER,))), (route, route), 2)
    stages = cut(graph, [(0, 1), (1, 2)])
    return Flow(plan, stages, tied_groups(graph, stages))


FLOW = two_stage_flow()
"""List of `me`: F0@0 F1@0 B0@0 B1@0 N> N< U (or another order of F and B)."""


def assign(run: str = "r", term: int = 1, **fields: Any) -> e.BrokerSaid:
    stages = [
        broker_pb2.StageSlot(start=0, stop=1, holders=[ME]),
        broker_pb2.StageSlot(start=1, stop=2, holders=[OTHER]),
    ]
    plan = fields.pop("plan", broker_pb2.Plan(stages=stages))
    return said(assign=broker_pb2.Assign(run=run, term=term, plan=plan, **fields))


def built(run: str = "r", term: int = 1, **fields: Any) -> e.Built:
    defaults: dict[str, Any] = {"slots": (), "device_bytes": 10, "steps": 2, "exports": (0,)}
    return e.Built(run, term, FLOW, **(defaults | fields))


def frame(port: str = "h<1", step: int = 0, term: int = 1, microbatch: int = 0) -> FrameKey:
    role = Role.ACTIVATION_GRAD if "<" in port else Role.SYNC
    return FrameKey("r", term, step, role, microbatch, 0, port, OTHER, ME)


Make = Callable[..., PeerMachine]


@pytest.fixture
def machine() -> Iterator[Make]:
    """Makes machines; validates the invariants of each when the test is over."""
    made: list[PeerMachine] = []

    def make(memory: int = 1000, **options: Any) -> PeerMachine:
        profile = broker_pb2.Profile(name="me", device_memory_bytes=memory)
        made.append(PeerMachine(ME, "boot", profile, counter=4, options=PeerOptions(**options)))
        return made[-1]

    yield make
    for one in made:
        one.validate()


@pytest.fixture
def member(machine: Make) -> Make:
    """Makes machines that are in the pool, at time 0."""

    def make(**options: Any) -> PeerMachine:
        one = machine(**options)
        for event in (e.Started(), e.Attached(), WELCOME):
            one.handle(event, 0.0)
        return one

    return make


@pytest.fixture
def running(member: Make) -> Make:
    """Makes machines that compute their first action, at time 0."""

    def make(steps: int = 2, **options: Any) -> PeerMachine:
        one = member(**options)
        one.handle(assign(), 0.0)
        one.handle(built(steps=steps), 0.0)
        one.handle(e.LinkUp(OTHER), 0.0)
        one.handle(e.DataReady("r", 1, 0), 0.0)
        out = one.handle(said(start=broker_pb2.Start(run="r", term=1)), 0.0)
        assert of(out, e.Compute)
        return one

    return make


def finish_step(one: PeerMachine, now: float = 1.0) -> list[e.Instruction]:
    """Lets the step that `me` is in run to its end, data of the next one included."""
    part = one.assignment
    assert part is not None
    assert part.steps is not None
    step, out = part.step, []
    out += one.handle(e.DataReady("r", 1, step + 1), now)
    for port, m in (("h<1", 0), ("h<1", 1), ("N+", 0)):
        out += one.handle(e.FrameArrived(frame(port, step, microbatch=m)), now)
    while one.assignment and part.steps.in_flight and part.step == step:
        action = part.steps.program.actions[part.steps.position]
        out += one.handle(e.Computed("r", 1, step, action, e.Result(0.1)), now)
    return out


# ---------------------------------------------------------------- membership


def test_it_connects_says_hello_and_sends_heartbeats(machine: Make) -> None:
    one = machine()
    assert one.handle(e.Started(), 0.0) == [e.Connect()]
    hello = told(one.handle(e.Attached(), 1.0), "hello")[0]
    assert (hello.peer, hello.boot, hello.counter, hello.version) == ("me", "boot", 4, 1)
    assert not hello.HasField("holding")
    out = one.handle(WELCOME, 1.0)
    assert len(told(out, "heartbeat")) == 1
    assert e.SetTimer("heartbeat", 4.0) in out
    assert len(told(one.handle(e.TimerFired("heartbeat"), 4.0), "heartbeat")) == 1
    assert repr(one) == "<Peer me member in the pool>"


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
    again = frame("N+", step=0)
    assert one.handle(e.FrameArrived(again), 2.0) == [e.Release(again)]
    assert one.late_frames == 1


def test_a_doubled_frame_that_still_waits_keeps_its_tensor(running: Make) -> None:
    one = running()
    one.handle(e.FrameArrived(frame("N+")), 0.1)
    assert one.handle(e.FrameArrived(frame("N+")), 0.2) == []
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
    one = running(patience=Patience(link_s=30.0))
    out = one.handle(e.LinkDown(OTHER, "reset"), 10.0)
    assert not told(out, "heard")[0].up, "perhaps its process has died"
    (timer,) = of(out, e.SetTimer)
    assert timer == e.SetTimer("link:other", 40.0)
    assert told(one.handle(e.LinkUp(OTHER), 20.0), "heard")[0].up
    assert one.handle(e.TimerFired(timer.name), 40.0) == []
    one.handle(e.LinkDown(OTHER, "reset"), 50.0)
    out = one.handle(e.TimerFired(timer.name), 80.0)
    (fault,) = told(out, "fault")
    assert (fault.about, fault.reason.code) == (OTHER, "link")
    assert not of(out, e.Discard), "what follows is the broker's decision"


def test_a_link_that_never_came_up_is_reported_too(member: Make) -> None:
    one = member(patience=Patience(link_s=30.0))
    for event in (assign(), built(), e.DataReady("r", 1, 0)):
        one.handle(event, 0.0)
    out = one.handle(said(start=broker_pb2.Start(run="r", term=1)), 5.0)
    assert e.SetTimer("link:other", 35.0) in out
    assert told(one.handle(e.TimerFired("link:other"), 35.0), "fault")[0].about == OTHER


def test_a_wait_without_progress_ends_with_a_report_of_what_is_missing_i9(running: Make) -> None:
    one = running(patience=Patience(stall_s=100.0))
    assert of(one.handle(e.TimerFired("stall"), 100.0), e.SetTimer), "it computes: no stall"
    for text in ("F0@0", "F1@0"):
        one.handle(e.Computed("r", 1, 0, Action.parse(text)), 101.0)
    assert of(one.handle(e.TimerFired("stall"), 200.0), e.SetTimer), "it went on since"
    (fault,) = told(one.handle(e.TimerFired("stall"), 300.0), "fault")
    assert fault.about == OTHER
    assert "h<1 of microbatch 0 from other" in fault.reason.text


# ---------------------------------------------------------------- without the broker


def back(one: PeerMachine, welcome: e.BrokerSaid, now: float = 2.0) -> list[e.Instruction]:
    """Lets a peer whose stream broke attach again."""
    one.handle(e.TimerFired("connect"), now)
    one.handle(e.Attached(), now)
    return one.handle(welcome, now)


def test_without_the_broker_the_run_goes_on_and_reports_wait(running: Make) -> None:
    one = running()
    one.handle(e.Detached("the stream broke"), 0.5)
    out = finish_step(one)
    assert of(out, e.Compute)
    assert not of(out, e.Tell)
    one.handle(e.TimerFired("connect"), 2.0)
    (hello,) = told(one.handle(e.Attached(), 2.0), "hello")
    assert (hello.holding.run, hello.holding.term, hello.holding.step) == ("r", 1, 1)
    (report,) = told(one.handle(resumed(0), 2.0), "step")
    assert (report.step, report.seconds) == (0, 1.0)


def test_a_broker_that_was_started_again_is_told_what_it_lacks_in_order(running: Make) -> None:
    one = running(steps=9)
    for _ in range(2):
        assert len(told(finish_step(one), "step")) == 1
    one.handle(e.Detached("the stream broke"), 1.5)
    finish_step(one)
    assert [r.step for r in told(back(one, resumed(1)), "step")] == [1, 2]
    one.handle(e.Detached("the stream broke"), 3.0)
    assert [r.step for r in told(back(one, resumed(1), 4.0), "step")] == [1, 2], "told once more"


def test_a_broker_that_does_not_go_on_with_the_run_is_told_nothing_of_it(running: Make) -> None:
    one = running()
    one.handle(e.Detached("the stream broke"), 0.5)
    finish_step(one)
    assert not told(back(one, WELCOME), "step")


def test_reports_of_committed_steps_are_not_kept(running: Make) -> None:
    one = running(steps=9)
    for _ in range(3):
        finish_step(one)
    one.handle(said(committed=broker_pb2.Committed(run="r", term=1, step=2)), 1.5)
    assert one.assignment is not None
    assert len(one.assignment.reports) == 1
    one.handle(said(committed=broker_pb2.Committed(run="r", term=0, step=3)), 1.5)
    assert len(one.assignment.reports) == 1, "of an older term (I3)"
    one.handle(e.Detached("the stream broke"), 2.0)
    assert [r.step for r in told(back(one, resumed(0), 3.0), "step")] == [2]


def test_who_keeps_all_the_reports_that_it_may_pauses_until_the_broker_has_some_i8(
    running: Make,
) -> None:
    one = running(steps=99, reports=64)
    one.handle(e.Detached("the stream broke"), 0.5)
    for step in range(63):
        assert of(finish_step(one), e.Compute)[-1].step == step + 1
    assert of(finish_step(one), e.Compute)[-1].step == 63, "it begins no other step"
    one.handle(e.DataReady("r", 1, 64), 1.5)
    assert of(one.handle(e.TimerFired("stall"), 900.0), e.SetTimer), "and blames nobody"
    out = back(one, resumed(1), 901.0)
    assert [r.step for r in told(out, "step")] == [*range(1, 64)]
    assert of(out, e.Compute)[0].step == 64


def test_a_peer_that_could_keep_too_few_reports_is_refused() -> None:
    with pytest.raises(ValueError, match="reports is 3: expected at least 64"):
        PeerOptions(reports=3)


def test_a_fault_is_told_again_to_a_broker_that_may_have_died_with_it(running: Make) -> None:
    one = running()
    assert told(one.handle(e.ComputeFailed("r", 1, 0, Action.parse("F0@0"), "no"), 0.5), "fault")
    one.handle(e.Detached("the stream broke"), 0.6)
    one.handle(e.TimerFired("connect"), 2.0)
    assert told(one.handle(e.Attached(), 2.0), "hello")[0].holding.run == "r"
    assert told(one.handle(resumed(0), 2.0), "fault")[0].reason.code == "compute"


def test_data_that_cannot_be_had_without_the_broker_is_fetched_when_it_is_back(
    running: Make,
) -> None:
    one = running()
    one.handle(e.Detached("the stream broke"), 0.5)
    assert one.handle(e.DataFailed("r", 1, 1, "nobody answers"), 1.0) == []
    assert e.Prefetch("r", 1, 1) in back(one, resumed(0))
    assert told(one.handle(e.DataFailed("r", 1, 1, "it is damaged"), 3.0), "fault")


def test_who_holds_a_run_tries_often_enough_for_a_broker_that_waits_for_a_lease(
    running: Make,
) -> None:
    one = running()
    now = 0.5
    for _ in range(12):
        (timer,) = of(one.handle(e.Detached("refused"), now), e.SetTimer)
        assert timer.at - now < 9 / 3
        now = timer.at
        one.handle(e.TimerFired("connect"), now)


# ---------------------------------------------------------------- weights


BLOB = common_pb2.BlobRef(hash="0" * 64, size_bytes=1)


def test_weights_asked_for_in_mid_run_are_copied_before_the_next_step(running: Make) -> None:
    one = running()
    one.handle(said(export=broker_pb2.Export(run="r", term=1)), 0.5)
    out = finish_step(one)
    orders = [i for i in out if isinstance(i, e.UploadWeights | e.Compute)]
    assert orders[-2] == e.UploadWeights("r", 1, 1)
    assert orders[-1].step == 1
    assert told(one.handle(e.ExportedWeights("r", 1, 1, BLOB), 2.0), "exported")[0].step == 1


def test_weights_of_the_end_are_tried_again_before_it_is_a_fault(running: Make) -> None:
    one = running(patience=Patience(export_tries=2, export_retry_s=1.0))
    finish_step(one)
    assert of(finish_step(one), e.UploadWeights) == [e.UploadWeights("r", 1, 2)]
    assert one.handle(e.ExportFailed("r", 1, 2, "no space"), 3.0) == [e.SetTimer("export", 4.0)]
    assert one.handle(e.TimerFired("export"), 4.0) == [e.UploadWeights("r", 1, 2)]
    (fault,) = told(one.handle(e.ExportFailed("r", 1, 2, "no space"), 5.0), "fault")
    assert "no space" in fault.reason.text


def test_an_upload_that_fails_without_the_broker_waits_for_it(running: Make) -> None:
    one = running(patience=Patience(export_tries=1))
    finish_step(one)
    finish_step(one)
    one.handle(e.Detached("the stream broke"), 2.0)
    assert one.handle(e.ExportFailed("r", 1, 2, "nobody answers"), 3.0) == []
    assert e.UploadWeights("r", 1, 2) in back(one, resumed(2), 60.0)
    one.handle(e.ExportedWeights("r", 1, 2, BLOB), 61.0)
    one.handle(e.Detached("the stream broke"), 62.0)
    assert told(back(one, resumed(2), 63.0), "exported")[0].step == 2


# ---------------------------------------------------------------- the end


def test_a_stop_in_the_pool_says_goodbye_and_exits(member: Make) -> None:
    out = member().handle(e.StopAsked(), 1.0)
    assert len(told(out, "goodbye")) == 1
    assert out[-1].code == 0


def test_a_stop_while_running_waits_for_the_end_of_the_step(running: Make) -> None:
    one = running(drain_s=30.0)
    out = one.handle(e.StopAsked(), 0.5)
    assert told(out, "opening")[0].closed.code == "stopped"
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
    assert of(one.handle(e.StopAsked(), 0.5), e.Waits)[0].what == "the end of the step"
    assert finish_step(one)[-1].code == 0


def test_a_stop_waits_until_another_peer_has_its_part(running: Make) -> None:
    one = running(drain_s=30.0)
    one.handle(e.StopAsked(), 0.5)
    assert of(finish_step(one), e.Exit) == [], "it waits for the broker's word"
    reason = common_pb2.Reason(text="peer p9 to take its part at step 2")
    stay = broker_pb2.Stay(run="r", term=1, within_s=90.0, reason=reason)
    out = one.handle(said(stay=stay), 1.0)
    assert out == [e.SetTimer("drain", 91.0), e.Waits(reason.text, 90.0)]
    one.validate()
    out = one.handle(said(leave=broker_pb2.Leave(run="r", term=2, goes_on=True)), 3.0)
    assert [i.message.WhichOneof("kind") for i in of(out, e.Tell)] == ["drained", "goodbye"]
    assert out[-1].code == 0


def test_it_waits_no_longer_than_the_broker_said_nor_than_its_own_bound(running: Make) -> None:
    one = running(hand_over_s=60.0)
    one.handle(e.StopAsked(), 0.5)
    stay = broker_pb2.Stay(run="r", term=1, within_s=1e9)
    assert of(one.handle(said(stay=stay), 1.0), e.SetTimer) == [e.SetTimer("drain", 61.0)]
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
    (said_so,) = told(one.handle(looked(paused=True), 1.0), "opening")
    assert said_so.closed.code == "paused"
    assert one.handle(looked(paused=True), 2.0) == [], "said once"
    out = one.handle(assign(), 3.0)  # was on its way
    assert [i.message.WhichOneof("kind") for i in of(out, e.Tell)] == ["goodbye"]
    assert one.assignment is None
    one.handle(e.Detached("goodbye"), 3.0)
    assert told(one.handle(e.Attached(), 4.0), "hello")[0].closed.code == "paused"
    one.handle(WELCOME, 4.0)
    (said_so,) = told(one.handle(looked(), 5.0), "opening")
    assert not said_so.HasField("closed")


def test_closed_in_a_run_it_ends_the_step_and_leaves_and_comes_back(running: Make) -> None:
    one = running(drain_s=30.0)
    out = one.handle(looked(paused=True), 0.5)
    assert told(out, "opening")
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
    one = member(terms=Terms(hours=Hours.parse("22-08"), monthly_bytes=1000))
    for facts, code in (
        (looked(hour=21), "hours"),
        (looked(hour=22), ""),
        (looked(hour=7, moved=999), ""),
        (looked(hour=7, moved=1000), "monthly"),
        (looked(hour=8, moved=1000), "hours"),
    ):
        one.handle(facts, 1.0)
        assert (one.opening.closed.code if one.opening.closed else "") == code


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
            shut = one.opening.closed is not None
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
        waiting.append(e.FrameArrived(frame("N+", step)))
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
