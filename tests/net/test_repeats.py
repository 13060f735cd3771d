"""A line that comes again and again is said now and then, and every other one each time."""

from __future__ import annotations

import errno
import logging
import sys

from hypothesis import given
from hypothesis import strategies as st

from shoal.net.repeats import AGAIN_S, MANY, PER_S, SAME, Repeats


def said(
    repeats: Repeats,
    text: str,
    *args: object,
    at: float,
    level: int = logging.INFO,
    error: Exception | None = None,
) -> logging.LogRecord | None:
    info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("shoal.x", level, "x.py", 1, text, args, info)
    record.created = at
    return record if repeats.filter(record) else None


def test_the_same_line_is_said_now_and_then_with_how_often_it_came() -> None:
    repeats = Repeats()
    lines = [said(repeats, "no way", at=n / 100, level=logging.ERROR) for n in range(5_000)]
    shown = [line.getMessage() for line in lines if line is not None]
    assert shown == ["no way"] * SAME  # within 50 s
    again = said(repeats, "no way", at=50.0 + AGAIN_S, level=logging.ERROR)
    assert again is not None
    assert again.getMessage() == f"no way (and {5_000 - SAME} more like it)"


def test_lines_that_differ_by_a_number_are_bounded_where_they_warn() -> None:
    for level, most in ((logging.INFO, 10_000), (logging.WARNING, MANY + 10 * PER_S)):
        repeats = Repeats()
        shown = [said(repeats, "port %d", n, at=n / 1000, level=level) for n in range(10_000)]
        assert sum(line is not None for line in shown) <= most
        assert level != logging.INFO or None not in shown


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=200),
)
def test_nothing_is_lost_without_being_counted(came: list[tuple[int, float]]) -> None:
    repeats, now, shown, counted = Repeats(), 0.0, 0, 0
    for which, passed in came:
        now += passed
        line = said(repeats, f"line {which}", at=now)
        if line is not None:
            shown += 1
            _, _, more = line.getMessage().partition("(and ")
            counted += int(more.split()[0]) if more else 0
    waiting = sum(bucket.refused for bucket in repeats._texts._left.values())
    assert shown + counted + waiting == len(came)


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    repeats = Repeats()
    assert said(repeats, "a", at=1e9) is not None
    assert said(repeats, "a", at=0.0) is not None
    assert all(said(repeats, f"b {n}", at=float(n)) is not None for n in range(100))


def test_what_the_machine_lacks_is_said_without_a_traceback() -> None:
    line = said(
        Repeats(), "accept failed", at=0.0, error=OSError(errno.EMFILE, "Too many open files")
    )
    assert line is not None
    assert line.exc_info is None
    assert "LimitNOFILE" in line.getMessage()
    bug = said(Repeats(), "bug", at=0.0, error=KeyError("x"))
    assert bug is not None
    assert bug.exc_info is not None


def test_many_texts_take_no_memory_for_good() -> None:
    repeats = Repeats()
    for n in range(3_000):
        said(repeats, f"text {n}", at=float(n))
    assert sys.getsizeof(repeats._texts._left) < 1 << 20
    assert len(repeats._texts._left) <= 1_000
