"""When a run is to end, over event logs made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.broker.records.stop_rule import StopRule
from shoal.job import Job, SettingsError
from shoal.job.training import Stop
from shoal.proto.broker_pb2 import (
    BUILDING,
    RUNNING,
    Evaluation,
    RoundDone,
    RunEvent,
    RunState,
    StepDone,
    VersionEvaluated,
)


def event(at_s: float, **kind: Any) -> RunEvent:
    return RunEvent(at_s=at_s, **kind)


def log(*losses: float | None, versions: bool = False, weight: float = 1.0) -> list[RunEvent]:
    """A step a second from second 10 on, with such an evaluation behind it or (None) none."""
    states = [(3.0, BUILDING), (9.0, RUNNING)]
    found = [event(t, state=RunState(phase=phase)) for t, phase in states]
    for k, loss in enumerate(losses):
        tried = None if loss is None else Evaluation(loss=loss, weight=weight)
        if versions:
            found.append(event(10.0 + k, round_done=RoundDone(round=k)))
            if tried:
                found.append(event(10.0 + k, evaluated=VersionEvaluated(evaluation=tried)))
        else:
            found.append(event(10.0 + k, step=StepDone(step=k, evaluation=tried)))
    return found


def due(rule: StopRule, events: list[RunEvent]) -> tuple[int | None, str]:
    """Number of the first of these events that it ends behind, and why."""
    for k, seen in enumerate(events):
        rule.apply(seen)
        if rule.why:
            return k, rule.why
    return None, ""


CASES: list[tuple[dict[str, Any], list[RunEvent], int | None, str]] = [
    ({}, log(1.0, 9.0, 9.0), None, ""),
    ({"loss": 2.0}, log(3.0, None, 2.0, 1.0), 4, "held-out loss is 2"),
    ({"loss": 2.0}, log(3.0, 2.1), None, ""),
    ({"loss": 2.0}, log(3.0, 1.9, versions=True), 5, "held-out loss is 1.9"),
    ({"no_better_for": 2}, log(3.0, 3.0, 2.0, 2.5, None, 2.0), 7, "2 evaluations in a row"),
    ({"no_better_for": 2}, log(3.0, 4.0, 2.0, 2.5, 1.0), None, ""),
    ({"no_better_for": 1}, log(math.nan), 2, "no better"),
    ({"no_better_for": 1}, log(math.nan, math.nan, weight=0.0), None, ""),
    ({"time": "2.5s"}, log(None, None, None), 4, "has lasted 3 s"),
    ({"time": "2.5s"}, log(None, None, None, versions=True), 4, "has lasted 3 s"),
    ({"time": "2.5s", "loss": 2.0}, log(1.0, None, None), 2, "held-out loss"),
]


@pytest.mark.parametrize(("stop", "events", "at", "why"), CASES)
def test_a_run_ends_at_the_first_event_that_says_so(
    stop: dict[str, Any], events: list[RunEvent], at: int | None, why: str
) -> None:
    found, said = due(StopRule(Stop(**stop)), events)
    assert found == at
    assert why in said


@pytest.mark.parametrize(("stop", "events", "at", "why"), CASES)
def test_a_restart_between_any_two_events_changes_nothing(
    stop: dict[str, Any], events: list[RunEvent], at: int | None, why: str
) -> None:
    for cut in range(len(events)):
        rule, again = StopRule(Stop(**stop)), StopRule(Stop(**stop))
        due(rule, events[:cut])
        again.restore(rule.kept())
        due(again, events[cut:])
        assert bool(again.why) == (at is not None)
        assert why in again.why


@pytest.mark.parametrize(
    ("train", "recovery", "wrong"),
    [
        ({"stop": {"loss": 2.0}, "eval_every": 0}, {}, "train.stop"),
        ({"stop": {"no_better_for": 0}}, {}, "train.stop.no_better_for"),
        ({"stop": {"time": 8}}, {}, "train.stop.time"),
        ({"stop": {"time": "0s"}}, {}, "train.stop.time"),
        ({"stop": {"patience": 8}}, {}, "train.stop.patience"),
        ({"stop": {"loss": math.inf}}, {}, "train.stop.loss"),
        ({"stop": {"time": "1h"}}, {"ladder": ["checkpoint"]}, "recovery.ladder"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(
    train: dict[str, Any], recovery: dict[str, Any], wrong: str
) -> None:
    table = {"version": 1, "model": {"factory": "a:b"}, "train": {"steps": 9, **train}}
    with pytest.raises(SettingsError) as raised:
        Job.from_table({**table, "recovery": recovery})
    assert raised.value.key == wrong
