"""A plan in three lines, and what people read of the steps behind it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.client.show.plan_lines import formed_in_short, long_time_text, planned_in_short
from shoal.client.show.progress import _Lines, _Told
from shoal.job.words import WRONG_CHOICE
from shoal.proto.broker_pb2 import (
    Evaluation,
    Formation,
    FormedReplica,
    Outcome,
    Plan,
    PlanReport,
    Prediction,
    ReplicaState,
    RunEvent,
    RunState,
    Spare,
    StageSlot,
    StepDone,
)

NAMES = {"p1": "anna", "p2": "bert", "p3": "carl\x1b[31m"}


def planned(*, step_s: float = 3.0, reasons: tuple[str, ...] = ()) -> RunEvent:
    stages = [StageSlot(start=0, stop=4, holders=["p1", "p2"]), StageSlot(start=4, holders=["p3"])]
    predicted = Prediction(step_s=step_s, bottlenecks=["link anna -> carl, 80 %", "carl"])
    report = PlanReport(predicted=predicted, reasons=reasons, spares=[Spare(peer="p4")])
    return RunEvent(plan=Plan(stages=stages), report=report, term=1)


def test_a_plan_in_three_lines() -> None:
    assert list(planned_in_short(planned(), 4000, NAMES)) == [
        "who trains   3 peers in 2 stages: anna + bert | carl?[31m; 1 peer in reserve",
        "how long     about 3 h 20 min: 4000 steps of 3 s, as predicted",
        "held back by link anna -> carl, 80 %",
    ]


def test_a_wrong_choice_is_what_holds_it_back() -> None:
    wrong = f"a pipeline is {WRONG_CHOICE}: anna alone takes 1 s"
    lines = list(planned_in_short(planned(step_s=0.0, reasons=("x", wrong)), 9, NAMES))
    assert lines[1:] == [
        "how long     not predicted: the bar says it after some steps",
        f"held back by {wrong}",
    ]


def test_replicas_in_three_lines() -> None:
    formation = Formation(reasons=["2 replicas that exchange every 50 steps"], every=50)
    formation.replicas.extend([FormedReplica()] * 2)
    formation.local_s, formation.exposed_s = 90.0, 10.0
    assert list(formed_in_short(formation)) == [
        "who trains   2 replicas: 2 replicas that exchange every 50 steps",
        "how long     2 min a round, as predicted",
        "held back by exchanges, for 10% of the time",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.6, "10 s"), (90, "2 min"), (3600, "1 h"), (3661 * 3, "3 h 3 min"), (86400 * 2, "2 days")],
)
def test_long_times(seconds: float, text: str) -> None:
    assert long_time_text(seconds) == text


def test_a_step_that_is_skipped_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    run: Any = SimpleNamespace(id="r-1", client=SimpleNamespace(names=lambda: NAMES))
    lines = _Lines(_Told(run, 0, verbose=False))
    for number, skipped in enumerate((False, False, True, False)):
        outcome = Outcome(loss=2.0, grad_norm=1.0, loss_scale=65536.0, skipped=skipped)
        done = StepDone(step=number, seconds=0.5, outcome=outcome)
        lines.show(RunEvent(step=done), RunState(run="r-1", steps=4), None)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" · ")[0] for line in said] == ["step 1/4", "step 3/4"]
    assert "skipped: overflow at loss scale 65536" in said[1]
    assert "skipped" not in said[0]


@pytest.mark.parametrize(
    ("stop_at_s", "left"), [(0.0, "10 min"), (1900.0, "10 min"), (430.0, "30 s")]
)
@pytest.mark.parametrize("apart", [False, True])
def test_time_left_is_by_pace_or_by_the_rule_that_ends_the_run(
    capsys: pytest.CaptureFixture[str], stop_at_s: float, left: str, apart: bool
) -> None:
    run: Any = SimpleNamespace(id="r-1", client=SimpleNamespace(names=lambda: NAMES))
    state = RunState(run="r-1", steps=1000, stop_at_s=stop_at_s)
    if apart:  # whose steps say nothing of the run's
        state.replicas.extend(ReplicaState(replica=r) for r in ("r-1", "r-1.1"))
        left = {0.0: "", 1900.0: "25 min"}.get(stop_at_s, left)
    done = StepDone(step=399, seconds=1.0, outcome=Outcome(loss=2.0))
    _Lines(_Told(run, 0, verbose=False)).show(RunEvent(at_s=400.0, step=done), state, None)
    assert capsys.readouterr().err.rstrip().partition("s/step")[2] == (left and f" · {left} left")


def test_what_a_pipe_gets(capsys: pytest.CaptureFixture[str]) -> None:
    run: Any = SimpleNamespace(id="r-1", client=SimpleNamespace(names=lambda: NAMES))
    state = RunState(run="r-1", step=0, steps=100)
    lines = _Lines(_Told(run, 1024, verbose=False))

    def step(number: int, held_out: float | None = None) -> RunEvent:
        done = StepDone(step=number, seconds=0.5, outcome=Outcome(loss=2.0, lr=0.1, grad_norm=1.0))
        if held_out is not None:
            done.evaluation.CopyFrom(Evaluation(loss=held_out))
        return RunEvent(step=done)

    again = planned()
    again.term = 2
    for event in (
        planned(),
        step(0),
        step(1),  # less than 5 s behind the first
        RunEvent(note="carl is lost; bert takes its part"),
        again,
        step(39, held_out=1.5),
    ):
        lines.show(event, state, None)
    assert capsys.readouterr().err.splitlines() == [
        "who trains   3 peers in 2 stages: anna + bert | carl?[31m; 1 peer in reserve",
        "how long     about 5 min: 100 steps of 3 s, as predicted",
        "held back by link anna -> carl, 80 %",
        "             why, and all else: shoal logs r-1",
        "step 1/100 · loss 2.0000 · 2048 tokens/s · 0.50 s/step · 50 s left",
        "carl is lost; bert takes its part",
        "another plan: 3 peers in 2 stages: anna + bert | carl?[31m; 1 peer in reserve",
        "step 40/100 · loss 2.0000 · held-out 1.5000 · 2048 tokens/s · 0.50 s/step · 30 s left",
    ]


def test_a_step_in_which_nothing_counts_has_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    run: Any = SimpleNamespace(id="r-1", client=SimpleNamespace(names=lambda: NAMES))
    lines = _Lines(_Told(run, 32, "samples", verbose=False))
    for number, weight in enumerate((0.0, 1.0)):
        lines.next_at = 0.0
        outcome = Outcome(loss=math.nan, weight=weight)
        tried = Evaluation(loss=math.nan, weight=weight)
        done = StepDone(step=number, seconds=0.5, outcome=outcome, evaluation=tried)
        lines.show(RunEvent(step=done), RunState(run="r-1", steps=4), None)
    nothing, diverged = capsys.readouterr().err.splitlines()
    assert nothing.startswith(
        "step 1/4 · loss none, nothing counts · held-out none, nothing counts · 64 samples/s"
    )
    assert diverged.startswith("step 2/4 · loss nan · held-out nan")
