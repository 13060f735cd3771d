"""One holder's part in rounds whose sums are masked: between what the broker says, what a round
computes, and `SecureMember`, which has the rules (`peer/secure/`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import MaskShare, MemberMasks, RoundMasks, RoundPlan
from .round_keys import SecureSumError
from .secure_member import SecureMember

__all__ = ["MaskedSums", "MemberOf"]

MemberOf = Callable[[PeerId, str, int], SecureMember]
"""Makes the part of a peer in a round of a run."""


class MaskedSums:
    """The sums of `peer` in rounds of a run. A round has keys of its own. `fewest`: it gives
    nothing to a sum of fewer members."""

    def __init__(self, peer: PeerId, run: str, member_of: MemberOf, fewest: int) -> None:
        self._fewest = fewest
        self._peer, self._run, self._member_of = peer, run, member_of
        self._member: SecureMember | None = None
        self._round = -1
        self._heard: RoundMasks | None = None

    def begin(self, round_: int) -> None:
        """Begin a round, or hear of it again."""
        if round_ != self._round:
            self._member = self._member_of(self._peer, self._run, round_)
            self._round, self._heard = round_, None

    @property
    def key(self) -> MemberMasks:
        """What the broker gets with the contribution."""
        return MemberMasks(key=self.now.key)

    def deal(self, plan: RoundPlan) -> MemberMasks:
        """Join an attempt. Raises SecureSumError for one that nothing may be given to."""
        if plan.round != self._round:
            raise SecureSumError(f"keys of round {plan.round}, in round {self._round}", self._peer)
        if len(plan.keys) < self._fewest:
            raise SecureSumError(
                f"{len(plan.keys)} members: expected at least {self._fewest}", self._peer
            )
        dealt = self.now.deal(plan.attempt, plan.keys)
        return MemberMasks(sealed=_shares(dealt))

    def hear(self, told: RoundMasks) -> None:
        """Take what the broker told, for the next `answer`."""
        self._heard = told

    def answer(self) -> MemberMasks | None:
        """Return what the broker is told for that; None: nothing, as the masks are known. Raises
        SecureSumError."""
        heard, member = self._heard, self.now
        assert heard is not None, "nothing was heard"
        if heard.sealed:
            member.hold(_by_member(heard.sealed))
            return MemberMasks(holds=True)
        if heard.reveal:
            return MemberMasks(revealed=_shares(member.reveal(heard.attempt)))
        member.open(_by_member(heard.masks))
        return None

    @property
    def now(self) -> SecureMember:
        """The member of the round. Raises SecureSumError in none."""
        if self._member is None:
            raise SecureSumError("it is in no round", self._peer)
        return self._member


def _shares(by_member: Mapping[PeerId, bytes]) -> list[MaskShare]:
    return [MaskShare(member=member, share=share) for member, share in by_member.items()]


def _by_member(shares: Iterable[MaskShare]) -> dict[PeerId, bytes]:
    return {PeerId(s.member): s.share for s in shares}
