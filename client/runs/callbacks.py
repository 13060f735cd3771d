"""What is called while a run is followed: of a program's own, for TensorBoard, for Weights &
Biases."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...job.log_options import Wandb
from ..files.records import read_run
from .readable import Evaluated, Event, Reached, Step

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Callback", "Callbacks", "Logs", "TensorBoard", "WandbLog", "loggers", "on_screen"]

Row = Mapping[str, Any]


class Callback:
    """What a program wants to hear of a run: `run.wait(Mine())`. Each method may do whatever it
    wants, such as `run.cancel()`, or `run.finish()` for a run in rounds; the run waits for none of
    them, and what one raises ends the waiting, not the run."""

    def on_event(self, run: Run, event: Event) -> None:
        """Hear of anything; before the method below that is of its kind."""

    def on_step(self, run: Run, step: Step) -> None:
        """Hear of a committed step."""

    def on_evaluation(self, run: Run, evaluation: Step | Evaluated) -> None:
        """Hear of held-out numbers: a step's (`eval_loss`, after `on_step`), or a version's."""

    def on_row(self, run: Run, row: Row, step: int, of: str) -> None:
        """Hear of numbers that the run's folder did not have yet: of a step, a round or an
        evaluation. of: "/replica-N" of replicas that train apart, else empty."""

    def on_end(self, run: Run, end: Reached) -> None:
        """Hear that the run has ended."""

    def close(self) -> None:
        """Let go of files; also when the waiting is broken off."""


class Callbacks:
    """Several, called in turn. Raises TypeError for what is none, before anything is called."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        given: Sequence[Any] = callbacks
        for one in given:
            if not isinstance(one, Callback):
                name = f"the class {one.__name__}" if isinstance(one, type) else repr(one)
                raise TypeError(f"{name} is no callback: expected objects of shoal.Callback's kind")
        self.run, self.callbacks = run, callbacks

    def happened(self, event: Event) -> None:
        for one in self.callbacks:
            one.on_event(self.run, event)
            if isinstance(event, Step):
                one.on_step(self.run, event)
            if isinstance(event, Evaluated) or getattr(event, "eval_loss", None) is not None:
                assert isinstance(event, Step | Evaluated), "only these have been evaluated"
                one.on_evaluation(self.run, event)

    def ended(self, end: Reached) -> None:
        for one in self.callbacks:
            one.on_end(self.run, end)

    def close(self) -> None:
        for one in self.callbacks:
            one.close()


class Logs:
    """New rows of a run's folder, for callbacks: `files.records.RowsTo`. own: closed with it.
    others: whoever made them closes them."""

    def __init__(self, run: Run, own: Sequence[Callback], others: Sequence[Callback] = ()) -> None:
        self.run, self.own, self.others = run, own, others

    def row(self, row: Row, step: int, of: str) -> None:
        for one in (*self.own, *self.others):
            one.on_row(self.run, row, step, of)

    def close(self) -> None:
        for one in self.own:
            one.close()


def loggers(run: Run) -> list[Callback]:
    """Return what `[log]` of the run's job asks for; of a run that was submitted elsewhere, a file
    for TensorBoard."""
    job = read_run(run.folder).get("job", {})
    log = job.get("log", {})
    found: list[Callback] = [TensorBoard(run.folder)] if log.get("tensorboard", True) else []
    if wanted := log.get("wandb"):
        found.append(WandbLog(Wandb(**wanted), job))
    return found


def _numbers(row: Row, of: str) -> dict[str, Any]:
    """Return the numbers of a row that are drawn, by name: no counters, no mean of nothing."""
    nothing = not row.get("weight", 1)
    return {
        f"{name}{of}": value
        for name, value in row.items()
        if name not in ("step", "round", "replicas") and not (nothing and value != value)
    }


class TensorBoard(Callback):
    """The numbers in a file for TensorBoard, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._board: Any = None

    def on_row(self, run: Run, row: Row, step: int, of: str) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._board = SummaryWriter(str(self.folder))
        for name, value in _numbers(row, of).items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None


class WandbLog(Callback):
    """The numbers in Weights & Biases; `job`: its settings, table by table, as the run's config.
    Followed again, it goes on in the same run."""

    def __init__(self, options: Wandb, job: Mapping[str, Any]) -> None:
        self.options, self.job = options, job
        self._run: Any = None

    def on_row(self, run: Run, row: Row, step: int, of: str) -> None:
        if self._run is None:
            import wandb

            asked = self.options
            self._run = wandb.init(
                project=asked.project,
                entity=asked.entity or None,
                name=asked.name or f"{self.job.get('name', 'job')} {run.id}",
                group=asked.group or None,
                mode=asked.mode or None,
                id=run.id,
                resume="allow",
                dir=str(run.folder),
                config=dict(self.job),
            )
        # Rows of replicas come in any order, and a step that is behind another one would be lost.
        self._run.log({"step": step, **_numbers(row, of)})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def on_screen() -> bool:
    """Whether somebody looks: a terminal on stderr, or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
