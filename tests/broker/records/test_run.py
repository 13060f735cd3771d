"""Names of replicas, and what a run's record refuses."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.broker.events import RunId
from shoal.broker.options import BrokerOptions
from shoal.broker.records.run import RunRecord
from shoal.broker.records.submitted import SubmittedRun, replica_id, run_of
from shoal.planner.requests.requirements import read_spec
from shoal.proto.broker_pb2 import CANCELLED, WAITING, RunEvent
from shoal.proto.journal_pb2 import Decision

from ..conftest import make_spec

RUN = RunId("r-1f")


def record(decisions: list[Decision]) -> RunRecord:
    spec = make_spec()
    return RunRecord(SubmittedRun(RUN, 1, "ann", spec, read_spec(spec), BrokerOptions()), decisions)


@given(st.integers(0, 10**6 - 1))
def test_a_replica_is_named_behind_its_run_and_found_by_that_name(number: int) -> None:
    assert run_of(replica_id(RUN, number)) == (RUN, number)


@given(st.text(max_size=12) | st.from_regex(r"r-1f\.\d+", fullmatch=True))
@example("r-1f." + 5000 * "1")
def test_no_other_name_finds_a_replica(text: str) -> None:
    run, number = run_of(text)
    assert number < 0 or replica_id(run, number) == text


def test_the_first_replica_has_the_runs_own_name() -> None:
    assert replica_id(RUN, 0) == RUN
    assert replica_id(RUN, 2) == "r-1f.2"


def test_what_changes_a_replica_changes_its_run_and_is_a_decision() -> None:
    decisions: list[Decision] = []
    run = record(decisions)
    assert (run.state.phase, run.ended) == (WAITING, False)
    stands = run.replicas[0].state
    stands.phase = CANCELLED
    published = run.changes(stands, 4.0)
    assert (run.state.phase, run.ended) == (CANCELLED, True)
    assert run.state.replicas[0] == stands
    again = record([])
    for decision in decisions:
        again.apply(decision.happened.event)
    assert again.state == run.state
    assert published.event == decisions[0].happened.event


def test_an_event_of_a_replica_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="replica 1 of r-1f"):
        record([]).apply(RunEvent(note="no", replica=1))
