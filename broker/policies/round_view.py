"""What a policy of rounds decides by, and what it answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import RoundMember, RoundPlan, RoundReport
from ..membership.membership import Membership
from ..records.rounds import RoundRecord
from ..records.run import RunRecord
from .disputes import Disputes

__all__ = [
    "LACKS",
    "Blame",
    "ExchangeGroup",
    "LinksAmong",
    "NetworkOf",
    "PlannedAttempt",
    "RoundView",
]

LACKS = ("late", "ungathered", "unsummed", "unpassed")
"""What a member may lack of an attempt, as it says it: contributions, sums of places, results or
versions from who made them, results from who passes them on. Of each it may be for lack of those
before that another one lacks it."""
NetworkOf = Callable[[Sequence[PeerId], float], Network | None]
"""The links among peers, as they are known at a time."""
LinksAmong = Callable[[Sequence[PeerId]], Network | None]
"""The links among peers, as they are known now."""


@dataclass(frozen=True)
class ExchangeGroup:
    """Replicas that exchange with each other. weights: of what each gives, by number. joiners: who
    takes the version from them. alike: whether they come to one version. apart: pairs of which
    neither gives the other a sum or a version, as long as there is another who can. scale: what
    the mean of parameters is multiplied by; 0: nothing. share, by_client: as in RoundPlan. whole:
    whether one of them adds up all. lines: what each gives to all others together, bytes/s, by
    which they add up more or less; none: all add up as much. places: by peer, the number of its
    place, of which one gives the sum of what all of it give; empty: each gives by itself. together:
    as in RoundPlan. behind: those of them that have an older version, and take the new one from
    the others, who make it."""

    weights: Mapping[int, int]
    joiners: Sequence[int] = ()
    alike: bool = True
    apart: Collection[frozenset[int]] = ()
    scale: float = 0.0
    share: float = 0.0
    by_client: bool = False
    whole: bool = False
    lines: Mapping[int, float] = field(default_factory=dict)
    places: Mapping[PeerId, int] = field(default_factory=dict)
    together: bool = False
    behind: Sequence[int] = ()


@dataclass(frozen=True)
class PlannedAttempt:
    """groups: those that begin with it. sources: by joiner, the member whose version it takes,
    where members have several. kept: who goes on with what an earlier attempt planned."""

    members: Sequence[RoundMember]
    joiners: Sequence[int]
    groups: Sequence[ExchangeGroup]
    sources: Mapping[int, int] = field(default_factory=dict)
    kept: Collection[int] = ()


@dataclass(frozen=True)
class Blame:
    """out: replicas that are left out of the round. disputes: pairs of which one is to blame, first
    who says so. convicts: whether who is left out may lose its place in later rounds."""

    out: Sequence[int]
    disputes: Sequence[tuple[int, int]] = ()
    convicts: bool = True


@dataclass
class RoundView:
    """The round under way, as far as that is not durable (`run` is); a policy only reads it.

    attempt, plans: the present attempt, and by peer what it does in it; None: there is none, or an
    earlier start of the broker made it. made: by replica, what its holders say of its version.
    troubled: replicas that cannot make the version of this attempt, or are waited for. lacks: by
    what it is, and by replica, others of whom it says that it lacks that.
    """

    run: RunRecord
    members: Membership
    network: NetworkOf
    disputes: Disputes
    attempt: PlannedAttempt | None = None
    plans: dict[PeerId, RoundPlan] = field(default_factory=dict)
    made: dict[int, dict[PeerId, RoundReport]] = field(default_factory=dict)
    troubled: set[int] = field(default_factory=set)
    lacks: Mapping[str, defaultdict[int, set[int]]] = field(
        default_factory=lambda: {what: defaultdict(set) for what in LACKS}
    )

    @property
    def rounds(self) -> RoundRecord:
        return self.run.of_rounds

    @property
    def sources(self) -> Mapping[int, int]:
        return self.attempt.sources if self.attempt is not None else {}

    def has_made(self, number: int) -> bool:
        """Whether all holders of a replica have made the version."""
        return set(self.made.get(number, ())) >= set(self.run.replicas[number].peers)

    def is_out(self, number: int) -> bool:
        """Whether a replica has no place in rounds now, by disputes or by a peer that has lied."""
        liars = self.rounds.versions.liars
        return self.disputes.is_out(number) or not liars.isdisjoint(self.run.replicas[number].peers)

    def forgive(self) -> None:
        """Forget what replicas lack: it tells nothing of the next attempt."""
        for lacks in self.lacks.values():
            lacks.clear()
