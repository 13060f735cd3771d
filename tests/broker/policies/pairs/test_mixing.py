"""What rounds of pairs do to what replicas have in common."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.benchmarks.gossip.mixing import (
    matrix,
    of_random_pairs,
    pairs_of_rounds,
    second_eigenvalue,
)
from shoal.broker.policies.pairs.selection import METHODS


def names(n):
    return [f"r{i:02}" for i in range(n)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_round_is_doubly_stochastic(method, n):
    for pairs in pairs_of_rounds(method, 0, range(4), names(n), np.ones((n, n))):
        w = matrix(names(n), pairs)
        assert w.sum(0).tolist() == w.sum(1).tolist() == [1.0] * n
        assert ((w == 0.5).sum(1) == np.isin(names(n), np.array(pairs)) * 2).all()


@pytest.mark.parametrize("n", [4, 14, 32])
def test_random_pairs_mix_as_the_closed_form_says(n):
    who = names(n)
    found = []
    for rounds in (100, 3000):
        pairs = pairs_of_rounds("random-pairs", 0, range(rounds), who, np.ones((n, n)))
        found.append(second_eigenvalue(who, pairs) - of_random_pairs(n))
    assert 0 < found[1] < found[0]
    assert found[1] < 0.03


def test_parts_that_never_meet_do_not_mix():
    assert second_eigenvalue("abcd", [(("a", "b"), ("c", "d"))]) == pytest.approx(1.0)


def test_the_factor_is_what_happens_to_the_distance_from_the_mean():
    """Over many vectors, in the direction that shrinks least."""
    who = names(6)
    rounds = pairs_of_rounds("ring", 0, range(2), who, np.ones((6, 6)))
    ws = [matrix(who, pairs) for pairs in rounds]
    values, vectors = np.linalg.eigh(np.mean([w.T @ w for w in ws], 0))
    slowest = vectors[:, -2]
    shrinks = np.mean([((w @ slowest) ** 2).sum() for w in ws])
    assert abs(slowest.sum()) < 1e-9
    assert shrinks == pytest.approx(second_eigenvalue(who, rounds)) == pytest.approx(values[-2])
