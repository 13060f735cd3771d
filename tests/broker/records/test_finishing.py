"""What the journal keeps of a run in rounds that somebody asked to finish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.records.cohort_ledger import CohortLedger
from shoal.broker.records.rounds import RoundRecord
from shoal.broker.records.version_ledger import VersionLedger
from shoal.broker.records.work_ledger import WorkLedger
from shoal.job.clients.client_privacy import SPARE_SUMS
from shoal.proto.broker_pb2 import (
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundPlanned,
    RoundWork,
    RunEvent,
    RunFinishing,
    SampleRange,
)

MICROBATCHES = 4


class Played:
    """The rounds of a run with the ledger that `make` gives, whose journal is read again behind
    every event, if the draw says so: by events, or from what is kept."""

    def __init__(self, data, make):
        self._data = data
        self._make = lambda: RoundRecord(VersionLedger(), make())
        self.record, self._events = self._make(), []

    def happens(self, **event):
        self._events.append(RunEvent(**event))
        self.record.apply(self._events[-1])
        match self._data.draw(st.sampled_from(["", "", "events", "kept"])):
            case "events":
                self.record = self._make()
                for each in self._events:
                    self.record.apply(each)
            case "kept":
                kept, self.record = self.record.kept(), self._make()
                self.record.restore(kept)

    def begin(self, work):
        self.happens(round_begun=RoundBegun(round=self.record.versions.round, work=work))

    def plan(self, members):
        versions = self.record.versions
        self.happens(
            round_planned=RoundPlanned(
                round=versions.round, attempt=versions.attempt + 1, members=members
            )
        )

    def done(self, members):
        versions = self.record.versions
        self.happens(
            round_done=RoundDone(round=versions.round, attempt=versions.attempt, members=members)
        )

    def asked(self):
        self.happens(finishing=RunFinishing(round=self.record.versions.round))


@given(st.integers(1, 6), st.integers(0, 6), st.booleans(), st.booleans(), st.data())
def test_the_round_of_clients_under_way_is_the_last(rounds, asked, first, hidden, data):
    """first: asked before it has begun, which can be of the first one only."""
    budget = rounds + SPARE_SUMS if hidden else 0
    played = Played(data, lambda: CohortLedger(rounds, budget))
    member, made, sums = [RoundMember(replica=0, term=1)], 0, 0
    if first:
        asked = 0
        played.asked()
        assert not played.record.work.over, "nobody has a version"
    while not played.record.work.over:
        played.begin([RoundWork(replica=0, cohort=[SampleRange(first=0, count=2)])])
        for _ in range(data.draw(st.integers(1, 3))):
            played.plan(member)
            sums += hidden
        if made == asked and not first:
            played.asked()
            assert played.record.work.rounds_left == 0
        played.done(member)
        made += 1
    assert played.record.work.sums == sums
    spent = hidden and sums + SPARE_SUMS >= budget
    assert made == min(rounds, asked + 1) or (spent and made < min(rounds, asked + 1))


@given(st.integers(1, 14), st.integers(1, 4), st.integers(-1, 5), st.booleans(), st.data())
def test_one_more_round_of_steps_is_the_last(steps, every, asked, full, data):
    """asked: in which round, -1: before the first. full: nobody is left out; who is gives its work
    back, and it is part of what is still made."""
    played = Played(data, lambda: WorkLedger(steps, MICROBATCHES, 2, round_steps=every))
    own, committed, made, most = MICROBATCHES // 2, set(), 0, steps * MICROBATCHES
    if asked < 0:
        played.asked()
        most = min(most, every * MICROBATCHES)
    while not played.record.work.over:
        work = played.record.work
        left = min(every * MICROBATCHES, work.total - work.committed)
        final = work.committed + left >= work.total
        counts = [left - left // 2 // own * own, left // 2 // own * own]
        ranges = played.record.work.hand_out(counts)
        given = [
            RoundWork(replica=i, term=1, steps=1, samples=r, final=final)
            for i, r in enumerate(ranges)
            if r
        ]
        played.begin(given)
        inside = [w for w in given if full or data.draw(st.booleans())] or given[:1]
        members = [RoundMember(replica=w.replica, weight=1, term=1) for w in inside]
        played.plan(members)
        if made == asked:
            assert played.record.work.rounds_left == (0 if final else 1)
            played.asked()
        played.done(members)
        numbers = [g for w in inside for s in w.samples for g in range(s.first, s.first + s.count)]
        assert not committed & {*numbers}
        committed |= {*numbers}
        if made == asked and not final:
            most = min(most, len(committed) + every * MICROBATCHES)
        made += 1
    assert len(committed) == most, "as many samples as were left to make"
    rounds = -(-steps // every)
    if full:
        assert made == (rounds if made <= asked else min(rounds, asked + 2))


def test_an_event_of_another_round_cannot_have_been():
    record = RoundRecord(VersionLedger(), CohortLedger(3))
    with pytest.raises(ValueError, match="expected round 0"):
        record.apply(RunEvent(finishing=RunFinishing(round=1)))
