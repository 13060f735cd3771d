"""Ctrl-C comes between two things, and a source is read elsewhere."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.interrupts import AHEAD, elsewhere, uninterrupted


def test_a_signal_in_a_block_comes_at_its_end() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_ignores_a_signal_still_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@given(st.lists(st.integers(), max_size=3 * AHEAD), st.booleans())
def test_items_come_in_their_order_and_then_the_error(items: list[int], fails: bool) -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        assert threading.current_thread() is not threading.main_thread()
        yield from items
        if fails:
            raise OSError("the line broke")

    reading = elsewhere(source(), ended.set)
    assert list(itertools.islice(reading, len(items))) == items
    if fails:
        with pytest.raises(OSError, match="the line broke"):
            next(reading)
    else:
        assert list(reading) == []
    assert ended.is_set()


@pytest.mark.parametrize("taken", [1, 10])
def test_a_source_is_read_some_items_ahead_and_stopped_when_nobody_reads_on(taken: int) -> None:
    given, stopped, over = [0], threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        for i in itertools.count():
            if stopped.is_set():
                over.set()
                return
            given[0] = i + 1
            yield i

    reading = elsewhere(source(), stopped.set)
    assert [next(reading) for _ in range(taken)] == list(range(taken))
    reading.close()
    assert over.wait(30), "the thread goes on"
    assert given[0] <= taken + AHEAD + 2


def test_an_interrupt_while_waiting_ends_the_source() -> None:
    seen: list[int] = []
    taken, stopped = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 1
        taken.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        stopped.wait(30)

    def read() -> None:
        for item in elsewhere(source(), stopped.set):
            seen.append(item)
            taken.set()

    with pytest.raises(KeyboardInterrupt):
        read()
    assert stopped.is_set()
    assert seen == [1]
