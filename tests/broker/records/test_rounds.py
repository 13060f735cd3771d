"""What the journal keeps of rounds: samples are handed out and committed once, whoever is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.records.rounds import RoundRecord, microbatches_of
from shoal.proto.broker_pb2 import (
    Checkpoint,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundPlanned,
    RoundWork,
    RunEvent,
)

STEPS, MICROBATCHES = 12, 6


def numbers(work: RoundWork) -> set[int]:
    return {g for s in work.samples for g in range(s.first, s.first + s.count)}


@given(st.data())
def test_every_sample_is_committed_once_and_a_journal_gives_the_same(data: st.DataObject) -> None:
    record, events = RoundRecord(STEPS, MICROBATCHES, 3), list[RunEvent]()
    committed = set[int]()

    def happens(event: RunEvent) -> None:
        events.append(event)
        record.apply(event)

    while not record.over:
        left = record.total - record.committed
        replicas = data.draw(st.integers(1, 4))
        counts = [data.draw(st.integers(0, left // replicas)) for _ in range(replicas)]
        counts[0] = max(counts[0], min(left, 1))
        ranges = record.hand_out(counts)
        work = [RoundWork(replica=i, term=1, steps=1, samples=r) for i, r in enumerate(ranges) if r]
        handed = [numbers(w) for w in work]
        assert sum(map(len, handed)) == sum(counts) == len(set().union(*handed))
        assert not committed & set().union(*handed)
        happens(RunEvent(round_begun=RoundBegun(round=record.round, work=work)))
        if data.draw(st.booleans()):  # a term later, with the same work or the first part of it
            again = RoundWork()
            again.CopyFrom(work[-1])
            again.term = 2
            again.samples[-1].count = data.draw(st.integers(1, again.samples[-1].count))
            work[-1] = again
            happens(RunEvent(round_begun=RoundBegun(round=record.round, work=[again])))
        inside = [w for w in work if data.draw(st.booleans())] or work[:1]
        members = [RoundMember(replica=w.replica, weight=1, term=1) for w in inside]
        happens(
            RunEvent(round_planned=RoundPlanned(round=record.round, attempt=1, members=members))
        )
        happens(RunEvent(round_done=RoundDone(round=record.round, attempt=1, members=members)))
        committed |= set().union(*(numbers(w) for w in inside))
        assert record.committed == len(committed)
    assert committed == set(range(STEPS * MICROBATCHES))

    replayed = RoundRecord(STEPS, MICROBATCHES, 3)
    cut = data.draw(st.integers(0, len(events)))
    for event in events[:cut]:
        replayed.apply(event)
    kept = RoundRecord(STEPS, MICROBATCHES, 3)
    kept.restore(replayed.kept())
    for event in events[cut:]:
        kept.apply(event)
    assert kept.kept() == record.kept()


def test_what_came_back_is_handed_out_first() -> None:
    record = RoundRecord(10, 4, 0)
    work = [RoundWork(replica=i, term=1, samples=r) for i, r in enumerate(record.hand_out([4, 4]))]
    record.apply(RunEvent(round_begun=RoundBegun(work=work)))
    member = RoundMember(replica=0, weight=1, term=1)
    record.apply(RunEvent(round_done=RoundDone(members=[member])))
    [again] = record.hand_out([6])
    assert [(r.first, r.count) for r in again] == [(4, 4), (8, 2)]
    assert microbatches_of(RoundWork(samples=again)) == 6


@pytest.mark.parametrize(("replicas", "left"), [(1, 3), (2, 0), (3, 1)])
def test_who_goes_on_from_a_version_trains_what_is_left_of_the_samples(
    replicas: int, left: int
) -> None:
    """A rest that is no local step of so many replicas is left out."""
    record = RoundRecord(10, 6, 0, 2)
    work = [RoundWork(replica=i, term=1, samples=r) for i, r in enumerate(record.hand_out([9, 10]))]
    record.apply(RunEvent(round_begun=RoundBegun(work=work)))
    member = RoundMember(replica=0, weight=1, term=1)
    record.apply(RunEvent(round_done=RoundDone(members=[member])))
    saved = Checkpoint(step=1, rounds=record.position)
    then = RoundRecord(10, 6, 0, replicas)
    then.begin_from(saved)
    assert (then.round, then.first, then.committed) == (1, 1, 9)
    [rest] = then.hand_out([then.total - then.committed])
    wanted = set(range(9, 60))
    assert numbers(RoundWork(samples=rest)) == set(sorted(wanted)[: len(wanted) - left])
    assert then.position == saved.rounds


def test_who_met_is_kept_for_so_many_rounds_and_until_all_do() -> None:
    record = RoundRecord(10, 2, 4, remembers=2)

    def play(groups: tuple[int, ...]) -> bool:
        """A round of two replicas; whether it gathers."""
        ranges = record.hand_out([1, 1])
        work = [RoundWork(replica=i, term=1, samples=r) for i, r in enumerate(ranges)]
        record.apply(RunEvent(round_begun=RoundBegun(round=record.round, work=work)))
        gathers = record.gathers
        members = [RoundMember(replica=i, term=1, group=g) for i, g in enumerate(groups)]
        record.apply(RunEvent(round_done=RoundDone(round=record.round, members=members)))
        return gathers

    assert [play(g) for g in ((1, 1), (1, 2), (1, 1))] == [False] * 3
    assert list(record.met) == [(), ((0, 1),)]
    copy = RoundRecord(10, 2, 4, remembers=2)
    copy.restore(record.kept())
    assert copy.met == record.met
    assert [play((1, 1)) for _ in range(6)] == [False] * 6  # evaluations are due in between
    assert play((0, 0))  # the last one
    assert not record.met
    assert record.over


def test_what_was_told_ahead_comes_back_in_its_order() -> None:
    """Where more had come back than a round takes, and who was ahead does not go on."""
    record = RoundRecord(10, 4, 0)
    member = RoundMember(replica=0, weight=1, term=1)

    def play(*work: RoundWork) -> None:
        begun = RoundBegun(round=record.round, work=work)
        record.apply(RunEvent(round_begun=begun))
        record.apply(RunEvent(round_done=RoundDone(round=record.round, members=[member])))

    mine, lost = record.hand_out([4, 8])
    play(RoundWork(replica=0, term=1, samples=mine), RoundWork(replica=1, term=1, samples=lost))
    mine, ahead = record.hand_out([4, 2])
    play(RoundWork(replica=0, term=1, samples=mine, ahead_samples=ahead))
    [again] = record.hand_out([5])
    assert [(r.first, r.count) for r in again] == [(8, 2), (10, 2), (12, 1)]
