from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.broker.policies.handing import divide, steps_of

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


@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 6)), min_size=1, max_size=6))
def test_who_was_ahead_by_more_has_fewer_steps_to_come(replicas: list[tuple[float, int]]) -> None:
    seconds, carried = [s for s, _ in replicas], [n for _, n in replicas]
    assume(any(carried))
    units = sum(carried) + 2 * len(replicas)
    found = steps_of(units, seconds, carried)
    assert sum(found) == units
    assert all(a >= b for a, b in zip(found, carried, strict=True))
    assert min(found) >= 1
    # But for the one step that everybody has.
    later = [n * s for n, s, c in zip(found, seconds, carried, strict=True) if n > max(c, 1)]
    last = max(later, default=0.0)
    # Nobody who got a step would have ended sooner had another one got it.
    assert all((n + 1) * s >= last - 1e-9 for n, s in zip(found, seconds, strict=True))


def test_equal_ones_are_equal_again_whoever_was_ahead() -> None:
    assert steps_of(12, (1.0, 1.0, 1.0), (4, 3, 1)) == [4, 4, 4]
