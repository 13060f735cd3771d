"""One member's part in a round whose sums are masked: decisions and arithmetic, no I/O. In each
attempt it deals, gives what is masked, holds, reveals and opens, in this order (`__init__.py`).

It reveals in one attempt of a round only, and is in no attempt behind that one. Before, another
attempt takes the place of an earlier one, with other masks; those of the earlier are forgotten. No
key of a pair is ever revealed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from torch import Tensor

from ...dag.plan.plan import PeerId
from ...dag.rounds.secret_sharing import SECRET_BYTES, split
from ...dag.rounds.vector import Span
from ...net.identity.statements import MemberIdentity
from ...proto.broker_pb2 import SignedStatement
from .pair_masks import Words, derived, with_masks
from .round_keys import OwnKey, Roster, SecureSumError, roster_of

__all__ = ["SecureMember"]

_NONCE = bytes(12)
"""Each key seals one message."""
_COMMITMENT_BYTES = 32


class SecureMember:
    """A member in one round. `draw`: so many random bytes that nobody can guess."""

    def __init__(
        self, identity: MemberIdentity, run: str, round_: int, draw: Callable[[int], bytes]
    ) -> None:
        self._identity, self._run, self._round, self._draw = identity, run, round_, draw
        self._mine = OwnKey(identity, run, round_, draw)
        self._attempt: _Attempt | None = None
        self._number = self._revealed = 0
        """The newest attempt that it was in, and that in which it revealed."""

    @property
    def key(self) -> SignedStatement:
        """Return the member's signed key."""
        return self._mine.said

    def deal(self, attempt: int, told: Iterable[SignedStatement]) -> dict[PeerId, bytes]:
        """Join an attempt, in place of an earlier one. Return for each member of it, itself too,
        the sealed share of this one's own mask. Raises SecureSumError, and is in no attempt then,
        for keys that are not as they should be (`roster_of`), where this member's is not among
        them, and behind an attempt that it revealed in."""
        told = list(told)
        if self._revealed:
            raise SecureSumError(
                f"attempt {attempt}: the masks of attempt {self._revealed} were revealed, and the "
                "sum of other members would tell what those gave who are in one of both"
            )
        if attempt <= self._number:
            raise SecureSumError(f"attempt {attempt}, behind attempt {self._number}")
        self._attempt = None
        roster = roster_of(told, self._identity, self._run, self._round, attempt)
        if self._mine.said.statement not in [signed.statement for signed in told]:
            raise SecureSumError(f"attempt {attempt} has another key than its own", self._me)
        own_mask = self._draw(SECRET_BYTES)
        self._attempt = _Attempt(self._me, self._mine, own_mask, roster)
        self._number = attempt
        return self._attempt.deal(self._draw)

    def masked(self, part: Span, values: Tensor) -> Tensor:
        """Return what it gives of a part: (elements,), int64, as `values` are. Raises
        SecureSumError for a part that it gave already, in whole or in part."""
        return self._now.masked(part, values)

    def hold(self, sealed: Mapping[PeerId, bytes]) -> None:
        """Take the shares that all members dealt to this one. Raises SecureSumError, naming whose
        does not open, and holds none then."""
        self._now.hold(sealed)

    def reveal(self, attempt: int) -> dict[PeerId, bytes]:
        """Return its share of each member's own mask; again the same where it is asked again.
        Raises SecureSumError for another attempt than that which it is in, and without shares."""
        if attempt != self._number or self._attempt is None:
            raise SecureSumError(f"attempt {attempt} is to be revealed, in attempt {self._number}")
        shares = self._attempt.shares
        if not shares:
            raise SecureSumError("it holds no shares yet", self._me)
        self._revealed = attempt
        return dict(shares)

    def open(self, own_masks: Mapping[PeerId, bytes]) -> None:
        """Take the own masks of all members. Raises SecureSumError for one that its member has not
        committed to, and takes none then; and where this member has revealed none."""
        if not self._revealed:
            raise SecureSumError("masks are opened that it did not reveal", self._me)
        self._now.open(own_masks)

    def unmasked(self, part: Span, total: Tensor) -> Tensor:
        """Return the sum of what all members gave of a part, by the sum of what they gave masked:
        (elements,), int64, as `total` is."""
        return self._now.unmasked(part, total)

    @property
    def _me(self) -> PeerId:
        return self._identity.member

    @property
    def _now(self) -> _Attempt:
        if self._attempt is None:
            raise SecureSumError("it is in no attempt", self._me)
        return self._attempt


class _Attempt:
    """What a member knows in one attempt. shares: by member, that of its own mask which was dealt
    to this one."""

    def __init__(self, me: PeerId, mine: OwnKey, own_mask: bytes, roster: Roster) -> None:
        self._me, self._own_mask, self._roster = me, own_mask, roster
        self.shares: dict[PeerId, bytes] = {}
        self._commitments: dict[PeerId, bytes] = {}
        """To the own mask of each member."""
        self._given: list[Span] = []
        self._own_masks: list[bytes] = []
        """Of all members; empty: they are not known yet."""
        others = [m for m in roster.members if m != me]
        self._shared = {m: roster.shared(mine.exchange, m) for m in others}
        self._adds, self._subtracts = (
            [
                derived(self._shared[m], "pair mask", roster.digest)
                for m in others
                if (me < m) is way
            ]
            for way in (True, False)
        )

    def _seal(self, source: PeerId, destination: PeerId) -> ChaCha20Poly1305:
        other = destination if source == self._me else source
        about = self._roster.digest, source.encode(), destination.encode()
        shared = self._shared.get(other, self._own_mask)  # to itself
        return ChaCha20Poly1305(derived(shared, "sealed share", *about))

    def deal(self, draw: Callable[[int], bytes]) -> dict[PeerId, bytes]:
        """Return for each member the sealed share of this one's own mask."""
        places, threshold = self._roster.places, self._roster.threshold
        shares = split(self._own_mask, places.values(), threshold, draw)
        commitment = _commitment(self._own_mask)
        return {
            member: self._seal(self._me, member).encrypt(_NONCE, commitment + share, None)
            for member, share in zip(places, shares, strict=True)
        }

    def masked(self, part: Span, values: Tensor) -> Tensor:
        """Add all masks."""
        start, stop = part
        if any(start < b and a < stop for a, b in self._given):
            raise SecureSumError(f"elements {start} to {stop} were given already", self._me)
        self._given.append(part)
        own = derived(self._own_mask, "own mask", self._roster.digest)
        return _tensor(with_masks(_words(values), part, [own, *self._adds], self._subtracts))

    def hold(self, sealed: Mapping[PeerId, bytes]) -> None:
        """Hold the shares that others sealed for this member."""
        found = {}
        for member in self._roster.members:
            try:
                found[member] = self._seal(member, self._me).decrypt(_NONCE, sealed[member], None)
            except KeyError:
                raise SecureSumError("dealt no share to this one", member) from None
            except InvalidTag:
                raise SecureSumError("dealt a share that does not open", member) from None
        self.shares = {m: opened[_COMMITMENT_BYTES:] for m, opened in found.items()}
        self._commitments = {m: opened[:_COMMITMENT_BYTES] for m, opened in found.items()}

    def open(self, own_masks: Mapping[PeerId, bytes]) -> None:
        """Take the own masks."""
        for member, commitment in self._commitments.items():
            if _commitment(own_masks.get(member, b"")) != commitment:
                raise SecureSumError("this is not the mask that it committed to", member)
        self._own_masks = [
            derived(own_masks[member], "own mask", self._roster.digest)
            for member in self._commitments
        ]

    def unmasked(self, part: Span, total: Tensor) -> Tensor:
        """Lift the members' own masks."""
        if not self._own_masks:
            raise SecureSumError("the masks are not known yet", self._me)
        return _tensor(with_masks(_words(total), part, (), self._own_masks))


def _commitment(own_mask: bytes) -> bytes:
    """Return what tells nothing of a random secret, and which no other one has."""
    return hashlib.sha256(b"shoal own mask\0" + own_mask).digest()


def _words(values: Tensor) -> Words:
    return values.numpy().view(np.uint64)


def _tensor(words: Words) -> Tensor:
    return torch.from_numpy(words.view(np.int64))
