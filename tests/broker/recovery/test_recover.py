"""The ladder as a function: it says what is done, and does nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.events import MakePlan, PlanReady
from shoal.broker.recovery.recover import Fail, Recover, Replan, recover
from shoal.dag.plan.cut import bare_stages
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.schedule import listed
from shoal.proto.broker_pb2 import Checkpoint, Ready, Snapshot, SnapshotReport, Span

from ..conftest import World, chain_outline
from ..test_machine_random import Driver


def view_of(world: World, run: str):
    replica = world.machine.replica(run)
    assert replica is not None
    return replica.snapshots.view(world.now)


def everything(machine) -> tuple:
    members = tuple((m.id, m.state, m.run) for m in machine.members.members.values())
    kept = tuple(run.record.kept().SerializeToString() for run in machine.runs.values())
    return members, machine.members.version, kept


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), live=st.booleans(), pick=st.randoms(use_true_random=False))
def test_it_changes_nothing_and_what_it_decides_can_be_done(seed, live, pick) -> None:
    driver = Driver(seed)
    for _ in range(120):
        driver.step()
        machine = driver.machine
        for replica in machine.registry.replicas():
            if not replica.record.active:
                continue
            pool = {m.id for m in machine.members.pool}
            gone = [p for p in replica.context.parts if p not in pool and pick.random() < 0.4]
            before = everything(machine)
            decision, why = recover(replica.snapshots.view(driver.now), gone, live)
            assert everything(machine) == before
            assert isinstance(decision, Recover | Replan | Fail)
            assert why.isprintable()
            if not isinstance(decision, Recover):
                continue
            for peer in decision.planned.plan.peers:
                assert peer not in gone
                assert peer in pool or machine.members.mine(peer, replica.id)
            decision.planned.plan.validate(decision.planned.plan.stages[-1].stop)
            assert {p for pair in decision.pairs for p in pair} <= set(decision.planned.plan.peers)
            assert set(decision.taken_by) <= set(gone)


def twins(first: str, second: str) -> Plan:
    """One stage that both hold, a microbatch each."""
    holders = PeerId(first), PeerId(second)
    routes = tuple((Visit(0, holder),) for holder in holders)
    plan = Plan((StageSlot(0, 1, holders),), routes, 2, outline=chain_outline(1))
    return listed(plan, bare_stages(plan))


def test_a_sibling_comes_first_and_goes_on_from_what_it_has(world) -> None:
    world.join("a")
    world.join("b")
    run, out = world.submit(world.spec(9, plan={"stages": 1, "pipelines": 2}))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, twins("a", "b")))
    for peer in "ab":
        world.say(peer, ready=Ready(run=run, term=1))
    world.join("c")
    decision, why = recover(view_of(world, run), ["a"])
    assert isinstance(decision, Recover)
    assert (decision.planned.plan.peers, decision.live, decision.taken_by) == (("b",), True, {})
    assert why == "; its siblings do its microbatches"
    decision, why = recover(view_of(world, run), ["a"], live=False)
    assert isinstance(decision, Recover)
    assert (decision.live, decision.taken_by) == (False, {"a": "c"})
    assert "stage 0 -> c (warm)" in why


@pytest.mark.parametrize("ladder", [["snapshot"], ["snapshot", "checkpoint"], []])
def test_without_a_set_a_run_begins_anew_only_where_its_ladder_has_that(world, ladder) -> None:
    run = world.start("a", "b", steps=9, recovery={"ladder": ladder})
    world.join("c")
    for peer in "ab":
        world.report(peer, run, 0)
    decision, why = recover(view_of(world, run), ["a"])
    assert isinstance(decision, Recover if "checkpoint" in ladder else Fail)
    assert why.startswith("; stage 0 -> c" if "checkpoint" in ladder else ". No snapshot of it")


def test_a_whole_set_is_gone_on_from_and_nobody_in_the_pool_means_another_plan(world) -> None:
    run = world.start("a", "b", steps=9, recovery={"ladder": ["snapshot"]})
    for peer in "ab":
        world.report(peer, run, 0)
    for at, holder in enumerate("ab"):
        span = [Span(start=at, stop=at + 1)]
        found = Snapshot(run=run, term=1, step=1, holder=holder, spans=span)
        for keeper in "ab":
            world.say(keeper, snapshot=SnapshotReport(snapshot=found, held=True))
    assert recover(view_of(world, run), ["a"]) == (Replan(), "")
    world.join("c")
    view = view_of(world, run)
    decision, _ = recover(view, ["a"])
    assert isinstance(decision, Recover)
    assert (decision.live, decision.taken_by) == (False, {"a": "c"})
    assert view.found is not None
    assert view.found.step == 1


def test_where_a_run_shall_not_wait_too_few_peers_end_it(world) -> None:
    run = world.start("a", "b", steps=9, recovery={"when_short": "fail"})
    view = view_of(world, run)
    view.suspects.again([PeerId("a")], 0, world.now)
    assert recover(view, ["a"]) == (Fail(), ", and too few peers are left")


def test_before_its_own_first_step_a_run_goes_on_from_what_it_was_resumed_from(world) -> None:
    """Nothing of its own is lost, so its ladder need not have checkpoints."""
    spec = world.spec(9, plan={"stages": 2}, recovery={"ladder": ["snapshot"]})
    spec.resumed.CopyFrom(Checkpoint(run="r-0", term=1, step=3, operators=2, microbatch_size=2))
    spec.resumed.job = spec.job
    spec.resumed.graph.CopyFrom(spec.graph)
    spec.resumed.data.CopyFrom(spec.data)
    for at, holder in enumerate("ab"):
        file = spec.resumed.files.add(holder=holder, blob=spec.graph)
        file.spans.add(start=at, stop=at + 1)
        world.join(holder)
    run, out = world.submit(spec)
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    for peer in "ab":
        world.say(peer, ready=Ready(run=run, term=1))
    world.join("c")
    decision, why = recover(view_of(world, run), ["a"])
    assert isinstance(decision, Recover), why
    for peer in "ab":
        world.report(peer, run, 3)
    assert isinstance(recover(view_of(world, run), ["a"])[0], Fail)
