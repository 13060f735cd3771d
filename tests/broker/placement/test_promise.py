"""When a plan counts as one that does not keep its promise, and what is told of why."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import ConsiderPlan, Log, MakePlan, PlanConsidered, PlanReady
from shoal.broker.placement.promise import BROKEN, Promise
from shoal.broker.records.steps import LATELY
from shoal.dag.cost.network import uniform
from shoal.dag.plan.plan import PeerId
from shoal.dag.plan.report import PlanReport, Prediction
from shoal.planner.base.interface import PeerOffer
from shoal.proto.broker_pb2 import Ready

A, B, C = map(PeerId, "abc")
OFFERS = {p: PeerOffer(p, name=f"n{p}") for p in (A, B, C)}


def promise(step_s: float = 1.0, rate: float = 150e6) -> Promise:
    return Promise(step_s, uniform((A, B, C), 0.01, rate), OFFERS)


@given(st.lists(st.floats(0.0, 10.0), max_size=1000))
def test_a_plan_asks_for_few_looks_and_ever_more_rarely(lately: list[float]) -> None:
    found, looks = promise(), []
    for step, seconds in enumerate(lately):
        if found.broken(seconds, step):
            assert seconds >= BROKEN
            found.looked(step)
            looks.append(step)
    assert len(looks) <= 6
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert all(gap >= LATELY * 2**i for i, gap in enumerate(gaps))


@pytest.mark.parametrize("step_s", [0.0, float("inf"), float("nan")])
def test_a_plan_without_a_prediction_promised_nothing(step_s: float) -> None:
    assert not promise(step_s).broken(10.0, 100)
    assert not promise().broken(None, 100)


def test_what_the_links_carry_now_is_told_the_slowest_first() -> None:
    now = uniform((A, B, C), 0.01, 150e6)
    now.bandwidth[0, 1], now.bandwidth[1, 0], now.bandwidth[1, 2] = 6.2e6, 50e6, 140e6
    text = promise(1.87).why(6.1, [(A, B), (B, C)], now, OFFERS)
    assert text == (
        "step 6.1 s, promised 1.87 s: the link na→nb carries 6.2 MB/s, not 150, nb→na carries "
        "50 MB/s, not 150"
    )
    now.bandwidth[:] = 1e6
    text = promise(1.87).why(6.1, [(A, B), (B, C), (A, C)], now, OFFERS)
    assert text.count("carries 1 MB/s") == 3
    assert text.endswith("3 more links carry less")


def test_who_computes_more_slowly_than_it_said_is_told() -> None:
    now = OFFERS | {B: replace(OFFERS[B], learned=2.1)}
    text = promise(1.0).why(2.0, [(A, B)], uniform((A, B, C), 0.01, 150e6), now)
    assert text == "step 2 s, promised 1 s: nb takes 2.1 times as long"
    assert promise(1.0).why(2.0, [(A, B)], None, OFFERS) == "step 2 s, promised 1 s"


# ------------------------------------------------------------ in the machine


def slow_steps(world, run, count, first=0, seconds=4.0):
    out = []
    for step in range(first, first + count):
        out += world.wait(seconds)
        for peer in world.streams:
            world.say(peer, heartbeat={})
        for peer in ("a", "b"):
            out += world.report(peer, run, step)
    return out


def begun(world, promised_s):
    """A run of a and b whose plan promised so much."""
    for peer in ("a", "b"):
        world.join(peer)
    run, out = world.submit(world.spec(2000, plan={"stages": 2}))
    plan = world.plan("a", "b")
    report = PlanReport(Prediction(promised_s))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, plan, report=report))
    for peer in ("a", "b"):
        world.say(peer, ready=Ready(run=run, term=1))
    return run


def asks(out):
    return [i for i in out if isinstance(i, ConsiderPlan)]


@pytest.mark.parametrize(("promised_s", "looks"), [(1.0, True), (3.0, False)])
def test_three_slow_steps_beyond_the_first_ask_for_another_plan_at_once(world, promised_s, looks):
    run = begun(world, promised_s)
    assert not asks(slow_steps(world, run, LATELY))
    assert bool(asks(slow_steps(world, run, 1, LATELY))) == looks


@pytest.mark.parametrize(("running_s", "moves"), [(4.0, True), (1.0, False)])
def test_it_moves_where_what_is_known_now_explains_the_steps(world, running_s, moves):
    """Otherwise whatever is predicted of the other plan is as little to be believed."""
    run = begun(world, 1.0)
    [ask] = asks(slow_steps(world, run, LATELY + 1))
    better = world.plan("b", "a")
    out = world.handle(PlanConsidered(run, ask.version, running_s, running_s / 2, 1.0, better))
    logs = {i.name: dict(i.fields) for i in out if isinstance(i, Log)}
    assert ("plan_prepared" in logs) == moves
    assert (world.machine.replica(run).handover.errand is not None) == moves
    why = logs["plan_prepared" if moves else "plan_late"]["why"]
    assert why.startswith("step 4 s, promised 1 s")


def test_a_network_can_be_compared_when_one_end_is_gone():
    now = uniform((A, B), 0.01, 1e6)
    text = promise(1.0).why(2.0, [(A, B), (B, C)], now, OFFERS)
    assert np.isfinite(now.rates()[0, 1])
    assert "nb→nc" not in text
