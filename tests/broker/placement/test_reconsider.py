"""Looking for a better plan while a run goes on: asked now and then, decided slowly, shown once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.broker.events import ConsiderPlan, Log, MakePlan, PlanConsidered, PlanReady
from shoal.broker.placement.reconsider import EVERY, EVERY_S, alike
from shoal.dag.cost.network import uniform
from shoal.dag.cost.speed import Speeds
from shoal.dag.plan.plan import CodecChoice, PeerId
from shoal.planner.base.interface import PeerOffer
from shoal.proto.broker_pb2 import Ready, Snapshot


def advance(world, run, steps, first):
    """Commits steps, a second each; returns all instructions."""
    out = []
    for step in range(first, first + steps):
        out += world.wait(1.0)
        for peer in world.streams:
            world.say(peer, heartbeat={})
        for peer in ("a", "b"):
            out += world.report(peer, run, step)
    return out


def asks(out):
    return [i for i in out if isinstance(i, ConsiderPlan)]


def test_a_running_plan_is_compared_now_and_then_with_the_pool_included(world):
    run = world.start("a", "b", steps=200)
    world.join("c")
    out = advance(world, run, 25, 0)
    asked = asks(out)
    assert len(asked) == 1  # one at a time: it is not answered
    assert [o.peer for o in asked[0].peers] == ["a", "b", "c"]
    assert asked[0].plan is world.machine.replica(run).record.plan


def test_without_snapshots_a_lasting_gain_is_announced_once(world):
    run = world.start("a", "b", steps=2000, recovery={"ladder": ["checkpoint"]})
    better = world.plan("b", "a")
    notes, prepared, searches = [], [], 0
    for step in range(0, 150, EVERY):
        out = advance(world, run, EVERY, step)
        for ask in asks(out):
            searches += 1
            out += world.handle(PlanConsidered(run, ask.version, 1.0, 0.7, 2.0, better))
        notes += [e.note for e in world.published(out) if e.HasField("note")]
        prepared += [i for i in out if isinstance(i, Log) and i.name == "plan_prepared"]
    assert len(notes) == len(prepared) == searches == 1  # nothing changed: it stands
    assert "30% faster" in notes[0]
    assert "b and a" in notes[0]
    assert "needs snapshots" in notes[0]
    assert world.machine.replica(run).record.running
    assert world.machine.replica(run).record.term == 1


def test_a_run_stops_between_two_steps_to_move(world):
    run, step = world.start("a", "b", steps=2000), 0
    better, told = world.plan("b", "a"), []
    while not told:
        out = advance(world, run, 1, step)
        step += 1
        for ask in asks(out):
            out += world.handle(PlanConsidered(run, ask.version, 1.0, 0.7, 2.0, better))
        told = [m.snapshot for m in world.told(out, "a") if m.snapshot.hold]
        assert step < 200
    held = told[-1].hold
    assert held >= step
    advance(world, run, held - step, step)
    out = []
    for peer in ("a", "b"):
        [slot] = [s for s in world.machine.replica(run).record.plan.stages if peer in s.holders]
        snapshot = Snapshot(run=run, term=1, step=held, holder=peer)
        snapshot.spans.add(start=slot.start, stop=slot.stop)
        out += world.say(peer, snapshot={"snapshot": snapshot, "held": True})
    assigned = [m.assign for m in world.told(out, "a") if m.HasField("assign")]
    assert [a.first_step for a in assigned] == [held]
    assert [tuple(s.holders) for s in assigned[0].slice.plan.stages] == [("b",), ("a",)]
    assert "30% faster" in world.machine.replica(run).record.reason.text


def test_an_answer_about_an_earlier_plan_decides_nothing(world):
    run = world.start("a", "b", steps=2000)
    world.join("c")
    [ask] = asks(advance(world, run, 20, 0))
    better = world.plan("b", "a")
    world.handle(PlanConsidered(run, ask.version, 1.0, 0.5, 0.0, better))
    advance(world, run, 35, 20)  # the gain has nearly lasted for long enough
    world.join("d")
    [ask] = asks(advance(world, run, 15, 55))
    world.close("b")
    assert not world.machine.replica(run).record.running
    out = world.handle(PlanConsidered(run, ask.version, 1.0, 0.5, 0.0, better))
    assert not [i for i in out if isinstance(i, Log) and i.name == "plan_prepared"]


def test_a_run_that_is_to_pause_is_not_moved_instead(world):
    run = world.start("a", "b", steps=2000)
    world.join("c")
    [ask] = asks(advance(world, run, 20, 0))
    world.handle(PlanConsidered(run, ask.version, 1.0, 0.5, 0.0, world.plan("b", "a")))
    known = world.machine.replica(run)
    known.lifecycle.pause(world.now)
    errand = known.handover.errand
    assert errand is not None
    assert errand.plan is None
    for step in range(20, 120):  # a gain that has lasted for 50 steps would move it
        advance(world, run, 1, step)
        assert known.handover.errand is errand


def test_one_who_comes_or_goes_asks_for_another_search(world):
    run = world.start("a", "b", steps=2000)
    searches = []
    for step in range(0, 120, EVERY):
        if step == 40:
            world.join("c")
        if step == 80:
            world.say("c", goodbye={})
        for ask in asks(advance(world, run, EVERY, step)):
            searches.append([o.peer for o in ask.peers])
            world.handle(PlanConsidered(run, ask.version, 1.0, 1.0, 2.0, world.plan("b", "a")))
    assert searches == [["a", "b"], ["a", "b", "c"], ["a", "b"]]


@pytest.mark.parametrize("share", [0.04, -0.04, 0.06, -0.06])
@pytest.mark.parametrize(
    "name", ["latency_s", "bandwidth", "up", "down", "product", "memory", "call_s", "flops_per_s"]
)
def test_a_number_has_changed_when_it_has_by_a_twentieth(share, name):
    peers = (PeerId("a"), PeerId("b"))
    links = uniform(peers, 0.01, 1e6)
    links = replace(links, up=np.full(2, 1e7), down=np.full(2, np.inf if name == "up" else 1e7))
    offers = tuple(PeerOffer(p, speeds=Speeds.of_flops(1e12, 1e-5)) for p in peers)
    if name == "flops_per_s":
        offers = tuple(PeerOffer(p, flops_per_s=1e12) for p in peers)
    plan = object()
    before = ConsiderPlan("r", 1, None, plan, offers, links)
    last, changed = offers[-1], links
    if hasattr(links, name):
        array = getattr(links, name).copy()
        array.flat[1] *= 1 + share
        changed = replace(links, **{name: array})
    elif name == "flops_per_s":
        last = replace(last, flops_per_s=last.flops_per_s * (1 + share))
    else:
        speeds = replace(last.speeds, **{name: getattr(last.speeds, name) * (1 + share)})
        last = replace(last, speeds=speeds)
    after = replace(before, version=2, peers=(offers[0], last), network=changed)
    assert alike(before, after) == (abs(share) < 0.05)
    assert not alike(before, replace(before, plan=object()))
    assert not alike(before, replace(before, peers=offers[:1]))
    assert not alike(before, replace(before, network=None))


def test_other_codecs_alone_are_announced_too(world):
    run = world.start("a", "b", steps=2000, recovery={"ladder": ["checkpoint"]})
    running = world.machine.replica(run).record.plan
    coded = replace(
        running, codecs=(CodecChoice(PeerId("a"), PeerId("b"), "activation", "int8/1"),)
    )
    notes = []
    for step in range(0, 150, EVERY):
        out = advance(world, run, EVERY, step)
        for ask in asks(out):
            out += world.handle(PlanConsidered(run, ask.version, 1.0, 0.7, 0.0, coded))
        notes += [e.note for e in world.published(out) if e.HasField("note")]
    assert len(notes) == 1
    assert "it would change the codecs of 1 link. Moving needs" in notes[0]


def test_nothing_is_asked_where_the_job_or_a_hand_written_plan_says_no(world):
    for peer in ("a", "b"):
        world.join(peer)
    spec = world.spec(200, plan={"stages": 2, "replan": False})
    run, out = world.submit(spec)
    ask = world.only(out, MakePlan)
    world.handle(PlanReady(run, ask.version, world.plan("a", "b")))
    for peer in ("a", "b"):
        world.say(peer, ready=Ready(run=run, term=1))
    assert not asks(advance(world, run, 40, 0))


def test_an_answer_for_a_run_that_has_ended_has_no_effect(world):
    run = world.start("a", "b", steps=200)
    [ask] = asks(advance(world, run, EVERY + int(EVERY_S), 0))
    world.cancel(run)
    late = PlanConsidered(run, ask.version, 1.0, 0.1, 0.0, world.plan("b", "a"))
    assert not world.published(world.handle(late))


def test_a_plan_that_could_not_be_compared_is_asked_for_again(world):
    run = world.start("a", "b", steps=200)
    [ask] = asks(advance(world, run, 20, 0))
    assert len(asks(world.handle(PlanConsidered(run, ask.version)))) == 1
