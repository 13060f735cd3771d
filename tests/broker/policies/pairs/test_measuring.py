"""Which links between replicas are measured before saps chooses among them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.policies.pairs.measuring import OTHERS, tournament


@given(st.integers(1, 60), st.integers(-(2**63), 2**63 - 1), st.integers(1, 70))
def test_nobody_is_twice_in_a_turn_and_no_pair_comes_twice(n, seed, turns):
    found = tournament(n, seed, turns)
    assert len(found) == min(turns, n - 1 + n % 2)
    for turn in found:
        assert len({i for pair in turn for i in pair}) == 2 * len(turn) == n - n % 2
    pairs = [frozenset(pair) for turn in found for pair in turn]
    assert len(set(pairs)) == len(pairs)
    assert {i for pair in pairs for i in pair} <= set(range(n))


@given(st.integers(2, OTHERS), st.integers(-(2**63), 2**63 - 1))
def test_few_are_measured_all_with_all(n, seed):
    found = {frozenset(pair) for turn in tournament(n, seed) for pair in turn}
    assert found == {frozenset(pair) for pair in itertools.combinations(range(n), 2)}


def test_another_seed_draws_others():
    assert tournament(40, 0) == tournament(40, 0) != tournament(40, 1)
