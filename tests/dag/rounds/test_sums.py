"""Weighted sums of contributions: exact in any order, and near the mean."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.rounds.sums import LargeContributionError, OverlapSum, WeightedSum

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


def overlap_of(given, order=None, gamma=3.0, degree=2):
    total = OverlapSum(WeightedSum(5, sum(w for _, w in given), 10), 5, gamma, degree)
    for values, weight in order or given:
        sent = [float(v != 0) for v in values]
        total.add(torch.tensor([values, sent]), weight)
    return total.mean()


@given(contributions, st.randoms(use_true_random=False))
def test_what_few_sent_counts_for_more_in_any_order(given_, rng: random.Random):
    got = overlap_of(given_)
    assert torch.equal(got, overlap_of(given_, rng.sample(given_, len(given_))))
    plain = mean_of(given_).tolist()
    for i, mean in enumerate(plain):
        few = 1 <= sum(v[i] != 0 for v, _ in given_) <= 2
        assert got[i] == torch.tensor(mean) * (3.0 if few else 1.0)


@given(contributions)
def test_without_gamma_or_below_the_degree_it_is_the_mean(given_):
    assert torch.equal(overlap_of(given_, gamma=1.0), mean_of(given_))
    full = [([v or 1.0 for v in values], w) for values, w in given_]
    assert torch.equal(overlap_of(full, degree=len(full) - 1), mean_of(full))


@pytest.mark.parametrize("bad", [-1.0, 0.5, 1e9, float("inf"), float("nan")])
def test_who_sent_an_element_is_a_whole_number(bad):
    total = OverlapSum(WeightedSum(2, 2, 10), 2, 3.0, 1)
    with pytest.raises(LargeContributionError, match="whole number"):
        total.add(torch.tensor([[1.0, 1.0], [1.0, bad]]), 1)
    for _ in range(2):
        total.add(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), 1)
    assert total.mean().tolist() == [1.0, 1.0], "of the first nothing was added"


@given(contributions, st.data())
def test_sums_of_places_change_no_bit(given_, data):
    """Nor does it matter of how many contributions each is; of integers the largest counts."""
    integers = [slice(2, 4)]
    rows = [
        ([*values[:2], *big, *values[2:]], w) for (values, w), big in with_integers(given_, data)
    ]
    weight = sum(w for _, w in rows)
    flat, top = (WeightedSum(len(rows[0][0]), weight, 10, integers) for _ in range(2))
    places = [WeightedSum(len(rows[0][0]), weight, 10, integers) for _ in range(2)]
    weights = [0, 0]
    for values, w in rows:
        row = torch.tensor(values)
        flat.add(row, w)
        at = data.draw(st.sampled_from([0, 1, None]))
        (top if at is None else places[at]).add(row, w)
        weights = [n + w * (i == at) for i, n in enumerate(weights)]
    for place, w in zip(places, weights, strict=True):
        if w:
            top.add_sum(place.total, w)
    assert torch.equal(flat.mean().view(torch.int32), top.mean().view(torch.int32))


def with_integers(given_, data):
    """Yield each contribution with the bits of a whole number, as two elements."""
    for row in given_:
        number = data.draw(st.integers(-(2**40), 2**40))
        yield row, torch.tensor([number]).view(torch.float32).tolist()


@pytest.mark.parametrize("beyond", [2**58 + 2, -(2**58) - 2, 2**63 - 1, -(2**63)])
def test_a_sum_beyond_what_its_contributions_come_to_adds_nothing(beyond):
    total = WeightedSum(2, 8, 10)
    total.add(torch.tensor([1.0, 2.0]), 4)
    wrong = torch.tensor([0, beyond]).view(torch.float32)
    with pytest.raises(LargeContributionError, match="that weigh 1 has an element beyond"):
        total.add_sum(wrong, 1)
    total.add(torch.tensor([3.0, 4.0]), 4)
    assert total.mean().tolist() == [2.0, 3.0]
