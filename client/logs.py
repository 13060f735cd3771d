"""What happened in a run so far, as lines for people; steps are summed up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

from ..proto.broker_pb2 import RunEvent
from .progress import note_of
from .text import safe

__all__ = ["lines"]

_TIME = 10
"""Columns of the time."""


def lines(events: Iterable[RunEvent]) -> Iterator[str]:
    """One line or more for each event that is no step, after the time since the run's first one
    that is kept; and one for all steps between two of them."""
    began: float | None = None
    steps: list[RunEvent] = []
    for event in events:
        if began is None:
            began = event.at_s
            if event.number:
                yield f"events 0 to {event.number - 1} are not kept any more"
        if event.HasField("step"):
            if steps and steps[-1].term != event.term:
                yield _at(steps[0], began, _steps(steps))
                steps = []
            steps.append(event)
        elif note := note_of(event):
            if steps:
                yield _at(steps[0], began, _steps(steps))
                steps = []
            first, *others = note.splitlines()
            yield _at(event, began, first)
            yield from (" " * (_TIME + 2) + safe(line) for line in others)
    if steps:
        assert began is not None
        yield _at(steps[0], began, _steps(steps))


def _at(event: RunEvent, began: float, text: str) -> str:
    return f"{timedelta(seconds=round(event.at_s - began))!s:>{_TIME}}  {safe(text)}"


def _steps(events: list[RunEvent]) -> str:
    """The committed steps of one term, numbered from 1 as in the progress line."""
    first, last = events[0].step, events[-1].step
    mean_s = sum(e.step.seconds for e in events) / len(events)
    text = f"loss {last.outcome.loss:.4f} · {mean_s:.2f} s/step"
    held_out = [e.step.evaluation.loss for e in events if e.step.HasField("evaluation")]
    if held_out:
        text += f" · held-out {held_out[-1]:.4f}"
    if len(events) == 1:
        return f"step {first.step + 1} · {text}"
    was = f"{first.outcome.loss:.4f}"
    return f"steps {first.step + 1} to {last.step + 1} · loss {was} → {text.removeprefix('loss ')}"
