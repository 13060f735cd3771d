"""What is recorded of a run beside its weights: each step once, and torn lines again."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from shoal.client.files.records import Recorder, evaluation_numbers
from shoal.proto import broker_pb2 as pb
from shoal.tests.client.runs.scripted_broker import step


def test_a_torn_line_is_written_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, tokens_per_step=100)
    recorder.add(step(0, 0).step)
    recorder.add(step(0, 1).step)
    recorder.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    again = Recorder(tmp_path, tokens_per_step=100)
    again.add(step(0, 0).step)
    again.add(step(0, 1).step)
    again.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["tokens_per_s"]) for r in rows] == [(0, 200.0), (1, 200.0)]


@given(turns=st.lists(st.integers(0, 2), max_size=30))
def test_a_step_is_written_once_however_many_follow_a_run_in_one_folder(turns: list[int]) -> None:
    with TemporaryDirectory() as name:
        followers = [Recorder(Path(name)) for _ in range(3)]
        at = [0, 0, 0]
        for who in turns:
            followers[who].add(step(0, at[who]).step)
            followers[who].add(step(0, at[who]).step, replica=1)
            at[who] += 1
        for follower in followers:
            follower.close()
        path = Path(name) / "metrics.jsonl"
        lines = path.read_text().splitlines() if turns else []
        rows = [(row.get("replica"), row["step"]) for row in map(json.loads, lines)]
    assert rows == [(replica, n) for n in range(max(at)) for replica in (None, 1)]


def test_a_mean_of_replicas_by_themselves_is_told_from_the_loss_of_a_version() -> None:
    found = pb.VersionEvaluated(round=4, step=16, evaluation=pb.Evaluation(loss=3.0), replicas=4)
    assert evaluation_numbers(found) == {"round": 4, "step": 16, "replicas": 4, "eval_loss": 3.0}
    found.replicas, found.replica = 0, 2
    assert evaluation_numbers(found) == {"round": 4, "step": 16, "replica": 2, "eval_loss": 3.0}


def test_a_diverged_loss_is_null_in_json(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.add(pb.StepDone(step=0, outcome=pb.Outcome(loss=float("nan"))))
    recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
