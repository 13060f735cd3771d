"""A holder dies while gradients of weights wait, and the training is what it would have been: that
of whole backwards, bit for bit (I1, I2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.dag.plan.plan import Plan
from shoal.tests.sim.recovery.test_recovery import Lab

STEP = 2
"""The step in which someone dies, in the fast test."""


class HalvesLab(Lab):
    """Plays the job of test_recovery.py under zero bubble."""

    def plan_of(self, operators: int) -> Plan:
        plan = super().plan_of(operators)
        return replace(plan, routes=plan.routes[:1] * 2, schedule="zero-bubble")

    def waiting(self) -> list[int]:
        """Numbers of the records at which a peer begins gradients of weights that waited."""
        return [i for i, kind in enumerate(self.calm.kinds, 1) if " Compute W" in kind]


@pytest.fixture(scope="module")
def lab(laboratory: Any, plans_once: None) -> HalvesLab:
    return HalvesLab(laboratory)


def test_it_may_die_while_gradients_of_weights_wait(lab: HalvesLab, laboratory: Any) -> None:
    lab.assert_same(Lab(laboratory).calm, "whole backwards")
    moments = lab.waiting()
    assert len(moments) == 5 * 4  # 5 steps of 2 microbatches on 2 stages
    for at, name in zip(moments[4 * STEP :][:4], ("p0", "p1", "p0", "p1"), strict=True):
        lab.assert_same(lab.play({at: name}), f"{name} at {lab.calm.moments[at - 1]}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["p0", "p1", "p2"])
def test_it_may_die_at_each_moment_around(lab: HalvesLab, name: str) -> None:
    for at in sorted({at + more for at in lab.waiting() for more in (-1, 0, 1)}):
        lab.assert_same(lab.play({at: name}), f"{name} at {at} ({lab.calm.moments[at - 1]})")
