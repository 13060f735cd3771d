"""`shoal logs`: what happened, with the steps between summed up."""

from collections.abc import Iterator

from shoal.client.logs import lines
from shoal.proto.broker_pb2 import (
    DONE,
    FAILED,
    RUNNING,
    Evaluation,
    Outcome,
    Plan,
    RunEvent,
    RunState,
    StageSlot,
    StepDone,
)


def events(*kinds: RunEvent, first: int = 0, apart_s: float = 10.0) -> Iterator[RunEvent]:
    """Numbered, and so far apart on a clock that did not begin with the run."""
    for i, event in enumerate(kinds):
        event.number, event.at_s = first + i, 5000.0 + apart_s * i
        yield event


def step(at: int, loss: float, term: int = 1, held_out: float | None = None) -> RunEvent:
    done = StepDone(step=at, outcome=Outcome(loss=loss), seconds=1.0 + at)
    if held_out is not None:
        done.evaluation.CopyFrom(Evaluation(loss=held_out))
    return RunEvent(step=done, term=term)


def state(phase: int, why: str = "") -> RunEvent:
    found = RunState(phase=phase)  # type: ignore[arg-type]
    found.reason.text = why
    return RunEvent(state=found)


def plan(*holders: str, term: int = 1, reasons: tuple[str, ...] = ()) -> RunEvent:
    stages = [StageSlot(start=i, stop=i + 1, holders=[h]) for i, h in enumerate(holders)]
    return RunEvent(plan=Plan(stages=stages, reasons=reasons), term=term)


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
        "   0:00:20  steps 1 to 3 · loss 3.0000 → 2.0000 · 2.00 s/step · held-out 2.2500",
        "   0:00:50  b lost at step 3",
        "   0:01:00  step 4 · loss 1.5000 · 4.00 s/step",
        "   0:01:10  done",
    ]


def test_a_run_that_goes_on_ends_with_its_newest_steps() -> None:
    assert list(lines(events(state(RUNNING), step(0, 3.0), step(1, 2.0))))[-1:] == [
        "   0:00:10  steps 1 to 2 · loss 3.0000 → 2.0000 · 1.50 s/step"
    ]


def test_it_says_what_is_not_kept_and_why_it_failed_and_nothing_unprintable() -> None:
    found = list(lines(events(state(FAILED, "no peers\x1b[2J"), first=7)))
    assert found == [
        "events 0 to 6 are not kept any more",
        "   0:00:00  failed: no peers\\u001b[2J",
    ]


def test_nothing_gives_nothing() -> None:
    assert list(lines([])) == []
