"""A broker that is made from its journal alone knows what the one before it had decided."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.events import (
    DescribeAsked,
    Instruction,
    MakePlan,
    Persist,
    PlanReady,
    Publish,
    RequestId,
    RunId,
    Started,
    StopAsked,
)
from shoal.broker.journal.decided import DurableState
from shoal.broker.journal.journal import Journal, JournalError, open_journal
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.broker.runs.lifecycle import COMMITTED_EVERY
from shoal.broker.validate import validate
from shoal.proto.broker_pb2 import (
    BUILDING,
    CANCELLED,
    DONE,
    EXPORTING,
    RUNNING,
    WAITING,
    Fault,
    Holding,
    LinkUse,
    RunEvent,
    StepDone,
)
from shoal.proto.common_pb2 import Reason
from shoal.proto.journal_pb2 import Decision, Record, RunForgotten
from shoal.tests.broker.conftest import make_spec
from shoal.tests.broker.test_machine_random import Driver


def known(decided: DurableState) -> list[bytes]:
    """All that a journal has to keep, as bytes."""
    return [r.SerializeToString(deterministic=True) for r in decided.snapshot()]


def back(world: Any, peer: str, run: str, step: int = 0, term: int = 1) -> list[Instruction]:
    """A peer attaches again with what it holds."""
    return world.join(peer, holding=Holding(run=run, term=term, step=step))


def running(world: Any, *peers: str, steps: int = 3) -> str:
    world.handle(Started())
    return world.start(*peers, steps=steps)


def recording(machine: BrokerMachine, records: list[Record] | None = None) -> list[Record]:
    """Gets every record that the machine persists from now on."""
    found, handle = [] if records is None else records, machine.handle

    def handled(event: Any, now: float) -> list[Instruction]:
        out = handle(event, now)
        found.extend(i.record for i in out if isinstance(i, Persist))
        return out

    machine.handle = handled  # type: ignore[method-assign]
    return found


# -------------------------------------------------------------------- replay


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_the_state_after_a_replay_is_the_state_of_the_live_machine(seed: int, cut: float) -> None:
    """For any history; and replaying a snapshot and what came after it is the same again."""
    driver = Driver(seed)
    records = recording(driver.machine)
    driver.machine.handle(Started(), 0.0)
    options, at = driver.machine.options, int(150 * cut)
    snapshot, before = [], 0
    for i in range(150):
        driver.step()
        if i == at:
            snapshot, before = driver.machine.decided.snapshot(), len(records)
    live = known(driver.machine.decided)
    assert known(DurableState(options, records)) == live
    assert known(DurableState(options, [*snapshot, *records[before:]])) == live
    restored = BrokerMachine("broker-1", options, decided=DurableState(options, records))
    restored.handle(Started(), driver.now)
    validate(restored)
    for event in (DescribeAsked(RequestId("q")), StopAsked()):
        restored.handle(event, driver.now + 1.0)
        validate(restored)


def test_a_snapshot_of_a_long_run_is_of_the_moment_and_no_record_of_it_is_long(tmp_path) -> None:
    """It is read later and elsewhere: in the journal's thread, while the run goes on."""
    records: list[Record] = []
    decided = DurableState(BrokerOptions())
    decided.start(0.0)
    decided.add(RunId("r-1"), make_spec(steps=9000))
    record = decided.taken()
    assert record is not None
    records.append(record)
    run = decided.runs[RunId("r-1")]
    links = [
        LinkUse(source=f"p{i}", destination=f"p{i + 1}", role="sync", codec="raw/1", bytes=2**i)
        for i in range(50)
    ]

    def happen(count: int) -> None:
        for _ in range(count):
            step = StepDone(step=run.replicas[0].committed, seconds=1.0, links=links)
            run.history.add(RunEvent(step=step, at_s=float(run.history.numbered)))

    happen(3000)
    snapshot, wanted = decided.snapshot(), list(run.history.events)
    happen(1000)
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        journal.append(records)
        journal.replace(snapshot)
        longest = max(n for (n,) in journal._db.execute("SELECT length(data) FROM record"))
    assert longest < sum(e.ByteSize() for e in wanted) / 4
    with Journal(path) as journal:
        again = DurableState(BrokerOptions(), journal.records())
    assert list(again.runs[RunId("r-1")].history.events) == wanted


def test_a_snapshot_with_all_events_in_one_record_is_still_read() -> None:
    """As brokers wrote it before a run's past had records of its own."""
    decided = DurableState(BrokerOptions())
    decided.add(RunId("r-1"), make_spec(steps=9000))
    run = decided.runs[RunId("r-1")]
    for i in range(1500):
        run.history.add(RunEvent(note=f"note {i}"))
    (_, head, *past) = decided.snapshot()
    assert past
    (kept,) = head.decisions
    del kept.kept.events[:]
    kept.kept.events.extend(run.history.events)
    again = DurableState(BrokerOptions(), [head])
    assert list(again.runs[RunId("r-1")].history.events) == list(run.history.events)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), deaths=st.sets(st.integers(1, 149), min_size=1, max_size=4))
def test_any_events_in_any_order_keep_the_invariants_over_restarts(
    seed: int, deaths: set[int]
) -> None:
    driver = Driver(seed)
    records = recording(driver.machine)
    for i in range(150):
        if i in deaths:
            options, live = driver.machine.options, known(driver.machine.decided)
            decided = DurableState(options, records)
            assert known(decided) == live
            driver.machine = BrokerMachine("broker-1", options, decided=decided)
            recording(driver.machine, records)
            driver.asked.clear()
            driver.machine.handle(Started(), driver.now)
            validate(driver.machine)
        driver.step()


def test_a_decision_that_cannot_follow_is_refused_with_words() -> None:
    forget = Record(decisions=[Decision(forgotten=RunForgotten(run="r-1"))])
    with pytest.raises(ValueError, match="never submitted"):
        DurableState(BrokerOptions(), [forget])
    with pytest.raises(ValueError, match="newer version"):
        DurableState(BrokerOptions(), [Record(decisions=[Decision()])])


def test_a_journal_that_cannot_be_replayed_is_named(tmp_path) -> None:
    path = tmp_path / "state" / "journal.sqlite"
    journal, _ = open_journal(path, BrokerOptions())
    journal.append([Record(decisions=[Decision(forgotten=RunForgotten(run="r-1"))])])
    journal.close()
    with pytest.raises(JournalError, match="cannot be replayed: a decision about run 'r-1'"):
        open_journal(path, BrokerOptions())
    with Journal(path) as again:  # and the lock is free
        assert again.count == 1


# -------------------------------------------------------------------- what it does then


def test_holders_that_come_back_go_on_where_the_journal_ends(world) -> None:
    run = running(world, "a", "b")
    for peer in "ab":
        world.report(peer, run, 0)
    world.report("a", run, 1)  # not committed: b has not said it
    before = world.watched(run).events
    world.restart()
    assert world.state(run).phase == RUNNING
    assert world.watched(run).events == before
    out = back(world, "a", run, step=2)
    assert world.kinds(out, "a") == ["welcome", "start"]
    resumed = world.told(out, "a")[0].welcome.resumed
    assert (resumed.run, resumed.term, resumed.step) == (run, 1, 1)
    back(world, "b", run, step=1)
    world.report("a", run, 1)
    world.report("a", run, 0)  # told again, and known
    world.report("b", run, 1)
    assert world.state(run).step == 2
    for peer in "ab":
        world.report(peer, run, 2)
        world.export(peer, run, 3)
    assert world.state(run).phase == DONE
    steps = [e.step.step for e in world.watched(run).events if e.HasField("step")]
    assert steps == [0, 1, 2]


def test_a_holder_that_is_not_back_within_a_lease_is_lost(world) -> None:
    run = running(world, "a", "b")
    world.restart()
    back(world, "a", run)
    lease = world.machine.options.lease_s
    world.wait(lease - 0.1)
    world.say("a", heartbeat={})
    assert world.state(run).phase == RUNNING
    out = world.wait(0.2)
    assert world.state(run).phase == WAITING
    assert "b did not come back within a lease" in world.state(run).reason.text
    assert world.kinds(out, "a") == ["leave"]
    out = back(world, "b", run)
    assert world.kinds(out, "b") == ["welcome", "leave"], "too late"
    world.drained("a", run)
    ask = world.only(world.drained("b", run), MakePlan)
    out = world.handle(PlanReady(run, ask.version, world.plan("a", "b")))
    assert world.told(out, "a")[0].assign.term == 2


def test_a_pool_peer_takes_the_part_of_who_did_not_come_back_and_is_found(world) -> None:
    """From the plan the new broker knows which of them exchange frames: a and c do not."""
    run = running(world, "a", "b", "c", "d")
    world.restart()
    for peer in "acd":
        back(world, peer, run)
    world.join("e")
    out = world.wait(world.machine.options.lease_s - 0.1)
    for peer in "acde":
        world.say(peer, heartbeat={})
    out = world.wait(0.2)
    assert world.state(run).phase == BUILDING
    assert "stage 1 -> e (from the pool)" in world.state(run).reason.text
    dials = {frozenset((p, d.peer)) for p in "acde" for d in world.told(out, p)[0].assign.dials}
    assert dials == {frozenset(pair) for pair in ("ad", "ae", "cd", "ce", "de")}


@pytest.mark.parametrize("holding", [None, ("other", 1), ("", 2)])
def test_a_holder_that_comes_back_without_its_part_is_lost_at_once(world, holding) -> None:
    run = running(world, "a", "b")
    world.restart()
    back(world, "a", run)
    if holding is None:
        out = world.join("b")
        assert world.state(run).phase == BUILDING, "and gets it again"
        assert world.kinds(out, "b") == ["welcome", "assign"]
        assert world.told(out, "a")[0].assign.term == 2
    else:
        out = back(world, "b", holding[0] or run, term=holding[1])
        assert world.state(run).phase == WAITING
        assert world.kinds(out, "b") == ["welcome", "leave"]
    assert "came back without the run" in world.state(run).reason.text


def test_a_fault_that_died_with_the_broker_is_told_again(world) -> None:
    run = running(world, "a", "b")
    world.restart()
    back(world, "a", run)
    world.say("a", fault=Fault(run=run, term=1, reason=Reason(code="memory", text="too much")))
    assert world.state(run).reason.code == "memory"
    assert world.state(run).phase == WAITING
    out = back(world, "b", run)
    assert world.kinds(out, "b") == ["welcome", "leave"]
    world.drained("b", run)
    world.drained("a", run)
    assert len(world.machine.members.pool) == 2


def test_a_run_that_was_being_built_is_planned_anew_in_a_later_term(world) -> None:
    world.handle(Started())
    for peer in "ab":
        world.join(peer)
    run, out = world.submit(world.spec(plan={"stages": 2}))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    assert world.state(run).phase == BUILDING
    world.restart()
    assert world.state(run).phase == WAITING
    for peer in "ab":
        assert world.kinds(back(world, peer, run), peer) == ["welcome", "leave"]
        out = world.drained(peer, run)
    assert not [i for i in out if isinstance(i, MakePlan)], "others may still attach again"
    assert world.state(run).reason.code == "restart"
    lease = world.machine.options.lease_s
    world.wait(lease / 2)
    for peer in "ab":
        world.say(peer, heartbeat={})
    out = world.wait(lease / 2)
    out = world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    assert world.told(out, "a")[0].assign.term == 2
    dials = [d.generation for p in "ab" for d in world.told(out, p)[0].assign.dials]
    assert dials == [(1 << 32) + 1], "above every one of the first start"


def test_a_run_that_was_exporting_ends_when_its_weights_are_told_again(world) -> None:
    run = running(world, "a", "b", steps=1)
    world.report("a", run, 0)
    world.report("b", run, 0)
    world.export("a", run, 1)
    assert world.state(run).phase == EXPORTING
    world.restart()
    for peer in "ab":
        back(world, peer, run, step=1)
        world.export(peer, run, 1)
    assert world.state(run).phase == DONE
    assert sum(e.HasField("weights") for e in world.watched(run).events) == 1


def test_ended_runs_are_there_with_their_weights_and_ids_never_come_twice(world) -> None:
    done = running(world, "a", "b", steps=1)
    for peer in "ab":
        world.report(peer, done, 0)
        world.export(peer, done, 1)
    cancelled, _ = world.submit(world.spec(plan={"stages": 3}))
    world.cancel(cancelled)
    before = {run: world.watched(run) for run in (done, cancelled)}
    world.restart()
    assert {run: world.watched(run) for run in before} == before
    assert world.state(done).phase == DONE
    assert world.state(cancelled).phase == CANCELLED
    assert world.submit()[0] not in before


def test_forgotten_runs_stay_forgotten_and_their_ids_are_not_used_again(make_world) -> None:
    world = make_world(kept_runs=1)
    world.handle(Started())
    ids = []
    for _ in range(4):
        ids.append(world.submit()[0])
        world.cancel(ids[-1])
    world.restart()
    assert list(world.machine.runs) == ids[2:]
    assert world.submit()[0] not in ids


def test_a_cancelled_run_expects_nobody_any_more(world) -> None:
    run = running(world, "a", "b")
    world.restart()
    world.cancel(run)
    assert not world.machine.members.expected
    assert world.kinds(back(world, "a", run), "a") == ["welcome", "leave"]


def test_an_event_is_decided_before_it_is_published(world) -> None:
    run = running(world, "a", "b")
    world.report("a", run, 0)
    out = world.report("b", run, 0)
    assert isinstance(out[0], Persist)
    (event,) = [i.event for i in out if isinstance(i, Publish)]
    assert out[0].record.decisions[0].happened.event == event


def test_holders_hear_now_and_then_which_reports_they_need_not_keep(world) -> None:
    run = running(world, "a", "b", steps=100)
    for step in range(COMMITTED_EVERY):
        world.report("a", run, step)
        out = world.report("b", run, step)
        if step < COMMITTED_EVERY - 1:
            assert not world.kinds(out, "a")
    assert world.told(out, "a")[0].committed.step == COMMITTED_EVERY
    assert world.kinds(out, "b") == ["committed"]


@pytest.mark.parametrize("how", ["journal", "snapshot"])
def test_what_only_peers_with_the_data_read_is_known_after_a_restart(world, how) -> None:
    """Peers' own word is among it, not only the submitter's."""
    for peer in "ab":
        world.join(peer)
    run, out = world.submit(world.spec(9, plan={"stages": 2}))
    ask = world.only(out, MakePlan)
    out = world.handle(PlanReady(run, ask.version, world.plan("a", "b"), local=("scan",)))
    assert list(world.told(out, "a")[0].assign.local) == ["scan"]
    if how == "snapshot":
        world.journal = list(world.machine.decided.snapshot())
    world.restart()
    assert world.machine.replica(run).record.local == ("scan",)
