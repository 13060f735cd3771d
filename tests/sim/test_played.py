"""Samples of the moments at which tests let somebody die."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.tests.sim.played import sampled_by_kind


@given(st.lists(st.sampled_from("abcdef"), min_size=1), st.integers(1, 60), st.integers(0, 3))
def test_a_sample_leaves_out_no_kind_and_has_of_each_its_share(
    kinds: list[str], count: int, turn: int
) -> None:
    found = sampled_by_kind(kinds, count, turn)
    assert found == sorted(set(found))
    played, there = Counter(kinds[i] for i in found), Counter(kinds)
    assert played == {
        kind: min(n, max(1, round(count * n / len(kinds)))) for kind, n in there.items()
    }
