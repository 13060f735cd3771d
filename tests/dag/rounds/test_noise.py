"""Noise of a round's sums."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.rounds import noise as of_noise
from shoal.dag.rounds.noise import VectorNoise, gaussian, known_key, secret_key
from shoal.dag.rounds.sums import EXPONENT, WeightedSum
from shoal.dag.rounds.vector import Entry, RunVector
from shoal.sim.plain import hidden as of_plain
from shoal.sim.plain.hidden import noise_of, share_of

KEY = known_key(3, 4, 1)


def test_it_is_of_a_normal_distribution() -> None:
    found = gaussian(KEY, "w 0", 200_001)
    n = len(found)
    assert abs(float(found.mean())) < 5 / math.sqrt(n)
    assert abs(float(found.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    for x in (-2.0, -0.5, 0.3, 1.0, 2.5):
        share = 0.5 * math.erfc(-x / math.sqrt(2))
        error = math.sqrt(share * (1 - share) / n)
        assert abs(float((found <= x).double().mean()) - share) < 5 * error
    for a, b in ((found[:-1], found[1:]), (found[: n // 2], found[n // 2 : 2 * (n // 2)])):
        assert abs(float((a * b).mean())) < 5 / math.sqrt(len(a)), "numbers that belong together"


@pytest.mark.parametrize("elements", [0, 1, 2, 7])
def test_it_is_what_plain_numbers_come_to(elements: int) -> None:
    wanted = noise_of("w", elements, 3, (4, 1))
    torch.testing.assert_close(gaussian(KEY, "param:w 0", elements), wanted)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sets(st.integers(0, 80)))
def test_it_is_the_same_however_the_vector_is_cut(sizes: list[int], cuts: set[int]) -> None:
    """Also in the middle of what has one stream."""
    starts = [0, *accumulate(sizes)]
    entries = [
        Entry(f"param:p{i}", TensorSpec((n,), "float32"), starts[i], i) for i, n in enumerate(sizes)
    ]
    noise = VectorNoise(RunVector(entries), 3, known_key)
    bounds = sorted({0, starts[-1], *(at for at in cuts if at < starts[-1])})
    with patch.object(of_noise, "_STREAM", 6), patch.object(of_plain, "_STREAM", 6):
        sums = torch.cat([noise.of_sum(part, 4, 1) for part in pairwise(bounds)])
        shares = torch.cat([noise.of_giver("2", part, 4, 1, 24) for part in pairwise(bounds)])
        plain = [noise_of(f"p{i}", n, 3, (4, 1)) for i, n in enumerate(sizes)]
        plain_shares = [share_of(f"p{i}", n, 3, (4, 1), 2) for i, n in enumerate(sizes)]
    torch.testing.assert_close(sums, torch.cat(plain))
    assert torch.equal(shares.double(), torch.cat(plain_shares))


@given(st.lists(st.tuples(*[st.integers(0, 2**40)] * 3), min_size=2, max_size=4, unique=True))
def test_no_two_attempts_have_one_noise(asked: list[tuple[int, int, int]]) -> None:
    assert len({known_key(*at) for at in asked}) == len(asked)
    assert len({secret_key(*asked[0]) for _ in range(3)}) == 3, "of one attempt that is said twice"


def test_no_two_places_have_one_noise() -> None:
    a, b, c = (
        gaussian(k, w, 64) for k, w in ((KEY, "w 0"), (KEY, "w 1"), (secret_key(3, 4, 1), "w 0"))
    )
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)


@given(
    st.lists(st.floats(-1.0, 1.0, width=32), min_size=1, max_size=6),
    st.floats(0.001, 4000.0),
    st.booleans(),
)
def test_in_a_sum_it_counts_once_and_has_no_order(
    values: list[float], deviation: float, first: bool
) -> None:
    noise = gaussian(KEY, "w 0", len(values)) * deviation
    given_ = torch.tensor(values)
    total = WeightedSum(len(values), 64, EXPONENT)
    for adds_noise in (first, not first):
        if adds_noise:
            total.add_noise(noise)
        else:
            total.add(given_, 3)
    wanted = (3 * given_.double() + noise) / 64
    torch.testing.assert_close(total.mean(), wanted.float(), rtol=1e-6, atol=1e-9)


def test_noise_is_a_whole_number_on_the_grid_of_the_sum() -> None:
    noise = gaussian(KEY, "w 0", 500)
    with_, alone = WeightedSum(500, 64, EXPONENT), WeightedSum(500, 64, EXPONENT)
    for total in (with_, alone):
        total.add(torch.randn(500, generator=torch.Generator().manual_seed(1)), 7)
    with_.add_noise(noise)
    added = with_._sum - alone._sum
    assert added.dtype == torch.int64
    torch.testing.assert_close(added.double() * 2.0 ** -(62 - EXPONENT - 7), noise)


def test_integers_have_none() -> None:
    counters = torch.tensor([7, 2]).view(torch.float32)
    total = WeightedSum(5, 1, EXPONENT, [slice(0, 4)])
    total.add_noise(torch.ones(5, dtype=torch.float64))
    total.add(torch.cat([counters, torch.zeros(1)]), 1)
    assert float(total.mean()[4]) == 1.0
    assert total.mean()[:4].view(torch.int64).tolist() == [7, 2]
