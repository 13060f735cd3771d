"""The life of runs on the machine alone: phases, commits, terms, deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.broker.events import (
    Instruction,
    MakePlan,
    PlanReady,
    Reject,
    RunAsked,
)
from shoal.dag.plan.report import PeerPrediction, PlanReport, Prediction
from shoal.proto.broker_pb2 import (
    BUILDING,
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
    assert (step.step, step.outcome.loss, step.seconds) == (0, 3.0, 5.0)  # b makes the loss
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
    assert [s.holders[0] for s in a.slice.plan.stages] == ["a", "b"]
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
    run = world.start("a", eval_every=1)
    message = StepReport(run=run, term=1, step=0)
    message.evaluation.loss = 2.5
    event = world.published(world.say("a", step=message))[0]
    assert event.step.evaluation.loss == 2.5
    assert not event.step.HasField("outcome")


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
    found = world.machine.replica(run)
    plan = found.record.plan
    plan = replace(plan, evaluation_routes=20 * plan.routes)
    found.record.plan = found.context.term.plan = plan
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


def test_large_parts_have_as_long_as_a_slow_link_takes(make_world) -> None:
    """Fetched before they are built, and brought at the end."""
    world = make_world(build_s=20.0, export_s=5.0)
    world.join("a")
    run, out = world.submit(world.spec(1))
    plan = world.plan("a")
    large = PeerPrediction(peer="a", compute_s=1.0, device_bytes=125_000_000, host_bytes=0)
    report = PlanReport(Prediction(peers=(large,)))  # 100 s over 10 Mbit/s
    world.handle(PlanReady(run, world.only(out, MakePlan).version, plan, report=report))
    beat(world, 99, "a")
    assert world.state(run).phase == BUILDING
    world.say("a", ready=Ready(run=run, term=1))
    world.report("a", run, 0)
    assert world.state(run).phase == EXPORTING
    beat(world, 99, "a")
    assert world.state(run).phase == EXPORTING
    beat(world, 2, "a")
    assert "no weights came for 100 s" in world.state(run).reason.text


def test_exporting_has_a_deadline(make_world) -> None:
    world = make_world(export_s=5.0)
    run = world.start("a", steps=1)
    world.report("a", run, 0)
    beat(world, 6, "a")
    assert "they are missing from a" in world.state(run).reason.text


def test_a_run_without_rounds_is_not_asked_to_finish(world) -> None:
    run = world.start("a", steps=2)
    refused = world.only(world.handle(RunAsked(world.request(), run, "finish")), Reject)
    assert refused.code == "FAILED_PRECONDITION"
    assert refused.reason.startswith(f"run {run} makes no rounds")
    assert world.state(run).phase == RUNNING


@pytest.mark.parametrize("name", ["r-1.", "r-1.07", "r-1.-1", "x." + 5000 * "1", "r-1.\u0661"])
def test_a_name_that_can_be_no_replicas_is_ignored(world, name) -> None:
    run = world.start("a")
    world.say("a", ready=Ready(run=name.replace("r-1", run), term=1))
    assert world.machine.ignored == {"ready": 1}
    assert world.state(run).phase == RUNNING


@pytest.mark.slow
def test_no_id_comes_twice_though_runs_are_forgotten(world) -> None:
    """Four digits by chance would: of 1,000 runs some seven pairs have the same."""
    seen = set()
    for _ in range(1000):
        run, _ = world.submit(world.spec(2))
        world.cancel(run)
        seen.add(run)
    assert len(seen) == 1000
    assert len(world.machine.runs) < 1000
