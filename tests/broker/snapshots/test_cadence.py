"""When snapshots are ordered: one set at a time, never behind what is committed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.recovery.suspects import SuspectTracker
from shoal.broker.snapshots.cadence import SnapshotSchedule

STEPS = 400


@given(
    every=st.integers(0, 30),
    first=st.integers(0, 50),
    deeds=st.lists(st.sampled_from(["commit", "copied", "missed", "late", "wait"]), max_size=120),
)
def test_one_set_is_pending_and_none_is_of_a_step_that_is_over(every, first, deeds) -> None:
    cadence, committed, now, pending = SnapshotSchedule(every, first), first, 0.0, None
    for deed in deeds:
        now += 1.0
        if deed == "commit":
            committed = min(STEPS, committed + 1)
        elif deed == "wait":
            now += 1000.0
        elif deed == "copied" and pending is not None:
            assert cadence.copied(now) == pending
            pending = None
        elif deed in ("missed", "late") and pending is not None:
            cadence.missed(pending if deed == "missed" else pending - 1)
            pending = None if deed == "missed" else pending
        assert cadence.pending == pending
        due = cadence.due(committed, STEPS, now)
        if due is None:
            continue
        assert pending is None, "two at once"
        restored = due == committed == first and cadence.whole is None
        assert restored or committed < due < STEPS
        assert restored or due > (cadence.whole or 0)
        assert restored or not every or due % every == 0
        cadence.ordered(due)
        pending = due


@given(every=st.integers(0, 40), misses=st.integers(0, 12))
def test_after_misses_another_set_is_ordered_ever_further_ahead(every, misses) -> None:
    cadence, committed = SnapshotSchedule(every, 0), 0
    leads = []
    for _ in range(misses + 1):
        for committed in range(committed, committed + 200):  # noqa: B020  # goes on from there
            due = cadence.due(committed, 10**6, 0.0)
            if due is not None:
                break
        assert due is not None, "never again"
        leads.append(due - committed)
        cadence.ordered(due)
        cadence.missed(due)
    assert max(leads) <= 64 + max(every, 1)
    if not every:
        assert leads == [min(2**i, 65) for i in range(misses + 1)]


@given(took=st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_left_alone_copies_take_at_most_half_of_the_time(took) -> None:
    cadence, now, committed, busy = SnapshotSchedule(0, 0), 0.0, 0, 0.0
    began = now
    for seconds in took:
        while (due := cadence.due(committed, 10**6, now)) is None:
            now += 0.1
            committed += 1
        cadence.ordered(due)
        cadence.taken(due, now)
        now += seconds
        committed = due
        cadence.copied(now)
        busy += seconds
    while cadence.due(committed, 10**6, now) is None:
        now += 0.1
    assert busy <= 0.5 * (now - began) + 1e-6


def test_a_set_of_every_nth_step() -> None:
    cadence, found = SnapshotSchedule(10, 0), []
    for committed in range(45):
        due = cadence.due(committed, 45, float(committed))
        if due is not None:
            found.append((committed, due))
            cadence.ordered(due)
        if cadence.pending == committed:
            cadence.copied(float(committed))
    assert [due for _, due in found] == [10, 20, 30, 40]
    assert all(committed < due for committed, due in found)


def test_what_was_restored_is_copied_first() -> None:
    assert SnapshotSchedule(7, 20).due(20, 100, 0.0) == 20
    assert SnapshotSchedule(0, 20).due(20, 100, 0.0) == 20
    assert SnapshotSchedule(0, 20).due(23, 100, 0.0) == 24, "in a replay the next that is new"
    assert SnapshotSchedule(0, 0).due(0, 100, 0.0) == 1
    assert SnapshotSchedule(0, 0).due(99, 100, 0.0) is None, "the end is exported"


@given(took=st.floats(0, 1e3), between_s=st.floats(1e-3, 1e6))
def test_pauses_cost_a_hundredth_of_the_time_at_most(took, between_s) -> None:
    """A loss at a random moment of a pause repeats half of it, once in `between_s`."""
    cadence = SnapshotSchedule(0, 0)
    cadence.ordered(1)
    cadence.taken(1, 0.0)
    cadence.copied(took, between_s)
    assert cadence.due(5, 100, took + 0.02 * between_s) is not None
    least = min(0.02 * between_s, max(0.5, took))
    assert cadence.due(5, 100, took + 0.99 * least) is None, "and no shorter than that"


def test_losses_say_how_often_there_are_some() -> None:
    blamed = SuspectTracker()
    assert blamed.between_s(5.0) == math.inf
    for i in range(20):
        blamed.lost(f"p{i}", 10.0 * i)
    assert blamed.between_s(200.0) == pytest.approx(10.0)
    assert blamed.between_s(1160.0) == pytest.approx(202.0), "grows again while nobody is lost"
