"""What the broker takes a peer's speed to be, and how steps correct it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import StreamId
from shoal.broker.membership.membership import Membership
from shoal.broker.membership.speeds import (
    ENOUGH,
    MEMORY,
    MOST_BYTES_PER_S,
    MOST_FACTOR,
    MOST_FLOPS_PER_S,
    Correction,
    speeds_of,
)
from shoal.broker.options import BrokerOptions
from shoal.dag.cost.speed import Speeds, Work
from shoal.planner.base.interface import DEFAULT_FLOPS_PER_S
from shoal.proto.broker_pb2 import Hello, Profile, StageTime, StepReport
from shoal.proto.broker_pb2 import Speeds as Wire
from shoal.proto.graph_pb2 import FULL

WIRE = {
    "product_flops_per_s": 8e10,
    "convolution_flops_per_s": 7e10,
    "attention_flops_per_s": 4e10,
    "memory_bytes_per_s": 3e10,
    "special_bytes_per_s": 8e9,
    "call_s": 5e-6,
    "error": 0.1,
}
anything = st.floats(width=64)


def test_speeds_that_are_possible_are_taken_as_they_are() -> None:
    found, notes = speeds_of(Profile(flops_per_s=1.0e10, speeds=Wire(**WIRE)))
    assert notes == ()
    assert found == Speeds(
        product=8e10, convolution=7e10, attention=4e10, memory=3e10, special=8e9, call_s=5e-6,
        error=0.1,
    )  # fmt: skip


def test_an_emulated_device_says_how_much_slower_than_its_machine_it_is() -> None:
    """Frames are handled at the machine's own speed."""
    from shoal.peer.host.profile import speeds_to_proto

    slower = speeds_of(Profile(speeds=Wire(**WIRE)))[0].slower(4.0)
    assert speeds_of(Profile(speeds=speeds_to_proto(slower)))[0] == slower
    for wrong in (math.nan, math.inf, 0.0, -3.0, 0.5):
        assert speeds_of(Profile(speeds=Wire(**WIRE, slowed=wrong)))[0].slowed == 1.0


def test_one_number_stands_for_all_where_only_one_is_known() -> None:
    assert speeds_of(Profile(flops_per_s=5e10)) == (Speeds.of_flops(5e10), ())
    found, notes = speeds_of(Profile(name="home-1"))
    assert found == Speeds.of_flops(DEFAULT_FLOPS_PER_S)
    assert notes == ("peer home-1 does not say how fast it computes: 1e+10 FLOP/s are assumed",)


def test_a_speed_that_no_device_has_is_clamped_and_people_are_told() -> None:
    wire = Wire(**WIRE | {"product_flops_per_s": 1e20, "memory_bytes_per_s": math.nan})
    found, notes = speeds_of(Profile(name="home-1", flops_per_s=1e10, speeds=wire))
    assert found.product == MOST_FLOPS_PER_S
    assert found.memory == MOST_BYTES_PER_S  # what so many FLOPs suggest is more
    assert notes == (
        "peer home-1 reports 1e+20 FLOP/s of product: clamped to 2e+15",
        "peer home-1 reports nan B/s of memory: not taken",
    )


@given(st.tuples(*(anything for _ in WIRE)), anything)
def test_whatever_a_profile_says_the_speeds_are_possible(
    values: tuple[float, ...], flops: float
) -> None:
    wire = Wire(**dict(zip(WIRE, values, strict=True)))
    found, _ = speeds_of(Profile(flops_per_s=flops, speeds=wire))
    assert max(found.product, found.convolution, found.attention) <= MOST_FLOPS_PER_S
    assert max(found.memory, found.special) <= MOST_BYTES_PER_S
    assert found.seconds(Work(1, 1, 1, 1, 1, 1)) > 0


# ---------------------------------------------------------------- corrections


@given(st.lists(st.tuples(anything, anything), max_size=40))
def test_a_factor_stays_within_its_bounds(steps: list[tuple[float, float]]) -> None:
    correction = Correction()
    for measured, predicted in steps:
        correction.observe(measured, predicted)
        assert 1 / MOST_FACTOR * 0.999 <= correction.factor <= MOST_FACTOR * 1.001
        assert correction.error is None or 0 <= correction.error <= MOST_FACTOR


@given(truth=st.floats(0.1, 10), seed=st.integers(0, 2**32))
def test_a_factor_finds_a_constant_truth_under_noise(truth: float, seed: int) -> None:
    rng, correction = random.Random(seed), Correction()
    for _ in range(40):
        correction.observe(truth * rng.uniform(0.8, 1.2), 1.0)
    assert correction.factor == pytest.approx(truth, rel=0.15)
    assert correction.error is not None
    assert correction.error == pytest.approx(abs(1 - truth) / truth, rel=0.35, abs=0.25)


@given(
    truth=st.floats(0.5, 2), outlier=st.floats(1e-3, 1e3), at=st.integers(0, 20),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_one_outlier_moves_a_factor_little(
    truth: float, outlier: float, at: int, seed: int
) -> None:
    rng, with_it, without = random.Random(seed), Correction(), Correction()
    for step in range(at + MEMORY + 1):
        measured = truth * rng.uniform(0.9, 1.1)
        without.observe(measured, 1.0)
        with_it.observe(measured * outlier if step == at else measured, 1.0)
        if with_it.steps >= ENOUGH:
            assert with_it.factor == pytest.approx(without.factor, rel=0.25)


def test_the_first_steps_correct_nothing() -> None:
    correction = Correction()
    for _ in range(ENOUGH - 1):
        correction.observe(5.0, 1.0)
    assert correction.factor == 1.0
    correction.observe(5.0, 1.0)
    assert correction.factor == pytest.approx(5.0)


def report(step: int, seconds: float) -> StepReport:
    stage = StageTime(stage=0, visits=2, forward_s=seconds / 4, backward_s=seconds / 2)
    return StepReport(step=step, stages=[stage], update_s=seconds / 4, compute_s=100.0)


def test_a_correction_is_of_the_peers_own_speeds_whatever_the_plan_was_made_with() -> None:
    first, second = Correction(), Correction()
    for step in range(10):
        first.report(report(step, 3.0), predicted_s=1.0, learned=1.0)
        second.report(report(step, 3.0), predicted_s=3.0, learned=3.0)
    assert first.factor == pytest.approx(3.0) == second.factor
    assert first.error == pytest.approx(2 / 3) == second.error
    assert first.steps == 9  # the first step warms up
    first.report(StepReport(step=11, compute_s=1.0), predicted_s=1.0, learned=1.0)
    assert first.steps == 9  # nothing is known of its stages


def test_a_peer_with_next_to_nothing_to_do_is_not_corrected_by_it() -> None:
    correction = Correction()
    for step in range(10):
        correction.report(report(step, 0.02), predicted_s=0.1, learned=1.0, most_s=1.0)
    assert correction.factor == 1.0
    for step in range(10):
        correction.report(report(step, 0.2), predicted_s=0.4, learned=1.0, most_s=1.0)
    assert correction.factor == pytest.approx(0.5)


def hello(boot: str, counter: int, **speeds: float) -> Hello:
    profile = Profile(
        name="a", operator_set=FULL, device_memory_bytes=1, speeds=Wire(**WIRE | speeds),
        host="m", cores=4, threads=2,
    )  # fmt: skip
    return Hello(version=3, peer="a", boot=boot, counter=counter, profile=profile)


def test_an_offer_has_the_corrected_speeds_of_this_start_of_the_peer() -> None:
    membership = Membership("broker", BrokerOptions())
    membership.opened(StreamId("1"), 0.0)
    out, _ = membership.greeted(StreamId("1"), hello("x", 1, product_flops_per_s=1e20), 0.0)
    assert "clamped" in str(out)
    (member,) = membership.pool
    assert (member.offer.host, member.offer.cores, member.offer.threads) == ("m", 4, 2)
    for _ in range(ENOUGH):
        member.correction.observe(2.0, 1.0)
    assert member.offer.speeds is not None
    assert member.offer.speeds.special == pytest.approx(4e9)
    assert member.offer.flops_per_s == pytest.approx(1e15)

    membership.opened(StreamId("2"), 1.0)
    membership.greeted(StreamId("2"), hello("x", 1), 1.0)  # the same start, attached again
    (member,) = membership.pool
    assert member.correction.factor == pytest.approx(2.0)

    membership.opened(StreamId("3"), 2.0)
    membership.greeted(StreamId("3"), hello("y", 2), 2.0)
    (member,) = membership.pool
    assert member.correction.factor == 1.0
