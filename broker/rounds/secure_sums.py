"""What the broker does for rounds whose sums are masked (`peer/secure/`): it passes on what members
tell each other, and says when all lift the masks (`Unmasking`). It sees public keys, sealed shares
and, of an attempt whose masks are lifted, masks; it has no vector that they are on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...dag.plan.plan import PeerId
from ...job.clients.client_privacy import why_members
from ...proto.broker_pb2 import (
    BrokerMessage,
    MaskShare,
    MemberMasks,
    RoundMasks,
    RoundPlan,
    RoundReport,
    RoundUnmasked,
    RunEvent,
    SignedStatement,
)
from ..events import Instruction, Tell
from ..membership.member import Member
from ..runs.run import Run
from .unmasking import Unmasking

__all__ = ["SecureSums"]


class SecureSums:
    """Masks of the round under way. asked_at: when members were asked to reveal; 0: not yet."""

    def __init__(self, run: Run) -> None:
        """Go on with an attempt that an earlier start of the broker had unmasked: members are asked
        again."""
        cohorts = run.submitted.requirements.cohorts
        assert cohorts is not None, f"run {run.submitted.id} has no clients"
        self._fewest, self._why = cohorts.fewest, why_members(cohorts.privacy)
        self._run, self._versions = run, run.rounds.versions
        self._keys: dict[PeerId, SignedStatement] = {}
        self._now: Unmasking | None = None
        self.asked_at = 0.0
        if self._versions.unmasked:
            self._now = Unmasking(list(map(PeerId, self._versions.unmasked)), begun=True)

    @property
    def lifted(self) -> bool:
        """Whether the masks are known."""
        return self._now is not None and self._now.masks is not None

    @property
    def members(self) -> Sequence[PeerId]:
        """Peers of the attempt's members; none where there is no attempt."""
        return self._now.members if self._now is not None else ()

    @property
    def waited_for(self) -> Collection[int]:
        """Numbers of replicas that others wait for, before masks are lifted."""
        waited = set(self._now.waited_for) if self._now is not None else set[PeerId]()
        records = (r.record for r in self._run.replicas)
        return [r.number for r in records if waited & set(r.peers)]

    def why_few(self, members: int) -> str:
        """Say why a round comes to nothing with so many members: they would know each other's
        contributions by their sum, or have too little noise in it; empty: they are enough."""
        if members >= self._fewest:
            return ""
        return (
            f"{members} peers are left with a contribution to round {self._versions.round}, "
            f"{self._why}"
        )

    @property
    def why_lost(self) -> str:
        """Say why an attempt that is unmasked comes to nothing."""
        return (
            f"too few are left of the {len(self.members)} peers of round {self._versions.round} to "
            "lift the masks of its sum, and the sum of others would tell what the lost ones gave"
        )

    # ------------------------------------------------------------ an attempt

    def contributed(self, peer: PeerId, said: MemberMasks) -> None:
        """A member has told its key with its contribution."""
        self._keys[peer] = said.key

    def begin(self, members: Iterable[int], plans: Mapping[PeerId, RoundPlan]) -> None:
        """Another attempt: its members are told each other's keys in their plans."""
        peers = [p for n in members for p in self._run.replicas[n].record.peers]
        self._now = Unmasking(peers)
        keys = [self._keys.get(p, SignedStatement()) for p in self._now.members]
        for peer in peers:
            plans[peer].keys.extend(keys)

    def goes_on(self, there: Collection[int]) -> bool:
        """Whether something can come of it with the members that are left."""
        if self._now is None:
            return True
        return self._now.goes_on([p for n in there for p in self._run.replicas[n].record.peers])

    def reported(
        self, member: Member, said: RoundReport, now: float, *, void: bool
    ) -> list[Instruction]:
        """A member of the attempt has dealt shares of its mask, holds what it takes to lift masks,
        or has revealed shares. `void`: nothing comes of the attempt."""
        of, did = self._now, said.masks
        if of is None or member.id not in of.members:
            return []
        if did.sealed:
            known = of.sealed is not None
            of.dealt(member.id, _by_member(did.sealed))
            return self.tell(member) if known else self._tell_all()
        if did.holds:
            return self._unmask(of, said.round, now) if of.holds(member.id) and not void else []
        if not did.revealed or not self._versions.unmasked:
            return []
        known = of.masks is not None
        try:
            of.revealed(member.id, _by_member(did.revealed))
        except ValueError as error:
            return self._run.fail("secure", f"masks cannot be lifted: {error}", now)
        if of.masks is None:
            return []
        return self.tell(member) if known else self._tell_all()

    def _unmask(self, of: Unmasking, round_: int, now: float) -> list[Instruction]:
        """Have all members reveal, which is written down before."""
        self.asked_at = now
        told = RunEvent(unmasked=RoundUnmasked(round=round_, members=of.members))
        out = self._run.record.publish(told, 0, now)
        of.begun = True
        return [out, *self._tell_all()]

    def tell(self, member: Member) -> list[Instruction]:
        """Tell a member where the attempt stands."""
        now = self._now
        if now is None or member.id not in now.members:
            return []
        told = RoundMasks(round=self._versions.round, attempt=self._versions.attempt)
        if now.masks is not None:
            told.masks.extend(_shares(now.masks))
        elif now.begun:
            told.reveal = True
        elif now.sealed is not None:
            told.sealed.extend(_shares(now.sealed[member.id]))
        else:
            return []
        for replica in self._run.replicas:
            if member.id in replica.record.peers:
                told.run, told.term = replica.id, replica.record.term
        return [Tell(member.stream, BrokerMessage(round_masks=told))]

    def _tell_all(self) -> list[Instruction]:
        there = [m for r in self._run.replicas if r.record.running for m in r.context.holders()]
        return [i for member in there for i in self.tell(member)]


def _shares(by_member: Mapping[PeerId, bytes]) -> list[MaskShare]:
    return [MaskShare(member=member, share=share) for member, share in by_member.items()]


def _by_member(shares: Iterable[MaskShare]) -> dict[PeerId, bytes]:
    return {PeerId(s.member): s.share for s in shares}
