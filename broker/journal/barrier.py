"""Between the machine and what leaves the broker: nothing passes a Persist before it is on disk.

Instructions stay in their order, over events too: an answer to a later question may tell of an
earlier decision. Records that wait while the disk is busy are written together, with one fsync.
When the disk fails, nothing passes any more: what was decided and not kept was told to nobody. A
disk that is full is asked again instead, for as long as it takes to make room: peers train
meanwhile, and the broker goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ...proto.journal_pb2 import Record
from ..events import Instruction, Persist
from .journal import FullError, Journal, JournalError

__all__ = ["Barrier"]

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Between two tries while the disk is full."""
MOST_HELD = 100_000
"""Instructions that wait for a full disk; past these the broker ends: a day of a run's steps."""


class Barrier:
    """`snapshot` gives records of all that was decided so far, which are read in the thread that
    writes; `moved` is called, in the event loop, when more may pass, or none ever will
    (`error`)."""

    def __init__(
        self,
        journal: Journal,
        snapshot: Callable[[], Iterable[Record]],
        moved: Callable[[], None],
    ) -> None:
        self.error: JournalError | None = None
        self.full: FullError | None = None
        """Why nothing passes for now."""
        self._journal, self._snapshot, self._moved = journal, snapshot, moved
        self._loop = asyncio.get_running_loop()
        self._held: deque[Instruction] = deque()
        self._written = 0  # of the records in _held
        self._writing = False
        self._again: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, "shoal-broker-journal")

    def __bool__(self) -> bool:
        """Whether something waits for the disk, and may soon pass."""
        return bool(self._held) and self.error is None and self.full is None

    def add(self, instructions: Iterable[Instruction]) -> None:
        """Add the instructions of one event, all of whose decisions `snapshot` has by now."""
        self._held.extend(instructions)

    def passing(self) -> Iterator[Instruction]:
        """Takes out what may be carried out now, and has written what the rest waits for."""
        held = self._held
        while held and self.error is None:
            if not isinstance(held[0], Persist):
                yield held.popleft()
            elif self._written:
                self._written -= 1
                held.popleft()
            else:
                self._write()
                return

    def _write(self) -> None:
        if self._writing or self._again is not None:
            return
        self._writing = True
        records = [i.record for i in self._held if isinstance(i, Persist)]
        # A snapshot has these records in it.
        snapshot = self._snapshot() if self._journal.crowded else None
        done = self._loop.run_in_executor(self._thread, self._keep, records, snapshot)
        done.add_done_callback(lambda done: self._wrote(done, len(records)))

    def _keep(self, records: list[Record], snapshot: Iterable[Record] | None) -> None:
        if snapshot is not None:
            try:
                return self._journal.replace(snapshot)
            except FullError as error:  # it takes more than the records do
                log.warning("journal_not_packed why=%s", error)
        self._journal.append(records)

    def _wrote(self, done: asyncio.Future[None], count: int) -> None:
        self._writing = False
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._written, self.full = count, None
        elif isinstance(error, FullError) and len(self._held) < MOST_HELD:
            if self.full is None:
                log.error("journal_waits why=%s", error)
            self.full = error
            self._again = self._loop.call_later(AGAIN_S, self._try_again)
        elif isinstance(error, JournalError):
            self.error = error
        else:  # a bug of ours is no reason to go on without a journal
            self.error = JournalError(f"cannot write the journal: {type(error).__name__}: {error}")
        self._moved()

    def _try_again(self) -> None:
        self._again = None
        self._moved()

    def close(self) -> None:
        """Ends the thread; what it writes is waited for."""
        if self._again is not None:
            self._again.cancel()
        self._thread.shutdown(wait=True)
