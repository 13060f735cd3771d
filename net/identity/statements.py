"""Statements of peers as messages have them: the bytes that travel, signed with what they are of.

Whoever gets one checks it with the authority's certificate alone, and so does whoever reads it in a
log. In simulations peers have names in place of certificates (`sim/virtual/identities.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import SignedStatement
from .credential import Credential
from .names import PartyRole
from .signing import SignatureError, sign, signer_of

__all__ = [
    "CertifiedMember",
    "CheckStatement",
    "MemberIdentity",
    "MemberOfNetwork",
    "checked_by",
    "signed",
    "signer",
]

CheckStatement = Callable[[bytes, SignedStatement], PeerId]
"""Returns the peer that signed these bytes. Raises SignatureError."""


class MemberIdentity(Protocol):
    """Identity of a member, and the authority by which it knows others."""

    @property
    def member(self) -> PeerId:
        """Id of the member."""

    @property
    def certificate(self) -> bytes:
        """Certificate, PEM, by which others check what it signs."""

    def sign(self, statement: bytes) -> bytes:
        """Return a signature under a statement."""

    def check(self, statement: bytes, signed: SignedStatement) -> PeerId:
        """Return who signed a statement. Raises SignatureError."""


MemberOfNetwork = Callable[[PeerId], MemberIdentity]
"""Returns the identity of a peer, as it is now."""


@dataclass(frozen=True)
class CertifiedMember:
    """A peer by its certificate. now: what time it is, aware."""

    credential: Credential
    now: Callable[[], datetime]

    @property
    def member(self) -> PeerId:
        return PeerId(self.credential.party.subject)

    @property
    def certificate(self) -> bytes:
        return self.credential.certificate

    def sign(self, statement: bytes) -> bytes:
        """Return a signature by the key of the certificate."""
        return sign(self.credential, statement)

    def check(self, statement: bytes, signed: SignedStatement) -> PeerId:
        """Return the peer that signed a statement, of the same authority. Raises
        SignatureError."""
        return checked_by(self.credential.authority, self.now)(statement, signed)


def checked_by(authority: bytes, now: Callable[[], datetime]) -> CheckStatement:
    """Return the check of what peers of an authority (its certificate, PEM) have signed whose own
    certificates are valid `now` (aware)."""

    def check(statement: bytes, signed: SignedStatement) -> PeerId:
        party = signer_of(signed.certificate, authority, statement, signed.signature, now())
        if party.role is not PartyRole.PEER:
            raise SignatureError(f"{party} is no peer")
        return PeerId(party.subject)

    return check


def signed(identity: MemberIdentity, about: bytes, statement: bytes) -> SignedStatement:
    """Return a statement, signed. `about`: what it is, in front of it for the signature."""
    return SignedStatement(
        statement=statement,
        signature=identity.sign(about + statement),
        certificate=identity.certificate,
    )


def signer(check: CheckStatement, about: bytes, said: SignedStatement) -> PeerId:
    """Return the peer that signed a statement of this kind. Raises SignatureError."""
    return check(about + said.statement, said)
