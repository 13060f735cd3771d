"""Two receipts prove a lie exactly where one honest peer could not have signed both."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.plan.plan import PeerId
from shoal.net.identity.authority import Authority
from shoal.net.identity.names import Party, PartyRole
from shoal.net.identity.receipts import (
    MOST_RECEIPTS,
    RECEIPT,
    NoProofError,
    claim_of,
    contradict,
    data_hash,
    proves,
    wrong_sum,
)
from shoal.net.identity.statements import CertifiedMember, checked_by, signed
from shoal.proto.broker_pb2 import RoundReceipt, SignedStatement

NOW = datetime(2026, 11, 1, tzinfo=UTC)
AUTHORITY = Authority.new(NOW)
CHECK = checked_by(AUTHORITY.pem, lambda: NOW)
ABOUT = {"run": "r", "round": 3, "attempt": 1, "hop": 1, "start": 0, "stop": 8, "hash": b"x"}


def member(name: str, role: PartyRole = PartyRole.PEER) -> CertifiedMember:
    credential = AUTHORITY.credential(Party(role, name), NOW, timedelta(days=1))
    return CertifiedMember(credential, lambda: NOW)


A, B = member("a"), member("b")


def receipt(by: CertifiedMember = A, about: bytes = RECEIPT, **changed: object) -> SignedStatement:
    said = RoundReceipt(**{**ABOUT, **changed})  # type: ignore[arg-type]
    return signed(by, about, said.SerializeToString(deterministic=True))


@pytest.mark.parametrize(
    "changed",
    [{"hash": b"y"}, {"heard": b"z"}, {"stop": 4}, {"start": 7, "stop": 20}],
    ids=["other bytes", "other addends", "a part of it", "some of it"],
)
def test_two_that_differ_about_the_same_elements_are_a_lie(changed: dict[str, object]) -> None:
    assert proves(receipt(), receipt(**changed), CHECK) == "a"
    assert proves(receipt(**changed), receipt(), CHECK) == "a"


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (receipt(), receipt(), "both say the same"),
        (receipt(), receipt(B, hash=b"y"), "one is of ., the other of ."),
        (receipt(), receipt(round=4, hash=b"y"), "different elements"),
        (receipt(), receipt(attempt=2, hash=b"y"), "different elements"),
        (receipt(), receipt(hop=0, hash=b"y"), "different elements"),
        (receipt(), receipt(block=1, hash=b"y"), "different elements"),
        (receipt(), receipt(run="q", hash=b"y"), "different elements"),
        (receipt(), receipt(start=8, stop=16, hash=b"y"), "different elements"),
        (receipt(), receipt(about=b"shoal mask key\0", hash=b"y"), "not by the key"),
        (receipt(), receipt(member("a", PartyRole.SUBMITTER), hash=b"y"), "is no peer"),
    ],
)
def test_what_an_honest_peer_could_have_signed_proves_nothing(
    first: SignedStatement, second: SignedStatement, why: str
) -> None:
    for pair in ((first, second), (second, first)):
        with pytest.raises(NoProofError, match=why):
            proves(*pair, CHECK)


def test_nobody_makes_a_proof_in_anothers_name() -> None:
    """Neither by a certificate of that name, nor by words under its signature."""
    forged = receipt(B, hash=b"y")
    forged.certificate = A.certificate
    other = receipt()
    other.statement = receipt(hash=b"y").statement
    strange = Authority.new(NOW).credential(Party(PartyRole.PEER, "a"), NOW, timedelta(days=1))
    for wrong in (forged, other, receipt(CertifiedMember(strange, lambda: NOW), hash=b"y")):
        with pytest.raises(NoProofError):
            proves(receipt(), wrong, CHECK)


@given(parts=st.lists(st.integers(1, 9), min_size=2, max_size=6), blocks=st.integers(1, 3))
def test_no_two_parts_of_one_vector_contradict_each_other(parts: list[int], blocks: int) -> None:
    made, at = [], 0
    for size in parts:
        for block in range(blocks):
            made.append(RoundReceipt(start=at, stop=at + size, block=block))
        at += size
    for i, one in enumerate(made):
        for j, other in enumerate(made):
            assert contradict(one, other) == (i == j)


@given(st.lists(st.binary(max_size=8), max_size=5), st.lists(st.binary(max_size=8), max_size=5))
def test_a_claim_stands_for_one_list(one: list[bytes], other: list[bytes]) -> None:
    assert (claim_of(one) == claim_of(other)) == (one == other)


def test_a_claim_about_too_many_says_nothing() -> None:
    assert claim_of([b""] * MOST_RECEIPTS)
    assert claim_of([b""] * (MOST_RECEIPTS + 1)) == b""


def test_a_hash_is_of_the_bytes_however_they_are_divided() -> None:
    assert data_hash([b"ab", memoryview(b"c")]) == data_hash([b"abc"])
    assert isinstance(A.member, str)
    assert A.member == PeerId("a")


def add(data: Sequence[bytes]) -> bytes:
    return bytes([sum(map(sum, data)) % 256])


GIFTS = [
    (receipt(by, hop=0, hash=hashlib.sha256(data).digest()), data)
    for by, data in ((A, b"\1"), (B, b"\2"))
]
HEARD = hashlib.sha256(
    b"".join(hashlib.sha256(said.statement).digest() for said, _ in GIFTS)
).digest()


def sum_of(by: CertifiedMember, sum_: bytes, **changed: object) -> SignedStatement:
    return receipt(by, **{"hash": hashlib.sha256(sum_).digest(), "heard": HEARD, **changed})


@pytest.mark.parametrize("false", [{"sum_": b"\4"}, {"sum_": b"\3", "heard": b"others"}])
def test_of_two_who_signed_different_sums_their_addends_show_the_liar(
    false: dict[str, bytes],
) -> None:
    for honest, liar in ((A, B), (B, A)):
        sums = [sum_of(honest, b"\3"), sum_of(liar, **false)]  # type: ignore[arg-type]
        assert wrong_sum(sums, GIFTS, add, CHECK) == liar.member
        assert wrong_sum(sums[::-1], GIFTS, add, CHECK) == liar.member


@pytest.mark.parametrize(
    ("sums", "given_", "why"),
    [
        ((sum_of(A, b"\3"), sum_of(B, b"\3")), GIFTS, "different sums"),
        ((sum_of(A, b"\3"), sum_of(A, b"\4")), GIFTS, "not of two peers"),
        ((sum_of(A, b"\3"), sum_of(B, b"\4", stop=9)), GIFTS, "one part"),
        ((sum_of(A, b"\3", hop=0), sum_of(B, b"\4", hop=0)), GIFTS, "different sums"),
        ((sum_of(A, b"\3"), sum_of(B, b"\4")), GIFTS[::-1], "neither"),
        ((sum_of(A, b"\3"), sum_of(B, b"\4")), [(GIFTS[0][0], b"?"), GIFTS[1]], "these bytes"),
        ((sum_of(A, b"\3"), sum_of(B, b"\4")), [(receipt(round=9), b"")], "another part"),
        ((sum_of(A, b"\3"), sum_of(B, b"\4", about=b"shoal other\0")), GIFTS, "signature"),
    ],
)
def test_sums_and_addends_that_show_no_liar_prove_nothing(
    sums: tuple, given_: list, why: str
) -> None:
    with pytest.raises(NoProofError, match=why):
        wrong_sum(sums, given_, add, CHECK)
