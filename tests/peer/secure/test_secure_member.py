"""Sums with masks: exact whoever is lost when, and refused where anything is not in order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.sums import WeightedSum
from shoal.net.identity.authority import Authority
from shoal.net.identity.names import Party, PartyRole
from shoal.net.identity.statements import CertifiedMember
from shoal.peer.secure.round_keys import SecureSumError
from shoal.peer.secure.secure_member import SecureMember
from shoal.proto.broker_pb2 import MaskKey, SignedStatement

from .people import NOW, deal, drawn, give, hold, identity, members_of, reveal

WORD = 2**64
PARTS = [(0, 4), (4, 9)]


def wrapped(total: int) -> int:
    return (total + WORD // 2) % WORD - WORD // 2


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_the_sum_is_exact_whoever_is_lost_in_whichever_phase(data: st.DataObject) -> None:
    count, seed = data.draw(st.integers(3, 10)), data.draw(st.integers(0, 10**6))
    members = members_of(count, seed)
    number = st.integers(-(2**63), 2**63 - 1)
    given_ = {m: torch.tensor(data.draw(st.lists(number, min_size=9, max_size=9))) for m in members}

    def lost() -> list[PeerId]:
        """Up to 30 % of those that are there, in each phase."""
        most = min(int(0.3 * len(members)), len(members) - 3)
        return data.draw(st.lists(st.sampled_from(list(members)), max_size=most, unique=True))

    def leave(gone: list[PeerId]) -> None:
        for name in gone:
            del members[name]

    leave(lost())  # before they say anything
    gone = lost()
    deal(members, 1, gone)
    leave(gone)
    gone = lost()
    deal(members, 2)
    give(members, PARTS, given_, gone)
    leave(gone)
    passing = deal(members, 3)
    adders = give(members, PARTS, given_)
    hold(members, passing)
    gone = lost()
    left = {name: m for name, m in members.items() if name not in gone}
    reveal(left, passing)
    for member in left.values():
        for adder in adders:
            start, stop = adder.part
            wanted = [wrapped(sum(int(given_[m][i]) for m in members)) for i in range(start, stop)]
            assert member.unmasked(adder.part, adder.total).tolist() == wanted


def test_the_mean_has_the_bits_of_a_sum_in_the_clear() -> None:
    members, weights = members_of(5), [3, 1, 7, 2, 11]
    values = {
        m: torch.randn(9, generator=torch.Generator().manual_seed(i)) for i, m in enumerate(members)
    }
    plain = WeightedSum(9, sum(weights), 10)
    fixed = {}
    for (name, tensor), weight in zip(values.items(), weights, strict=True):
        plain.add(tensor, weight)
        fixed[name] = plain.grid.fixed(tensor, weight)
    passing = deal(members, 1)
    [adder] = give(members, [(0, 9)], fixed)
    hold(members, passing)
    reveal(members, passing)
    first = members[PeerId("p0")]
    assert torch.equal(plain.grid.mean(first.unmasked((0, 9), adder.total)), plain.mean())


# ---------------------------------------------------------------- wrong keys


def said_by(name: str, **changed: object) -> SignedStatement:
    """Keys that somebody signed, of which something is otherwise."""
    keys = MaskKey(run="run", round=3, member=name, exchange=b"k" * 32)
    for field, value in changed.items():
        setattr(keys, field, value)
    data, signer = keys.SerializeToString(deterministic=True), identity(name)
    signature = signer.sign(b"shoal mask key\0" + data)
    return SignedStatement(statement=data, signature=signature, certificate=signer.certificate)


def forged() -> SignedStatement:
    """Whose signature is of other keys."""
    found, other = said_by("p2"), said_by("p2", exchange=b"x" * 32)
    return SignedStatement(
        statement=other.statement, signature=found.signature, certificate=found.certificate
    )


def swapped() -> SignedStatement:
    """Signed by another member, in the name of this one."""
    data = MaskKey.FromString(said_by("p2").statement).SerializeToString(deterministic=True)
    other = identity("p9")
    signature = other.sign(b"shoal mask key\0" + data)
    return SignedStatement(statement=data, signature=signature, certificate=other.certificate)


def elsewhere() -> SignedStatement:
    """By the certificate of another authority, which says the same name."""
    credential = Authority.new(NOW).credential(Party(PartyRole.PEER, "p2"), NOW, timedelta(days=1))
    return by(CertifiedMember(credential, lambda: NOW))


def by(other: CertifiedMember) -> SignedStatement:
    return SecureMember(other, "run", 3, drawn(7)).key


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (forged, "not by the key of the certificate"),
        (swapped, "p2: this key was signed by p9"),
        (elsewhere, "not one of this network's authority"),
        (lambda: by(identity("p2", days=0)), "not valid on"),
        (lambda: by(identity("p2", role=PartyRole.SUBMITTER)), "submitter p2 is no peer"),
        (lambda: said_by("p2", round=2), "p2: a key of round 2 of run: expected round 3"),
        (lambda: said_by("p2", run="other"), "p2: a key of round 3 of other"),
        (lambda: said_by("p2", exchange=b"short"), "p2: a key of 5 bytes: expected 32"),
        (lambda: said_by("p2", exchange=bytes(32)), "p2: its key is none"),
        (lambda: said_by("p1"), "p1: has keys twice"),
        (
            lambda: SignedStatement(statement=b"\xff", certificate=b"", signature=b""),
            "the key of a member",
        ),
    ],
)
def test_keys_that_are_not_a_members_are_refused(
    wrong: Callable[[], SignedStatement], words: str
) -> None:
    member = members_of(2)
    told = [m.key for m in member.values()]
    with pytest.raises(SecureSumError, match=words):
        member[PeerId("p0")].deal(1, [*told, wrong()])
    with pytest.raises(SecureSumError, match="in no attempt"):
        member[PeerId("p0")].masked((0, 1), torch.zeros(1, dtype=torch.int64))


def test_good_keys_of_the_same_making_are_taken() -> None:
    member = members_of(2)
    told = [m.key for m in member.values()]
    assert set(member[PeerId("p0")].deal(1, [*told, said_by("p2")])) == {"p0", "p1", "p2"}


def test_two_are_too_few_and_without_its_own_keys_it_joins_nothing() -> None:
    members = members_of(4)
    told = [m.key for m in members.values()]
    with pytest.raises(SecureSumError, match="2 members: expected at least 3"):
        members[PeerId("p0")].deal(1, told[:2])
    with pytest.raises(SecureSumError, match="another key than its own"):
        members[PeerId("p0")].deal(1, told[1:])


def test_each_attempt_has_masks_of_its_own() -> None:
    members = members_of(4)
    p0, values = members[PeerId("p0")], torch.zeros(3, dtype=torch.int64)
    first = deal(members, 1)
    before = p0.masked((0, 3), values)
    with pytest.raises(SecureSumError, match="behind attempt 1"):
        p0.deal(1, first.told)
    deal(members, 2)
    assert not (p0.masked((0, 3), values) == before).any()


# ---------------------------------------------------------------- wrong shares


def test_a_share_of_another_or_of_an_earlier_attempt_does_not_open() -> None:
    members = members_of(4)
    first = deal(members, 1)
    second = deal(members, 2)
    p0 = members[PeerId("p0")]
    for wrong in (first.dealt["p2"]["p0"], second.dealt["p2"]["p3"], second.dealt["p1"]["p0"], b""):
        with pytest.raises(SecureSumError, match="p2: dealt a share that does not open"):
            p0.hold({**second.sealed_for(PeerId("p0")), PeerId("p2"): wrong})
    with pytest.raises(SecureSumError, match="p3: dealt no share"):
        p0.hold({n: s for n, s in second.sealed_for(PeerId("p0")).items() if n != "p3"})
    with pytest.raises(SecureSumError, match="holds no shares yet"):
        p0.reveal(2)
    p0.hold(second.sealed_for(PeerId("p0")))
    assert set(p0.reveal(2)) == set(members)


def test_members_that_were_told_of_different_ones_open_nothing_of_each_other() -> None:
    members = members_of(5)
    told = {n: m.key for n, m in members.items()}
    some, others = ("p0", "p1", "p2"), ("p0", "p1", "p3", "p4")
    dealt = {n: members[PeerId(n)].deal(1, [told[PeerId(m)] for m in some]) for n in ("p0", "p2")}
    dealt |= {
        n: members[PeerId(n)].deal(1, [told[PeerId(m)] for m in others]) for n in ("p1", "p3")
    }
    with pytest.raises(SecureSumError, match="p1: dealt a share that does not open"):
        members[PeerId("p0")].hold({PeerId(m): dealt[m][PeerId("p0")] for m in ("p0", "p1", "p2")})


def test_it_reveals_in_one_attempt_and_is_in_none_behind_it() -> None:
    members = members_of(4)
    passing = deal(members, 1)
    hold(members, passing)
    p0 = members[PeerId("p0")]
    with pytest.raises(SecureSumError, match="attempt 2 is to be revealed, in attempt 1"):
        p0.reveal(2)
    with pytest.raises(SecureSumError, match="did not reveal"):
        p0.open({})
    shares = p0.reveal(1)
    assert p0.reveal(1) == shares, "asked again, by a broker that was started again"
    others = [m.key for n, m in members.items() if n != "p1"]
    with pytest.raises(SecureSumError, match="the sum of other members would tell"):
        p0.deal(2, others)
    assert p0.reveal(1) == shares


def test_what_is_opened_is_the_masks_or_refused() -> None:
    members = members_of(5)
    passing = deal(members, 1)
    hold(members, passing)
    for name, member in list(members.items())[:2]:
        passing.revealed[name] = member.reveal(1)
    with pytest.raises(ValueError, match="shares of 2: expected those of 3"):
        passing.own_masks()
    for name, member in members.items():
        passing.revealed[name] = member.reveal(1)
    p0, masks = members[PeerId("p0")], passing.own_masks()
    with pytest.raises(SecureSumError, match="not known yet"):
        p0.unmasked((0, 1), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(SecureSumError, match="p3: this is not the mask"):
        p0.open({**masks, PeerId("p3"): masks[PeerId("p2")]})
    with pytest.raises(SecureSumError, match="p3: this is not the mask"):
        p0.open({m: mask for m, mask in masks.items() if m != "p3"})
    passing.revealed[PeerId("p1")] |= {PeerId("p3"): b"\1" * 33}
    try:
        wrong = passing.own_masks()
    except ValueError:
        wrong = {}
    with pytest.raises(SecureSumError, match="this is not the mask"):
        p0.open(wrong)
    passing.revealed[PeerId("p1")] = {}
    with pytest.raises(ValueError, match="p1 has no share of the secret of p0"):
        passing.own_masks()
    p0.open(masks)


def test_no_mask_hides_two_things() -> None:
    members = members_of(3)
    deal(members, 1)
    p0, values = members[PeerId("p0")], torch.arange(4)
    p0.masked((4, 8), values)
    for start, stop in ((4, 8), (0, 5), (7, 9), (5, 6)):
        with pytest.raises(SecureSumError, match="were given already"):
            p0.masked((start, stop), torch.zeros(stop - start, dtype=torch.int64))
    p0.masked((8, 12), values)
