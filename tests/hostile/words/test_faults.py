"""Faults that come again and again: their sender waits longer, and they end no run in which others
go on. And what no run without a ladder asks for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import Instruction, Tell
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.broker.recovery.suspects import SuspectTracker
from shoal.dag.plan.plan import PeerId
from shoal.proto.broker_pb2 import Fault, Heartbeat
from shoal.proto.common_pb2 import Reason
from shoal.tests.broker.conftest import World
from shoal.tests.hostile.scripted_rounds import ScriptedRounds


@given(st.lists(st.floats(0.0, 5000.0), min_size=2, max_size=12))
def test_who_fails_again_waits_longer_each_time(pauses: list[float]) -> None:
    suspects, evil, now, waits = SuspectTracker(), PeerId("evil"), 0.0, list[float]()
    for pause in pauses:
        suspects.leave_out(evil, now)
        waits.append(next(s for s in (30.0 * 2**n for n in range(8)) if not out(suspects, now + s)))
        now += pause
    assert waits == [min(30.0 * 2**n, 3840.0) for n in range(len(pauses))]


def out(suspects: SuspectTracker, at: float) -> bool:
    return suspects.out(PeerId("evil"), at)


def test_faults_of_one_replicas_peer_end_no_run_in_which_others_go_on() -> None:
    game = ScriptedRounds(3, {})
    game.play(2)
    evil = game.members["p0"]
    for said in range(60):
        reason = Reason(code=("compute", "graph", "plan", "weights")[said % 4], text="no kernel")
        fault = Fault(run=evil.run, term=evil.term, step=evil.step, reason=reason)
        game.settle(game.world.say("p0", fault=fault))
        game.play(len(game.done) + 1, 120.0)
        assert not game.over, game.world.state(game.run).reason.text
    rounds = len(game.done)
    game.play(rounds + 3, 600.0)
    assert len(game.done) >= rounds + 3, "the others go on"


class Noted(World):
    """Remembers the kinds of what peers were told."""

    def __init__(self) -> None:
        super().__init__(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0)))
        self.kinds_told = set[str | None]()

    def handle(self, event: Any) -> list[Instruction]:
        out = super().handle(event)
        self.kinds_told |= {i.message.WhichOneof("kind") for i in out if isinstance(i, Tell)}
        return out


@pytest.mark.parametrize(("recovery", "asked"), [({}, True), ({"ladder": []}, False)])
def test_without_a_ladder_nobody_is_asked_for_a_copy(recovery: dict[str, Any], asked: bool) -> None:
    world = Noted()
    world.join("c")  # of the pool, where copies would lie
    run = world.start("a", "b", steps=200, recovery=recovery)
    for step in range(100):
        for peer in "ab":
            world.report(peer, run, step)
        world.wait(1.0)
        for peer in "abc":
            world.say(peer, heartbeat=Heartbeat())
    assert ("snapshot" in world.kinds_told) is asked
