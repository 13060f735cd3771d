"""Looking for a better plan while a run goes on: asked now and then, decided slowly, shown once."""

from __future__ import annotations

from dataclasses import replace

from shoal.broker.events import ConsiderPlan, Log, MakePlan, PlanConsidered, PlanReady
from shoal.broker.reconsider import EVERY, EVERY_S
from shoal.dag.plan import CodecChoice, PeerId
from shoal.proto.broker_pb2 import Ready


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
    assert asked[0].plan is world.machine.runs[run].plan


def test_a_lasting_gain_is_announced_once_and_the_run_goes_on(world):
    run = world.start("a", "b", steps=2000)
    better = world.plan("b", "a")
    notes, prepared = [], []
    for step in range(0, 150, EVERY):
        out = advance(world, run, EVERY, step)
        for ask in asks(out):
            out += world.handle(PlanConsidered(run, ask.version, 1.0, 0.7, 2.0, better))
        notes += [e.note for e in world.published(out) if e.HasField("note")]
        prepared += [i for i in out if isinstance(i, Log) and i.name == "plan_prepared"]
    assert len(notes) == len(prepared) == 1
    assert "30% faster" in notes[0]
    assert "b and a" in notes[0]
    assert world.machine.reconsidering.prepared(run) is better
    assert world.machine.runs[run].running


def test_other_codecs_alone_are_announced_too(world):
    run = world.start("a", "b", steps=2000)
    running = world.machine.runs[run].plan
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
    assert "it would change the codecs of 1 link. The run goes on" in notes[0]


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
