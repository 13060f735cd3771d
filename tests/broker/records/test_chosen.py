"""What the journal keeps of clients that a rule has chosen, and what the broker takes as such."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.clients import choose
from shoal.broker.records.cohort_ledger import CohortLedger
from shoal.broker.records.rounds import RoundRecord
from shoal.broker.records.version_ledger import VersionLedger
from shoal.dag.rounds.cohorts import cohort_of, places_of_clients
from shoal.proto.broker_pb2 import (
    Cohort,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundPlanned,
    RoundWork,
    RunEvent,
    SampleRange,
)

ROUNDS, CLIENTS = 4, 9


def record() -> RoundRecord:
    return RoundRecord(VersionLedger(), CohortLedger(ROUNDS))


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 10**6), st.data())
def test_places_of_clients_are_where_the_rounds_order_has_them(
    clients: int, seed: int, number: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.integers(0, clients - 1)))
    places = places_of_clients(clients, seed, number, chosen)
    assert places == sorted(set(places))
    assert {*cohort_of(clients, seed, number, places)} == chosen


@given(st.data())
def test_a_choice_is_kept_until_its_round_begins(data: st.DataObject) -> None:
    """Whatever else happens meanwhile, and whenever the journal is read again, by events or from
    what is kept of them; a choice of another round is an error there."""
    events, now, wanted = list[RunEvent](), record(), dict[int, Cohort]()

    def happens(**event: Any) -> None:
        nonlocal now
        events.append(RunEvent(**event))
        now.apply(events[-1])
        again = record()
        match data.draw(st.sampled_from(["", "events", "kept"])):
            case "events":
                for each in events:
                    again.apply(each)
                now = again
            case "kept":
                again.restore(now.kept())
                now = again

    def may_choose(number: int) -> None:
        for wrong in {max(0, number - 1), number + 1} - {number}:
            with pytest.raises(ValueError, match=f"expected round {number}"):
                now.apply(RunEvent(chosen=Cohort(round=wrong, clients=[1])))
        if number not in wanted and data.draw(st.booleans()):
            clients = data.draw(st.lists(st.integers(0, CLIENTS - 1), min_size=1, unique=True))
            wanted[number] = Cohort(round=number, clients=clients)
            happens(chosen=wanted[number])
        assert now.work.chosen == wanted.get(number)

    work = RoundWork(replica=0, cohort=[SampleRange(count=2)])
    for number in range(ROUNDS):
        may_choose(number)
        happens(round_begun=RoundBegun(round=number, work=[work]))
        assert now.work.chosen is None
        may_choose(number + 1)
        if data.draw(st.booleans()):  # another term goes on with its work
            happens(round_begun=RoundBegun(round=number, work=[work]))
        members = [RoundMember(replica=0, weight=2)]
        planned = RoundPlanned(round=number, attempt=1, members=members)
        happens(round_planned=planned)
        may_choose(number + 1)
        happens(round_done=RoundDone(round=number, members=members))
        assert now.work.chosen == wanted.get(number + 1)


def a_run(*, begun: bool, selected: bool = True, fewest: int = 1, most: int = 4) -> Any:
    rounds = record()
    if begun:
        work = RoundWork(replica=0, cohort=[SampleRange(count=2)])
        rounds.apply(RunEvent(round_begun=RoundBegun(round=0, work=[work])))
    cohorts = SimpleNamespace(selected=selected, clients=CLIENTS, per_round=2, fewest=fewest)
    needs = SimpleNamespace(cohorts=cohorts, sync=SimpleNamespace(asked=lambda per_round: most))

    def publish(event: RunEvent, replica: int, now: float) -> RunEvent:
        rounds.apply(event)
        return event

    return SimpleNamespace(
        id="r-1",
        ended=False,
        rounds=rounds,
        submitted=SimpleNamespace(requirements=needs),
        record=SimpleNamespace(publish=publish),
    )


def test_the_clients_of_the_next_round_are_taken_once() -> None:
    for number in range(2):
        run = a_run(begun=number == 1)
        (event,) = choose(run, Cohort(round=number, clients=[4, 1]), 1.0)
        assert event == RunEvent(chosen=Cohort(round=number, clients=[4, 1]))
        assert choose(run, Cohort(round=number, clients=[1, 4]), 1.0) == []
        with pytest.raises(ValueError, match="has its clients already"):
            choose(run, Cohort(round=number, clients=[1, 5]), 1.0)


@pytest.mark.parametrize(
    ("number", "clients", "why"),
    [
        (0, [1], "round 0 has begun: expected the clients of round 1"),
        (2, [1], "round 2 is not the next one: expected the clients of round 1"),
        (1, [], "round 1 has 0 clients: expected 2 to 4"),
        (1, [1], "round 1 has 1 clients: expected 2 to 4"),
        (1, [*range(5)], "round 1 has 5 clients: expected 2 to 4"),
        (1, [1, 9, 10], "round 1 has clients 9, 10, and there are 9: expected numbers from 0 to 8"),
        (1, [3, 3], "round 1 has a client twice: expected each once"),
    ],
)
def test_what_is_no_cohort_is_refused(number: int, clients: list[int], why: str) -> None:
    run = a_run(begun=True, fewest=2)
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        choose(run, Cohort(round=number, clients=clients), 1.0)
    assert run.rounds.work.chosen is None


def test_no_cohort_is_taken_where_no_round_comes_or_no_rule_chooses() -> None:
    run = a_run(begun=True, selected=False)
    with pytest.raises(ValueError, match="that was submitted with sync"):
        choose(run, Cohort(round=1, clients=[1]), 1.0)
    run = a_run(begun=True)
    run.rounds.work.finish()
    with pytest.raises(ValueError, match="begins no round any more"):
        choose(run, Cohort(round=1, clients=[1]), 1.0)
    run = a_run(begun=False)
    run.ended = True
    with pytest.raises(ValueError, match="begins no round any more"):
        choose(run, Cohort(round=0, clients=[1]), 1.0)


def test_clients_are_told_apart_by_their_numbers_alone() -> None:
    """Ten thousand, of which a thousand are chosen."""
    chosen = np.random.default_rng(0).permutation(10_000)[:1000].tolist()
    places = places_of_clients(10_000, 7, 3, chosen)
    assert sorted(cohort_of(10_000, 7, 3, places)) == sorted(chosen)
