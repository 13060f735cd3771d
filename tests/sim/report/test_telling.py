"""What an output folder tells of its run, beside the events that it was written from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.client.errors import RecordError
from shoal.client.files.records import Recorder, write_run
from shoal.client.runs.history import History
from shoal.proto.broker_pb2 import FAILED, Evaluation, Outcome, RunEvent, RunState, StepDone
from shoal.proto.common_pb2 import Reason
from shoal.sim.comparing import folder_told, labels, run_told
from shoal.sim.report import Summary, write_json
from shoal.sim.report.side_by_side import RunComparison, Told, reported


def test_a_folder_tells_what_its_events_did(tmp_path: Path) -> None:
    write_run(tmp_path, {"run": "r-1", "job": {"seed": 7, "train": {"batch": 4}}})
    recorder = Recorder(tmp_path, 16)
    for step in range(3):
        done = StepDone(step=step, seconds=0.5, sent_bytes=100)
        done.outcome.CopyFrom(Outcome(loss=3.0 - step))
        if step == 2:
            done.evaluation.CopyFrom(Evaluation(loss=1.5))
        recorder.see(RunEvent(number=step, step=done))
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # somebody is writing
    found = folder_told(tmp_path, "a")
    assert found.seed == 7
    assert [(p["step"], p["samples"], p["sent_bytes"], p["seconds"]) for p in found.course] == [
        (1, None, 100, 0.5),
        (2, None, 200, 1.0),
        (3, None, 300, 1.5),
    ]
    assert [p["loss"] for p in found.course] == [3.0, 2.0, 1.0]
    assert [p["held_out"] for p in found.course] == [None, None, 1.5]


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("run.json", b""),
        ("run.json", b'{"run": "r-1", "jo'),
        ("run.json", b"\0" * 40),
        ("metrics.jsonl", b'\0\0\0\0{"step": 2, "loss": 1.0}\n'),
        ("metrics.jsonl", b"[1]\n"),
        ("rounds.jsonl", b"\xff\n"),
    ],
)
def test_what_a_power_loss_left_is_named(tmp_path: Path, name: str, left: bytes) -> None:
    write_run(tmp_path, {"run": "r-1", "job": {"seed": 7, "train": {"batch": 4}}})
    (tmp_path / name).write_bytes(left)
    with pytest.raises(RecordError, match=f"{name} is damaged.*remove"):
        folder_told(tmp_path, "a")
    if name != "run.json":
        with pytest.raises(RecordError, match=f"{name} is damaged.*remove"):
            Recorder(tmp_path, 16)
    if name == "metrics.jsonl":
        with pytest.raises(RecordError, match=f"{name} is damaged.*remove"):
            History(tmp_path)


def test_a_broker_tells_what_the_folder_does(tmp_path: Path) -> None:
    events = []
    recorder = Recorder(tmp_path / "r-1", 16)
    write_run(tmp_path / "r-1", {"run": "r-1", "job": {"seed": 7, "train": {"batch": 4}}})
    for step in range(3):
        done = StepDone(step=step, seconds=0.5, sent_bytes=100, outcome=Outcome(loss=3.0 - step))
        events.append(RunEvent(number=step, step=done))
        recorder.see(events[-1])
    recorder.close()
    spec = SimpleNamespace(job='{"seed": 8}')
    client = SimpleNamespace(recall=lambda name: SimpleNamespace(spec=spec))

    def told(to: Path) -> Told:
        run: Any = SimpleNamespace(so_far=lambda: iter(events), id="r-1", client=client, folder=to)
        return run_told(run, "a")

    assert told(tmp_path / "r-1") == folder_told(tmp_path / "r-1", "a")
    assert told(tmp_path / "elsewhere").job == {"seed": 8}
    reason = Reason(text="out of memory")
    events.append(RunEvent(number=3, state=RunState(run="r-1", phase=FAILED, reason=reason)))
    assert told(tmp_path / "r-1").error == "out of memory"


def test_a_run_that_diverged_says_so_in_table_and_history(tmp_path: Path) -> None:
    """JSON has no NaN: what a file has as null is the number that it was, not one before it."""
    losses = [3.0, 2.0, math.nan]
    job = {"seed": 7, "train": {"batch": 4}}
    write_run(tmp_path, {"run": "r-1", "job": job})
    recorder = Recorder(tmp_path, 16)
    for step, loss in enumerate(losses):
        done = StepDone(step=step, seconds=0.5, outcome=Outcome(loss=loss))
        done.evaluation.CopyFrom(Evaluation(loss=loss))
        recorder.see(RunEvent(number=step, step=done))
    recorder.close()
    found = folder_told(tmp_path, "a")
    summary = Summary(name="n", world="w", seed=7, job=job, course=tuple(found.course))
    write_json(summary, tmp_path / "summary.json")
    told = [
        Told(label="a", seed=7, job=job, course=found.course, more={}),
        reported(tmp_path / "summary.json", "b"),
    ]
    for one in RunComparison(told).table()["runs"]:
        assert math.isnan(one["loss"])
        assert one["step"] == 3
    assert math.isnan(found.course[-1]["held_out"])
    history = History(tmp_path)
    assert "3 -> nan" in repr(history)
    assert all(map(math.isnan, (history[-1]["loss"], history.columns["eval_loss"][-1])))


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run": "r-1"}))
    with pytest.raises(RecordError, match=r"has no run\.json with a job"):
        folder_told(tmp_path, "a")


def test_names_are_short_and_those_of_one_setting_are_one(tmp_path: Path) -> None:
    for name in ("g/a-seed-1", "g/a-seed-2", "g/b-seed-1"):
        (tmp_path / name).mkdir(parents=True)
    names = [str(tmp_path / "g" / n) for n in ("a-seed-1", "a-seed-2", "b-seed-1")]
    assert labels(names) == ["a", "a", "b-seed-1"]
    assert labels([names[0], "r-12"]) == ["a-seed-1", "r-12"]
