"""What is made of contributions that may be wrong, against brute force over lists of numbers."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.rounds.combiners import (
    combined,
    krum_scores,
    median,
    middle_integers,
    squared_distances,
    trimmed_mean,
)

RULES = "median", "trimmed-mean", "krum", "multi-krum"
finite = st.floats(-100, 100, width=32)


@st.composite
def tables(draw, least=1, most=9):
    """(n, elements)."""
    n, elements = draw(st.integers(least, most)), draw(st.integers(1, 5))
    rows = st.lists(finite, min_size=elements, max_size=elements)
    return torch.tensor(draw(st.lists(rows, min_size=n, max_size=n)))


def random_table(n, elements, seed):
    return torch.randn(n, elements, generator=torch.Generator().manual_seed(seed))


def closest(rows, f):
    """Scores by the definition: all sets of n - f - 2 others, of which the nearest is the least."""
    found = []
    for i, a in enumerate(rows):
        others = [b for j, b in enumerate(rows) if j != i]
        apart = [sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) for b in others]
        found.append(min(sum(c) for c in itertools.combinations(apart, len(rows) - f - 2)))
    return found


@given(tables())
def test_the_median_is_that_of_each_element(rows):
    wanted = [statistics.median(column) for column in rows.T.tolist()]
    torch.testing.assert_close(median(rows), torch.tensor(wanted), rtol=1e-6, atol=1e-30)


@given(tables(least=3), st.integers(0, 4))
def test_a_trimmed_mean_leaves_the_same_number_out_at_both_ends(rows, f):
    f = min(f, (len(rows) - 1) // 2)
    wanted = [statistics.fmean(sorted(c)[f : len(c) - f]) for c in rows.T.tolist()]
    torch.testing.assert_close(trimmed_mean(rows, f), torch.tensor(wanted), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "f"), [(3, 0), (5, 1), (7, 2), (8, 1), (9, 3)])
def test_krum_gives_the_row_whose_neighbours_are_nearest(n, f):
    for seed in range(20):
        rows = random_table(n, 4, seed)
        scores = closest(rows.tolist(), f)
        order = sorted(range(n), key=lambda i: scores[i])
        [one] = combined("krum", [rows], f)
        assert torch.equal(one, rows[order[0]])
        [several] = combined("multi-krum", [rows], f)
        torch.testing.assert_close(several, rows[order[: n - f]].mean(0))


@given(tables(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_order_of_clients_changes_nothing(rows, f, random):
    order = random.sample(range(len(rows)), len(rows))
    for rule in RULES[:2]:
        [a], [b] = (combined(rule, [r], f) for r in (rows, rows[order]))
        assert torch.equal(a, b), rule
    scores = krum_scores(squared_distances(rows), f)
    assert torch.equal(krum_scores(squared_distances(rows[order]), f), scores[order])


@given(tables(least=3), st.data())
def test_what_few_say_stays_within_what_the_others_say(rows, data):
    """At most f of 2f + 1 rows or more, whatever these are, even far away."""
    n = len(rows)
    f = data.draw(st.integers(0, (n - 1) // 2))
    bad = data.draw(st.sets(st.integers(0, n - 1), max_size=f))
    for i in bad:
        rows[i] *= data.draw(st.sampled_from([1.0, -1e30, 1e30]))
    honest = rows[[i for i in range(n) if i not in bad]]
    for rule in RULES[:2]:
        [found] = combined(rule, [rows], f)
        assert bool((found >= honest.amin(0)).all()), rule
        assert bool((found <= honest.amax(0)).all()), rule


@given(tables(), st.integers(0, 4))
def test_krum_gives_one_of_the_rows(rows, f):
    [found] = combined("krum", [rows], f)
    assert any(torch.equal(found, row) for row in rows)


@pytest.mark.parametrize("rule", ["krum", "multi-krum"])
def test_rows_that_are_far_from_most_are_never_chosen(rule):
    for n, f in ((5, 1), (7, 2), (12, 4)):
        rows = random_table(n, 6, n)
        rows[:f] = 1e4 + torch.arange(f)[:, None]  # near to each other
        [found] = combined(rule, [rows], f)
        assert float(found.abs().amax()) < 10


@given(tables(), st.integers(0, 3), st.integers(0, 5))
@settings(deadline=None)
def test_parts_of_a_vector_come_to_what_the_whole_does(rows, f, at):
    for rule in RULES:
        [whole] = combined(rule, [rows], f)
        # Of distances that are equal up to rounding either row may be chosen.
        scores = krum_scores(squared_distances(rows), f).sort().values
        clear = bool((scores.diff() > 1e-6 * scores[-1]).all())
        if rule in RULES[:2] or clear:
            parts = combined(rule, [rows[:, :at], rows[:, at:]], f)
            assert torch.equal(torch.cat(parts), whole), rule


def test_more_elements_than_are_looked_at_once():
    rows = random_table(5, 70_000, 0)
    torch.testing.assert_close(median(rows), rows.median(0).values)
    torch.testing.assert_close(
        squared_distances(rows), torch.cdist(rows.double(), rows.double()).square()
    )
    [found] = combined("krum", [rows], 1)
    assert any(torch.equal(found, row) for row in rows)


def test_of_integers_the_middle_one_counts():
    rows = torch.tensor([[5, -(2**60)], [1, 3], [2**62, 4], [2, 9]])
    assert middle_integers(rows).tolist() == [2, 3]
    assert middle_integers(rows[:3]).tolist() == [5, 3]


def test_fewer_rows_than_the_rule_needs():
    one, two = random_table(1, 3, 0), random_table(2, 3, 1)
    for rule in RULES:
        assert torch.equal(combined(rule, [one], 4)[0], one[0]), rule
    for rule in ("median", "trimmed-mean", "multi-krum"):
        torch.testing.assert_close(combined(rule, [two], 4)[0], two.mean(0))
    assert torch.equal(combined("krum", [two], 4)[0], two[0])
