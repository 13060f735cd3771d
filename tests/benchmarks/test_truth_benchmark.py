"""benchmarks/steps/truth_rounds.py: what plans reckon with for rounds is what peers allocate."""

from __future__ import annotations

import pytest

from shoal.benchmarks.steps import truth_memory, truth_rounds


@pytest.mark.slow
@pytest.mark.timeout(900)  # 100 peers in 20 sets of replicas: 145 s of one core
def test_an_exchange_takes_what_plans_say() -> None:
    worst, _, count = truth_memory.summary(truth_rounds.outcomes())
    assert count > 50
    assert worst < 0.15
