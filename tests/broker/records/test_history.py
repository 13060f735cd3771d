"""Events of a run, kept for watchers: against a plain list."""

from __future__ import annotations

import random

import pytest

from shoal.broker.records.history import BLOCK, FEW, LEAST, EventHistory
from shoal.proto.broker_pb2 import RunEvent


def event(i: int) -> RunEvent:
    made = RunEvent(at_s=float(i), term=1)
    made.step.step, made.step.outcome.loss = i, 1.0 / (i + 1)
    return made


def filled(kept: int, count: int) -> tuple[EventHistory, list[RunEvent]]:
    history = EventHistory(kept)
    return history, [history.add(event(i)) for i in range(count)]


@pytest.mark.parametrize("kept", [1, 4, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 10 * BLOCK])
@pytest.mark.parametrize("count", [0, 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("over", [False, True])
def test_the_newest_can_be_read_from_any_number(kept: int, count: int, over: bool) -> None:
    history, added = filled(kept, count)
    if over:
        history.rest()
        assert len(history.recent) == min(kept, count, FEW)
    wanted = added[-kept:]
    assert len(history) == len(wanted)
    assert list(history.events) == wanted
    assert list(history.recent) == wanted[len(wanted) - len(history.recent) :]
    for start in {0, 1, count // 3, count - kept, count - BLOCK, count - 1, count, count + 9}:
        at, read = max(0, start), list[RunEvent]()
        while True:  # as a watcher does
            first, some = history.read(at)
            if not some:
                break
            assert [e.number for e in some] == list(range(first, first + len(some)))
            read, at = [*read, *some], first + len(some)
        assert read == [e for e in wanted if e.number >= start]


def test_only_the_newest_are_messages_and_the_rest_is_small() -> None:
    history, added = filled(10**6, 20 * BLOCK)
    assert len(history.recent) < 2 * BLOCK
    dense = sum(e.ByteSize() for e in added)
    assert sum(len(block) for _, block in history._packed) < dense


@pytest.mark.parametrize("count", [1, BLOCK, 2 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("over", [False, True])
def test_past_and_unpacked_together_are_the_same_history(count: int, over: bool) -> None:
    history, _ = filled(3 * BLOCK, count)
    if over:
        history.rest()
    again = EventHistory(3 * BLOCK)
    again.restore(history.unpacked, history.numbered)
    for first, packed in history.past:
        again.restore_past(first, packed)
    assert list(again.events) == list(history.events)
    for one in (history, again):
        for i in range(count, count + 4 * BLOCK):
            one.add(event(i))
    assert (again.past, again.unpacked) == (history.past, history.unpacked)
    assert list(again.events) == list(history.events)


def test_a_past_out_of_its_order_is_refused() -> None:
    history, _ = filled(9 * BLOCK, 4 * BLOCK)
    again = EventHistory(9 * BLOCK)
    (first, packed), *_ = history.past
    with pytest.raises(ValueError, match="twice"):
        again.restore_past(first, packed)
    again.restore(history.unpacked, history.numbered)
    again.restore_past(first, packed)
    for wrong in (first, again.unpacked[0].number):
        with pytest.raises(ValueError, match=f"from number {wrong} on"):
            again.restore_past(wrong, packed)


def test_what_an_earlier_broker_kept_is_there_again() -> None:
    history, added = filled(3 * BLOCK, 7 * BLOCK + 3)
    again = EventHistory(3 * BLOCK)
    again.restore(history.events, history.numbered)
    assert (again.numbered, list(again.events)) == (7 * BLOCK + 3, added[-3 * BLOCK :])
    again.rest()
    assert list(again.events) == added[-3 * BLOCK :]
    assert again.add(event(0)).number == 7 * BLOCK + 3
    assert len(again) == 3 * BLOCK


def large(number: int, size: int) -> RunEvent:
    """One that does not become smaller when it is packed."""
    return RunEvent(note=random.Random(number).randbytes(size // 2).hex())


def test_large_events_are_kept_in_bytes_not_in_numbers() -> None:
    history = EventHistory(1000, most_bytes=64 << 10)
    for i in range(100):
        history.add(large(i, 200_000))
        assert history.size_bytes <= (64 << 10) + (4 << 20)
    history.rest()
    assert history.size_bytes <= (64 << 10) + 4 * 200_000
    assert len(history.recent) == LEAST
    first, events = history.read(0)
    assert first == history.numbered - len(history) > 0
    assert [e.number for e in history.events] == list(range(first, 100))
    assert events[0].note == large(first, 200_000).note


def test_a_smaller_share_lets_go_of_the_oldest_at_once() -> None:
    history, _ = filled(100 * BLOCK, 20 * BLOCK)
    before = len(history)
    history.most_bytes = history.size_bytes // 8
    history.trim()
    assert 0 < len(history) < before
    assert history.read(0)[0] == 20 * BLOCK - len(history)
