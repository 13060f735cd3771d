"""Statements that a party signed, and who it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from shoal.net.identity.authority import Authority
from shoal.net.identity.names import Party, PartyRole
from shoal.net.identity.signing import SignatureError, sign, signer_of

NOW = datetime(2026, 11, 1, tzinfo=UTC)
AUTHORITY = Authority.new(NOW)
PEER = Party(PartyRole.PEER, "p1")
MINE = AUTHORITY.credential(PEER, NOW, timedelta(days=1))
SAID = b"shoal test: it is so"


def test_it_says_who_signed() -> None:
    signature = sign(MINE, SAID)
    assert signer_of(MINE.certificate, AUTHORITY.pem, SAID, signature, NOW) == PEER
    with pytest.raises(SignatureError, match="not by the key"):
        signer_of(MINE.certificate, AUTHORITY.pem, SAID + b"!", signature, NOW)
    with pytest.raises(SignatureError, match="not by the key"):
        signer_of(MINE.certificate, AUTHORITY.pem, SAID, b"", NOW)


@pytest.mark.parametrize("days", [-1, 1, 2])
def test_a_certificate_counts_as_long_as_it_is_valid(days: int) -> None:
    signature, at = sign(MINE, SAID), NOW + timedelta(days=days)
    with pytest.raises(SignatureError, match="is not valid on"):
        signer_of(MINE.certificate, AUTHORITY.pem, SAID, signature, at)


def test_what_is_no_certificate_of_the_authority_signs_nothing() -> None:
    signature = sign(MINE, SAID)
    other = Authority.new(NOW)
    theirs = other.credential(PEER, NOW, timedelta(days=1))
    for shown in (theirs.certificate, other.pem, b"", b"-----BEGIN CERTIFICATE-----", MINE.key):
        with pytest.raises(SignatureError, match="not one of this network's authority"):
            signer_of(shown, AUTHORITY.pem, SAID, sign(theirs, SAID), NOW)
    with pytest.raises(SignatureError, match="another kind of key"):
        signer_of(AUTHORITY.pem, AUTHORITY.pem, SAID, signature, NOW)


def test_what_could_be_something_else_is_not_signed() -> None:
    with pytest.raises(AssertionError, match="could be something else"):
        sign(MINE, b"anything")
