"""Which samples the batches of participants have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.permutation import key, permute
from shoal.peer.federated.batches import Participant, batches

COHORTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def participants(sizes: list[int]) -> list[Participant]:
    rng = np.random.default_rng(len(sizes))
    return [Participant(7 * i, rng.permutation(1000)[:n]) for i, n in enumerate(sizes)]


@given(COHORTS, st.integers(1, 9), st.integers(1, 3))
def test_a_pass_has_each_sample_once(sizes: list[int], batch: int, passes: int) -> None:
    cohort = participants(sizes)
    found = batches(cohort, seed=3, round_=5, batch=batch, passes=passes)
    for one, mine in zip(cohort, found, strict=True):
        n, each = len(one.samples), -(-len(one.samples) // batch)
        assert len(mine) == passes * each
        assert all(len(b) == batch for k, b in enumerate(mine) if (k + 1) % each)
        for e in range(passes):
            walk = np.concatenate(mine[e * each : (e + 1) * each])
            assert sorted(walk) == sorted(one.samples)
            assert len(walk) == n


@given(COHORTS, st.integers(1, 9), st.integers(1, 30))
def test_so_many_steps_are_the_first_of_as_many_passes_as_that_takes(
    sizes: list[int], batch: int, steps: int
) -> None:
    cohort = participants(sizes)
    found = batches(cohort, seed=3, round_=5, batch=batch, steps=steps)
    whole = batches(cohort, seed=3, round_=5, batch=batch, passes=steps)
    for mine, all_of_it in zip(found, whole, strict=True):
        assert len(mine) == steps
        assert all(map(np.array_equal, mine, all_of_it))


def test_the_order_of_a_pass_is_that_of_its_own_words() -> None:
    [one] = participants([23])
    [found] = batches([one], seed=3, round_=5, batch=23, passes=2)
    for e, walk in enumerate(found):
        words = [int(permute(np.array([i]), 23, key(3, 7, 5, one.number, e))[0]) for i in range(23)]
        assert walk.tolist() == [one.samples[i] for i in words]


def test_they_hang_on_seed_round_and_participant_and_not_on_who_is_beside() -> None:
    cohort = participants([30, 30, 17])
    found = batches(cohort, seed=3, round_=5, batch=30, passes=2)
    alone = batches(cohort[1:2], seed=3, round_=5, batch=30, passes=2)
    assert all(map(np.array_equal, found[1], alone[0]))
    orders = [
        found[0][0],
        found[0][1],
        batches(cohort[:1], seed=3, round_=6, batch=30, passes=1)[0][0],
        batches(cohort[:1], seed=4, round_=5, batch=30, passes=1)[0][0],
        batches([Participant(9, cohort[0].samples)], seed=3, round_=5, batch=30, passes=1)[0][0],
    ]
    assert len({tuple(o) for o in orders}) == len(orders)


def test_a_participant_without_samples_is_named() -> None:
    nobody = Participant(4, np.empty(0, np.int64))
    with pytest.raises(ValueError, match="participant 4 has no samples"):
        batches([*participants([3]), nobody], seed=0, round_=0, batch=2, passes=1)
