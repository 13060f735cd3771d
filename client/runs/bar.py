"""A bar for people: the steps of a run, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from .callbacks import Callback
from .readable import Evaluated, Event, Reached, Step

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Bar", "TimeLeft", "on_clock", "progress_bar", "time_left"]


def time_left(by_steps_s: float | None, stop_at_s: float, now_s: float) -> float | None:
    """Return the seconds until a run's last step: by its pace, or until train.stop.time ends it at
    `stop_at_s` (0: it does not) of the clock that says `now_s`, whichever is sooner; None: not
    known."""
    ends = [] if by_steps_s is None else [by_steps_s]
    if stop_at_s:
        ends.append(max(0.0, stop_at_s - now_s))
    return min(ends, default=None)


class TimeLeft(ProgressColumn):
    """Time left of a task, as H:MM:SS."""

    max_refresh = 0.5  # seconds, so that it does not flicker

    def render(self, task: Task) -> Text:
        left = time_left(task.time_remaining, task.fields["stop_at_s"], task.get_time())
        text = "-:--:--" if left is None else str(timedelta(seconds=int(left)))
        return Text(text, style="progress.remaining")


def progress_bar(console: Console, get_time: Callable[[], float] = time.monotonic) -> Progress:
    """Return a bar of steps, not begun; its tasks have the fields `figures`, and `stop_at_s` by the
    bar's clock."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeLeft(),
        TextColumn("{task.fields[figures]}"),
        console=console,
        get_time=get_time,
    )


def on_clock(bar: Progress, stop_at_s: float, at_s: float) -> float:
    """Return by the bar's clock a time of the broker's, which says `at_s` about now; 0 stays 0."""
    return bar.get_time() + stop_at_s - at_s if stop_at_s else 0.0


class Bar(Callback):
    """A progress bar with loss, held-out loss and the time that is left, on a terminal or in a
    notebook."""

    def __init__(self) -> None:
        self.bar = progress_bar(Console(stderr=True))
        self.task = self.bar.add_task("waiting", total=None, figures="", stop_at_s=0.0)
        self.held_out, self.stop_at_s = "", 0.0
        self.bar.start()

    def on_event(self, run: Run, event: Event) -> None:
        if isinstance(event, Reached):
            total, self.stop_at_s = event.steps or None, event.stop_at_s or 0.0
            self.bar.update(self.task, description=event.phase, total=total, completed=event.step)
        self.bar.update(self.task, stop_at_s=on_clock(self.bar, self.stop_at_s, event.at_s))

    def on_evaluation(self, run: Run, evaluation: Step | Evaluated) -> None:
        if isinstance(evaluation, Evaluated):
            self._hold_out(evaluation.loss)

    def _hold_out(self, loss: float | None) -> None:
        if loss is not None:
            self.held_out = f" · held-out {loss:.4f}"

    def on_step(self, run: Run, step: Step) -> None:
        self._hold_out(step.eval_loss)
        figures = f"loss {step.loss_text}{self.held_out} · {step.seconds:.2f} s/step"
        self.bar.update(self.task, figures=figures)
        self.bar.update(self.task, completed=max(step.step + 1, self._done()))

    def _done(self) -> int:
        """Steps until now: of replicas that train apart each counts its own."""
        return int(self.bar.tasks[0].completed)

    def close(self) -> None:
        self.bar.stop()
