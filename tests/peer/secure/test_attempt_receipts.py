"""Receipts of one attempt at one peer: which frames count by theirs, and what is claimed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.wiring import (
    GATHER,
    GIVE,
    RESULT,
    VERSION,
    Giver,
    Place,
    VectorSegment,
)
from shoal.dag.schedule.flow import Role
from shoal.net.identity.receipts import RECEIPT, claim_of
from shoal.net.identity.statements import signed
from shoal.net.links.frame import Arrived, FrameKey
from shoal.peer.secure.attempt_receipts import AttemptReceipts
from shoal.proto.broker_pb2 import (
    AttemptStatement,
    RoundGiver,
    RoundPlan,
    RoundQuestion,
    RoundReceipt,
    RoundSegment,
    SignedStatement,
)
from shoal.sim.virtual.identities import NamedMember

A, B, C = map(PeerId, "abc")
PART = 8, 16
PLAN = RoundPlan(run="r.0", term=1, round=5, attempt=2)


def receipts(peer: PeerId, plan: RoundPlan = PLAN) -> AttemptReceipts:
    return AttemptReceipts(NamedMember(peer), "r", plan)


def frame(hop: int = GIVE, data: bytes = b"numbers") -> Arrived:
    """From a to b, with its receipt."""
    mine = receipts(A)
    mine.sign(hop, PART, 0, [memoryview(data)])
    key = FrameKey("r", 2, 5, Role.ROUND, 0, hop, "8:16", A, B)
    spec = TensorSpec((8,), "float32")
    return Arrived(key, "raw", mine.header(key, PART), spec, memoryview(bytearray(data)))


def said(by: PeerId, **changed: Any) -> bytes:
    """A receipt for the frame, of which something is otherwise."""
    found = RoundReceipt.FromString(SignedStatement.FromString(frame().codec_header).statement)
    for name, value in changed.items():
        setattr(found, name, value)
    return signed(NamedMember(by), RECEIPT, found.SerializeToString()).SerializeToString()


WRONG: dict[str, Callable[[], bytes]] = {
    "cannot be read": lambda: b"\xff",
    "cannot be read: the signature": lambda: b"",
    "is of c": lambda: said(C),
    "for other bytes": lambda: said(A, hash=bytes(32)),
}
CHANGED: list[dict[str, Any]] = [
    {"run": "q"},
    {"round": 4},
    {"attempt": 1},
    {"hop": RESULT},
    {"start": 0},
    {"stop": 24},
    {"block": 1},
]


@pytest.mark.parametrize("why", WRONG)
def test_a_frame_counts_with_its_senders_receipt_for_its_bytes_only(why: str) -> None:
    assert receipts(B).read(PART, frame()) is not None
    with pytest.raises(TensorSpecError, match=why):
        receipts(B).read(PART, replace(frame(), codec_header=WRONG[why]()))


@pytest.mark.parametrize("changed", CHANGED, ids=lambda c: next(iter(c)))
def test_a_receipt_is_of_one_frame(changed: dict[str, Any]) -> None:
    with pytest.raises(TensorSpecError, match="is of a, for another frame"):
        receipts(B).read(PART, replace(frame(), codec_header=said(A, **changed)))


def test_a_version_has_no_receipt() -> None:
    key = frame().key._replace(hop=VERSION)
    bare = replace(frame(), key=key, codec_header=b"")
    assert receipts(B).read(PART, bare) is None
    assert receipts(A).header(key, PART) == b""
    with pytest.raises(TensorSpecError, match="expected no receipt"):
        receipts(B).read(PART, replace(frame(), key=key))


def test_it_signs_once_whatever_comes_later() -> None:
    mine, key = receipts(A), frame().key
    mine.sign(GIVE, PART, 0, [memoryview(b"first")])
    first = mine.header(key, PART)
    mine.sign(GIVE, PART, 0, [memoryview(b"second")])
    assert mine.header(key, PART) == first


def test_claims_are_of_the_parts_that_end_in_a_segment_in_order() -> None:
    """Segments begin and end inside of pieces, parts where pieces do."""
    plan = RoundPlan(run="r.0", term=1, round=5, attempt=2)
    for start, stop in ((0, 19), (19, 40)):
        mine = RoundSegment(start=start, stop=stop, aggregator=A, takers=[A])
        mine.givers.extend([RoundGiver(peer=A, weight=1), RoundGiver(peer=B, weight=1)])
        plan.segments.append(mine)
    at, given = receipts(A, plan), {}
    for part in ((16, 24), (8, 16), (24, 40), (0, 8)):
        at.sign(GIVE, part, 0, [memoryview(b"a")])
        at.sign(RESULT, part, 0, [memoryview(b"sum")])
        asked = RoundQuestion(hop=GIVE, start=part[0], stop=part[1], signer=A)
        [given[part]] = [r.statement for r in at.answer(asked).receipts]
    told = AttemptStatement.FromString(at.statement([3]).statement)
    wanted = [
        claim_of([given[0, 8], given[8, 16]]),
        claim_of([given[16, 24], given[24, 40]]),
    ]
    nothing = claim_of([])
    assert [*told.gave] == wanted
    assert [*told.heard] == [wanted[0], nothing, wanted[1], nothing]
    assert len(set(told.got) | {nothing}) == 3
    assert (told.run, told.round, told.attempt, [*told.hashes]) == ("r", 5, 2, [3])
    plan.unclaimed = True
    told = AttemptStatement.FromString(at.statement([3]).statement)
    assert {*told.gave, *told.heard, *told.got} == {b""}


def test_a_result_that_is_passed_on_counts_with_the_receipt_of_who_made_it() -> None:
    made = frame(RESULT)
    passed = replace(made, key=made.key._replace(source=C))
    assert receipts(B).read(PART, passed, signer=A) is not None
    with pytest.raises(TensorSpecError, match="its receipt is of a, for another frame"):
        receipts(B).read(PART, passed)
    other = replace(passed, data=memoryview(bytearray(b"others!")))
    with pytest.raises(TensorSpecError, match="for other bytes"):
        receipts(B).read(PART, other, signer=A)


def test_who_adds_up_again_knows_what_an_honest_gatherer_signs() -> None:
    """And shows it to nobody, as nobody has signed it."""
    total, heard = [memoryview(b"sum")], b"\1" * 32
    gatherer, again = receipts(A), receipts(B)
    gatherer.sign_sum(A, PART, total, heard)
    again.sign_sum(A, PART, total, heard)
    giver = ((GATHER, A), 1)
    assert gatherer.heard(PART, [giver]) == again.heard(PART, [giver])
    segment = VectorSegment((0, 40), B, (Giver(A, 1), Giver(C, 2)), places=(Place(A, (A, C)),))
    [*_, mine], [*_, claimed] = (r.heard_of(segment) for r in (gatherer, again))
    assert mine == claimed != claim_of([])
    asked = RoundQuestion(hop=GATHER, start=0, stop=40, signer=A)
    assert not again.answer(asked).receipts
    [shown] = gatherer.answer(asked).receipts
    again.sign_sum(A, PART, [memoryview(b"another")], heard)
    assert claim_of([shown.statement]) == claimed != again.heard_of(segment)[-1]
