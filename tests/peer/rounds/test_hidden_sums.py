"""Sums in which noise hides clients, at who adds up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.rounds.noise import known_key
from shoal.dag.rounds.sums import FixedPoint
from shoal.dag.rounds.vector import PIECE, Entry, RunVector
from shoal.job.clients.client_options import Cohorts
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.job.clients.partitioning import Partitioning
from shoal.job.rounds import RoundSettings
from shoal.peer.federated.cohort import Trained
from shoal.peer.federated.local_cohort import hidden_mean
from shoal.peer.rounds.client_tensors import ClientTensors
from shoal.proto.broker_pb2 import RoundPlan
from shoal.sim.plain.hidden import share_of

SIZE = 50_000
VECTOR = RunVector(
    [
        Entry("param:a", TensorSpec((SIZE,), "float32"), 0, 0),
        Entry("param:b", TensorSpec((SIZE,), "float32"), SIZE, 1),
    ]
)
WHOLE = (0, 2 * SIZE)
PER_ROUND, NOISE, CLIP = 20, 3.0, 0.25


def algebra(replica="r.0", shares=None, **key):
    """`shares`: for how many that give, at least, each adds some of the noise."""
    how = {} if shares is None else {"where": "distributed", "fewest": shares}
    privacy = ClientPrivacy(clip=CLIP, epsilon=1.0, delta=1e-5, noise=NOISE, **how)
    cohorts = Cohorts(
        partition=Partitioning(kind="iid", clients=40), labels="", clients=40, per_round=PER_ROUND,
        weight="equal", privacy=privacy, secure=shares is not None,
    )  # fmt: skip
    return ClientTensors(VECTOR, RoundSettings(method="fedavg", cohorts=cohorts), replica, **key)


def given_by(own, plan, values, weight, part=WHOLE):
    """Multiples of the grid that it gives of a part, as they would be masked."""
    [written] = [own.masked(part, values, weight, plan, lambda integers: integers)]
    return written.values.view(torch.int64)


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


def test_shares_of_all_but_one_are_the_whole_noise_and_who_adds_up_adds_none():
    fewest, plan = 4, plan_of()
    each = [algebra(f"r.{i}", fewest, noise_key=known_key) for i in range(fewest)]
    came = [given_by(a, plan, torch.full((2 * SIZE,), 0.5), 5) for a in each]
    step = NOISE * CLIP / (fewest - 1) ** 0.5 / 2**24
    for one in came:  # nobody could tell with one share what was given: it has a third of it
        noise = one.double() * step - 5 * 0.5
        assert float(noise.std()) == pytest.approx(NOISE * CLIP / 3**0.5, rel=0.02)
    others = (sum(came[1:]).double() * step - 15 * 0.5).std()
    assert float(others) == pytest.approx(NOISE * CLIP, rel=0.02)
    total = each[0].sum(WHOLE, plan)
    for one in came:
        total.add(one.view(torch.float32), 5)
    found = each[1].unmasked(WHOLE, total.mean(), plan, lambda integers: integers)
    assert torch.equal(found.double(), (sum(came).double() * step / PER_ROUND).float().double())


def test_what_is_given_is_what_moved_and_a_share_that_whoever_knows_the_key_finds():
    fewest, plan = 3, plan_of()
    values = torch.linspace(-CLIP, CLIP, 2 * SIZE) / SIZE**0.5
    step = NOISE * CLIP / (fewest - 1) ** 0.5 / 2**24
    wanted = torch.cat([share_of(name, SIZE, 0, (2, 1), 7) for name in "ab"])
    wanted += (values.double() * 3 / step).round()
    own = algebra("r-1.7", fewest, noise_key=known_key)
    assert torch.equal(given_by(own, plan, values, 3).double(), wanted)
    assert torch.equal(given_by(own, plan, values[SIZE:], 3, (SIZE, 2 * SIZE)), wanted[SIZE:])


def test_in_daemons_no_two_shares_are_alike_even_of_one_attempt():
    own, nothing = algebra(shares=3), torch.zeros(2 * SIZE)
    a, b = (given_by(own, plan_of(), nothing, 3) for _ in range(2))
    assert float((a - b).double().std()) == pytest.approx(2**0.5 * 2**24, rel=0.02)


def test_a_plan_with_a_coarser_grid_changes_no_digit_of_noise_in_shares():
    plan = plan_of()
    values = torch.linspace(-0.1, 0.1, 2 * SIZE)
    wanted = given_by(algebra(shares=3, noise_key=known_key), plan, values, 3)
    plan.exponent = 46
    assert torch.equal(given_by(algebra(shares=3, noise_key=known_key), plan, values, 3), wanted)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([1.0, 3e4, 1e6]), st.integers(1, 200)
)
def test_one_client_more_changes_a_sum_on_the_grid_by_no_more_than_the_clip(
    clients, seed, noise, elements
):
    """Also where the grid is coarse, and steps of it are a good part of the clip."""
    privacy = ClientPrivacy(
        clip=CLIP, epsilon=1.0, delta=1e-5, noise=noise, where="distributed", fewest=3
    )
    generator = torch.Generator().manual_seed(seed)
    began = {"a": torch.randn(elements, generator=generator)}
    moved = torch.randn(clients, elements, generator=generator) * 3 * CLIP
    most, count = privacy.shortened(elements), clients

    def multiples(there):
        values = {"a": began["a"] + torch.where(there[:, None], moved, 0.0)}
        norms = (values["a"].double() - began["a"].double()).square().sum(1)
        squares = dict(enumerate(norms.tolist()))
        trained = [Trained(tuple(range(count)), values, (1,) * count, torch.zeros(count))]
        mean = hidden_mean(trained, began, squares, clip=most, count=count)["a"]
        return FixedPoint(PER_ROUND, 10, privacy.step).fixed(mean, count).double()

    everybody = torch.ones(count, dtype=torch.bool)
    one_less = everybody.clone()
    one_less[seed % count] = False
    apart = (multiples(everybody) - multiples(one_less)) * privacy.step
    assert float(apart.norm()) <= CLIP * (1 + 1e-12)
