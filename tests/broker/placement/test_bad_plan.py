"""A plan that cannot be told to peers, or not be read again, begins no term and harms no broker."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from shoal.broker.events import Log, MakePlan, PlanConsidered, PlanReady
from shoal.broker.placement.placing import bad_plan
from shoal.broker.scheduler.base.interface import NoPlan
from shoal.broker.scheduler.planners.planners import plan as planner
from shoal.dag.ir.convert import MAX_TEXT
from shoal.dag.plan.plan import CodecChoice, PeerId, Plan, PlanError, Prediction, Spare
from shoal.proto.broker_pb2 import BUILDING, FAILED
from shoal.tests.broker.conftest import make_plan
from shoal.tests.broker.scheduler.cases import random_case

from .test_reconsider import advance, asks

A, B = PeerId("a"), PeerId("b")
GOOD = make_plan("a", "b")
BAD: dict[str, tuple[Plan, str]] = {
    "a long reason": (replace(GOOD, reasons=("x" * (MAX_TEXT + 1),)), "a reason has 4097"),
    "no number": (replace(GOOD, predicted=Prediction(math.nan)), "a predicted time is nan"),
    "less than nothing": (replace(GOOD, microbatch_size=-1), "microbatch"),
    "too large": (replace(GOOD, microbatch_size=2**70), "it cannot be told to peers"),
    "a role": (replace(GOOD, codecs=(CodecChoice(A, B, "gossip", "raw/1"),)), "role 'gossip'"),
    "a list": (replace(GOOD, spares=[Spare(PeerId("z"), "slow")]), "other spares"),
    "no name": (replace(GOOD, spares=(Spare(PeerId(""), "slow"),)), "a peer id"),
}  # type: ignore[arg-type, dict-item]


@pytest.mark.parametrize("what", BAD)
def test_a_run_is_not_begun_with_a_plan_that_peers_would_not_have(world: Any, what: str) -> None:
    plan, why = BAD[what]
    world.join("a")
    world.join("b")
    run, out = world.submit(world.spec(plan={"stages": 2}))
    ask = world.only(out, MakePlan)
    world.handle(PlanReady(run, ask.version, plan))
    assert world.state(run).phase == FAILED
    assert why in world.state(run).reason.text
    world.restart()
    assert world.state(run).phase == FAILED


@pytest.mark.parametrize("what", BAD)
def test_a_run_does_not_move_to_one(world: Any, what: str) -> None:
    plan, why = BAD[what]
    run = world.start("a", "b", steps=2000)
    world.join("c")
    [ask] = asks(advance(world, run, 20, 0))
    out = world.handle(PlanConsidered(run, ask.version, 1.0, 0.5, 0.0, plan))
    (said,) = (i for i in out if isinstance(i, Log) and i.name == "plan_dropped")
    assert why in str(said.fields)
    advance(world, run, 60, 20)
    assert world.state(run).term == 1


def test_a_takeover_of_very_many_stages_can_be_told(world: Any) -> None:
    peers = ["a", "b"] * 1500
    for peer in "abc":
        world.join(peer)
    run, out = world.submit(world.spec(plan={"stages": 2}))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, make_plan(*peers)))
    assert world.state(run).phase == BUILDING
    world.close("a")
    plan = world.machine.runs[run].plan
    assert world.state(run).term == 2
    assert "c (" in plan.reasons[0] or len(plan.reasons[0]) == MAX_TEXT
    assert bad_plan(plan, ()) == ""
    world.restart()


@pytest.mark.parametrize("seed", range(8))
def test_what_the_planner_makes_is_good(seed: int) -> None:
    try:
        plan = planner(random_case(seed, operators=8, peers=4, held=False))
    except (NoPlan, PlanError):
        return
    assert bad_plan(plan, ()) == ""
