"""What a conviction and a dispute cost, against the words of docs/security.md: whatever is said in
whatever order."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.policies.disputes import Disputes, doubted
from shoal.dag.plan.plan import PeerId
from shoal.proto.broker_pb2 import RoundPlan, RoundReport

MEMBER = st.integers(0, 4)


def rounds_out(disputes: Disputes, number: int, at: int) -> int:
    """For how many rounds after this one it has no place."""
    gone = 0
    while True:
        disputes.begin(at + 1 + gone)
        if not disputes.is_out(number):
            return gone
        gone += 1


def test_each_conviction_costs_more_rounds_and_sixteen_good_ones_forgive_one() -> None:
    disputes, at, cost = Disputes(), 0, []
    for _ in range(9):
        disputes.begin(at)
        disputes.strike(1)
        cost.append(rounds_out(disputes, 1, at))
        at += 1000
    assert cost == [0, 1, 3, 7, 15, 31, 63, 63, 63]
    once = Disputes()
    for good in (15, 16):
        once.strike(1)  # twice: 0 and 1 rounds; forgiven, it is the first again
        for _ in range(good):
            once.done([1])
    once.begin(500)
    once.strike(1)
    assert rounds_out(once, 1, 500) == 1


def test_a_dispute_lasts_and_comes_back_for_twice_as_long() -> None:
    disputes, at = Disputes(), 0
    for lasts in (32, 64, 128, 256, 512, 512):
        disputes.begin(at)
        disputes.accuse(1, 2, 3)
        disputes.accuse(1, 2, 3)  # to say it again makes it no longer
        disputes.begin(at + lasts - 1)
        assert disputes.between(range(5)) == {frozenset((1, 2))}
        at += lasts
        disputes.begin(at)
        assert disputes.between(range(5)) == set()


def test_of_two_the_one_who_was_left_out_less_often_goes_else_who_spoke() -> None:
    disputes, gone = Disputes(), []
    for times in range(4):
        disputes.begin(times * 10_000)
        disputes.accuse(1, 2, 0)
        gone += disputes.leaves_out([1, 2])
        disputes.left_out(gone[-1:])
    assert gone == [1, 2, 1, 2], "who speaks pays first, and as often"
    disputes = Disputes()
    disputes.accuse(1, 2, 0)
    disputes.begin(3)
    assert disputes.between([1, 2])
    disputes.begin(4)
    assert not disputes.between([1, 2])


@settings(max_examples=40)
@given(st.lists(st.tuples(MEMBER, MEMBER), max_size=12), st.integers(0, 4))
def test_one_member_convicts_nobody_whatever_it_says_of_whom(
    said: list[tuple[int, int]], liar: int
) -> None:
    """Who is convicted has disputes with two others: of one liar's words that is the liar."""
    disputes = Disputes()
    for by, about in said:
        disputes.accuse(by, about, 3)
    pairs = disputes.between(range(5))
    for number in disputes.convicted(range(5)):
        assert sum(number in pair for pair in pairs) >= 2
    only = Disputes()
    for _, about in said:
        only.accuse(liar, about, 3)
    assert set(only.convicted(range(5))) <= {liar}
    assert set(only.leaves_out(range(5))) <= {liar}, "and nobody else is left out"


def test_every_set_of_disputes_leaves_somebody_to_add_up() -> None:
    """All 1024 of five members: who stays can add up what others give, or is alone."""
    every = list(combinations(range(5), 2))
    for chosen in range(1 << len(every)):
        disputes = Disputes()
        for i, (a, b) in enumerate(every):
            if chosen >> i & 1:
                disputes.accuse(a, b, 3)
        gone = disputes.leaves_out(range(5))
        left = [n for n in range(5) if n not in gone]
        pairs = disputes.between(left)
        assert left
        assert any(all(n not in pair for pair in pairs) for n in left)


@pytest.mark.parametrize(
    ("who", "giver"),
    [("near", "gatherer"), ("gatherer", "adder"), ("far", "adder"), ("new", "far")],
)
def test_of_a_version_that_differs_the_one_is_doubted_who_gave_it(who: str, giver: str) -> None:
    """Peers do not sign here. In a place the gatherer passes the result on to the others; outside
    of it who adds up gives it, and who joins has the version of another."""
    plan = RoundPlan()
    segment = plan.segments.add(start=0, stop=8, aggregator="adder")
    segment.takers.extend(["near", "gatherer", "far", "adder"])
    segment.places.add(gatherer="gatherer", takers=["near", "gatherer"])
    segment.versions.add(source="far", destination="new")
    plan.segments.add(start=8, stop=9, aggregator="other", takers=segment.takers)
    made = {
        1: {PeerId(who): RoundReport(parts=[7, 3])},
        2: {PeerId("adder"): RoundReport(parts=[6, 3])},
    }
    plans = {PeerId(who): plan, PeerId("adder"): plan}
    assert doubted(1, 2, made, plans) == {giver}
    made[1][PeerId(who)].parts[0] = 6
    assert doubted(1, 2, made, plans) == set()
