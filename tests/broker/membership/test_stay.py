"""Peers that say how long they stay: a plan counts on those last who leave soon."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.broker.events import MakePlan
from shoal.broker.runs.replica import LEAST_STAY_S

from ..conftest import make_spec


def offered(world: Any, stages: int) -> list[str]:
    """Who is planned over, by a run of so many stages."""
    _, out = world.submit(make_spec(plan={"stages": stages}))
    return [offer.peer for offer in world.only(out, MakePlan).peers]


@pytest.mark.parametrize(
    ("waited_s", "wanted"), [(0, ["a", "b", "brief"]), (1, ["a", "b"])], ids=["enough", "too soon"]
)
def test_who_leaves_soon_is_not_planned_with_while_others_are_enough(
    world: Any, waited_s: float, wanted: list[str]
) -> None:
    for peer in "ab":
        world.join(peer)
    world.join("brief", stay_s=LEAST_STAY_S)
    world.wait(waited_s)
    assert offered(world, stages=2) == wanted


def test_with_too_few_others_it_is(world: Any) -> None:
    world.join("a")
    world.join("brief", stay_s=10)
    assert offered(world, stages=2) == ["a", "brief"]


def test_a_run_that_ends_before_counts_on_it_like_on_anybody(world: Any) -> None:
    run = world.machine.replica(world.start("a", steps=100))
    world.join("brief", stay_s=LEAST_STAY_S - 1)
    brief = world.machine.members.members["brief"]
    assert run.record.step_s is None
    assert not run.steady(brief, world.now)
    for step in range(10):  # of two seconds each
        world.wait(2)
        world.report("a", run.id, step)
        world.say("brief", heartbeat={})
    assert run.record.ends_at(world.now) == pytest.approx(200, rel=0.2)
    assert run.steady(brief, world.now)
