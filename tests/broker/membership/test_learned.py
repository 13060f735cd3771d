"""What is learned of a peer's speed is of that peer, whatever happens to the plan.

The oracle: the seconds that its steps took over those that its own speeds say, which is 2 for b.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.broker.events import ConsiderPlan, MakePlan, PlanReady
from shoal.broker.membership.speeds import ENOUGH, Correction
from shoal.broker.placement.reconsider import alike
from shoal.dag.plan.plan import PeerId, Plan
from shoal.dag.plan.report import PeerPrediction, PlanReport, Prediction
from shoal.planner.schedulers.schedulers import plan
from shoal.proto.broker_pb2 import Holding, Ready, RunSpec, Speeds, StageTime, StepReport
from shoal.tests.planner.cases import random_case

OWN_S = {"a": 1.0, "b": 4.0, "c": 0.5}
"""By their own speeds, for any stage."""
TRUTH = {"a": 1.0, "b": 2.0, "c": 1.0}


def report(world: Any, run: str, step: int, *peers: str, term: int = 1) -> None:
    for peer in peers:
        seconds = OWN_S[peer] * TRUTH[peer]
        stage = StageTime(stage=0, visits=2, forward_s=seconds / 2, backward_s=seconds / 2)
        world.say(peer, step=StepReport(run=run, term=term, step=step, stages=[stage]))


def factor(world: Any, peer: str) -> float:
    found: float = world.machine.members.members[PeerId(peer)].correction.factor
    return found


@pytest.fixture
def begun(world: Any) -> tuple[Any, str]:
    """A run on a and b; its plan was made when nothing was known of a, and b was thought to be
    eight times slower than it says."""
    world.join("a")
    world.join("b")
    run, out = world.submit(world.spec(500, plan={"stages": 2}))
    made = world.plan("a", "b")
    expected = (
        PeerPrediction(PeerId("a"), OWN_S["a"], 0, 0, learned=1.0),
        PeerPrediction(PeerId("b"), OWN_S["b"] * 8.0, 0, 0, learned=8.0),
    )
    said = PlanReport(Prediction(1.0, expected))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, made, report=said))
    for peer in "ab":
        world.say(peer, ready=Ready(run=run, term=1))
    for step in range(ENOUGH + 1):
        report(world, run, step, "a", "b")
    return world, run


def test_it_is_learned_from_the_peers_own_speeds(begun: Any) -> None:
    world, _ = begun
    assert [factor(world, p) for p in "ab"] == pytest.approx([1.0, 2.0])


def test_who_takes_over_is_not_measured_by_who_was_there(begun: Any) -> None:
    world, run = begun
    world.join("c")
    world.close("b")
    for peer in "ac":
        world.say(peer, ready=Ready(run=run, term=2))
    for step in range(4 * ENOUGH):
        report(world, run, step, "a", "c", term=2)
    assert [factor(world, p) for p in "ac"] == pytest.approx([1.0, 1.0])


def test_who_attaches_again_is_measured_as_before(begun: Any) -> None:
    world, run = begun
    world.break_stream("b")
    world.join("b", holding=Holding(run=run, term=1, step=ENOUGH + 1))
    for step in range(ENOUGH + 1, 4 * ENOUGH):
        report(world, run, step, "a", "b")
    assert factor(world, "b") == pytest.approx(2.0)


def test_after_a_restart_of_the_broker_it_is_learned_again(begun: Any) -> None:
    world, run = begun
    world.restart()
    for peer in "ab":
        world.join(peer, holding=Holding(run=run, term=1, step=ENOUGH + 1))
    assert factor(world, "b") == 1.0
    for step in range(ENOUGH + 1, 4 * ENOUGH):
        report(world, run, step, "a", "b")
    assert factor(world, "b") == pytest.approx(2.0)


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_a_plan_says_what_its_seconds_were_made_with(seed: int) -> None:
    request = random_case(seed, operators=8, peers=4, held=False)
    learned = {o.peer: 1.0 + i for i, o in enumerate(request.offers)}
    offers = tuple(replace(o, learned=learned[o.peer]) for o in request.offers)
    found = plan(replace(request, offers=offers)).report.predicted.peers
    assert found
    assert all(p.learned == learned[p.peer] for p in found)


def test_what_is_learned_alone_asks_for_no_other_search() -> None:
    """Speeds say it too, and a change of a few per cent is no change."""
    request = random_case(0, operators=8, peers=4, held=False)
    facts = ConsiderPlan("r", 1, RunSpec(), Plan((), (), 1), tuple(request.offers), None)
    now = tuple(replace(o, learned=1.01) for o in request.offers)
    assert alike(facts, replace(facts, peers=now))


def test_a_device_that_is_measured_anew_in_the_pool_is_planned_with_as_that(world: Any) -> None:
    """What steps have shown was of the speeds before."""
    world.join("a")
    member = world.machine.members.members["a"]
    member.correction = Correction(factor=2.0)
    version = world.machine.members.version
    world.say("a", measured=Speeds(product_flops_per_s=3e12))
    assert member.offer.pace.product == member.profile.flops_per_s == 3e12
    assert member.correction.factor == 1.0
    assert world.machine.members.version > version, "plans are made anew"


def test_of_a_peer_in_a_run_steps_show_what_it_does(begun: Any) -> None:
    world, _ = begun
    world.say("b", measured=Speeds(product_flops_per_s=3e12))
    assert not world.machine.members.members["b"].profile.HasField("speeds")
    assert factor(world, "b") == pytest.approx(2.0)
