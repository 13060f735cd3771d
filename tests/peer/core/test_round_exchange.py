"""What one holder waits for in an exchange, and what it says of that."""

from __future__ import annotations

import pytest

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds import vector as of_vector
from shoal.dag.rounds.vector import Entry, RunVector
from shoal.dag.rounds.wiring import GATHER, GIVE, RESULT, port_of
from shoal.net.links.frame import FrameKey, Role
from shoal.peer.core import events as e
from shoal.peer.core.rounds.round_exchange import RoundExchange
from shoal.proto.broker_pb2 import RoundGiver, RoundPlace, RoundPlan, RoundSegment

A, B, C, D = map(PeerId, "abcd")
FIRST, SECOND = (0, 8), (8, 16)


def exchange(me: PeerId, plan: RoundPlan) -> RoundExchange:
    vector = RunVector([Entry("param:w", TensorSpec((16,), "float32"), 0, 0)])
    made = RoundExchange(me, "r.1", 1, vector)
    made.planned(plan)
    made.joins()
    return made


def key(source: PeerId, to: PeerId, hop: int, part: tuple[int, int]) -> FrameKey:
    return FrameKey("r", 1, 3, Role.ROUND, 0, hop, port_of(part), source, to)


def plan(*segments: RoundSegment, together: bool = False) -> RoundPlan:
    return RoundPlan(
        run="r.1", term=1, round=3, attempt=1, segments=segments, together=together, weight=4
    )


def segment(part: tuple[int, int], by: PeerId, near: tuple[PeerId, ...] = ()) -> RoundSegment:
    """All four give and take; of those that are `near` the first is between."""
    made = RoundSegment(start=part[0], stop=part[1], aggregator=by, takers=[A, B, C, D])
    made.givers.extend(RoundGiver(peer=p, weight=1) for p in (A, B, C, D))
    if near:
        made.places.append(RoundPlace(gatherer=near[0], givers=near, takers=near))
    return made


@pytest.fixture(autouse=True)
def _parts_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_vector, "PIECE", 8)


def sent(out: list[e.Instruction], hop: int) -> set[str]:
    return {i.key.destination for i in out if isinstance(i, e.SendFrame) and i.key.hop == hop}


def test_what_is_lacked_is_said_by_what_it_is_made_of() -> None:
    """Of c and d, c gives the sum to a, which adds up the first part; b adds up the second."""
    mine = plan(segment(FIRST, A, (C, D)), segment(SECOND, B, (C, D)))
    at = {p: exchange(p, mine) for p in (A, B, C, D)}
    for one in at.values():
        one.begins()
    assert at[A].lacking() == ([B], "late")
    assert at[C].lacking() == ([D], "late")
    at[A].arrived(key(B, A, GIVE, FIRST), 3)
    assert at[A].lacking() == ([C], "ungathered")
    out = at[A].arrived(key(C, A, GATHER, FIRST), 3)
    assert sent(out, RESULT) == {B, C}, "d has it from c"
    assert at[A].lacking() == ([B], "unsummed")
    for part in (FIRST, SECOND):
        out = at[C].arrived(key(D, C, GIVE, part), 3)
        assert sent(out, GATHER) == {A if part == FIRST else B}
    assert at[C].lacking() == ([A, B], "unsummed")
    assert at[D].lacking() == ([C], "unpassed")
    assert sent(at[C].arrived(key(A, C, RESULT, FIRST), 3), RESULT) == {D}
    at[D].arrived(key(C, D, RESULT, FIRST), 3)
    at[D].arrived(key(C, D, RESULT, SECOND), 3)
    assert at[D].complete


def test_results_wait_for_the_own_contribution_and_not_for_ever() -> None:
    """Whoever withholds acknowledgements holds nobody else up."""
    mine = plan(segment(FIRST, A), segment(SECOND, B), together=True)
    at = exchange(A, mine)
    assert sent(at.begins(), GIVE) == {B}
    for p in (B, C, D):
        assert not sent(at.arrived(key(p, A, GIVE, FIRST), 3), RESULT)
    assert sent(at.waits_no_longer(), RESULT) == {B, C, D}
    assert at.waits_no_longer() == []
    assert not sent(at.acknowledged(key(A, B, GIVE, SECOND), 1.0, 2.0), RESULT), "once"
