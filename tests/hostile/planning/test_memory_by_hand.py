"""A plan that somebody wrote by hand does not take more of a peer than its owner offers: the broker
refuses it, and the peer ends a run that passes the offer whatever its plan said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.broker.events import MakePlan, PlanFailed, PlanReady, RunId
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.schedule.schedule import Action
from shoal.peer.core import events as e
from shoal.peer.core.assignment import STOP_AT
from shoal.planner.answers.planning import answer
from shoal.tests.broker.conftest import make_world, world
from shoal.tests.peer.scripted import Make, machine, member, running, told
from shoal.tests.planner.answers.test_planning import by_hand, make_graph, offers

__all__ = ["machine", "make_world", "member", "running", "world"]


def test_a_plan_by_hand_is_judged_by_memory_like_any_other(world: Any) -> None:
    spec = by_hand(world, (0, 2, "one"), (2, 5, "two"))
    found = offers("one", "two")
    graph = graph_to_bytes(make_graph())
    assert isinstance(answer(MakePlan(RunId("r"), 1, spec, found), graph), PlanReady)
    small = (replace(found[0], device_memory_bytes=50), found[1])
    failed = answer(MakePlan(RunId("r"), 1, spec, small), graph)
    assert isinstance(failed, PlanFailed)
    assert failed.code == "plan"
    assert "of one, which offers 50 B: short by" in failed.reason


@pytest.mark.parametrize("over", [False, True])
def test_a_run_that_passes_what_the_owner_offers_is_stopped_at_the_peer(
    running: Make, over: bool
) -> None:
    one = running()
    assert one.assignment is not None
    most = one.assignment._memory_bytes
    assert most, "this peer offers something"
    held = int(STOP_AT * most) + over
    done = e.Computed("r", 1, 0, Action.parse("F0@0"), e.Result(0.1, held))
    faults = told(one.handle(done, 1.0), "fault")
    assert [f.reason.code for f in faults] == ["memory"] * over
    if over:
        assert "on the device in step 0, this peer offers" in faults[0].reason.text
