"""A plan that cannot be told to peers, or not be read again, begins no term and harms no broker."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from shoal.broker.events import Log, MakePlan, PlanConsidered, PlanReady
from shoal.broker.recovery import recover
from shoal.dag.ir.convert import MAX_TEXT
from shoal.dag.plan.plan import CodecChoice, PeerId, PlanError
from shoal.dag.plan.report import NO_REPORT, PlanReport, PlanWithReport, Prediction, Spare
from shoal.dag.schedule import convert_report
from shoal.planner.answers.bad_plan import bad_plan
from shoal.planner.base.interface import NoPlan
from shoal.planner.schedulers.schedulers import plan as planner
from shoal.proto.broker_pb2 import BUILDING, FAILED
from shoal.tests.broker.conftest import make_plan
from shoal.tests.planner.cases import random_case

from .test_reconsider import advance, asks

A, B = PeerId("a"), PeerId("b")
GOOD = make_plan("a", "b")


def said(**report: Any) -> PlanWithReport:
    return PlanWithReport(GOOD, PlanReport(**report))


def done(**plan: Any) -> PlanWithReport:
    return PlanWithReport(replace(GOOD, **plan))


BAD: dict[str, tuple[PlanWithReport, str]] = {
    "a long reason": (said(reasons=("x" * (MAX_TEXT + 1),)), "a reason has 4097"),
    "no number": (said(predicted=Prediction(math.nan)), "a predicted time is nan"),
    "less than nothing": (done(microbatch_size=-1), "microbatch"),
    "too large": (done(microbatch_size=2**70), "it cannot be told to peers"),
    "a role": (done(codecs=(CodecChoice(A, B, "gossip", "raw/1"),)), "role 'gossip'"),
    "a list": (said(spares=[Spare(PeerId("z"), "slow")]), "other spares"),
    "no name": (said(spares=(Spare(PeerId(""), "slow"),)), "a peer id"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_run_is_not_begun_with_a_plan_that_peers_would_not_have(world: Any, what: str) -> None:
    (plan, report), why = BAD[what]
    world.join("a")
    world.join("b")
    run, out = world.submit(world.spec(plan={"stages": 2}))
    ask = world.only(out, MakePlan)
    world.handle(PlanReady(run, ask.version, plan, report=report))
    assert world.state(run).phase == FAILED
    assert why in world.state(run).reason.text
    world.restart()
    assert world.state(run).phase == FAILED


@pytest.mark.parametrize("what", BAD)
def test_a_run_does_not_move_to_one(world: Any, what: str) -> None:
    (plan, report), why = BAD[what]
    run = world.start("a", "b", steps=2000)
    world.join("c")
    [ask] = asks(advance(world, run, 20, 0))
    out = world.handle(PlanConsidered(run, ask.version, 1.0, 0.5, 0.0, plan, report=report))
    (said,) = (i for i in out if isinstance(i, Log) and i.name == "plan_dropped")
    assert why in str(said.fields)
    advance(world, run, 60, 20)
    assert world.state(run).term == 1


def test_stages_of_which_nobody_could_find_the_order_in_time_are_refused() -> None:
    assert bad_plan(PlanWithReport(make_plan(*["a", "b"] * 150), NO_REPORT), ()) == ""
    why = bad_plan(PlanWithReport(make_plan(*["a", "b"] * 750), NO_REPORT), ())
    assert "4500000 choices: expected at most 400000" in why


def test_a_takeover_of_very_many_stages_can_be_told(world: Any, monkeypatch: Any) -> None:
    for module in (recover, convert_report):
        monkeypatch.setattr(module, "MAX_TEXT", 400)
    peers = ["a", "b"] * 150
    for peer in "abc":
        world.join(peer)
    run, out = world.submit(world.spec(plan={"stages": 2}))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, make_plan(*peers)))
    assert world.state(run).phase == BUILDING
    world.close("a")
    held = world.machine.replica(run).record
    assert world.state(run).term == 2
    assert "c (" in held.report.reasons[0] or len(held.report.reasons[0]) == 400
    assert bad_plan(PlanWithReport(held.plan, held.report), ()) == ""
    world.restart()


@pytest.mark.parametrize("seed", range(8))
def test_what_the_planner_makes_is_good(seed: int) -> None:
    try:
        made = planner(random_case(seed, operators=8, peers=4, held=False))
    except (NoPlan, PlanError):
        return
    assert bad_plan(made, ()) == ""
