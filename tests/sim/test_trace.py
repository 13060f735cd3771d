"""The trace: its lines come back, its digest depends on nothing else, and it is bounded."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.sim.trace import Kind, Mark, Span, Total, TotalKey, Trace, TraceError

TIMES = st.floats(0, 1e9, allow_nan=False)
NAMES = st.text(max_size=8)
SPANS = st.builds(
    lambda start_s, lasts_s, **rest: Span(start_s=start_s, end_s=start_s + lasts_s, **rest),
    start_s=TIMES,
    lasts_s=TIMES,
    peer=NAMES,
    kind=st.sampled_from(get_args(Kind)),
    step=st.integers(-1, 9),
    microbatch=st.integers(-1, 9),
    stage=st.integers(-1, 9),
    to=NAMES,
    size_bytes=st.integers(0, 1 << 60),
    dense_bytes=st.integers(0, 1 << 60),
    role=NAMES,
    codec=NAMES,
)
MARKS = st.builds(Mark, at_s=TIMES, who=NAMES, what=NAMES, text=NAMES)


@settings(deadline=None)
@given(records=st.lists(SPANS | MARKS, max_size=20), most=st.integers(0, 8))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, records: list[Span | Mark], most: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "events.jsonl"
    trace = Trace(most_spans=most, most_marks=most)
    for record in records:
        trace.add(record)
    trace.write(path)
    again = Trace.read(path)
    assert again.spans == trace.spans
    assert again.marks == trace.marks
    assert again.beyond == trace.beyond
    assert again.marks_left_out == trace.marks_left_out
    assert again.digest() == trace.digest()
    if records:
        assert again.end_s == trace.end_s
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert list(record) == sorted(record)


@settings(deadline=None)
@given(records=st.lists(SPANS, max_size=30), most=st.integers(0, 30))
def test_totals_do_not_depend_on_the_bound(records: list[Span], most: int) -> None:
    bounded = Trace(most_spans=most)
    for record in records:
        bounded.add(record)
    assert len(bounded.spans) == min(most, len(records))
    assert bounded.spans_left_out == len(records) - len(bounded.spans)
    totals = bounded.totals()
    assert sum(t.count for t in totals.values()) == len(records)
    for part, total in totals.items():
        mine = [s for s in records if (s.peer, s.kind, s.to, s.role, s.codec) == part]
        assert total.count == len(mine)
        assert total.size_bytes == sum(s.size_bytes for s in mine)
        assert total.dense_bytes == sum(s.dense_bytes for s in mine)
        assert total.seconds == pytest.approx(sum(s.end_s - s.start_s for s in mine))


def test_totals_leave_the_trace_as_it_is() -> None:
    trace = Trace(most_spans=1)
    for _ in range(3):
        trace.add(Span(start_s=0, end_s=1, peer="a", kind="forward"))
    part = TotalKey("a", "forward", "", "", "")
    assert trace.totals()[part] == Total(3, 3.0)
    assert trace.beyond[part] == Total(2, 2.0)


MADE_ELSEWHERE = """
from shoal.sim.trace import Mark, Span, Trace
trace = Trace(most_spans=40)
for i in range(60):
    for peer in (f"p{n}" for n in range(8)):
        trace.add(Span(start_s=i, end_s=i + 0.1, peer=peer, kind="send", to="x", size_bytes=i))
    trace.add(Mark(at_s=i, who="p1", what="loss", text=str(0.1 * i)))
print(trace.digest())
"""


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    def digest(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", MADE_ELSEWHERE]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert digest("1") == digest("2") != ""


def test_every_field_counts_in_the_digest() -> None:
    def digest(**changed: object) -> str:
        trace = Trace()
        fields = {"start_s": 0.0, "end_s": 1.0, "peer": "a", "kind": "send", **changed}
        trace.add(Span(**fields))  # type: ignore[arg-type]
        return trace.digest()

    changes = [
        {"start_s": 0.5},
        {"end_s": 1.5},
        {"peer": "b"},
        {"kind": "forward"},
        {"step": 1},
        {"microbatch": 1},
        {"stage": 1},
        {"to": "b"},
        {"size_bytes": 1},
        {"dense_bytes": 1},
        {"role": "r"},
        {"codec": "c"},
    ]
    assert len({digest(), *(digest(**change) for change in changes)}) == len(changes) + 1


@pytest.mark.parametrize(
    "record",
    [
        Span(start_s=2, end_s=1, peer="a", kind="forward"),
        Span(start_s=math.nan, end_s=1, peer="a", kind="forward"),
        Span(start_s=0, end_s=math.inf, peer="a", kind="forward"),
        Mark(at_s=math.nan, who="a", what="kill"),
    ],
)
def test_times_that_cannot_be_are_refused(record: Span | Mark) -> None:
    with pytest.raises(TraceError, match="finite"):
        Trace().add(record)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "expected an object, got list"),
        ("{", "Expecting property name"),
        ('{"kind":"sing","peer":"a","start_s":0,"end_s":1}', "expected one of forward, backward"),
        ('{"kind":"send","peer":"a","start_s":3,"end_s":1}', "not before the start"),
        ('{"at_s":0,"who":"a","what":"kill","where":"b"}', "where"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f'{{"at_s":0,"who":"a","what":"kill"}}\n{line}\n')
    with pytest.raises(TraceError, match=r"events\.jsonl:2: ") as error:
        Trace.read(path)
    assert message in str(error.value)


@settings(deadline=None)
@given(record=SPANS | MARKS)
def test_a_line_is_what_json_makes_of_the_record(record: Span | Mark) -> None:
    trace = Trace()
    trace.add(record)
    [line] = trace.lines()
    wanted = {f.name: v for f in fields(record) if (v := getattr(record, f.name)) != f.default}
    assert line == json.dumps(wanted, sort_keys=True, separators=(",", ":"))
