"""What happened in a run so far, as lines for people; steps are summed up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...broker.round_rows import RoundRows
from ...job.words import count_of, loss_text
from ...proto.broker_pb2 import Evaluation, Outcome, RunEvent
from .progress import note_of
from .text import safe

__all__ = ["lines"]

_TIME = 10
"""Columns of the time; of a run of over a thousand hours it takes more."""


def _loss(of: Outcome | Evaluation) -> str:
    return loss_text(of.loss, of.weight)


class _Steps:
    """Committed steps of one term, one after the other. who: "" or the replica that made them."""

    def __init__(self, first: RunEvent, who: str) -> None:
        self.at_s, self.term, self.first = first.at_s, first.term, first.step.step
        self.who, self.began_with = who, _loss(first.step.outcome)
        self.count, self.seconds, self.held_out = 0, 0.0, ""
        self.skipped = self.loss_scale = 0.0

    def add(self, event: RunEvent) -> None:
        done = event.step
        self.last, self.loss = done.step, _loss(done.outcome)
        self.count += 1
        self.seconds += done.seconds
        self.skipped += done.outcome.skipped
        self.loss_scale = done.outcome.loss_scale
        if done.HasField("evaluation"):
            self.held_out = f" · held-out {_loss(done.evaluation)}"

    def __str__(self) -> str:
        each = f"{self.loss} · {self.seconds / self.count:.2f} s/step{self.held_out}"
        if self.skipped:
            each += f" · {self.skipped:g} skipped, loss scale {self.loss_scale:g}"
        if self.count == 1:
            return f"{self.who}step {self.last} · loss {each}"
        steps = f"{self.who}steps {self.first} to {self.last}"
        return f"{steps} · loss {self.began_with} -> {each}"


class _Lines:
    """By replica, the steps that have no line yet."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.steps: dict[int, _Steps] = {}
        self.rounds = RoundRows(keep=False)
        self.replicas = 1

    def of(self, event: RunEvent) -> Iterator[str]:
        if self.began is None:
            self.began = event.at_s
            if event.number:
                yield f"not kept any more: the first {count_of(event.number, 'event')}"
        if event.HasField("state"):
            self.replicas = len(event.state.replicas)
        round, at = self.rounds.see(event), event.replica
        note = "" if event.HasField("step") else note_of(event, round)
        if note:
            yield from self.rest()
        elif at in self.steps and event.term != self.steps[at].term:
            yield self._line(self.steps.pop(at))
        if event.HasField("step"):
            who = f"replica {at}, " if self.replicas > 1 else ""
            self.steps.setdefault(at, _Steps(event, who)).add(event)
        elif note:
            first, *others = note.split("\n")
            yield _line(event.at_s - self.began, first)
            yield from (" " * (_TIME + 2) + safe(line) for line in others)

    def rest(self) -> Iterator[str]:
        for at in sorted(self.steps):
            yield self._line(self.steps.pop(at))

    def _line(self, steps: _Steps) -> str:
        assert self.began is not None
        return _line(steps.at_s - self.began, str(steps))


def lines(events: Iterable[RunEvent]) -> Iterator[str]:
    """One line or more for each event that is no step, after the hours, minutes and seconds of the
    broker's clock (which stands still while there is none) since the first that is kept; and one
    for all steps of a replica's term between two of them, numbered from 0 as in the broker's
    sentences. Also for those that came before `events` raised something."""
    made = _Lines()
    try:
        for event in events:
            yield from made.of(event)
    except Exception:
        yield from made.rest()
        raise
    yield from made.rest()


def _line(after_s: float, text: str) -> str:
    minutes, seconds = divmod(round(after_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours}:{minutes:02}:{seconds:02}':>{_TIME}}  {safe(text)}"
