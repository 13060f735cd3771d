"""What the journal keeps of rounds: samples are handed out and committed once, whoever is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.records.rounds import RoundRecord
from shoal.broker.records.version_ledger import VersionLedger
from shoal.broker.records.work_ledger import WorkLedger, handed_out
from shoal.proto.broker_pb2 import (
    Checkpoint,
    LieProved,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundPlanned,
    RoundWork,
    RunEvent,
)

STEPS, MICROBATCHES = 12, 6


def record_of(steps: int, microbatches: int, replicas: int = 1, remembers: int = 0) -> RoundRecord:
    return RoundRecord(VersionLedger(remembers), WorkLedger(steps, microbatches, replicas))


def numbers(work: RoundWork) -> set[int]:
    return {g for s in work.samples for g in range(s.first, s.first + s.count)}


@given(st.data())
def test_every_sample_is_committed_once_and_a_journal_gives_the_same(data: st.DataObject) -> None:
    record, events = record_of(STEPS, MICROBATCHES), list[RunEvent]()
    committed = set[int]()

    def happens(event: RunEvent) -> None:
        events.append(event)
        record.apply(event)

    while not record.work.over:
        left = record.work.total - record.work.committed
        replicas = data.draw(st.integers(1, 4))
        counts = [data.draw(st.integers(0, left // replicas)) for _ in range(replicas)]
        counts[0] = max(counts[0], min(left, 1))
        ranges = record.work.hand_out(counts)
        work = [RoundWork(replica=i, term=1, steps=1, samples=r) for i, r in enumerate(ranges) if r]
        handed = [numbers(w) for w in work]
        assert sum(map(len, handed)) == sum(counts) == len(set().union(*handed))
        assert not committed & set().union(*handed)
        happens(RunEvent(round_begun=RoundBegun(round=record.versions.round, work=work)))
        if data.draw(st.booleans()):  # a term later, with the same work or the first part of it
            again = RoundWork()
            again.CopyFrom(work[-1])
            again.term = 2
            again.samples[-1].count = data.draw(st.integers(1, again.samples[-1].count))
            work[-1] = again
            happens(RunEvent(round_begun=RoundBegun(round=record.versions.round, work=[again])))
        inside = [w for w in work if data.draw(st.booleans())] or work[:1]
        members = [RoundMember(replica=w.replica, weight=1, term=1) for w in inside]
        happens(
            RunEvent(
                round_planned=RoundPlanned(round=record.versions.round, attempt=1, members=members)
            )
        )
        happens(
            RunEvent(round_done=RoundDone(round=record.versions.round, attempt=1, members=members))
        )
        committed |= set().union(*(numbers(w) for w in inside))
        assert record.work.committed == len(committed)
    assert committed == set(range(STEPS * MICROBATCHES))

    replayed = record_of(STEPS, MICROBATCHES)
    cut = data.draw(st.integers(0, len(events)))
    for event in events[:cut]:
        replayed.apply(event)
    kept = record_of(STEPS, MICROBATCHES)
    kept.restore(replayed.kept())
    for event in events[cut:]:
        kept.apply(event)
    assert kept.kept() == record.kept()


def test_what_came_back_is_handed_out_first() -> None:
    record = record_of(10, 4)
    work = [
        RoundWork(replica=i, term=1, samples=r) for i, r in enumerate(record.work.hand_out([4, 4]))
    ]
    record.apply(RunEvent(round_begun=RoundBegun(work=work)))
    member = RoundMember(replica=0, weight=1, term=1)
    record.apply(RunEvent(round_done=RoundDone(members=[member])))
    [again] = record.work.hand_out([6])
    assert [(r.first, r.count) for r in again] == [(4, 4), (8, 2)]
    assert handed_out(RoundWork(samples=again)) == 6


@pytest.mark.parametrize(("replicas", "left"), [(1, 3), (2, 0), (3, 1)])
def test_who_goes_on_from_a_version_trains_what_is_left_of_the_samples(
    replicas: int, left: int
) -> None:
    """A rest that is no local step of so many replicas is left out."""
    record = record_of(10, 6, 2)
    work = [
        RoundWork(replica=i, term=1, samples=r) for i, r in enumerate(record.work.hand_out([9, 10]))
    ]
    record.apply(RunEvent(round_begun=RoundBegun(work=work)))
    member = RoundMember(replica=0, weight=1, term=1)
    record.apply(RunEvent(round_done=RoundDone(members=[member])))
    saved = Checkpoint(step=1, rounds=record.position)
    then = record_of(10, 6, replicas)
    then.begin_from(saved)
    assert (then.versions.round, then.versions.first, then.work.committed) == (1, 1, 9)
    [rest] = then.work.hand_out([then.work.total - then.work.committed])
    wanted = set(range(9, 60))
    assert numbers(RoundWork(samples=rest)) == set(sorted(wanted)[: len(wanted) - left])
    assert then.position == saved.rounds


def test_who_met_is_kept_for_so_many_rounds_and_until_all_do() -> None:
    record = record_of(10, 2, remembers=2)

    def play(*groups: int) -> None:
        """A round of two replicas."""
        ranges = record.work.hand_out([1, 1])
        work = [RoundWork(replica=i, term=1, samples=r) for i, r in enumerate(ranges)]
        record.apply(RunEvent(round_begun=RoundBegun(round=record.versions.round, work=work)))
        members = [RoundMember(replica=i, term=1, group=g) for i, g in enumerate(groups)]
        record.apply(RunEvent(round_done=RoundDone(round=record.versions.round, members=members)))

    for groups in ((1, 1), (1, 2), (1, 1)):
        play(*groups)
    assert list(record.versions.met) == [(), ((0, 1),)]
    copy = record_of(10, 2, remembers=2)
    copy.restore(record.kept())
    assert copy.versions.met == record.versions.met
    for _ in range(6):
        play(1, 1)
    assert len(record.versions.met) == 2
    play(0, 0)  # the last one
    assert not record.versions.met
    assert record.work.over


def test_what_was_told_ahead_comes_back_in_its_order() -> None:
    """Where more had come back than a round takes, and who was ahead does not go on."""
    record = record_of(10, 4)
    member = RoundMember(replica=0, weight=1, term=1)

    def play(*work: RoundWork) -> None:
        begun = RoundBegun(round=record.versions.round, work=work)
        record.apply(RunEvent(round_begun=begun))
        record.apply(RunEvent(round_done=RoundDone(round=record.versions.round, members=[member])))

    mine, lost = record.work.hand_out([4, 8])
    play(RoundWork(replica=0, term=1, samples=mine), RoundWork(replica=1, term=1, samples=lost))
    mine, ahead = record.work.hand_out([4, 2])
    play(RoundWork(replica=0, term=1, samples=mine, ahead_samples=ahead))
    [again] = record.work.hand_out([5])
    assert [(r.first, r.count) for r in again] == [(8, 2), (10, 2), (12, 1)]


def test_who_has_lied_is_remembered_in_the_journals_snapshots() -> None:
    ledger, again = VersionLedger(), VersionLedger()
    ledger.proved(LieProved(round=0, peer="p1"))
    again.restore(ledger.kept())
    assert again.liars == {"p1"}
