"""A run whose holders are lost, or do not do their part."""

from __future__ import annotations

import pytest

from shoal.broker.events import (
    MakePlan,
    PlanReady,
    RunId,
)
from shoal.broker.recovery.suspects import SuspectTracker
from shoal.dag.plan.plan import PeerId
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
)
from shoal.proto.common_pb2 import Reason

from ..runs.test_runs import beat


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
    kind = "warm" if phase == "RUNNING" else "from the pool"
    assert f"stage 0 -> c ({kind})" in world.state(run).reason.text
    assert "from the starting weights" in world.state(run).reason.text
    for peer in "bc":
        assign = world.told(out, peer)[0].assign
        assert (assign.term, assign.first_step) == (2, 0)
        assert [s.holders[0] for s in assign.slice.plan.stages] == ["c", "b"]
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
    run = world.start("a", "b", recovery={"warm_spares": 0})
    world.join("c")
    reason = Reason(code="memory", text="there is no more of it")
    out = world.say("b", fault=Fault(run=run, term=1, step=2, reason=reason))
    text = world.state(run).reason.text
    assert text.startswith("peer b reports a fault at step 2: there is no more of it;")
    assert "stage 1 -> c (from the pool)" in text
    assert world.state(run).reason.code == "memory"
    assert world.kinds(out, "b") == ["leave"]
    assert world.kinds(out, "a") == world.kinds(out, "c") == ["assign"]
    world.drained("b", run)
    out = world.close("c")
    assert world.state(run).phase == WAITING, "b is left out for a while"
    world.drained("a", run)
    assert not [i for i in beat(world, 20, "a", "b") if isinstance(i, MakePlan)]
    ask = world.only(beat(world, 15, "a", "b"), MakePlan)
    assert {o.peer for o in ask.peers} == {"a", "b"}


def blame(world, run, by: str, about: str, term: int) -> None:
    reason = Reason(code="link", text="no frame came for 30 s")
    world.say(by, fault=Fault(run=run, term=term, step=2, reason=reason, about=about))


def test_one_word_removes_nobody_but_who_spoke_it(world) -> None:
    run = world.start("a", "honest", "evil", recovery={"warm_spares": 0})
    world.join("c")
    blame(world, run, "evil", "honest", term=1)
    text = world.state(run).reason.text
    assert text.startswith("peer evil reports a fault at step 2 about peer honest: no frame came")
    assert "stage 2 -> c (from the pool)" in text
    assert world.machine.replica(run).record.peers == ("a", "honest", "c")
    world.drained("evil", run)
    blame(world, run, "evil", "honest", term=2)  # from outside of the run, and once more
    assert world.machine.replica(run).record.peers == ("a", "honest", "c")


def test_who_two_others_do_not_hear_goes_at_once(world) -> None:
    """Both neighbours say so in the same moment: the second word is of a term that is over."""
    run = world.start("a", "dead", "b")
    for peer in ("c", "d"):
        world.join(peer)
    blame(world, run, "a", "dead", term=1)
    blame(world, run, "b", "dead", term=1)
    assert "dead" not in world.machine.replica(run).record.peers


def test_who_is_not_in_a_run_says_nothing_about_it(world) -> None:
    for spares in (0, 1):  # the other one is in the pool, or keeps copies
        run = world.start("a", "honest", "evil", recovery={"warm_spares": spares})
        world.join("accomplice")
        assert (world.machine.members.members["accomplice"].state == "pool") == (not spares)
        blame(world, run, "accomplice", "honest", term=1)
        blame(world, run, "evil", "honest", term=1)
        suspects = world.machine.replica(run).context.suspects
        assert suspects.out(PeerId("evil"), world.now)
        assert not suspects.out(PeerId("honest"), world.now)
        world.cancel(run)
        for peer in ("a", "honest", "evil", "accomplice"):
            world.drained(peer, run)


def test_the_same_one_counts_once_however_often_it_says_so() -> None:
    blamed = SuspectTracker()
    assert not any(blamed.accuse("evil", "honest") for _ in range(3))
    assert blamed.accuse("a", "honest")


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
    run = world.start("a")
    out = world.say("a", fault=Fault(run=run, term=1, reason=Reason(code="plan", text="no stage")))
    assert world.state(run).phase == FAILED
    assert world.state(run).reason.text == "peer a reports a fault at step 0: no stage"
    assert world.kinds(out, "a") == ["leave"]


def test_a_step_that_fails_with_one_peer_after_the_other_ends_the_run(world) -> None:
    run = world.start("a")
    names = [f"p{i}" for i in range(9)]
    for peer in names:
        world.join(peer)
    while world.state(run).phase == BUILDING or world.state(run).term == 1:
        term, (holder,) = world.state(run).term, world.machine.replica(run).record.peers
        fault = Fault(run=run, term=term, reason=Reason(code="compute", text="no kernel"))
        world.say(holder, fault=fault)
        assert world.state(run).term == term + 1 or world.state(run).phase == FAILED
    assert world.state(run).phase == FAILED
    assert "was tried 5 times" in world.state(run).reason.text


@pytest.mark.parametrize("code", ["host", "export"])
def test_a_fault_of_the_only_holder_gives_its_part_to_another(world, code: str) -> None:
    run = world.start("a", recovery={"warm_spares": 0})
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
