"""`shoal logs`: what happened, with the steps between summed up."""

import json
import math
from collections.abc import Iterator

import pytest

from shoal.client.show.logs import lines
from shoal.client.show.progress import row_of
from shoal.proto.broker_pb2 import (
    DONE,
    FAILED,
    RUNNING,
    Evaluation,
    Outcome,
    Plan,
    PlanReport,
    RunEvent,
    RunState,
    StageSlot,
    StepDone,
    Weights,
)


def events(*kinds: RunEvent, first: int = 0, apart_s: float = 10.0) -> Iterator[RunEvent]:
    """Numbered, and so far apart on a clock that did not begin with the run."""
    for i, event in enumerate(kinds):
        event.number, event.at_s = first + i, 5000.0 + apart_s * i
        yield event


def step(
    at: int, loss: float, term: int = 1, held_out: float | None = None, weight: float = 1.0
) -> RunEvent:
    done = StepDone(step=at, outcome=Outcome(loss=loss, weight=weight), seconds=1.0 + at)
    if held_out is not None:
        done.evaluation.CopyFrom(Evaluation(loss=held_out, weight=weight))
    return RunEvent(step=done, term=term)


def state(phase: int, why: str = "") -> RunEvent:
    found = RunState(phase=phase)  # type: ignore[arg-type]
    found.reason.text = why
    return RunEvent(state=found)


def plan(*holders: str, term: int = 1, reasons: tuple[str, ...] = ()) -> RunEvent:
    stages = [StageSlot(start=i, stop=i + 1, holders=[h]) for i, h in enumerate(holders)]
    report = PlanReport(reasons=reasons)
    return RunEvent(plan=Plan(stages=stages), report=report, term=term)


def test_steps_between_two_notes_are_one_line() -> None:
    found = lines(
        events(
            plan("a", "b", reasons=("b is far away",)),
            state(RUNNING),
            step(0, 3.0),
            step(1, 2.5, held_out=2.25),
            step(2, 2.0),
            RunEvent(note="b lost at step 3"),
            step(3, 1.5, term=2),
            state(DONE),
        )
    )
    assert list(found) == [
        "   0:00:00  plan of term 1: 2 stages",
        "              stage 0: operators [0, 1) on a",
        "              stage 1: operators [1, 2) on b",
        "              b is far away",
        "   0:00:10  running",
        "   0:00:20  steps 0 to 2 · loss 3.0000 -> 2.0000 · 2.00 s/step · held-out 2.2500",
        "   0:00:50  b lost at step 3",
        "   0:01:00  step 3 · loss 1.5000 · 4.00 s/step",
        "   0:01:10  done",
    ]


def test_a_run_that_goes_on_ends_with_its_newest_steps() -> None:
    assert list(lines(events(state(RUNNING), step(0, 3.0), step(1, 2.0))))[-1:] == [
        "   0:00:10  steps 0 to 1 · loss 3.0000 -> 2.0000 · 1.50 s/step"
    ]


def test_terms_without_a_word_between_are_two_lines_and_an_export_is_none() -> None:
    found = events(step(0, 3.0), RunEvent(weights=Weights(), term=1), step(1, 2.0), step(2, 1.0, 2))
    assert list(lines(found)) == [
        "   0:00:00  steps 0 to 1 · loss 3.0000 -> 2.0000 · 1.50 s/step",
        "   0:00:30  step 2 · loss 1.0000 · 3.00 s/step",
    ]


def test_long_runs_and_losses_that_are_no_number_keep_their_columns() -> None:
    found = list(lines(events(state(RUNNING), step(0, float("nan")), apart_s=25 * 3600 + 61)))
    assert found[1] == "  25:01:01  step 0 · loss nan · 1.00 s/step"


def test_a_stream_that_breaks_shows_what_came() -> None:
    def breaks() -> Iterator[RunEvent]:
        yield from events(state(RUNNING), step(0, 3.0), step(1, 2.0))
        raise ConnectionError("gone")

    shown: list[str] = []
    with pytest.raises(ConnectionError, match="gone"):
        shown.extend(lines(breaks()))
    assert shown[-1].endswith("steps 0 to 1 · loss 3.0000 -> 2.0000 · 1.50 s/step")


def test_rows_for_programs_are_json_whatever_the_loss() -> None:
    (nan,) = events(step(0, float("nan")))
    row = json.loads(json.dumps(row_of(nan), allow_nan=False))
    assert (row["kind"], row["step"], row["loss"], row["event"]) == ("step", 0, None, 0)


def test_it_says_what_is_not_kept_and_why_it_failed_and_nothing_unprintable() -> None:
    found = list(lines(events(state(FAILED, "no peers\x1b[2J"), first=7)))
    assert found == [
        "not kept any more: the first 7 events",
        "   0:00:00  failed: no peers?[2J",
    ]


def test_nothing_gives_nothing() -> None:
    assert list(lines([])) == []


def test_steps_that_fp16_skipped_are_counted() -> None:
    several = [step(n, 3.0 - n) for n in range(3)]
    for event, scale, skipped in zip(several, (8.0, 4.0, 2.0), (True, True, False), strict=True):
        event.step.outcome.loss_scale, event.step.outcome.skipped = scale, skipped
    (found,) = [text for text in lines(events(*several)) if "steps 0 to 2" in text]
    assert found.endswith(" · 2 skipped, loss scale 2")


def test_steps_in_which_nothing_counts_have_no_loss() -> None:
    none = [step(n, math.nan, held_out=math.nan, weight=0.0) for n in range(2)]
    (said,) = lines(events(*none))
    assert "steps 0 to 1 · loss none, nothing counts -> none, nothing counts" in said
    assert "held-out none, nothing counts" in said
    (diverged,) = lines(events(step(0, math.nan)))
    assert "loss nan" in diverged
