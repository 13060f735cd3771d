"""Interleaved weighted round robin: one holder of each stage, as often as it is fast."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.swarm.routing import round_robin

TIMES = st.sampled_from([0.5, 1.0, 1.0, 1.5, 2.0, 3.0, 10.0])
STAGE = st.lists(TIMES, min_size=1, max_size=4)


@st.composite
def swarms(draw: st.DrawFn) -> list[dict[int, float]]:
    """By stage and holder, seconds; every holder has a number of its own."""
    of = itertools.count()
    return [{next(of): s for s in draw(STAGE)} for _ in range(draw(st.integers(1, 4)))]


@given(swarms(), st.integers(1, 40), st.integers(0, 3))
def test_every_microbatch_has_one_holder_of_every_stage(
    seconds: list[dict[int, float]], count: int, seed: int
) -> None:
    ways = round_robin(seconds, count, seed)
    assert len(ways) == count
    for way in ways:
        assert len(way) == len(seconds)
        assert all(p in of for p, of in zip(way, seconds, strict=True))
    assert ways == round_robin(seconds, count, seed)


@given(swarms(), st.integers(1, 40))
def test_after_every_microbatch_two_holders_have_worked_equally_long_but_for_one(
    seconds: list[dict[int, float]], count: int
) -> None:
    """So shares are those of the speeds to within one microbatch."""
    ways = round_robin(seconds, count)
    for k, of in enumerate(seconds):
        for m in range(1, count + 1):
            done = Counter(way[k] for way in ways[:m])
            for p, q in itertools.permutations(of, 2):
                assert done[p] * of[p] <= (done[q] + 1) * of[q] + 1e-9


@given(STAGE, st.integers(1, 6))
def test_a_stage_is_done_as_early_as_any_choice_of_holders_has_it(
    times: list[float], count: int
) -> None:
    ways = round_robin([dict(enumerate(times))], count)
    ours = Counter(way[0] for way in ways)
    every = itertools.product(range(len(times)), repeat=count)
    least = min(max(Counter(of)[p] * times[p] for p in of) for of in every)
    assert max(ours[p] * times[p] for p in ours) <= least + 1e-9


def test_equals_are_drawn_by_the_seed_and_work_equally_often() -> None:
    stages = [dict.fromkeys(range(4), 1.0), dict.fromkeys(range(4, 8), 1.0)]
    ways = round_robin(stages, 400)
    assert Counter(way[0] for way in ways) == dict.fromkeys(range(4), 100)
    met = Counter(ways)
    assert len(met) == 16, "who sends to whom is drawn"
    assert all(10 <= m <= 40 for m in met.values())
    assert ways != round_robin(stages, 400, seed=1)
