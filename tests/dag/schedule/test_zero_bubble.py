"""Zero bubble: gradients of weights are visits of their own, and nothing waits for them but what
needs them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.benchmarks.schedules.wan import chain as equal_stages
from shoal.dag.plan.action import Action, ExchangeContent, Kind
from shoal.dag.plan.plan import PeerId, PlanError
from shoal.dag.plan.visit_lists import halved
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.orders import one_f_one_b, zero_bubble
from shoal.dag.schedule.orders.list_scheduler import Visited
from shoal.dag.schedule.schedule import check_listed, executed_s, listed, with_visits
from shoal.tests.dag.schedule.checker import check


@given(st.data())
def test_gradients_of_weights_stand_behind_their_backward_and_before_what_needs_them(
    worlds, data
) -> None:
    world = data.draw(worlds)
    bounds = {k: data.draw(st.integers(1, 4)) for k in range(len(world.stages))}
    waiting = {k: data.draw(st.integers(1, 4)) for k in range(len(world.stages))}
    lists = zero_bubble.order(world.plan, world.stages, None, bounds, waiting)
    plan = with_visits(world.plan, world.stages, tuple(tuple(lists[p]) for p in world.plan.peers))
    check_listed(plan, world.stages)
    flow = Flow(plan, world.stages, world.tied)
    check(plan, world.stages, world.tied, {p: flow.actions(p) for p in plan.peers})
    for peer in plan.peers:
        live, waits = Counter[int](), Counter[int]()
        apart = halved(flow.actions(peer))
        for action in flow.actions(peer):
            k = action.stage
            if action.kind is Kind.FORWARD and world.stages[k].has_backward:
                live[k] += 1
            elif action.kind is Kind.BACKWARD:
                live[k] -= 1
                waits[k] += k in apart
            elif action.kind is Kind.WEIGHT:
                waits[k] -= 1
            elif action.content is ExchangeContent.GRADIENT:
                assert not waits[k]
            elif action.content is ExchangeContent.NORM or action.kind is Kind.UPDATE:
                assert not any(waits.values())
            assert live[k] <= bounds[k]
            assert waits[k] <= waiting[k]
        assert apart == {
            k
            for route in plan.routes
            for v in route
            if v.peer == peer
            for k in [v.stage]
            if world.stages[k].trainable and world.stages[k].has_backward
        }


class Hop:
    """A forward, a backward and gradients of weights take 1 each, a message arrives 3 later."""

    def visit(self, peer: PeerId, action: Action) -> float:
        return 1.0

    def message(self, source: Visited, target: Visited) -> tuple[float, float]:
        return 0.0, 3.0


class Whole(Hop):
    """The same where a backward is not split."""

    def visit(self, peer: PeerId, action: Action) -> float:
        return 2.0 if action.kind is Kind.BACKWARD else 1.0


def test_the_step_is_that_of_a_stage_that_never_waits() -> None:
    plan, stages = equal_stages(16)
    free = dict.fromkeys(range(len(stages)), 16)
    lists = zero_bubble.order(plan, stages, Hop(), free)
    halves = with_visits(plan, stages, tuple(tuple(lists[p]) for p in plan.peers))
    lists = one_f_one_b.order(plan, stages, Whole(), free)
    whole = with_visits(plan, stages, tuple(tuple(lists[p]) for p in plan.peers))
    # The last peer's backwards end at 7 hops + 32; then 7 hops back, and one gradient of weights.
    assert executed_s(halves, stages, Hop()) == 7 * 4 + 2 * 16 + 7 * 4 + 1
    assert executed_s(halves, stages, Hop()) < 0.85 * executed_s(whole, stages, Whole())


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("F0@0 W0@0 B0@0 F1@0 B1@0 W1@0", "W0@0 stands where it cannot in the list of a"),
        ("F0@0 B0@0 F1@0 B1@0 W1@0", "has B0@0 without W0@0: expected the weights' gradients"),
        ("F0@0 B0@0 W0@0 W0@0 F1@0 B1@0 W1@0", "W0@0 stands where it cannot in the list of a"),
        ("F0@0 B0@0 F1@0 B1@0 W1@0 W0@0", "has W0@0 behind microbatch 1: expected"),
        ("F0@0 B0@0 W0@0 F1@0 B1@0 W1@0 W2@0", "W2@0 stands where it cannot in the list of a"),
    ],
)
def test_lists_in_which_halves_do_not_fit_are_refused(chain, first: str, why: str) -> None:
    world = chain(2, 2)
    last = tuple(map(Action.parse, ("F0@1", "B0@1", "F1@1", "B1@1")))
    mine = tuple(map(Action.parse, first.split()))
    with pytest.raises(PlanError, match=why):
        check_listed(replace(world.plan(), visits=(mine, last)), world.stages)


def test_one_peer_may_have_halves_and_another_not(chain) -> None:
    world = chain(2, 2)
    mine = tuple(map(Action.parse, ("F0@0", "F1@0", "B0@0", "B1@0", "W0@0", "W1@0")))
    last = tuple(map(Action.parse, ("F0@1", "B0@1", "F1@1", "B1@1")))
    check_listed(replace(world.plan(), visits=(mine, last)), world.stages)
    plan = listed(replace(world.plan(), schedule="zero-bubble"), world.stages)
    assert sum(a.kind is Kind.WEIGHT for visits in plan.visits for a in visits) == 4
