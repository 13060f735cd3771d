"""What peers sign in the exchange of a round, and how two receipts prove a lie.

Who sends a contribution, or the mean of several, signs a receipt for it: which elements of which
attempt these are, and a hash of the bytes. It signs one for the same elements once, and sends the
same signed bytes to everybody. So two different receipts for elements in common, signed by one
peer, are a lie of that peer, whoever shows them: of one that tells two members different things.
Nobody else can make them.

Two who sign different sums of the same contributions cannot both be honest either. Which of them
has lied, the receipts do not say: whoever has the bytes of the contributions can (`wrong_sum`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from google.protobuf.message import DecodeError

from ...dag.plan.plan import PeerId
from ...dag.rounds.wiring import GIVE, RESULT
from ...proto.broker_pb2 import RoundReceipt, SignedStatement
from .signing import SignatureError
from .statements import CheckStatement, signer

__all__ = [
    "ATTEMPT",
    "MOST_RECEIPTS",
    "RECEIPT",
    "NoProofError",
    "another_sum",
    "claim_of",
    "contradict",
    "data_hash",
    "proves",
    "read_receipt",
    "wrong_sum",
]

RECEIPT, ATTEMPT = b"shoal round receipt\0", b"shoal attempt statement\0"
"""What the two kinds of statements begin with where they are signed."""
MOST_RECEIPTS = 192
"""Receipts of one segment that a claim is about, at most: so many fit in one answer."""


class NoProofError(ValueError):
    """Two statements show no lie; the message says why."""


def data_hash(buffers: Iterable[memoryview | bytes]) -> bytes:
    """Return the SHA-256 of buffers one behind the other."""
    found = hashlib.sha256()
    for buffer in buffers:
        found.update(buffer)
    return found.digest()


def claim_of(statements: Iterable[bytes]) -> bytes:
    """Return the hash that stands for receipts in order; empty for more than MOST_RECEIPTS."""
    hashes = [hashlib.sha256(statement).digest() for statement in statements]
    return b"" if len(hashes) > MOST_RECEIPTS else hashlib.sha256(b"".join(hashes)).digest()


def read_receipt(said: SignedStatement, check: CheckStatement) -> tuple[PeerId, RoundReceipt]:
    """Return who signed a receipt, and what it says. Raises SignatureError."""
    by = signer(check, RECEIPT, said)
    try:
        return by, RoundReceipt.FromString(said.statement)
    except DecodeError:
        raise SignatureError(f"{by} has signed what is no receipt") from None


def contradict(first: RoundReceipt, second: RoundReceipt) -> bool:
    """Whether these, of one peer and not of the same bytes, cannot both be honest: they have
    elements in common."""
    of = [(r.run, r.round, r.attempt, r.hop, r.block) for r in (first, second)]
    return of[0] == of[1] and first.start < second.stop and second.start < first.stop


def proves(first: SignedStatement, second: SignedStatement, check: CheckStatement) -> PeerId:
    """Return the peer whose lie two receipts prove. Raises NoProofError where they prove none, be
    it that they are not signed."""
    try:
        (a, one), (b, other) = read_receipt(first, check), read_receipt(second, check)
    except SignatureError as error:
        raise NoProofError(str(error)) from None
    if a != b:
        raise NoProofError(f"one is of {a}, the other of {b}")
    if first.statement == second.statement:
        raise NoProofError("both say the same")
    if not contradict(one, other):
        raise NoProofError("they are about different elements")
    return a


def another_sum(first: RoundReceipt, second: RoundReceipt) -> bool:
    """Whether these are for sums of the same part in one attempt, and not for the same sum."""
    of = [(r.run, r.round, r.attempt, r.hop, r.start, r.stop) for r in (first, second)]
    same = (first.hash, first.heard) == (second.hash, second.heard)
    return of[0] == of[1] and first.hop == RESULT and not same


def wrong_sum(
    sums: Sequence[SignedStatement],
    given: Sequence[tuple[SignedStatement, bytes]],
    add: Callable[[Sequence[bytes]], bytes],
    check: CheckStatement,
) -> PeerId:
    """Return which of two peers has signed a sum that is none. `sums`: their receipts. `given`: the
    receipts and the bytes of what it is of, in order of givers and blocks. `add`: makes the bytes
    of the sum of theirs, as the run does. Raises NoProofError where these show no lie of just one
    of the two."""
    try:
        (a, one), (b, other) = (read_receipt(said, check) for said in sums)
        gifts = [read_receipt(said, check) for said, _ in given]
    except SignatureError as error:
        raise NoProofError(str(error)) from None
    if a == b or not another_sum(one, other):
        raise NoProofError("they are not of two peers for different sums of one part")
    part = one.run, one.round, one.attempt, GIVE, one.start, one.stop
    for (by, gift), (_, data) in zip(gifts, given, strict=True):
        if (gift.run, gift.round, gift.attempt, gift.hop, gift.start, gift.stop) != part:
            raise NoProofError(f"the contribution of {by} is of another part")
        if gift.hash != data_hash([data]):
            raise NoProofError(f"the contribution of {by} is not of these bytes")
    hashes = [hashlib.sha256(said.statement).digest() for said, _ in given]
    heard = hashlib.sha256(b"".join(hashes)).digest()
    right = data_hash([add([data for _, data in given])]), heard
    wrong = [by for by, said in ((a, one), (b, other)) if (said.hash, said.heard) != right]
    if len(wrong) != 1:
        raise NoProofError("neither is the sum of these contributions")
    return wrong[0]
