"""Evaluations between rounds: each is told once, as the mean of what replicas came to."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.records.rounds import RoundRecord
from shoal.broker.rounds.evaluations import Evaluations, mean_of
from shoal.proto.broker_pb2 import (
    Evaluation,
    NamedNumber,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundWork,
    RunEvent,
)

REPLICAS = 3
losses = st.floats(0.0, 100.0)


def begun(record: RoundRecord) -> None:
    ranges = record.hand_out([1] * REPLICAS)
    work = [RoundWork(replica=i, term=1, steps=1, samples=r) for i, r in enumerate(ranges)]
    record.apply(RunEvent(round_begun=RoundBegun(round=record.round, work=work)))


def done(record: RoundRecord) -> None:
    members = [RoundMember(replica=i, term=1, group=1 + i // 2) for i in range(REPLICAS)]
    record.apply(RunEvent(round_done=RoundDone(round=record.round, members=members)))


@given(found=st.lists(losses, min_size=1, max_size=5))
def test_the_mean_is_that_of_exact_arithmetic(found: list[float]) -> None:
    said = [Evaluation(loss=x, weight=8, metrics=[NamedNumber(name="a", value=x)]) for x in found]
    wanted = float(sum(map(Fraction, found)) / len(found))
    mean = mean_of(said)
    assert mean.loss == pytest.approx(wanted)
    assert (mean.weight, mean.metrics[0].value) == (8, pytest.approx(wanted))


@given(said=st.lists(st.tuples(st.integers(0, REPLICAS - 1), losses), max_size=8))
def test_in_gossip_it_is_told_once_when_all_have_said_so_or_the_round_ends(
    said: list[tuple[int, float]],
) -> None:
    record = RoundRecord(10, REPLICAS, 1, REPLICAS, remembers=2)
    found = Evaluations(record, REPLICAS)
    begun(record)
    done(record)
    begun(record)
    told, first = [], dict[int, float]()
    for replica, loss in said:
        found.add(replica, 1, Evaluation(loss=loss))
        first |= {} if len(first) == REPLICAS else {replica: first.get(replica, loss)}
        told += [found.told()]
    told += [found.told(closes=True), found.told(closes=True)]
    kept = [t for t in told if t is not None]
    assert len(kept) == bool(said)
    for one in kept:
        assert (one.round, one.step, one.replicas) == (1, 1, len(first))
        assert one.evaluation.loss == pytest.approx(sum(first.values()) / len(first))


def test_a_version_of_all_is_evaluated_by_one_and_told_at_once() -> None:
    record = RoundRecord(10, REPLICAS, 1, REPLICAS)
    found = Evaluations(record, REPLICAS)
    begun(record)
    assert not found.add(0, 0, Evaluation(loss=9.5))  # the starting weights are not evaluated
    done(record)
    begun(record)
    first = record.evaluators
    assert found.told() is None
    others = {*range(REPLICAS)} - {*first}
    for other in others:
        assert not found.add(other, 1, Evaluation(loss=0.1))  # nobody asked it
    for number in (0, 7):
        assert not found.add(0, number, Evaluation(loss=9.5))  # before, and what nobody has told
    [asked] = first
    assert found.add(asked, 1, Evaluation(loss=2.5))
    assert not found.add(asked, 1, Evaluation(loss=0.2))
    told = found.told()
    assert told is not None
    assert (told.round, told.replicas, told.replica) == (1, 0, asked)
    assert told.evaluation.loss == 2.5
    assert not found.add(asked, 1, Evaluation(loss=3.5))  # again, behind a restart
    assert found.told(closes=True) is None


def test_who_begins_again_meanwhile_is_asked_too_and_the_first_one_stays_asked() -> None:
    record = RoundRecord(10, REPLICAS, 1, REPLICAS)
    found = Evaluations(record, REPLICAS)
    begun(record)
    done(record)
    ranges = record.hand_out([1] * REPLICAS)
    work = [RoundWork(replica=i, term=1, steps=1, samples=r) for i, r in enumerate(ranges)]
    record.apply(RunEvent(round_begun=RoundBegun(round=1, work=work[1:])))
    assert found.told() is None
    assert [*record.evaluators] == [1]
    record.apply(RunEvent(round_begun=RoundBegun(round=1, work=work[:1])))
    assert [*record.evaluators] == [0]
    assert not found.add(2, 1, Evaluation(loss=0.1))
    assert found.add(1, 1, Evaluation(loss=2.5))
