"""What the search for listed plans says of a candidate, against lists and the judge."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.auto import space_of
from shoal.planner.search.deep import deep_starts
from shoal.planner.search.depth import Lister, deepened, rooms
from shoal.tests.planner.cases import chain, random_case


@given(st.integers(0, 2**32 - 1))
def test_visits_are_listed_with_the_judges_times(seed: int) -> None:
    """With all else left out, lists end when the judge says that the last visit does."""
    request, rng = random_case(seed, held=False), random.Random(seed)
    judge = CostModel(request)
    peers = rng.sample(range(len(request.offers)), rng.randint(1, len(request.offers)))
    stages = min(len(peers), judge.operators)
    candidate = chain(peers[:stages], judge.even_cuts(stages), request.microbatches)
    assume(judge.cuttable(candidate) and judge.fits(candidate))
    has = rooms(judge, candidate, "listed")
    visits, ended_s = Lister(judge, candidate, "listed").visits(dict(enumerate(has)))
    structure, played = judge.play(replace(candidate, schedule="listed", visits=visits))
    actions = zip(structure.program.actions, played.end, strict=True)
    last = max(
        end
        for action, end in actions
        if action.content is None
        and action.stage >= 0
        and action.kind.name in ("FORWARD", "BACKWARD")
    )
    # Links that are shared only make it later.
    assert ended_s <= last * (1 + 1e-6)


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1))
def test_what_is_found_can_be_planned(seed: int) -> None:
    judge = CostModel(random_case(seed, held=False))
    options = replace(judge.request.options, schedule="auto")
    judge = CostModel(replace(judge.request, options=options))
    space = space_of(judge.request)
    known = chain([0], [0, judge.operators], judge.request.microbatches)
    assume(judge.fits(known))
    for candidate in deep_starts(judge, space, [known]):
        assert judge.cuttable(candidate)
        found = deepened(judge, candidate, 1)
        assert found.seconds == pytest.approx(judge.seconds(found.candidate))
