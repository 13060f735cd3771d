"""Discrete Gaussians, against their probabilities and against the same words read one by one."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.rounds.noise import discrete_gaussian
from shoal.sim.plain.hidden import share_of

KEY = bytes(range(32))
DRAWN = 200_000


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_each_number_comes_as_often_as_it_should(bits: int) -> None:
    sigma = 2**bits
    found = discrete_gaussian(KEY, "some", DRAWN, bits).numpy()
    numbers = np.arange(-20 * sigma, 20 * sigma + 1)
    assert np.isin(found, numbers).all()
    chance = np.exp(-(numbers**2) / (2 * sigma**2))
    wanted = DRAWN * chance / chance.sum()
    came = np.array([(found == k).sum() for k in numbers])
    often = wanted > 5
    off = ((came - wanted)[often] ** 2 / wanted[often]).sum()
    free = often.sum() - 1
    assert off < free + 4 * math.sqrt(2 * free), "chi-square, four deviations"


def test_the_variance_of_a_share_is_that_of_its_bits() -> None:
    found = discrete_gaussian(KEY, "some", DRAWN, 24).double() / 2**24
    assert float(found.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(DRAWN))
    assert float(found.var()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / DRAWN))
    assert float((found**4).mean()) == pytest.approx(3.0, abs=4 * math.sqrt(96 / DRAWN))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 40), st.integers(0, 60))
def test_they_are_those_that_are_found_one_by_one(seed: int, giver: int, elements: int) -> None:
    key = hashlib.sha256(f"{seed} 3 2".encode()).digest()
    found = discrete_gaussian(key, f"{giver} param:a.b 0", elements, 24)
    assert found.double().tolist() == share_of("a.b", elements, seed, (3, 2), giver).tolist()


def test_keys_and_labels_have_streams_of_their_own() -> None:
    one, other, third = (
        discrete_gaussian(key, label, 1000, 24)
        for key, label in ((KEY, "a"), (KEY, "b"), (KEY[::-1], "a"))
    )
    assert not set(one.tolist()) & set(other.tolist())
    assert not set(one.tolist()) & set(third.tolist())
