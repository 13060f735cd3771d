from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.rounds.work import divide

SECONDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40)


@given(st.integers(0, 5000), SECONDS)
def test_all_steps_are_given_out_and_nobody_waits_while_there_are_enough(
    units: int, seconds: list[float]
) -> None:
    found = divide(units, seconds)
    assert sum(found) == units
    assert min(found) >= (1 if units >= len(seconds) else 0)


@given(st.integers(1, 5000), SECONDS)
def test_no_other_division_ends_a_step_earlier(units: int, seconds: list[float]) -> None:
    """The last one ends at most one of its steps behind the moment at which all would."""
    found = divide(units, seconds)
    together = units / sum(1 / s for s in seconds)
    for steps, each in zip(found, seconds, strict=True):
        if steps > 1:
            assert steps * each <= together + each * (1 + 1e-9)


def test_who_was_not_measured_gets_as_much_as_the_others_on_the_mean() -> None:
    assert divide(12, [1.0, 0.0, 1.0]) == [4, 4, 4]
    assert divide(7, [0.0, 0.0]) in ([4, 3], [3, 4])
    assert divide(0, []) == []
    assert math.isclose(sum(divide(10, [1.0, 3.0])), 10)
