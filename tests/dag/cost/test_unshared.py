"""The longest path against the event calculation: a bound, and equal where nothing is shared."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.tests.planner.cases import random_case


def some_candidate(rng: random.Random, judge: CostModel) -> Candidate:
    """One or two pipelines over peers drawn at random, which may be in both."""
    n, peers, m = judge.operators, len(judge.offers), judge.request.microbatches
    pipelines = []
    for _ in range(rng.randint(1, min(2, m))):
        stages = rng.randint(1, min(peers, n))
        cuts = [0, *sorted(rng.sample(range(1, n), stages - 1)), n]
        chosen = rng.sample(range(peers), stages)
        pipelines.append(
            tuple(StageShare(p, a, b) for p, a, b in zip(chosen, cuts[:-1], cuts[1:], strict=True))
        )
    first = rng.randint(1, m - 1) if len(pipelines) == 2 else m
    counts = (first, m - first) if len(pipelines) == 2 else (m,)
    return Candidate(tuple(pipelines), counts, rng.choice(["gpipe", "1f1b", "interleaved"]))


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_path_is_a_bound_and_exact_where_it_says_so(seed: int) -> None:
    rng = random.Random(seed)
    judge = CostModel(random_case(seed, held=False))
    for _ in range(6):
        candidate = some_candidate(rng, judge)
        played = CostModel(judge.request).play(candidate)[1].step_s  # nothing known from before
        assert judge.play(candidate)[1].step_s == played
        bound = judge.bound(candidate)
        assert bound <= played * (1 + 1e-9)
        if judge.fits(candidate):
            assert judge.seconds(candidate) == pytest.approx(played, rel=1e-12)
        many = judge.bound_many(candidate, np.array([candidate.peers] * 2))
        assert many == pytest.approx(bound, rel=1e-12)
