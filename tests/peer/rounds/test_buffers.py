"""Buffers between replicas: of running statistics the mean, of integers the largest, by any
method."""

from __future__ import annotations

import pytest
import torch

from shoal.tests.peer.rounds.conftest import COUNTER, Exchange, case_of_three, hand_out, same

MEAN = "norm.running_mean"
SPARSE = {"density": 0.25, "chunk": 32, "decay": 0.75}


def apart(case, replica, steps, round_=0, replicas=(), **settings):
    """Replicas that make so many steps each."""
    replicas = replicas or [
        replica(case, n, k, of=3, **settings) for n, k in zip("abc", (1, 2, 3), strict=True)
    ]
    for i, (each, n) in enumerate(zip(replicas, steps, strict=True)):
        each.begin(round_, 10 * round_, n, hand_out(i, round_, n, 3))
        each.train(10 * round_, 10 * round_ + n)
        assert not any(r.code for r in each.contribute(round_).values())
    return replicas


@pytest.mark.parametrize(
    ("method", "options"), [("average", {}), ("diloco", {}), ("sparse-loco", SPARSE)]
)
def test_statistics_are_the_plain_mean_and_a_counter_the_largest(
    make_case, replica, method, options
):
    """In the second round too, when a momentum would be there."""
    case, replicas = case_of_three(make_case), ()
    for round_, steps in enumerate([(1, 2, 3), (3, 1, 1)]):
        replicas = apart(case, replica, steps, round_, replicas, method=method, options=options)
        before = [r.weights() for r in replicas]
        counters = [int(w[COUNTER]) for w in before]
        assert len({*counters}) > 1
        weights = (2, 3, 7)
        assert len({*Exchange(replicas, round=round_, weights=weights).run()}) == 1
        wanted = sum(w * b[MEAN].double() for w, b in zip(weights, before, strict=True)) / 12
        for each in replicas:
            after = each.weights()
            torch.testing.assert_close(after[MEAN].double(), wanted, rtol=1e-6, atol=1e-7)
            assert int(after[COUNTER]) == max(counters)
            assert same(after, replicas[0].weights())


def test_who_is_left_out_counts_nothing_and_who_joins_takes_the_counter(make_case, replica):
    case = case_of_three(make_case)
    replicas = apart(case, replica, (1, 2, 3), method="diloco")
    counters = [int(r.weights()[COUNTER]) for r in replicas]
    Exchange(replicas).run()
    again = Exchange(replicas[:2], joiners=replicas[2:], attempt=2)
    assert len({*again.run()}) == 1
    assert {int(r.weights()[COUNTER]) for r in replicas} == {max(counters[:2])}


def test_a_counter_may_be_any_integer(make_case, replica):
    """Its bits are those of no number, and of one beyond what 24 bits of a float tell apart."""
    case = case_of_three(make_case)
    replicas = apart(case, replica, (1, 1, 1), method="diloco")
    large = [2**40 + 1, -1, 2**40]
    for each, number in zip(replicas, large, strict=True):
        for device in each.devices.values():
            for held in device._work.held.values():
                if COUNTER in held.executor.buffers:
                    held.executor.buffers[COUNTER].fill_(number)
        each.begin(1, 10, 1, ())
        each.contribute(1)
    assert len({*Exchange(replicas, round=1).run()}) == 1
    assert {int(r.weights()[COUNTER]) for r in replicas} == {2**40 + 1}
