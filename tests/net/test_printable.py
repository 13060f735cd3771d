"""What reaches a terminal or a log: whatever strangers call things, nothing in it acts, and one
event is one line."""

from __future__ import annotations

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.net.printable import SafeFormatter, printable, printable_lines
from shoal.peer.logs import LineFormatter

ANY = st.text() | st.text("\x1b[]0;m\n\r\t\x07\x08\x9b\u2028\u2029\u202e\u2066\u200b\ufeff\ud800ab")


@given(ANY, st.integers(1, 50))
@example("\x1b]0;title\x07", 50)
@example("a\nb\r\x85c\u2028d\u2029e\x0bf\x0cg", 50)
@example("\u202egnp.exe", 50)
def test_a_text_is_one_line_of_bounded_length_that_only_shows(text: str, most: int):
    shown = printable(text, most)
    assert shown.isprintable()
    assert len(shown) <= most
    assert len(shown.splitlines()) <= 1
    shown.encode()  # no half of a pair
    assert printable(shown, most) == shown
    if text.isprintable() and len(text) <= most:
        assert shown == text


@given(ANY)
def test_lines_of_ours_end_where_we_say_so(text: str):
    shown = printable_lines(text)
    assert shown.count("\n") == text.count("\n")
    assert all(line.isprintable() for line in shown.split("\n"))


@pytest.mark.parametrize("formatter", [SafeFormatter("%(levelname)s %(message)s"), LineFormatter()])
@given(message=ANY, field=ANY, error=ANY)
def test_a_record_is_one_line_and_its_traceback_is_set_off(
    formatter: logging.Formatter, message: str, field: str, error: str
):
    record = logging.LogRecord("shoal", logging.INFO, "f.py", 1, "said %s", (message,), None)
    record.fields = {"peer": field}
    line = formatter.format(record)
    assert line.isprintable()
    try:
        raise ValueError(error)
    except ValueError as raised:
        record.exc_info = (ValueError, raised, raised.__traceback__)
    first, *others = formatter.format(record).split("\n")
    assert first == line
    assert others
    assert all(text.startswith("    | ") and text.isprintable() for text in others)
