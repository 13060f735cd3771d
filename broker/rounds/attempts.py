"""The exchange of a round, attempt by attempt: who is in it, for how long, and who is to blame if
nothing comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import RoundMember, RoundPlan, RoundPlanned, RoundReport
from ..records.rounds import RoundRecord, microbatches_of
from ..runs.run import Run
from .contributions import Contributions
from .exchange import ExchangePlanner
from .gossip import Gossip
from .version import Versions
from .windows import RoundWindow

__all__ = ["Attempts"]

_RAISED = 12
"""By so much a contribution that is too large raises the exponent."""
_MOST_EXPONENT = 48
"""Who has a larger element is left out."""


class Attempts:
    """The attempts of the round under way; not durable. plans: by peer, what it does in the present
    one; none: an earlier start of the broker made them. gossip, window: of runs that gossip."""

    def __init__(
        self,
        run: Run,
        record: RoundRecord,
        exchange: ExchangePlanner,
        contributions: Contributions,
        versions: Versions,
        gossip: Gossip | None,
        window: RoundWindow | None,
    ) -> None:
        self._run, self._record, self._exchange = run, record, exchange
        self._contributions, self._versions = contributions, versions
        self._gossip, self._window = gossip, window
        self.plans: dict[PeerId, RoundPlan] = {}
        self._troubled = set[int]()
        """Who cannot make the version of this attempt, or is waited for."""
        self._blamed = Counter[int]()
        """By replica, how often somebody lacked what it was to send in this attempt."""
        self._sums_lack = Counter[int]()
        """The same, of the sums that it was to make."""

    def begin(self, plans: Mapping[PeerId, RoundPlan]) -> None:
        """A round begins. `plans`: of its first attempt, if peers are told."""
        self.plans = {**plans}
        self._anew()
        if self._gossip is not None:
            self._gossip.sources, self._gossip.kept = {}, set()

    # ------------------------------------------------------------ who is in it

    @property
    def inside(self) -> list[int]:
        """Numbers of members and joiners."""
        return self._exchange.inside

    @property
    def gone(self) -> set[int]:
        """Members that nobody waits for, and whose part counts."""
        return self._window.gone(self._contributions.bad) if self._window is not None else set()

    def is_gone(self, member: RoundMember) -> bool:
        """Whether a member of the attempt is not there any more, as it was."""
        record, work = self._run.replicas[member.replica].record, self._record.work
        return not record.running or record.term != member.term or member.replica not in work

    @property
    def void(self) -> bool:
        """Whether a member is not there any more, as it was; or an earlier start of the broker
        planned the attempt, and who has heard of it nobody knows."""
        window = self._window if self._record.told is not None else None
        if not self.plans and (window is None or window.unsettled(self._contributions.bad)):
            return True
        members, gone = self._record.members, self.gone
        return any(self.is_gone(m) for m in members if m.replica not in gone)

    def of(self, number: int) -> int:
        """In which attempt what a replica now does was planned."""
        sources = self._gossip.sources if self._gossip else {}
        return self._record.attempt_of(sources.get(number, number))

    # ------------------------------------------------------------ until when

    @property
    def ends(self) -> float:
        assert self._contributions.since is not None
        told = self._record.told is not None and self._record.attempt == 1
        since = self._contributions.closes_at if told else self._contributions.since
        return since + self.lasts_s

    @property
    def lasts_s(self) -> float:
        """How long one may take."""
        return self._exchange.attempt_s

    def looks_at(self, now: float) -> float:
        """When somebody may be late next, if nothing happens."""
        told = self._record.told is not None and self._record.attempt == 1
        closes_at = self._contributions.closes_at
        return closes_at if told and now < closes_at else self.ends

    def overdue(self, now: float) -> bool:
        """Whether somebody's contribution to a round that was told ahead is late."""
        told = self._record.told is not None and self._record.attempt <= 1
        if not told or now < self._contributions.closes_at:
            return False
        gone = self.gone
        return any(not self._contributions.is_ready(n) for n in self.inside if n not in gone)

    # ------------------------------------------------------------ the next one

    def planned(self, ready: Sequence[int], joining: Sequence[int], now: float) -> RoundPlanned:
        """Its event, for replicas whose contribution is there and others that take the version.
        What was made in the present attempt counts no more, but for groups that stay."""
        record, gone, made = self._record, self.gone, self._versions.made
        plan = self._run.replicas[ready[0]].record.plan
        assert plan is not None
        members = [
            RoundMember(
                replica=n,
                weight=microbatches_of(record.work[n]) * plan.microbatch_size,
                term=self._run.replicas[n].record.term,
            )
            for n in ready
        ]
        members += [m for m in record.members if m.replica in gone]
        members.sort(key=lambda m: m.replica)
        kept: dict[int, dict[PeerId, RoundReport]] = {}
        if self._gossip is not None:
            anew = self._troubled if self.plans else None
            if anew is None and self._window is not None and record.told is not None:
                anew = self._window.unsettled(self._contributions.bad)
            members = self._gossip.grouped(members, anew=anew, now=now)
            joining = self._gossip.joining(
                members, [n for n in joining if n not in self._troubled], record.attempt
            )
            kept = {n: made[n] for n in self._gossip.kept if n in made}
        self._versions.made, self._contributions.since = kept, now
        self._anew()
        return RoundPlanned(
            round=record.round,
            attempt=record.attempt + 1,
            members=members,
            joiners=joining,
            exponent=record.exponent,
        )

    def make_plans(self) -> None:
        """What peers do in it, behind its event."""
        if self._gossip is None:
            self.plans = self._exchange.plans()
        else:
            self.plans |= self._exchange.plans(self._gossip.sources)

    # ------------------------------------------------------------ nothing comes of it

    def _anew(self) -> None:
        """Nobody is in trouble, or to blame, in the attempt that begins."""
        self._troubled = set()
        self._forgive()

    def _forgive(self) -> None:
        self._blamed.clear()
        self._sums_lack.clear()

    def late(self) -> list[int]:
        """It has ended, and those that have not made the version are in trouble. Whom most wait
        for; else all of these."""
        gone, made = self.gone, self._versions.has_made
        self._troubled.update(n for n in self.inside if not made(n))
        if blamed := self._blamed or self._sums_lack:
            most = max(blamed.values())
            return [n for n in self.inside if blamed[n] == most]
        return [n for n in self.inside if not made(n) and n not in gone]

    def give_up(self, without: Sequence[int], why: str) -> None:
        """There will be another one, without these."""
        self._forgive()
        for number in without:
            self._contributions.bad[number] = f"replica {number} {why}"

    def raises_exponent(self, number: int) -> bool:
        """An element of a replica is too large; False: for any exponent that there is."""
        self._troubled.add(number)
        fits = self._record.exponent < _MOST_EXPONENT
        self._record.exponent += _RAISED if fits else 0
        return fits

    def blame(self, number: int, lacks: Iterable[str], *, sums: bool = False) -> None:
        """A replica lacks what these peers are to send. `sums`: those lack because of whoever's
        contribution lacks, if somebody's does."""
        lacked, replicas = set(lacks), self._run.replicas
        about = [n for n in self.inside if lacked & set(replicas[n].record.peers)]
        (self._sums_lack if sums else self._blamed).update(about or [number])
