"""The life of runs on the machine alone: phases, commits, terms, losses, deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.broker.events import (
    Answer,
    DescribeAsked,
    DrainAsked,
    Instruction,
    MakePlan,
    PlanFailed,
    PlanReady,
    Reject,
    RunAsked,
    RunId,
    RunSubmitted,
    Stop,
    StopAsked,
    WatchAsked,
)
from shoal.proto.broker_pb2 import (
    BUILDING,
    CANCELLED,
    DONE,
    EXPORTING,
    FAILED,
    RUNNING,
    WAITING,
    Fault,
    Heartbeat,
    Ready,
    StepReport,
)
from shoal.proto.common_pb2 import Reason
from shoal.proto.graph_pb2 import CORE


def test_a_run_goes_from_waiting_to_done(world) -> None:
    world.join("a")
    world.join("b")
    run, out = world.submit(world.spec(2))
    ask = world.only(out, MakePlan)
    assert [o.peer for o in ask.peers] == ["a", "b"]

    out = world.handle(PlanReady(run, ask.version, world.plan("a", "b")))
    assert world.kinds(out, "a") == world.kinds(out, "b") == ["assign"]
    assert world.state(run).phase == BUILDING

    assert world.kinds(world.say("a", ready=Ready(run=run, term=1)), "a") == []
    out = world.say("b", ready=Ready(run=run, term=1))
    assert world.kinds(out, "a") == world.kinds(out, "b") == ["start", "snapshot"]
    assert world.told(out, "a")[1].snapshot.step == 1
    assert world.state(run).phase == RUNNING

    world.now = 5.0
    world.report("a", run, 0)
    assert world.state(run).step == 0  # not committed: b has not reported
    step = world.published(world.report("b", run, 0, loss=3.0))[0].step
    assert (step.step, step.outcome.loss, step.seconds) == (0, 1.0, 5.0)
    assert (step.sent_bytes, step.compute_s) == (20, 1.0)

    world.report("b", run, 1)
    world.report("a", run, 1)
    assert world.state(run).phase == EXPORTING
    world.export("a", run, 2)
    out = world.export("b", run, 2)
    assert world.state(run).phase == DONE
    assert world.kinds(out, "a") == world.kinds(out, "b") == ["leave"]
    world.drained("a", run)
    world.drained("b", run)
    assert repr(world.machine) == "<Broker 2 peers (2 in pool), 0 runs>"

    events = world.watched(run).events
    assert [e.number for e in events] == list(range(len(events)))
    kinds = [e.WhichOneof("kind") for e in events]
    assert kinds == ["state", "plan", "state", "state", "step", "step", "state", "weights", "state"]
    assert [len(e.weights.files) for e in events if e.HasField("weights")] == [2]


def test_an_assignment_carries_what_the_peer_needs(world) -> None:
    world.join("a")
    world.join("b", operator_set=CORE)
    spec = world.spec()
    spec.core_graph.hash = "cd" * 32
    run, out = world.submit(spec)
    ask = world.only(out, MakePlan)
    out = world.handle(PlanReady(run, ask.version, world.plan("a", "b")))
    a, b = world.told(out, "a")[0].assign, world.told(out, "b")[0].assign
    assert (a.run, a.term, a.first_step) == (run, 1, 0)
    assert [s.holders[0] for s in a.plan.stages] == ["a", "b"]
    assert a.graph == a.full_graph == spec.graph
    assert (b.graph, b.full_graph) == (spec.core_graph, spec.graph)
    assert '"steps": 3' in a.training


def test_exactly_one_side_of_each_pair_dials_with_a_growing_generation(world) -> None:
    for peer in "abc":
        world.join(peer, address="" if peer == "b" else f"{peer}:1")
    run, out = world.submit()
    pairs = (("a", "b"), ("b", "c"))
    out = world.handle(
        PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b", "c"), pairs)
    )
    orders = {p: world.told(out, p)[0].assign.dials for p in "abc"}
    dials = {p: [(d.peer, d.address, d.generation) for d in orders[p]] for p in orders}
    # a would dial b, which cannot be dialled: b dials a. c keeps nothing of b's, as a does of c's.
    assert dials == {"a": [], "b": [("a", "a:1", 1), ("c", "c:1", 2)], "c": [("a", "a:1", 3)]}
    world.cancel(run)
    for peer in "abc":
        world.drained(peer, run)
    run, out = world.submit()
    out = world.handle(
        PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b", "c"), pairs)
    )
    assert [d.generation for d in world.told(out, "b")[0].assign.dials] == [4, 5]


def test_two_peers_that_nobody_can_dial_end_the_run_with_that_reason(world) -> None:
    world.join("a", address="")
    world.join("b", address="")
    run, out = world.submit()
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    assert world.state(run).reason.code == "address"
    assert world.state(run).phase == FAILED


# ---------------------------------------------------------------- waiting


def test_a_run_waits_for_peers_and_says_for_how_many(world) -> None:
    run, _ = world.submit(world.spec(plan={"stages": 3}))
    assert "needs 3 peers (3 stages), has 0 in the pool" in world.state(run).reason.text
    world.join("a")
    assert "has 1 in the pool" in world.state(run).reason.text
    world.join("b")
    ask = world.only(world.join("c"), MakePlan)
    assert [o.peer for o in ask.peers] == ["a", "b", "c"]


def test_runs_get_peers_by_priority_then_first_come(world) -> None:
    first, _ = world.submit()
    second, _ = world.submit(world.spec(priority=1))
    third, _ = world.submit(world.spec(priority=1))
    ask = world.only(world.join("a"), MakePlan)
    assert ask.run == second
    assert world.state(third).reason.text == f"waits behind run {second} (priority 1)"
    assert world.state(first).reason.text == f"waits behind run {second} (priority 1)"


def test_a_run_that_lacks_peers_altogether_is_overtaken_and_one_that_waits_is_not(world) -> None:
    world.start("a")
    world.join("b")
    big, _ = world.submit(world.spec(plan={"stages": 3}))
    small, out = world.submit()
    assert world.only(out, MakePlan).run == small  # there are no three peers: nobody knows when
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
    busy = world.start("a", "b")
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
    assert (ask.run, [o.peer for o in ask.peers]) == (run, ["a", "c"])


def test_a_run_that_lacks_more_memory_than_there_is_is_overtaken(world) -> None:
    world.start("a")
    world.join("b")
    run, out = world.submit(world.spec(priority=5))
    small, _ = world.submit()
    assert "waits behind" in world.state(small).reason.text
    out = lacking(world, run, out, short_bytes=9 << 30)
    assert world.only(out, MakePlan).run == small
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


# ---------------------------------------------------------------- terms and reports


def test_messages_of_another_term_have_no_effect(world) -> None:
    run = world.start("a")
    world.report("a", run, 0, term=2)
    world.say("a", fault=Fault(run=run, term=0, reason=Reason(code="x", text="x")))
    world.export("a", run, 3, term=7)
    assert world.state(run).phase == RUNNING
    assert world.state(run).step == 0
    assert world.machine.ignored == {"step": 1, "fault": 1, "exported": 1}


def test_reports_of_a_peer_outside_the_run_have_no_effect(world) -> None:
    world.join("warm")
    world.join("z")
    run = world.start("a")
    assert [m.id for m in world.machine.members.pool] == ["z"]
    world.report("z", run, 0)
    world.say("z", fault=Fault(run=run, term=1))
    assert world.state(run).phase == RUNNING
    assert world.state(run).step == 0


def test_a_peer_that_only_keeps_snapshots_is_neither_waited_for_nor_counted(world) -> None:
    world.join("warm")
    world.join("a")
    world.join("b")
    run, out = world.submit(world.spec(plan={"stages": 2}))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    world.say("warm", ready=Ready(run=run, term=1))
    world.say("a", ready=Ready(run=run, term=1))
    assert world.state(run).phase == BUILDING
    world.say("b", ready=Ready(run=run, term=1))
    world.report("warm", run, 0)
    world.export("warm", run, 3)
    assert world.state(run).step == 0
    assert world.machine.ignored == {"ready": 1, "step": 1, "exported": 1}


def test_a_report_again_is_history_only(world) -> None:
    run = world.start("a")
    world.report("a", run, 0)
    assert world.published(world.report("a", run, 0)) == []
    assert world.state(run).step == 1


def test_a_report_out_of_order_ends_the_run(world) -> None:
    run = world.start("a")
    world.report("a", run, 2)
    assert world.state(run).phase == FAILED
    assert "reported step 2: expected step 0 of 3" in world.state(run).reason.text


def test_reports_far_ahead_of_the_commit_are_bounded(make_world) -> None:
    world = make_world(most_lead=2)
    run = world.start("a", "b", steps=10)
    world.report("a", run, 0)
    world.report("a", run, 1)
    world.report("a", run, 2)
    assert "expected a lead below 2 steps" in world.state(run).reason.text


def test_weights_may_come_before_the_last_report_of_another_peer(world) -> None:
    run = world.start("a", "b", steps=1)
    world.report("a", run, 0)
    world.export("a", run, 1)
    world.report("b", run, 0)
    world.export("b", run, 1)
    assert world.state(run).phase == DONE


def test_weights_of_another_step_have_no_effect(world) -> None:
    run = world.start("a", steps=1)
    world.report("a", run, 0)
    world.export("a", run, 0)
    assert world.state(run).phase == EXPORTING


def test_an_evaluation_is_part_of_its_step(world) -> None:
    run = world.start("a")
    message = StepReport(run=run, term=1, step=0)
    message.evaluation.loss = 2.5
    event = world.published(world.say("a", step=message))[0]
    assert event.step.evaluation.loss == 2.5
    assert not event.step.HasField("outcome")


# ---------------------------------------------------------------- losses


def at_phase(world, phase: str) -> RunId:
    """A run of a and b in a phase, nothing in the pool."""
    if phase == "BUILDING":
        world.join("a")
        world.join("b")
        run, out = world.submit(world.spec(1, plan={"stages": 2}))
        world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
        return run
    run = world.start("a", "b", steps=1)
    if phase == "EXPORTING":
        world.report("a", run, 0)
        world.report("b", run, 0)
    return run


def finish(world, run: RunId, *peers: str, term: int) -> None:
    """Its one step, once all have built."""
    for peer in peers:
        world.say(peer, ready=Ready(run=run, term=term))
    for peer in peers:
        world.report(peer, run, 0, term=term)
    for peer in peers:
        world.export(peer, run, 1, term=term)
    assert world.state(run).phase == DONE
    steps = [e.step.step for e in world.watched(run).events if e.HasField("step")]
    assert steps == [0], "committed once"


@pytest.mark.parametrize("phase", ["BUILDING", "RUNNING", "EXPORTING"])
def test_a_run_waits_for_another_peer_when_a_holder_is_lost_and_goes_on_with_it(
    world, phase
) -> None:
    run = at_phase(world, phase)
    out = world.close("a")
    assert world.state(run).phase == WAITING
    text = world.state(run).reason.text
    assert "peer a was lost" in text
    assert "connection reset" in text
    assert ("at step 0" in text) == (phase == "RUNNING")
    assert world.kinds(out, "b") == ["leave"]
    assert world.told(out, "b")[0].leave.goes_on
    world.drained("b", run)
    assert repr(world.machine) == "<Broker 1 peer (1 in pool), 1 run>"
    ask = world.only(world.join("c"), MakePlan)
    assert [o.peer for o in ask.peers] == ["b", "c"]
    assert [s.holders for s in ask.before.stages] == [("a",), ("b",)]
    out = world.handle(PlanReady(run, ask.version, world.plan("b", "c")))
    assign = world.told(out, "b")[0].assign
    assert (assign.term, assign.first_step, assign.HasField("resume")) == (2, 0, False)
    finish(world, run, "b", "c", term=2)


@pytest.mark.parametrize("phase", ["BUILDING", "RUNNING", "EXPORTING"])
def test_a_pool_peer_takes_the_part_of_a_lost_holder_at_once(world, phase) -> None:
    run = at_phase(world, phase)
    world.join("c")
    out = world.close("a")
    assert world.state(run).phase == BUILDING
    assert "peer a was lost" in world.state(run).reason.text
    assert "stage 0 -> c (from the pool)" in world.state(run).reason.text
    assert "from the starting weights" in world.state(run).reason.text
    for peer in "bc":
        assign = world.told(out, peer)[0].assign
        assert (assign.term, assign.first_step) == (2, 0)
        assert [s.holders[0] for s in assign.plan.stages] == ["c", "b"]
    assert not [i for i in out if isinstance(i, MakePlan)]
    finish(world, run, "b", "c", term=2)


def test_the_run_ends_with_a_lost_holder_where_its_ladder_is_empty(world) -> None:
    for peer in "abc":
        world.join(peer)
    run, out = world.submit(world.spec(plan={"stages": 2}, recovery={"ladder": []}))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    out = world.close("a")
    assert world.state(run).phase == FAILED
    assert "its ladder has no checkpoint" in world.state(run).reason.text
    assert not world.told(out, "b")[0].leave.goes_on


def test_a_run_that_shall_not_wait_ends_when_too_few_peers_are_left(world) -> None:
    for peer in "ab":
        world.join(peer)
    run, out = world.submit(world.spec(plan={"stages": 2}, recovery={"when_short": "fail"}))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    world.close("a")
    assert world.state(run).phase == FAILED
    assert "too few peers are left" in world.state(run).reason.text


def test_who_has_finished_and_sent_its_weights_is_not_missed(world) -> None:
    run = at_phase(world, "EXPORTING")
    world.export("a", run, 1)
    world.close("a")
    assert world.state(run).phase == EXPORTING
    world.export("b", run, 1)
    assert world.state(run).phase == DONE


def test_who_has_sent_its_weights_is_missed_while_another_replays(world) -> None:
    run = at_phase(world, "EXPORTING")
    world.join("c")
    world.close("a")
    for peer in "bc":
        world.say(peer, ready=Ready(run=run, term=2))
    assert world.state(run).phase == EXPORTING
    world.report("c", run, 0, term=2)
    world.export("c", run, 1, term=2)
    world.close("c")  # b may still need frames of it
    assert world.state(run).phase == WAITING


def test_a_takeover_gives_the_part_to_the_new_incarnation_in_a_new_term(world) -> None:
    run = world.start("a", "b")
    out = world.join("a", counter=2)
    assert world.state(run).phase == BUILDING
    assert "a newer start of peer a" in world.state(run).reason.text
    assert world.kinds(out, "a") == ["welcome", "assign"]
    assert world.told(out, "a")[1].assign.term == 2
    assert world.kinds(out, "b") == ["assign"]


def test_a_fault_of_one_peer_frees_it_and_names_peer_step_and_cause(world) -> None:
    run = world.start("a", "b")
    world.join("c")
    reason = Reason(code="link", text="no frame came for 30 s")
    out = world.say("a", fault=Fault(run=run, term=1, step=2, reason=reason, about="b"))
    text = world.state(run).reason.text
    assert text.startswith("peer a reports a fault at step 2 about peer b: no frame came for 30 s;")
    assert "stage 1 -> c (from the pool)" in text
    assert world.state(run).reason.code == "link"
    assert world.kinds(out, "b") == ["leave"]
    assert world.kinds(out, "a") == world.kinds(out, "c") == ["assign"]
    world.drained("b", run)
    out = world.close("c")
    assert world.state(run).phase == WAITING, "b is left out for a while"
    world.drained("a", run)
    assert not [i for i in beat(world, 20, "a", "b") if isinstance(i, MakePlan)]
    ask = world.only(beat(world, 15, "a", "b"), MakePlan)
    assert {o.peer for o in ask.peers} == {"a", "b"}


def lose_again(world, run, lost: str, other: str, times: int) -> None:
    """It dies, comes back and is asked again within seconds, as nobody else is there."""
    for term in range(2, 2 + times):
        world.close(lost)
        world.drained(other, run)
        out = [*world.join(lost, counter=term), *beat(world, 6, lost, other)]
        ask = world.only(out, MakePlan)
        assert {o.peer for o in ask.peers} == {lost, other}
        world.handle(PlanReady(run, ask.version, world.plan(other, lost)))
        for peer in (other, lost):
            world.say(peer, ready=Ready(run=run, term=term))
        assert world.state(run).phase == RUNNING


def test_a_run_goes_on_with_who_is_lost_again_and_again_where_nobody_else_is(world) -> None:
    run = world.start("a", "b")
    lose_again(world, run, "b", "a", times=9)


def test_all_others_are_asked_before_who_is_lost_again_and_again(world) -> None:
    run = world.start("a", "b")
    lose_again(world, run, "b", "a", times=2)
    world.join("c")
    world.close("b")
    assert "stage 1 -> c" in world.state(run).reason.text
    for peer in "ac":
        world.say(peer, ready=Ready(run=run, term=4))
    world.join("b", counter=4)
    beat(world, 6, "a", "b", "c")
    world.join("d")
    world.close("c")
    assert "stage 1 -> d" in world.state(run).reason.text, "b has been in the pool for longer"


def test_a_fault_that_every_peer_would_have_ends_the_run(world) -> None:
    run = world.start("a", "b")
    world.join("c")
    out = world.say("a", fault=Fault(run=run, term=1, reason=Reason(code="plan", text="no stage")))
    assert world.state(run).phase == FAILED
    assert world.state(run).reason.text == "peer a reports a fault at step 0: no stage"
    assert world.kinds(out, "a") == world.kinds(out, "b") == ["leave"]


def test_a_step_that_fails_with_one_peer_after_the_other_ends_the_run(world) -> None:
    run = world.start("a")
    names = [f"p{i}" for i in range(9)]
    for peer in names:
        world.join(peer)
    while world.state(run).phase == BUILDING or world.state(run).term == 1:
        term, (holder,) = world.state(run).term, world.machine.runs[run].peers
        fault = Fault(run=run, term=term, reason=Reason(code="compute", text="no kernel"))
        world.say(holder, fault=fault)
        assert world.state(run).term == term + 1 or world.state(run).phase == FAILED
    assert world.state(run).phase == FAILED
    assert "was tried 5 times" in world.state(run).reason.text


@pytest.mark.parametrize("code", ["host", "export"])
def test_a_fault_of_the_only_holder_gives_its_part_to_another(world, code: str) -> None:
    run = world.start("a")
    world.join("b")
    full = Reason(code=code, text="OSError: [Errno 28] No space left on device")
    out = world.say("a", fault=Fault(run=run, term=1, reason=full))
    assert "stage 0 -> b (from the pool)" in world.state(run).reason.text
    assert world.kinds(out, "a") == ["leave"]
    assert world.kinds(out, "b") == ["assign"]
    for _ in range(4):  # nobody else is there: it is tried again, and not for ever
        term = world.state(run).term
        world.say("b", fault=Fault(run=run, term=term, reason=full))
    assert world.state(run).phase == FAILED
    assert "No space left on device" in world.state(run).reason.text
    assert "was tried 5 times" in world.state(run).reason.text


def test_a_silent_holder_is_lost(world) -> None:
    run = world.start("a", "b")
    world.wait(9)
    world.say("a", heartbeat=Heartbeat())
    world.wait(2)
    assert "peer b was lost at step 0: it was silent for 10.0 s" in world.state(run).reason.text
    assert world.state(run).phase == WAITING


# ---------------------------------------------------------------- deadlines


def beat(world, seconds: float, *peers: str) -> list[Instruction]:
    """Time passes while these peers stay alive."""
    out: list[Instruction] = []
    for _ in range(int(seconds)):
        out += world.wait(1)
        for peer in peers:
            out += world.say(peer, heartbeat=Heartbeat())
    return out


def test_building_has_a_deadline(make_world) -> None:
    world = make_world(build_s=20.0)
    world.join("a")
    world.join("b")
    run, out = world.submit()
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    world.say("a", ready=Ready(run=run, term=1))
    beat(world, 19, "a", "b")
    assert world.state(run).phase == BUILDING
    beat(world, 2, "a", "b")
    assert world.state(run).phase == WAITING
    text = world.state(run).reason.text
    assert text.startswith("not built within 20 s: no Ready came from b")
    assert not text.startswith("not built within 20 s: no Ready came from b,")


def test_a_step_without_progress_is_given_up_by_the_measured_speed(make_world) -> None:
    world = make_world(first_step_s=100.0, step_floor_s=10.0, step_factor=5.0)
    run = world.start("a", "b", steps=50)
    beat(world, 90, "a", "b")
    for step in range(5):
        beat(world, 3, "a", "b")
        world.report("a", run, step)
        world.report("b", run, step)
    beat(world, 14, "a", "b")
    assert world.state(run).phase == RUNNING
    world.report("b", run, 5)
    beat(world, 16, "a", "b")
    text = world.state(run).reason.text
    assert "step 5 made no progress for 15 s" in text
    assert "no report came from a (waits" in text
    assert world.state(run).phase == WAITING


def test_a_long_evaluation_is_progress(make_world) -> None:
    world = make_world(step_floor_s=10.0, step_factor=5.0)
    run = world.start("a", "b", steps=50)
    found = world.machine.runs[run]
    found.plan = replace(found.plan, evaluation_routes=20 * found.plan.routes)
    for step in range(5):
        beat(world, 3, "a", "b")
        world.report("a", run, step)
        world.report("b", run, step)
    beat(world, 74, "a", "b")  # (5 + 20) medians of 3 s
    assert world.state(run).phase == RUNNING
    beat(world, 2, "a", "b")
    assert "step 5 made no progress for 75 s" in world.state(run).reason.text


def test_the_first_step_has_its_own_allowance(make_world) -> None:
    world = make_world(first_step_s=30.0)
    run = world.start("a")
    beat(world, 29, "a")
    assert world.state(run).phase == RUNNING
    beat(world, 2, "a")
    assert "none measured" in world.state(run).reason.text


def test_exporting_has_a_deadline(make_world) -> None:
    world = make_world(export_s=5.0)
    run = world.start("a", steps=1)
    world.report("a", run, 0)
    beat(world, 6, "a")
    assert "they are missing from a" in world.state(run).reason.text


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
    assert world.only(world.cancel(first), MakePlan).run == second
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
    run = world.start("a")
    world.join("b")
    world.now += 2
    answer = world.only(world.handle(DescribeAsked("q")), Answer).message
    assert [(p.peer, p.membership, p.run, p.silent_s) for p in answer.peers] == [
        ("a", "assigned", run, 2.0),
        ("b", "pool", "", 2.0),
    ]
    assert [(r.run, r.phase, r.steps) for r in answer.runs] == [(run, RUNNING, 3)]


# ---------------------------------------------------------------- leaving


def test_a_draining_broker_starts_nothing_and_stops_when_nothing_is_active(world) -> None:
    run = world.start("a", steps=1)
    waiting, _ = world.submit()
    assert not [i for i in world.handle(DrainAsked()) if isinstance(i, Stop)]
    assert world.only(world.handle(RunSubmitted("q", world.spec())), Reject).code == "UNAVAILABLE"
    world.report("a", run, 0)
    assert [i for i in world.export("a", run, 1) if isinstance(i, Stop)]
    assert world.state(run).phase == DONE
    world.drained("a", run)
    assert world.state(waiting).reason.code == "broker"


def test_a_broker_that_stops_ends_runs_and_streams(world) -> None:
    run = world.start("a")
    out = world.handle(StopAsked())
    assert world.state(run).phase == FAILED
    assert world.kinds(out, "a") == ["leave", "refused", "close"]
    assert world.told(out, "a")[1].refused.again
    assert [i for i in out if isinstance(i, Stop)]


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
    assert world.only(out, MakePlan).run == run
