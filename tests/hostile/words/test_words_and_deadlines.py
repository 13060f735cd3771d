"""A run that stands still is noticed, whatever one of its members says meanwhile."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.broker.validate import validate
from shoal.proto.broker_pb2 import (
    RUNNING,
    Evaluation,
    Exported,
    Heartbeat,
    Holding,
    LinkStatus,
    RoundReport,
    Saved,
    StepReport,
)
from shoal.proto.common_pb2 import BlobRef, Reason
from shoal.tests.broker.conftest import World
from shoal.tests.hostile.scripted_rounds import Lie, ScriptedRounds

PAUSE_S = 20.0
FLOOR_S = 120.0


def made() -> World:
    return World(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0, step_floor_s=FLOOR_S)))


def chat(world: World, rng: random.Random, who: str, run: str, said: int) -> None:
    """Say one of all that a member may say at any time."""
    replica = world.machine.replica(run)
    term, step = replica.record.term, rng.choice((said, 0, 1, replica.record.committed))
    about = {"run": run, "term": term}
    reason = Reason(code="disk", text="full")
    match rng.randrange(7):
        case 0:
            world.say(who, step=StepReport(step=min(step, 1), **about))
        case 1:
            world.say(who, saved=Saved(step=said, reason=reason, **about))
        case 2:
            world.say(who, saved=Saved(step=said, blob=BlobRef(hash="a" * 64), **about))
        case 3:
            world.say(who, exported=Exported(step=replica.record.steps, **about))
        case 4:
            world.say(who, round=RoundReport(round=said, attempt=said, **about))
        case 5:
            world.say(who, link_status=LinkStatus(peer="honest", up=True, **about))
        case 6:
            world.break_stream(who)
            world.join(who, holding=Holding(run=run, term=term))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_member_that_only_talks_moves_no_deadline(seed: int) -> None:
    rng, world = random.Random(seed), made()
    run = world.start("evil", "honest", steps=100)
    term = world.machine.replica(run).record.term
    for step in range(2):
        for who in ("evil", "honest"):
            world.report(who, run, step)
    for said in range(40):
        chat(world, rng, "evil", run, said)
        for _ in range(4):
            world.wait(PAUSE_S / 4)
            for who in ("evil", "honest"):
                world.say(who, heartbeat=Heartbeat())
        record = world.machine.replica(run).record
        if record.term != term or record.phase != RUNNING:
            break
    else:
        pytest.fail("13 minutes without a step, and the run is taken for one that goes on")
    validate(world.machine)


def test_a_replica_whose_holder_only_talks_of_rounds_is_noticed() -> None:
    game = ScriptedRounds(3, {"p0": Lie(late=True)})
    game.play(2)
    world, liar = game.world, game.members["p0"]
    term = liar.term
    for said in range(300):
        report = RoundReport(run=liar.run, term=term, round=said, attempt=said)
        if said % 2:
            report.evaluation.CopyFrom(Evaluation(loss=0.0, weight=1.0))
        game.settle(world.say("p0", round=report))
        game.play(len(game.done) + 1, 5.0)
        game.settle(world.wait(5.0))
        if liar.term != term or game.over:
            break
    else:
        pytest.fail("half an hour without a step, and the replica is taken for one that goes on")
