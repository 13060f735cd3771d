"""Weighted sums of contributions: exact in any order, and near the mean."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.rounds.sums import LargeContributionError, WeightedSum

numbers = st.floats(-1000, 1000, width=32)
contributions = st.lists(
    st.tuples(st.lists(numbers, min_size=5, max_size=5), st.integers(1, 10**6)),
    min_size=1,
    max_size=6,
)


def mean_of(given, order=None):
    total = WeightedSum(5, sum(w for _, w in given), 10)
    for values, weight in order or given:
        total.add(torch.tensor(values), weight)
    return total.mean()


@given(contributions, st.randoms(use_true_random=False))
def test_order_changes_no_bit(given_, rng: random.Random):
    order = rng.sample(given_, len(given_))
    assert torch.equal(mean_of(given_), mean_of(given_, order))


@given(contributions)
def test_it_is_the_mean_to_the_last_bit_or_nearly(given_):
    whole = sum(w for _, w in given_)
    for i, got in enumerate(mean_of(given_).tolist()):
        exact = sum(Fraction(v[i]) * w for v, w in given_) / whole
        assert abs(Fraction(got) - exact) <= abs(exact) / 2**23 + Fraction(len(given_), 2**49)


@pytest.mark.parametrize("bad", [1024.0, -1e30, float("inf"), float("nan")])
def test_what_is_too_large_or_no_number_adds_nothing(bad):
    total = WeightedSum(3, 2, 10)
    total.add(torch.tensor([1.0, 2.0, 3.0]), 1)
    with pytest.raises(LargeContributionError, match="below 2\\^10"):
        total.add(torch.tensor([1.0, bad, 3.0]), 1)
    total.add(torch.tensor([3.0, 4.0, 5.0]), 1)
    assert total.mean().tolist() == [2.0, 3.0, 4.0]
