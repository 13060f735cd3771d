"""Secrets that are shared by threshold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.rounds.secret_sharing import joined, majority, split

PRIME = 2**256 + 297


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 10**6), st.data())
def test_any_that_are_enough_find_the_secret(
    secret: bytes, count: int, seed: int, data: st.DataObject
) -> None:
    threshold, places = data.draw(st.integers(1, count)), {i: i for i in range(1, count + 1)}
    shares = split(secret, places, threshold, random.Random(seed).randbytes)
    some = data.draw(st.permutations(list(places)))[:threshold]
    held = {i: dict.fromkeys(places, shares[i - 1]) for i in some}
    assert joined(held, places, threshold) == dict.fromkeys(places, secret)
    with pytest.raises(ValueError, match="expected those of"):
        joined({i: held[i] for i in some[1:]}, places, threshold)


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(2, 7))
def test_fewer_may_have_the_shares_of_any_secret(
    secret: bytes, other: bytes, threshold: int
) -> None:
    places = {i: i for i in range(1, threshold + 1)}
    shares = split(secret, places, threshold, random.Random(1).randbytes)
    # A polynomial that is `other` at 0 and has the same shares but for the last place.
    value, points = 0, {0: int.from_bytes(other, "big")}
    points |= {i: int.from_bytes(shares[i - 1], "big") for i in range(1, threshold)}
    for i, y in points.items():
        above, below = 1, 1
        for j in points:
            if j != i:
                above, below = above * (threshold - j) % PRIME, below * (i - j) % PRIME
        value += y * above * pow(below, -1, PRIME)
    shares[-1] = (value % PRIME).to_bytes(33, "big")
    held = {i: dict.fromkeys(places, shares[i - 1]) for i in places}
    assert joined(held, places, threshold)[1] == other


def test_the_modulus_is_a_prime() -> None:
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 42):  # Miller and Rabin
        powers = [pow(base, odd * 2**i, PRIME) for i in range(twos)]
        assert powers[0] == 1 or PRIME - 1 in powers


def test_two_sets_that_are_enough_have_somebody_in_common() -> None:
    for members in range(3, 200):
        assert 2 * majority(members) > members
        assert majority(members) + majority(members - 1) > members, "of all but one"
        assert members - majority(members) >= int(0.3 * members), "30 % may be lost"
