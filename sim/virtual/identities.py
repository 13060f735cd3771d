"""Identities of peers in the virtual world, by their names alone: a keyed hash tells who signed, so
that all runs are the same and no test makes certificates. A liar there keeps to its own name."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from ...dag.plan.plan import PeerId
from ...net.identity.signing import SignatureError
from ...peer.secure.secure_member import SecureMember
from ...proto.broker_pb2 import SignedStatement

__all__ = ["NamedMember", "check_named", "known_member"]


@dataclass(frozen=True)
class NamedMember:
    """A peer by its name."""

    member: PeerId

    @property
    def certificate(self) -> bytes:
        return self.member.encode()

    def sign(self, statement: bytes) -> bytes:
        """Return what only a peer of this name would have signed with."""
        return hmac.digest(self.member.encode(), statement, "sha256")

    def check(self, statement: bytes, signed: SignedStatement) -> PeerId:
        """Return who signed. Raises SignatureError."""
        return check_named(statement, signed)


def check_named(statement: bytes, signed: SignedStatement) -> PeerId:
    """Return the peer by whose name a statement is signed. Raises SignatureError."""
    name = signed.certificate
    if not name or not hmac.compare_digest(
        hmac.digest(name, statement, "sha256"), signed.signature
    ):
        raise SignatureError("the signature is of another peer")
    return PeerId(name.decode())


def known_member(peer: PeerId, run: str, round_: int) -> SecureMember:
    """Return the part of a peer in a round, whose secrets are the same every time."""
    return SecureMember(NamedMember(peer), run, round_, _drawn(f"{peer}\0{run}\0{round_}"))


def _drawn(seed: str) -> Callable[[int], bytes]:
    numbers = count(1)
    return lambda size: hashlib.shake_256(f"{seed}\0{next(numbers)}".encode()).digest(size)
