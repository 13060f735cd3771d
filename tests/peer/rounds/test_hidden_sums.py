"""Sums in which noise hides clients, at who adds up."""

from __future__ import annotations

import pytest
import torch

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.rounds.noise import known_key
from shoal.dag.rounds.vector import PIECE, Entry, RunVector
from shoal.job.clients.client_options import Cohorts
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.job.clients.partitioning import Partitioning
from shoal.job.rounds import RoundSettings
from shoal.peer.rounds.tensors import TensorAlgebra
from shoal.proto.broker_pb2 import RoundPlan

SIZE = 50_000
VECTOR = RunVector(
    [
        Entry("param:a", TensorSpec((SIZE,), "float32"), 0, 0),
        Entry("param:b", TensorSpec((SIZE,), "float32"), SIZE, 1),
    ]
)
WHOLE = (0, 2 * SIZE)
PER_ROUND, NOISE, CLIP = 20, 3.0, 0.25


def algebra(**key):
    privacy = ClientPrivacy(clip=CLIP, epsilon=1.0, delta=1e-5, noise=NOISE)
    cohorts = Cohorts(
        partition=Partitioning(kind="iid", clients=40), labels="", clients=40, per_round=PER_ROUND,
        weight="equal", privacy=privacy,
    )  # fmt: skip
    return TensorAlgebra(VECTOR, RoundSettings(method="fedavg", cohorts=cohorts), "r.0", **key)


def plan_of(attempt=1, weight=PER_ROUND):
    return RoundPlan(round=2, attempt=attempt, weight=weight, members=2, exponent=10)


def mean(own, plan, part=WHOLE, value=0.5):
    """Of which each client gave `value`."""
    total = own.sum(part, plan)
    total.add(torch.full((part[1] - part[0],), value), plan.weight)
    return total.mean()


@pytest.mark.parametrize("weight", [PER_ROUND, 7])
def test_noise_has_the_deviation_that_was_asked_for_and_the_mean_is_over_all_that_were(weight):
    found = mean(algebra(), plan_of(weight=weight)).double()
    wanted = NOISE * CLIP / PER_ROUND
    assert float(found.std()) == pytest.approx(wanted, rel=0.02)
    error = wanted / len(found) ** 0.5
    assert abs(float(found.mean()) - 0.5 * weight / PER_ROUND) < 5 * error


def test_in_daemons_no_two_sums_have_one_noise_even_of_one_attempt_that_is_said_twice():
    one = algebra()
    a, b = mean(one, plan_of()), mean(one, plan_of())
    assert float((a - b).double().std()) == pytest.approx(
        2**0.5 * NOISE * CLIP / PER_ROUND, rel=0.02
    )


def test_in_simulations_it_is_the_same_however_the_vector_is_divided_and_another_in_each_attempt():
    one, other = algebra(noise_key=known_key), algebra(noise_key=known_key)
    whole = mean(one, plan_of())
    assert torch.equal(whole, mean(other, plan_of()))
    assert PIECE > SIZE, "entries are pieces"
    assert torch.equal(whole[SIZE:], mean(other, plan_of(), (SIZE, 2 * SIZE)))
    assert not torch.equal(whole[SIZE:], whole[:SIZE])
    again = mean(one, plan_of(attempt=2)) - whole
    assert float(again.double().std()) == pytest.approx(2**0.5 * NOISE * CLIP / PER_ROUND, rel=0.02)
