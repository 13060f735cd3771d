"""Where Ctrl-C may come in a program that blocks.

Python raises KeyboardInterrupt wherever the main thread is: also inside of a library between taking
a lock and the block that would give it back (`Condition.__enter__`). The lock stays taken then, and
closing what has it never ends. So what has locks is used in another thread, or uninterrupted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["elsewhere", "uninterrupted"]

T = TypeVar("T")

AHEAD = 64
"""Items that are read before they are asked for."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that would end this process wait for the end of the block: what was made in it has an
    owner then, what it removes is gone, and no lock stays taken. Short blocks only; in another
    thread than the main one it does nothing, signals do not come there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: handler for n in numbers if (handler := signal.getsignal(n)) is not None}
    try:
        for number in before:  # not what C code has installed: nobody could put that back
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in reversed(before.items()):  # Ctrl-C, which may come now, last
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def elsewhere(source: Iterable[T], stop: Callable[[], object]) -> Iterator[T]:
    """What `source` gives or raises, taken from it by another thread, some AHEAD items before they
    are asked for. `stop` is called in the end, and ends a source that goes on."""
    room: SimpleQueue[None] = SimpleQueue()  # in C: whoever waits for it holds nothing
    came: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()

    def read() -> None:
        try:
            for item in source:
                came.put((item,))
                room.get()
        except BaseException as error:  # whatever it is, it is the reader's
            came.put(error)
        else:
            came.put(None)

    for _ in range(AHEAD):
        room.put(None)
    try:
        with uninterrupted():
            threading.Thread(target=read, name="reader", daemon=True).start()
        while True:
            try:  # a signal between Python's last look and the wait is seen when the wait is over
                found = came.get(timeout=1)
            except Empty:
                continue
            if found is None:
                break
            if isinstance(found, BaseException):
                raise found
            yield found[0]
            room.put(None)
    finally:
        with uninterrupted():
            stop()
        room.put(None)
