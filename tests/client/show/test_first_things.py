"""What people read first: a sentence that calls a choice wrong stands on top, and one who comes
back to a run is shown what is new."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.client.files.records import Recorder, read_run, write_run
from shoal.client.show import progress
from shoal.client.show.formation import formation_lines
from shoal.client.show.preview import page
from shoal.job.words import WRONG_CHOICE
from shoal.proto.broker_pb2 import (
    DONE,
    Formation,
    FormedReplica,
    Plan,
    PlanReport,
    PreviewAnswer,
    RunEvent,
    RunState,
)

WRONG = f"these replicas are {WRONG_CHOICE}: one replica trains 9 samples/s, 3.00 times theirs"


@pytest.mark.parametrize("wrong", [False, True])
def test_replicas_are_not_recommended_and_called_wrong_at_once(wrong: bool) -> None:
    reasons = ["2 replicas that exchange every 50 steps", "2 replicas as asked for"]
    formation = Formation(reasons=[*reasons, *[WRONG] * wrong], replicas=[FormedReplica()] * 2)
    lines = formation_lines(formation, {})
    assert lines[0].startswith("asked for: 2 rep" if wrong else "recommended: 2 rep")
    assert [line for line in lines if WRONG_CHOICE in line] == [WRONG] * wrong
    assert (lines[1] == WRONG) == wrong


def test_a_pipeline_that_one_peer_outruns_is_called_wrong_in_the_second_line() -> None:
    note = f"a pipeline over this network is {WRONG_CHOICE}: a alone, takes 1 s"
    answer = PreviewAnswer(plan=Plan(), report=PlanReport(), notes=["first", note])
    text = page(answer, "job")
    assert text.splitlines()[1].strip() == note
    assert text.count(WRONG_CHOICE) == 1


def test_run_json_has_the_division_that_the_plan_took(tmp_path: Path) -> None:
    write_run(tmp_path, {"run": "r-1", "job": {"train": {"microbatch": 4, "batch": 16}}})
    seen = Recorder(tmp_path)
    seen.see(RunEvent(plan=Plan(microbatch_size=8)))
    seen.close()
    assert read_run(tmp_path)["job"]["train"] == {"microbatch": 8, "batch": 16}


def test_who_resumes_a_run_is_shown_what_is_new_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [RunEvent(number=n, note=f"note {n}") for n in range(5)]
    events.append(RunEvent(number=5, state=RunState(run="r-1", phase=DONE)))

    def watch() -> Iterator[RunEvent]:
        yield from events

    run: Any = SimpleNamespace(
        id="r-1",
        recorder=lambda: Recorder(tmp_path),
        watch=watch,
        client=SimpleNamespace(names={}),
        checkpoint_keeper=None,
    )
    keeper = nullcontext()
    keeper.problems, keeper.see = (), lambda event: None  # type: ignore[attr-defined]
    monkeypatch.setattr(progress, "CheckpointWriter", lambda run: keeper)
    progress.follow(run, json=True, since=3)
    shown = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert shown == [3, 4, 5]
