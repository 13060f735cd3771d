"""Stochastic rounding to bfloat16: one of the two neighbours, the mean is the number, and the bits
hang on key and place alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.ir import random
from shoal.dag.ir.random import rounded, rounding_key

FLOATS = st.floats(-(2.0**126), 2.0**126, width=32)
KEY = rounding_key(3, 5, "head.weight:")


def neighbours(x):
    """The bfloat16 numbers below and above, by cutting bits off."""
    bits = x.view(torch.int32)
    toward = (bits & -(2**16)).view(torch.float32)
    away = torch.where(bits & 0xFFFF != 0, (bits & -(2**16)) + 2**16, bits).view(torch.float32)
    return toward, away


@settings(max_examples=60)
@given(
    st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=40),
    st.integers(0, 50),
)
def test_each_is_one_of_its_neighbours(values, first):
    x = torch.tensor(values)
    made = rounded(x, first, key=KEY).float()
    toward, away = neighbours(x)
    assert ((made == toward) | (made == away)).all()


@pytest.mark.parametrize("value", [1.001, -0.7531, 3e-5, 1.0 + 2**-12])
def test_the_mean_is_the_number(value):
    n = 200_000
    made = rounded(torch.full((n,), value), 0, key=KEY).double()
    toward, away = (float(t) for t in neighbours(torch.tensor([value])))
    spread = abs(away - toward) / 2
    assert abs(float(made.mean()) - float(torch.tensor(value))) < 5 * spread / math.sqrt(n)


def test_what_is_no_number_stays():
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.5])
    made = rounded(x, 0, key=KEY).float()
    assert torch.equal(made.isnan(), x.isnan())
    assert torch.equal(made[~made.isnan()], x[~x.isnan()])


@given(st.integers(1, 70), st.lists(st.integers(0, 70), max_size=4), st.integers(0, 40))
def test_parts_are_rounded_as_the_whole(n, ends, first):
    """Over the borders of what shares a number of the hash, too."""
    x = torch.linspace(0.1, 7.3, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "ROUNDED", 16)
        whole = rounded(x, first, key=KEY)
        places = sorted({0, n, *(e for e in ends if e < n)})
        parts = [rounded(x[a:b].clone(), first + a, key=KEY) for a, b in itertools.pairwise(places)]
    assert torch.equal(torch.cat(parts), whole)


def test_steps_names_and_seeds_have_bits_of_their_own():
    x = torch.full((4096,), 1.001)
    keys = [rounding_key(0, 0, "a"), rounding_key(1, 0, "a"), rounding_key(0, 1, "a")]
    made = [rounded(x, 0, key=k) for k in (*keys, rounding_key(0, 0, "b"))]
    for i, a in enumerate(made):
        for b in made[:i]:
            assert 0.6 < float((a == b).float().mean()) < 0.95  # 0.79 for independent ones
