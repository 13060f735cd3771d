"""What uploads of hosts have shown, against a list of all of them."""

from __future__ import annotations

from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.records.host_lines import HostLines
from shoal.proto.broker_pb2 import HostLine, RoundDone
from shoal.proto.journal_pb2 import RoundsKept

LINE = st.builds(
    HostLine,
    replica=st.integers(0, 2),
    term=st.integers(1, 2),
    bytes_per_s=st.floats(1.0, 1e9),
    update_bytes_per_s=st.floats(1.0, 1e9),
    latency_s=st.floats(0.0, 1.0),
)


@given(st.lists(st.lists(LINE, max_size=3, unique_by=lambda line: line.replica), max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_line_is_the_median_of_the_newest_three_uploads_of_the_term(
    rounds: list[list[HostLine]],
) -> None:
    lines, told = HostLines(), list[HostLine]()
    for round_ in rounds:
        lines.done(RoundDone(lines=round_))
        told += round_
        kept, lines = lines.kept(), HostLines()
        lines.restore(RoundsKept.FromString(kept.SerializeToString()))
        for number in range(3):
            mine = [line for line in told if line.replica == number]
            for term in (1, 2):
                since = max((i + 1 for i, m in enumerate(mine) if m.term != term), default=0)
                newest = mine[since:][-3:]
                found = lines.line(number, term)
                if not newest:
                    assert found is None, "it may be elsewhere since"
                    continue
                assert found is not None
                for name in ("bytes_per_s", "update_bytes_per_s", "latency_s"):
                    assert getattr(found, name) == median(getattr(m, name) for m in newest)


def test_one_upload_of_three_that_was_held_up_changes_nothing() -> None:
    lines = HostLines()
    for rate in (100.0, 3.0, 101.0):
        lines.done(RoundDone(lines=[HostLine(replica=4, term=1, bytes_per_s=rate)]))
    found = lines.line(4, 1)
    assert found is not None
    assert found.bytes_per_s == 100.0
