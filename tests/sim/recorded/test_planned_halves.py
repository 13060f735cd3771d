"""A job that asks for zero bubble, from its file to its last step: a search plans it, the broker
proves it, and machines carry it out; of tensors and of hashes every invariant is watched (I1)."""

from __future__ import annotations

import pytest

from shoal.dag.plan.action import Kind

from .contained import pipeline
from .named_worlds import NamedWorld, planned
from .playing import Laboratories, played


def test_a_job_asks_for_zero_bubble_and_gets_the_losses_of_1f1b(
    laboratories: Laboratories,
) -> None:
    def named(schedule: str) -> NamedWorld:
        tables = {"plan": planned(schedule, 3)}
        return NamedWorld(model="deep", tables=tables, contains=pipeline(schedule))

    halves, whole = named("zero-bubble"), named("1f1b")
    lab = laboratories.of(halves)
    found = played(lab, halves)
    (plan,) = found.plans
    assert halves.contains((lab.graph, [plan], found.events))
    assert any(a.kind is Kind.WEIGHT for visits in plan.visits for a in visits)
    other = played(laboratories.of(whole), whole)
    losses, wanted = (
        [e.step.outcome.loss for e in one.events if e.HasField("step")] for one in (found, other)
    )
    assert losses == pytest.approx(wanted, rel=1e-5)
    ghosts = played(lab, halves, ghosts=True)
    assert ghosts.plans[0].schedule == "zero-bubble"
