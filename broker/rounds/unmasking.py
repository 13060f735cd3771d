"""The masks of one attempt at a round whose sums are masked (`peer/secure/`): whether all members
hold what it takes to lift them, and the masks, once enough have revealed their shares. What is
sealed is passed on unread. Pure.

    all have dealt -> each gets what is sealed for it -> all hold -> begun, written down
    -> each is asked to reveal -> enough have -> each gets the masks

Before it has begun, a member that is lost makes it void, and there may be another attempt. From
then on there is none at this round: it is made of these members, if enough are left to reveal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...dag.plan.plan import PeerId
from ...dag.rounds.secret_sharing import joined, majority

__all__ = ["Unmasking"]


class Unmasking:
    """Unmasking of one attempt with these members. begun: whether they are asked to reveal; so it
    is written down before anybody is."""

    def __init__(self, members: Collection[PeerId], *, begun: bool = False) -> None:
        self.members: Sequence[PeerId] = sorted(members)
        self.begun = begun
        self._dealt: dict[PeerId, Mapping[PeerId, bytes]] = {}
        self._holding = set[PeerId]()
        self._revealed: dict[PeerId, Mapping[PeerId, bytes]] = {}
        self.masks: Mapping[PeerId, bytes] | None = None
        """All members' own masks; None while fewer than the threshold have revealed."""

    @property
    def threshold(self) -> int:
        """Number of members that find the masks together."""
        return majority(len(self.members))

    @property
    def waited_for(self) -> Sequence[PeerId]:
        """Members that others wait for, before it has begun: those who have dealt no shares, or
        else those who do not hold."""
        silent = [m for m in self.members if m not in self._dealt]
        return silent or [m for m in self.members if m not in self._holding]

    def goes_on(self, there: Collection[PeerId]) -> bool:
        """Whether something can come of it with the members that are there."""
        if not self.begun:
            return set(there) >= set(self.members)
        able = {*self._revealed, *there} & set(self.members)
        return self.masks is not None or len(able) >= self.threshold

    def dealt(self, by: PeerId, sealed: Mapping[PeerId, bytes]) -> None:
        """A member has dealt shares of its mask, sealed for each."""
        if by in self.members:
            self._dealt.setdefault(by, dict(sealed))

    @property
    def sealed(self) -> Mapping[PeerId, Mapping[PeerId, bytes]] | None:
        """For each member what all sealed for it; None while some have not."""
        if len(self._dealt) < len(self.members):
            return None
        return {
            m: {source: given.get(m, b"") for source, given in self._dealt.items()}
            for m in self.members
        }

    def holds(self, by: PeerId) -> bool:
        """A member has the masked sums of all parts, and the shares that are sealed for it. Return
        whether it is time to begin: all have."""
        if by in self.members:
            self._holding.add(by)
        return not self.begun and self._holding >= set(self.members)

    def revealed(self, by: PeerId, shares: Mapping[PeerId, bytes]) -> None:
        """A member has revealed its shares. Raises ValueError for shares that are none."""
        assert self.begun, "shares are revealed before it is written down that they may be"
        if by in self.members and self.masks is None:
            self._revealed[by] = dict(shares)
            if len(self._revealed) >= self.threshold:
                places = {member: place for place, member in enumerate(self.members, 1)}
                self.masks = joined(self._revealed, places, self.threshold)
