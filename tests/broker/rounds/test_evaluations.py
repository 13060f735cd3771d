"""Evaluations between rounds: each is told once, as the mean of what replicas came to."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import RunId
from shoal.broker.options import BrokerOptions
from shoal.broker.policies.policies import policy_of
from shoal.broker.records.rounds import RoundRecord
from shoal.broker.records.submitted import SubmittedRun
from shoal.broker.records.version_ledger import VersionLedger
from shoal.broker.records.work_ledger import WorkLedger
from shoal.broker.rounds.versions import Evaluations, mean_of
from shoal.planner.requests.requirements import read_spec
from shoal.proto.broker_pb2 import (
    Evaluation,
    NamedNumber,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundWork,
    RunEvent,
)
from shoal.tests.broker.conftest import make_spec

REPLICAS = 3
losses = st.floats(0.0, 100.0)


def begins(kind: str) -> tuple[RoundRecord, Callable[[], Evaluations]]:
    """A run of ten steps, each evaluated, and the evaluations of its round under way."""
    tables = {"sync": {"kind": kind}, "plan": {"replicas": REPLICAS}, "eval_every": 1}
    spec = make_spec(10, REPLICAS, **tables)
    run = SubmittedRun(RunId("r-1"), 1, "", spec, read_spec(spec), BrokerOptions())
    record = RoundRecord(VersionLedger(), WorkLedger(10, REPLICAS, REPLICAS))
    return record, lambda: Evaluations(record, policy_of(run))


def begun(record: RoundRecord) -> None:
    ranges = record.work.hand_out([1] * REPLICAS)
    work = [RoundWork(replica=i, term=1, steps=1, samples=r) for i, r in enumerate(ranges)]
    record.apply(RunEvent(round_begun=RoundBegun(round=record.versions.round, work=work)))


def done(record: RoundRecord) -> None:
    members = [RoundMember(replica=i, term=1, group=1 + i // 2) for i in range(REPLICAS)]
    record.apply(RunEvent(round_done=RoundDone(round=record.versions.round, members=members)))


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
    record, of_round = begins("gossip")
    begun(record)
    done(record)
    begun(record)
    found = of_round()
    told, first = [], dict[int, float]()
    for replica, loss in said:
        found.add(replica, Evaluation(loss=loss))
        first |= {} if len(first) == REPLICAS else {replica: first.get(replica, loss)}
        told += [found.told()]
    told += [found.told(closes=True), found.told(closes=True)]
    kept = [t for t in told if t is not None]
    assert len(kept) == bool(said)
    for one in kept:
        assert (one.round, one.step, one.replicas) == (1, 1, len(first))
        assert one.evaluation.loss == pytest.approx(sum(first.values()) / len(first))


def test_a_version_of_all_is_evaluated_by_one_and_told_at_once() -> None:
    record, of_round = begins("local")
    begun(record)
    assert not of_round().add(0, Evaluation(loss=9.5))  # the starting weights are not evaluated
    done(record)
    begun(record)
    found, asked = of_round(), 0
    assert found.told() is None
    for other in range(1, REPLICAS):
        assert not found.add(other, Evaluation(loss=0.1))  # nobody asked it
    assert found.add(asked, Evaluation(loss=2.5))
    assert not found.add(asked, Evaluation(loss=0.2))
    told = found.told()
    assert told is not None
    assert (told.round, told.replicas, told.replica) == (1, 0, asked)
    assert told.evaluation.loss == 2.5
    assert not found.add(asked, Evaluation(loss=3.5))  # again, behind a restart
    assert found.told(closes=True) is None


def test_who_begins_again_meanwhile_is_asked_too_and_the_first_one_stays_asked() -> None:
    record, of_round = begins("local")
    begun(record)
    done(record)
    ranges = record.work.hand_out([1] * REPLICAS)
    work = [RoundWork(replica=i, term=1, steps=1, samples=r) for i, r in enumerate(ranges)]
    record.apply(RunEvent(round_begun=RoundBegun(round=1, work=work[1:])))
    found = of_round()
    assert found.told() is None
    record.apply(RunEvent(round_begun=RoundBegun(round=1, work=work[:1])))
    assert not found.add(2, Evaluation(loss=0.1))
    assert found.add(1, Evaluation(loss=2.5))
    assert of_round().add(0, Evaluation(loss=2.5))  # who is asked now
