"""Candidates and the plans made of them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.plan.plan import PeerId
from shoal.planner.cost.candidate import Candidate, StageShare, to_plan


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """Pipelines over disjoint peers, each cut for itself."""
    operators, peers = draw(st.integers(2, 8)), iter(draw(st.permutations(range(12))))
    pipelines = []
    for _ in range(draw(st.integers(1, 3))):
        inner = draw(st.sets(st.integers(1, operators - 1), max_size=3))
        at = [0, *sorted(inner), operators]
        pipelines.append(tuple(StageShare(next(peers), a, b) for a, b in itertools.pairwise(at)))
    return Candidate(tuple(pipelines), (1,) * len(pipelines))


@given(candidates())
def test_peers_stand_in_the_order_of_the_plan(candidate: Candidate) -> None:
    plan = to_plan(candidate, [PeerId(str(i)) for i in range(12)], 1)
    assert plan.peers == tuple(str(p) for p in candidate.peers)
