"""What a planning process says of a stranger's graph: lines of the broker's log, and nothing on
its terminal."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from shoal.net.printable import SafeFormatter
from shoal.planner.service.children import Children, EndedError, PlannerLimits
from shoal.planner.service.said import IN_A_ROW, MOST_LINE, follow

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("planner_said")]


def test_each_line_is_one_printable_line_and_many_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = f"name {ESCAPE}\r\u202e\n".encode() + b"\xff\n\n" + b"x" * (3 * MOST_LINE) + b"\n"
    said += b"again\n" * (10 * IN_A_ROW)
    with caplog.at_level(logging.WARNING):
        follow(io.BytesIO(said), clock=lambda: 0.0).join()
    found = lines(caplog)
    assert len(found) == IN_A_ROW
    assert all(line.isprintable() and len(line) < MOST_LINE + 100 for line in found)
    assert found[0].startswith("planner_said line=name ?]0;owned??[2J?")
    assert SafeFormatter().format(caplog.records[0]).isprintable()


def test_nothing_that_a_planning_process_writes_reaches_the_brokers_terminal(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A request that its process cannot read: the traceback quotes what was asked."""
    children = Children(PlannerLimits())
    with caplog.at_level(logging.WARNING):
        with pytest.raises(EndedError, match="log tells of"):
            children.ask("graph", ESCAPE.encode() * 3, lambda: False)
        children.close()
        for thread in threading.enumerate():
            if thread.name == "planner-said":
                thread.join(10)
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "")
    assert any("Error" in line for line in lines(caplog)), lines(caplog)
