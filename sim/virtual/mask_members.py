"""Members of sums with masks in the virtual world, where all runs are the same: who signs is told
by a keyed hash, and what is random follows from who draws it. The masks are those of daemons."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

from ...dag.plan.plan import PeerId
from ...net.identity.signing import SignatureError
from ...peer.secure.secure_member import SecureMember
from ...proto.broker_pb2 import SignedKey

__all__ = ["known_member"]


@dataclass(frozen=True)
class _Named:
    """A peer by its name alone."""

    member: PeerId

    @property
    def certificate(self) -> bytes:
        return self.member.encode()

    def sign(self, statement: bytes) -> bytes:
        """Return what only a peer of this name would have signed with."""
        return hmac.digest(self.member.encode(), statement, "sha256")

    def check(self, statement: bytes, signed: SignedKey) -> PeerId:
        """Return who signed. Raises SignatureError."""
        if not hmac.compare_digest(
            hmac.digest(signed.certificate, statement, "sha256"), signed.signature
        ):
            raise SignatureError("the signature is of another peer")
        return PeerId(signed.certificate.decode())


def known_member(peer: PeerId, run: str, round_: int) -> SecureMember:
    """Return the part of a peer in a round, whose secrets are the same every time."""
    return SecureMember(_Named(peer), run, round_, _drawn(f"{peer}\0{run}\0{round_}"))


def _drawn(seed: str) -> Callable[[int], bytes]:
    drawn = 0

    def draw(size: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_256(f"{seed}\0{drawn}".encode()).digest(size)

    return draw
