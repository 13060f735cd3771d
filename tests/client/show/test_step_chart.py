"""The chart of a planned step says of each moment what the peer's list has there."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.client.show.step_chart import step_chart
from shoal.proto.broker_pb2 import PlannedRow


def row(peer: str, *actions: tuple[str, float, float]) -> PlannedRow:
    texts, starts, ends = zip(*actions, strict=True)
    return PlannedRow(peer=peer, actions=texts, start_s=starts, end_s=ends)


def chart(*rows: PlannedRow, columns: int = 45) -> list[str]:
    return list(step_chart(rows, {"p0": "ann"}, columns))


def test_each_column_shows_what_is_done_in_it() -> None:
    found = chart(
        row(
            "p0",
            ("F0@0", 0, 1),
            ("F13@0", 1, 2),
            ("B0@0", 3, 4),
            ("W0@0", 4, 5),
            (">@norm", 5, 5),
            ("U", 5, 6),
        ),
        row("p1", ("F0@1", 2, 3)),
        columns=5 + 36,
    )
    assert found[0] == "one step, 6 s from left to right"
    assert found[1] == "ann  " + "0" * 6 + "3" * 6 + "." * 6 + "a" * 6 + "A" * 6 + "=" * 6
    assert found[2] == "p1   " + "." * 12 + "0" * 6 + "." * 18


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=30), st.integers(40, 120))
def test_a_chart_is_as_wide_as_said_and_shows_every_action_of_more_than_two_columns(
    lengths: list[float], columns: int
) -> None:
    at, actions = 0.0, []
    for m, length in enumerate(lengths):
        actions.append((f"F{m}@0", at, at + length))
        at += length
    name, *cells = chart(row("p0", *actions), row("p1", ("U", 0, at)), columns=columns)[1].split()
    assert name == "ann"
    assert len(cells[0]) == min(100, columns - 5)
    for m, length in enumerate(lengths):
        assert str(m % 10) in cells[0] or length <= 2 * at / len(cells[0])
    assert "." not in cells[0]


def test_peers_beyond_the_first_are_counted_and_one_alone_is_not_drawn() -> None:
    rows = [row(f"q{k}", ("U", 0, 1)) for k in range(20)]
    assert "and 4 more" in chart(*rows)
    assert chart(rows[0]) == []
    assert chart(*rows, columns=20) == []


@pytest.mark.parametrize("times", [(nan, 1), (0, inf), (2, 1), (-1, 1)])
def test_times_that_are_none_are_not_drawn(times: tuple[float, float]) -> None:
    good = row("p0", ("U", 0, 1)), row("p1", ("U", 0, 1))
    assert chart(*good, row("p2", ("F0@0", *times))) == chart(*good)


def test_an_action_without_times_is_not_drawn() -> None:
    good = row("p0", ("U", 0, 1)), row("p1", ("U", 0, 1))
    assert chart(*good, PlannedRow(peer="p2", actions=["F0@0", "U"], start_s=[0], end_s=[1])) == (
        chart(*good)
    )
