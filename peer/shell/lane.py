"""A lane: one thread that does jobs in order and hands each result to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["SerialExecutor"]

T = TypeVar("T")
_Job = Callable[[], None]


class SerialExecutor:
    """One thread that does jobs in order and hands each result to the event loop; used from the
    loop's thread. How many jobs wait is bounded by who submits them (the machine has one action in
    flight, frames have slots). The thread is a daemon: a kernel or a fetch that hangs cannot keep
    the process from ending."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._started = False

    def do(
        self,
        job: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Runs `job` in the thread after all earlier ones, then one of the others in the loop."""

        def work() -> None:
            try:
                result = job()
            except Exception as error:  # what a job may raise is its caller's to sort
                self._back(failed, error)
            else:
                self._back(then, result)

        if not self._started:
            self._started = True
            self._thread.start()
        self._jobs.put(work)

    def _back(self, callback: Callable[[T], None], value: T) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # a closure may hold tensors while the lane is idle

    async def close(self, patience_s: float = 5.0) -> bool:
        """Ends after the job at work; what waits is dropped. False when it did not end in time."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._started:
            await asyncio.to_thread(self._thread.join, patience_s)
        return not self._thread.is_alive()
