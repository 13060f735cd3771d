"""What happened in a run so far, as lines for people; steps are summed up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...job.words import count_of
from ...proto.broker_pb2 import RunEvent
from .progress import note_of
from .text import safe

__all__ = ["lines"]

_TIME = 10
"""Columns of the time; of a run of over a thousand hours it takes more."""


class _Steps:
    """Committed steps of one term, one after the other."""

    def __init__(self, first: RunEvent) -> None:
        self.at_s, self.term, self.first = first.at_s, first.term, first.step.step
        self.began_with = first.step.outcome.loss
        self.count, self.seconds, self.held_out = 0, 0.0, ""

    def add(self, event: RunEvent) -> None:
        done = event.step
        self.last, self.loss = done.step, done.outcome.loss
        self.count += 1
        self.seconds += done.seconds
        if done.HasField("evaluation"):
            self.held_out = f" · held-out {done.evaluation.loss:.4f}"

    def __str__(self) -> str:
        each = f"{self.loss:.4f} · {self.seconds / self.count:.2f} s/step{self.held_out}"
        if self.count == 1:
            return f"step {self.last} · loss {each}"
        return f"steps {self.first} to {self.last} · loss {self.began_with:.4f} -> {each}"


def lines(events: Iterable[RunEvent]) -> Iterator[str]:
    """One line or more for each event that is no step, after the hours, minutes and seconds of the
    broker's clock (which stands still while there is none) since the first that is kept; and one
    for all steps of a term between two of them, numbered from 0 as in the broker's sentences. Also
    for those that came before `events` raised something."""
    began: float | None = None
    steps: _Steps | None = None
    try:
        for event in events:
            if began is None:
                began = event.at_s
                if event.number:
                    yield f"not kept any more: the first {count_of(event.number, 'event')}"
            note = "" if event.HasField("step") else note_of(event)
            if steps is not None and (note or event.term != steps.term):
                yield _line(steps.at_s - began, str(steps))
                steps = None
            if event.HasField("step"):
                steps = steps or _Steps(event)
                steps.add(event)
            elif note:
                first, *others = note.split("\n")
                yield _line(event.at_s - began, first)
                yield from (" " * (_TIME + 2) + safe(line) for line in others)
    except Exception:
        if steps is not None and began is not None:
            yield _line(steps.at_s - began, str(steps))
        raise
    if steps is not None and began is not None:
        yield _line(steps.at_s - began, str(steps))


def _line(after_s: float, text: str) -> str:
    minutes, seconds = divmod(round(after_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours}:{minutes:02}:{seconds:02}':>{_TIME}}  {safe(text)}"
