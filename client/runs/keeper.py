"""Checkpoints come home while a run is followed where it was submitted, beside the following."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ...proto.broker_pb2 import RunEvent

if TYPE_CHECKING:
    from .run import Run

__all__ = ["CheckpointWriter"]

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the newest checkpoint into the run's outputs whenever there is one, one at a time;
    those that were replaced meanwhile are left out. Leaving the block waits for the last one.

    problems: what could not be written, one sentence each; the run itself goes on."""

    def __init__(self, run: Run) -> None:
        self.problems: list[str] = []
        self._run = run
        self._here = run.submitted_here
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Whoever detaches does not wait for one that has not begun.
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def see(self, event: RunEvent) -> None:
        """One event of the run."""
        if event.HasField("checkpoint") and self._here:
            if self._last is not None:
                self._last.cancel()
            self._last = self._pool.submit(self._keep, event.checkpoint.step)

    def _keep(self, step: int) -> None:
        try:
            self._run.keep_checkpoint()
        except Exception as error:  # whatever the place of the files raises: the run goes on
            text = f"the checkpoint after step {step} was not written: {error}"
            self.problems.append(text)
            log.warning("%s", text)
