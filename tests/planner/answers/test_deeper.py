"""As many replicas as can be, and pipelines of clients where no peer has memory for the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.answers.deeper import most_of, or_deeper
from shoal.planner.base.interface import NoPlan, PlannerOptions
from shoal.planner.requests.requirements import RunRequirements


@given(most=st.integers(1, 40), can=st.integers(0, 40))
def test_the_most_that_can_be_made_is(most: int, can: int) -> None:
    tried = 0

    def made(count: int) -> int:
        nonlocal tried
        tried += 1
        if count > can:
            raise NoPlan(f"{count} are too many", "memory")
        return count

    if not can:
        with pytest.raises(NoPlan, match="1 are too many"):
            most_of(most, made)
        return
    assert most_of(most, made) == min(most, can)
    assert tried <= 2 + most.bit_length()


@dataclass
class Wish:
    """What is asked of requirements."""

    options: PlannerOptions
    deeper: PlannerOptions | None
    cohorts: object = "clients"
    one_peer: str = "why"


ALONE, DEEP = PlannerOptions(stages=1), PlannerOptions(stages=None)


@pytest.mark.parametrize(
    ("wish", "code", "tried"),
    [
        (Wish(ALONE, DEEP), "memory", [1, None]),
        (Wish(ALONE, DEEP), "peers", [1]),
        (Wish(ALONE, None), "memory", [1]),
        (Wish(PlannerOptions(stages=3), None), "memory", [3]),
        (Wish(ALONE, None, cohorts=None), "memory", [1]),
    ],
)
def test_stages_are_tried_only_where_memory_is_short(wish: Any, code: Any, tried: Any) -> None:
    seen: list[int | None] = []

    def made(options: PlannerOptions) -> int:
        seen.append(options.stages)
        if options.stages is not None:
            raise NoPlan("nothing fits", code)
        return 7

    if tried[-1] is None:
        assert or_deeper(cast(RunRequirements, wish), made) == 7
    else:
        with pytest.raises(NoPlan, match="nothing fits") as error:
            or_deeper(cast(RunRequirements, wish), made)
        said = "cannot train a client together: why" in error.value.reason
        assert said == (code == "memory" and bool(wish.cohorts) and wish.options.stages == 1)
    assert seen == tried
