"""The owner's caps: over no time more leaves than the rate allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.cap import BURST_S, Reserve

RATE = 1000.0


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), min_size=1, max_size=60))
def test_over_any_time_no_more_leaves_than_the_rate_and_a_burst(sends):
    reserve, now, left = Reserve(RATE), 0.0, []
    for size, pause_s in sends:
        now += pause_s
        now += reserve.take(size, now)  # the sender waits
        left.append((now, size))
    for i in range(len(left)):
        total = 0
        for at, size in left[i:]:
            total += size
            # Bytes leave at the end of their wait: the first message took its own time before.
            span = at - left[i][0] + left[i][1] / RATE
            assert total <= RATE * (span + BURST_S) + 1e-6 * total


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_one_who_always_has_something_gets_the_whole_rate(sizes):
    reserve, now = Reserve(RATE), 0.0
    for size in sizes:
        now += reserve.take(size, now)
    assert sum(sizes) / RATE - BURST_S - 1e-9 <= now <= sum(sizes) / RATE + 1e-9


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
def test_a_cap_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="expected a number above 0"):
        Reserve(rate)
