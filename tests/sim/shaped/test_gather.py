"""Traces of several processes become one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.sim.shaped.run import gather
from shoal.sim.trace import Span, TraceError


def file(path: Path, *records: object, tail: str = "") -> Path:
    path.write_text("".join(f"{json.dumps(r)}\n" for r in records) + tail)
    return path


def span(kind: str, start_s: float, end_s: float, **more: object) -> dict[str, object]:
    return {"kind": kind, "run": "r", "start_s": start_s, "end_s": end_s, **more}


def test_files_become_one_trace_by_time_and_under_names(tmp_path: Path) -> None:
    one = file(
        tmp_path / "one",
        {"peer": "a-1f", "name": "a"},
        span("forward", 102, 103, step=0, microbatch=1, stage=0),
        span("send", 103, 104, to="b-2e", size_bytes=5, role="activation"),
    )
    other = file(
        tmp_path / "other",
        {"peer": "b-2e", "name": "b"},
        span("build", 97, 99),  # of before
        span("forward", 101, 102),
        span("update", 105, 106) | {"run": "another"},
    )
    trace = gather([one, other], 100.0, run="r")
    assert trace.spans == [
        Span(start_s=1, end_s=2, peer="b", kind="forward"),
        Span(start_s=2, end_s=3, peer="a", kind="forward", step=0, microbatch=1, stage=0),
        Span(start_s=3, end_s=4, peer="a", kind="send", to="b", size_bytes=5, role="activation"),
    ]
    assert gather([other, one], 100.0, run="r").digest() == trace.digest()
    assert [s.kind for s in gather([one, other], 100.0).spans][-1] == "update"


def test_a_trace_has_all_replicas_of_its_run_and_of_no_other(tmp_path: Path) -> None:
    runs = ["r-1-ab", "r-1-ab.1", "r-1-ab.11", "r-1-abc", "r-1-abc.1", "r-11-ab.1"]
    spans = [span("forward", k, k + 1, step=k) | {"run": run} for k, run in enumerate(runs)]
    path = file(tmp_path / "spans", {"peer": "a-1f", "name": "a"}, *spans)
    assert [s.step for s in gather([path], 0.0, run="r-1-ab").spans] == [0, 1, 2]


def test_what_a_killed_process_left_unfinished_is_passed_over(tmp_path: Path) -> None:
    cut = file(
        tmp_path / "cut", {"peer": "a-1f", "name": "a"}, span("update", 1, 2), tail='{"kind":"for'
    )
    assert [s.kind for s in gather([cut], 0.0).spans] == ["update"]
    with pytest.raises(TraceError, match=r"cut:3: "):
        gather([file(cut, {"peer": "a-1f", "name": "a"}, span("update", 1, 2), tail="{\n")], 0.0)


@pytest.mark.parametrize("record", [3, {}, {"kind": "update"}, {"kind": "update", "start_s": "x"}])
def test_a_line_that_is_no_span_is_named(tmp_path: Path, record: object) -> None:
    path = file(tmp_path / "bad", {"peer": "a-1f", "name": "a"}, record)
    with pytest.raises(TraceError, match=r"bad:2: "):
        gather([path], 0.0)
