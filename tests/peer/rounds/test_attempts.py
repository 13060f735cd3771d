"""What becomes of an exchange does not hang on who is asked when: attempts, joiners, codecs."""

from __future__ import annotations

from itertools import permutations

import pytest

from shoal.dag.plan.action import Kind
from shoal.dag.rounds import vector
from shoal.dag.rounds.wiring import VERSION
from shoal.tests.peer.compute.test_device import Gpt
from shoal.tests.peer.rounds.conftest import (
    COUNTER,
    PLAIN,
    Exchange,
    case_of_three,
    hand_out,
    same,
    train,
    trained,
)


def test_neither_order_nor_who_adds_up_changes_a_bit(make_case, replica):
    case = case_of_three(make_case)
    found = set()
    for seed, order in enumerate(permutations(range(3))):
        replicas = trained(case, replica)
        weights = [(2, 3, 7)[i] for i in order]
        hashes = Exchange([replicas[i] for i in order], weights=weights, seed=seed).run()
        found |= {*hashes}
    assert len(found) == 1


@pytest.mark.parametrize("applied", [False, True])
def test_another_attempt_comes_to_what_it_would_have_come_to_as_the_first(
    make_case, replica, applied
):
    case = case_of_three(make_case)
    calm = trained(case, replica)
    wanted = Exchange(calm[:2], weights=(2, 3)).run()
    replicas = trained(case, replica)
    first = Exchange(replicas, weights=(2, 3, 4))
    first.begin()
    first.give()
    if applied:
        assert {*first.apply()} != {*wanted}
    second = Exchange(replicas[:2], weights=(2, 3), attempt=2)
    assert second.run() == wanted
    assert first.frames.keys().isdisjoint(second.frames)
    for each, other in zip(replicas[:2], calm[:2], strict=True):
        assert same(each.weights(), other.weights())
    for both in (calm, replicas):  # and so does the next round, with its momentum
        train(both[:2], 1, 1)
    assert Exchange(replicas[:2], round=1).run() == Exchange(calm[:2], round=1).run()


def test_a_contribution_is_taken_down_once(make_case, replica):
    case = case_of_three(make_case)
    [a, b, c] = trained(case, replica)
    first = Exchange([a, b, c])
    first.run()
    before = a.contribute()
    a.begin(0, 0, 1, hand_out(0, 0, 1, 3))
    assert a.contribute() == before
    assert sum(r.drift for r in before.values()) > 0
    second = Exchange([a, b, c], attempt=2)
    second.run()
    gives = [{k._replace(term=0): f for k, f in e.frames.items()} for e in (first, second)]
    assert gives[0] == gives[1]


def test_who_joins_by_a_version_goes_on_as_the_others(make_case, replica):
    case = case_of_three(make_case)
    a, b, c = trained(case, replica, cuts=(2, 1, 3))
    hashes = Exchange([a, b], joiners=[c]).run()
    assert len({*hashes}) == 1
    assert same(c.weights(), a.weights(), but={COUNTER})
    train([a, b, c], 1, 1)
    hashes = Exchange([a, b, c], round=1).run()
    assert len({*hashes}) == 1
    calm = trained(case, replica, cuts=(2, 1, 3))
    Exchange(calm[:2]).run()
    train(calm[:2], 1, 1)
    assert Exchange(calm[:2], round=1).run() != hashes[:2], "the joiner counts"


def test_a_version_may_be_sent_once_its_round_is_over(make_case, replica):
    case = case_of_three(make_case)
    a, b, c = trained(case, replica, cuts=(1, 1, 1))
    exchange = Exchange([a, b], joiners=[c])
    exchange.begin()
    exchange.give()
    for each in (a, b):
        each.each(Kind.APPLY, 0)
        each.begin(1, 1, 1, [(0, 4)])
        each.train(1, 2)
    [segment] = exchange.segments
    exchange.send([(VERSION, p, "a.0", "c.0") for p in exchange.parts(segment)])
    [hash_c] = [h for r in c.each(Kind.APPLY, 0).values() for h in r.hashes]
    calm = trained(case, replica, cuts=(1, 1, 1))
    assert hash_c == Exchange(calm[:2]).run()[0]


# ---------------------------------------------------------------- codecs


@pytest.mark.parametrize("codec", ["bf16", "int8", "lossless", "int4:rounding=stochastic", "e3m0"])
def test_all_apply_the_bytes_of_the_result(make_case, replica, codec, monkeypatch):
    monkeypatch.setattr("shoal.peer.rounds.coding.LEAST_ELEMENTS", 64)
    case = make_case(Gpt(), length=8, **{**PLAIN, "batch": 24})
    exact = trained(case, replica)
    Exchange(exact).run()
    coded = trained(case, replica, codec=codec)
    exchange = Exchange(coded)
    hashes = exchange.run()
    assert len({*hashes}) == 1
    apart = [
        float((t - exact[0].weights()[n]).norm() / t.norm()) for n, t in coded[0].weights().items()
    ]
    assert (max(apart) == 0) == (codec == "lossless")
    assert max(apart) < 0.1
    swapped = [trained(case, replica, codec=codec)[i] for i in (2, 0, 1)]
    if "stochastic" not in codec:
        assert {*Exchange(swapped).run()} == {*hashes}, "who adds up makes no difference"


@pytest.mark.parametrize("codec", ["ef+topk:ratio=10", "delta+int8", "lowrank:rank=2"])
def test_codecs_that_remember_are_refused(make_case, replica, codec):
    case = case_of_three(make_case)
    with pytest.raises(ValueError, match="attempts of a round may be done again"):
        replica(case, "a", codec=codec)


def test_large_entries_are_cut_into_pieces(make_case, replica, monkeypatch):
    """Frames of 100 elements at most, and the same version."""
    case = case_of_three(make_case)
    whole = Exchange(trained(case, replica))
    whole.run()
    monkeypatch.setattr(vector, "PIECE", 100)
    replicas = trained(case, replica)
    small = Exchange(replicas)
    assert len({*small.run()}) == 1
    assert len(small.frames) > len(whole.frames)
    assert max(len(f) for f in small.frames.values()) <= 400
    assert same(replicas[0].weights(), whole.replicas[0].weights())
