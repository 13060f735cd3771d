"""What members tell each other of their keys: signed with the key of a certificate, so that whoever
passes it on cannot put in a key of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from google.protobuf.message import DecodeError

from ...dag.plan.plan import PeerId
from ...dag.rounds.secret_sharing import majority
from ...job.clients.client_options import LEAST_MEMBERS
from ...net.identity.signing import SignatureError
from ...net.identity.statements import MemberIdentity, signed, signer
from ...proto.broker_pb2 import MaskKey, SignedStatement

__all__ = [
    "OwnKey",
    "Roster",
    "SecureSumError",
    "roster_of",
]

_BEGINS = b"shoal mask key\0"


class SecureSumError(ValueError):
    """What came is not as the protocol has it, and nothing was done. member: whose it is; empty:
    nobody's by name."""

    def __init__(self, why: str, member: str = "") -> None:
        super().__init__(f"{member}: {why}" if member else why)
        self.member = member


class OwnKey:
    """The key of a member for one round, and what it says of it. `draw`: so many random bytes that
    nobody can guess."""

    def __init__(
        self, identity: MemberIdentity, run: str, round_: int, draw: Callable[[int], bytes]
    ) -> None:
        self.exchange = X25519PrivateKey.from_private_bytes(draw(32))
        public = self.exchange.public_key().public_bytes_raw()
        key = MaskKey(run=run, round=round_, member=identity.member, exchange=public)
        said = key.SerializeToString(deterministic=True)
        self.said = signed(identity, _BEGINS, said)


@dataclass(frozen=True)
class Roster:
    """Members whose contributions an attempt adds up, and no others. members: the public key of
    each, by id, ascending. digest: of all that was agreed on, with the attempt's number."""

    members: Mapping[PeerId, bytes]
    digest: bytes

    @property
    def threshold(self) -> int:
        """Number of members that find a mask again."""
        return majority(len(self.members))

    @cached_property
    def places(self) -> Mapping[PeerId, int]:
        """Places of members among those who share secrets, from 1."""
        return {member: place for place, member in enumerate(self.members, 1)}

    def shared(self, mine: X25519PrivateKey, other: PeerId) -> bytes:
        """Return the secret of two members, 32 bytes. Raises SecureSumError."""
        try:
            return mine.exchange(X25519PublicKey.from_public_bytes(self.members[other]))
        except ValueError:
            raise SecureSumError("its key is none", other) from None


def roster_of(
    told: Iterable[SignedStatement], identity: MemberIdentity, run: str, round_: int, attempt: int
) -> Roster:
    """Return the members of an attempt by what they say of their keys. Raises SecureSumError for
    a key that is not signed by whose it is said to be, or of another run or round, for two of one
    member, and for too few."""
    found: dict[PeerId, bytes] = {}
    for said in told:
        try:
            key = MaskKey.FromString(said.statement)
            by = signer(identity.check, _BEGINS, said)
        except (DecodeError, SignatureError) as error:
            raise SecureSumError(f"the key of a member: {error}") from None
        if key.member != by:
            raise SecureSumError(f"this key was signed by {by}", key.member)
        if (key.run, key.round) != (run, round_):
            raise SecureSumError(
                f"a key of round {key.round} of {key.run}: expected round {round_} of {run}", by
            )
        if by in found:
            raise SecureSumError("has keys twice", by)
        if len(key.exchange) != 32:
            raise SecureSumError(f"a key of {len(key.exchange)} bytes: expected 32", by)
        found[by] = key.exchange
    if len(found) < LEAST_MEMBERS:
        raise SecureSumError(f"{len(found)} members: expected at least {LEAST_MEMBERS}")
    members = {member: found[member] for member in sorted(found)}
    digest = hashlib.sha256(f"shoal roster\0{run}\0{round_}\0{attempt}\0".encode())
    for member, exchange in members.items():
        digest.update(f"{member}\0".encode() + exchange)
    return Roster(members, digest.digest())
