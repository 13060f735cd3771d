"""The flag aggregate, against a singular value decomposition of all that clients moved, and by what
it may never come to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.rounds.combiners import combined
from shoal.sim.plain.robust import AGGREGATES
from shoal.tests.dag.rounds.test_combiners import random_table, tables


def flag(rows):
    [found] = combined("flag", [rows], 0)
    return found


def clients(n, elements, seed):
    """Rows that have something in common, the first of them long and the other way."""
    rows = 0.7 * random_table(n, elements, seed) + random_table(1, elements, 99 + seed)
    rows[: n // 4] *= -50
    return rows


@pytest.mark.parametrize("elements", [4, 30, 300])
def test_it_is_what_singular_vectors_come_to(elements):
    for n in range(1, 14):
        rows = clients(n, elements, n)
        wanted = AGGREGATES["flag"]([{"w": row.double()} for row in rows], 0)["w"]
        torch.testing.assert_close(flag(rows), wanted.float(), rtol=1e-4, atol=1e-6)


def test_what_is_lost_of_rows_counts():
    """A mean of units, which is what comes out where nothing is lost, is another vector."""
    rows = clients(9, 300, 0)
    units = rows / rows.norm(dim=1, keepdim=True)
    far = (flag(rows) - units.mean(0) * rows.norm(dim=1).median()).norm() / flag(rows).norm()
    assert 0.05 < far < 1


rows_of_weight = tables().map(lambda rows: torch.where(rows.abs() < 2**-20, 0.0, rows))
"""Numbers of which float32 has squares, and what is 2^30 times smaller."""


@given(rows_of_weight, st.data())
def test_rows_of_no_more_dimensions_than_the_subspace_come_to_the_mean_of_units(rows, data):
    n = len(rows)
    rows = rows[:, : data.draw(st.integers(1, n // 2 + 1))]
    lengths = rows.double().norm(dim=1, keepdim=True)
    units = torch.where(lengths > 0, rows / lengths, 0)
    middle = lengths.flatten().sort().values[(n - 1) // 2]
    error = (flag(rows) - units.mean(0) * middle).norm()
    assert float(error) <= 1e-4 * float(middle)


@given(rows_of_weight, st.data())
def test_lengths_of_few_change_nothing_but_which_length_is_the_middle_one(rows, data):
    """However long: by a power of two, so to the bit but for the last rounding. What comes out is
    no longer than the longest honest row."""
    n = len(rows)
    bad = data.draw(st.sets(st.integers(0, n - 1), max_size=(n - 1) // 2))
    other = rows.clone()
    for i in bad:
        other[i] *= 2.0 ** data.draw(st.sampled_from([-30, 1, 30, 100]))
    before, after = rows.double().norm(dim=1).median(), other.double().norm(dim=1).median()
    torch.testing.assert_close(
        flag(other).double() * before, flag(rows).double() * after, rtol=1e-6, atol=1e-30
    )
    honest = rows[[i for i in range(n) if i not in bad]].double().norm(dim=1)
    assert float(flag(other).norm()) <= float(honest.amax()) * (1 + 1e-5)


@given(tables(), st.data())
def test_whatever_few_send_it_is_no_longer_than_the_longest_honest_row(rows, data):
    n = len(rows)
    bad = data.draw(st.sets(st.integers(0, n - 1), max_size=(n - 1) // 2))
    for i in bad:
        of = data.draw(st.integers(0, n - 1))
        rows[i] = rows[of] * data.draw(st.sampled_from([0.0, -1.0, -1e30, 1e-30]))
    honest = rows[[i for i in range(n) if i not in bad]].double().norm(dim=1)
    found = flag(rows)
    assert bool(found.isfinite().all())
    assert float(found.norm()) <= float(honest.amax()) * (1 + 1e-5)


def test_order_and_parts_change_nothing_but_rounding():
    rows = clients(11, 70_000, 3)
    whole = flag(rows)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(flag(rows[order]), whole, rtol=1e-4, atol=1e-7)
    parts = combined("flag", [rows[:, :5], rows[:, 5:5], rows[:, 5:]], 0)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-7)
    assert torch.equal(flag(rows), whole)


def test_rows_of_zeros_have_no_direction():
    assert not flag(torch.zeros(4, 3)).any()
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]])
    torch.testing.assert_close(flag(rows), torch.tensor([2.0, 8 / 3]))
