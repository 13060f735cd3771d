"""Windows of gossip: rounds of pairs that replicas are told at once, and go through without a word
from the broker.

    a window opens    work and pairs of some rounds are settled, in one event, and told
    free              a replica begins the next round by itself, once it has made its version and
                      its partner has all that it sent; the record follows, round by round
    trouble           somebody is lost, late, about to leave, or waits to join; the broker was
                      started again: all are held. They stay in the round that they are in, say
                      what they have done, and begin no other by themselves
    level             all that are there have answered. Rounds that nobody has begun are recalled;
                      those that somebody has are done as they were told, each when the one before
                      is committed, as any other round is

Who has gone past a round stays so, and so what it got from its partner counts, even if that one is
lost: the pair is *settled*. Nobody who is there goes past a round while others are asked, so what
they answer is all that there is to know: a group is settled if a member that is there is past the
round, or if one that is lost is in a settled group of the round behind, for it must have made this
one. Any other group of somebody that is lost is planned anew, and of what that one did in it nobody
has anything.

Of a replica with several holders none goes past a round before all have their parts of its version
and all that they sent has come (`peer/core/rounds/ahead.py`). So it is past it if one of them is:
those that did not hear of it in time have all that they need, and follow when the record does.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import (
    BrokerMessage,
    RoundAhead,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundPlan,
    RoundReport,
    RunEvent,
)
from ..membership.member import Member
from ..records.replica import ReplicaRecord
from ..records.rounds import RoundRecord, microbatches_of
from ..runs.run import Run
from .exchange import ExchangePlanner
from .gossip import Gossip
from .handing import local_work

__all__ = ["RoundWindow", "settled"]

_MOST_SAID = 16
"""Reports that are kept of one holder, of each round."""


def settled(
    rounds: Sequence[Sequence[RoundMember]], first: int, stands: Mapping[int, int]
) -> set[int]:
    """Members of round `first` that are gone and whose part in it counts, as somebody goes on with
    it. rounds: members of it and of those behind it, as they were told; stands: by replica that is
    there, the round that it is in. Pure."""
    found = set[int]()
    for number, members in reversed([*enumerate(rounds, first)]):
        groups: dict[int, list[int]] = {}
        for m in members:
            groups.setdefault(m.group, []).append(m.replica)
        kept = [
            g for g in groups.values() if any(n in found or stands.get(n, 0) > number for n in g)
        ]
        found = {n for g in kept for n in g if n not in stands}
    return found


@dataclass(eq=False)
class RoundWindow:
    """How far one run is in rounds that were told ahead; not durable. asked: whether all are held.
    level: whether all have answered. stands: by replica, the round that it is in, by the answers of
    all its holders; behind: the earliest that one of these is in."""

    run: Run
    record: RoundRecord
    gossip: Gossip
    exchange: ExchangePlanner
    asked: bool = False
    level: bool = False
    order: int = 0
    """The number of the order to be held; no two windows have one."""
    asked_until: float = 0.0
    """Who has not answered by then is left out."""
    away_until: float = 0.0
    """Whose stream broke is not waited for any longer then."""
    stands: dict[int, int] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)
    plans: dict[int, dict[PeerId, RoundPlan]] = field(default_factory=dict)
    """By round that was told ahead, those of its first attempt."""
    _told: dict[PeerId, list[RoundAhead]] = field(default_factory=dict)
    _said: dict[int, list[tuple[Member, RoundReport]]] = field(default_factory=dict)
    """By replica, reports of which nothing is made yet."""
    _answers: dict[int, dict[PeerId, int]] = field(default_factory=dict)
    """By replica, what its holders have answered."""

    # ------------------------------------------------------------ opening

    def opens(
        self, begun: RoundBegun, exchange_s: float, present: Collection[int], now: float
    ) -> None:
        """Adds to the beginning of a round what is told with it. Nothing, where there is no
        window."""
        self.asked = self.level = False
        self.plans, self._told = {}, {}
        self.stands, self.behind, self._answers = {}, {}, {}
        sync = self.run.submitted.requirements.sync
        replicas = [self.run.replicas[w.replica] for w in begun.work]
        alone = len(replicas) < 2 or {w.replica for w in begun.work} != set(present)
        busy = any(r.lifecycle.handover for r in replicas)
        quorum = sync.needed(len(replicas)) < len(replicas)
        if sync.window < 2 or alone or busy or quorum or any(r.paused for r in self._records):
            return
        trials = self._trials(begun, sync.window, exchange_s)
        if len(trials) < 2:
            return
        plan = replicas[0].record.plan
        size = plan.microbatch_size if plan is not None else 1
        pairs = self.gossip.paired(_members(begun, size), len(trials), now)
        each = []
        for trial, groups in zip(trials, pairs, strict=True):
            one = begun if trial.round == begun.round else RoundBegun(round=trial.round)
            if one is not begun:
                one.work.extend(trial.work.values())
            for own, met in zip(_members(one, size), groups, strict=True):
                own.group, own.attempt = met.group, met.attempt
                one.members.append(own)
            one.committed, one.handed = trial.committed, trial.handed
            trial.attempt, trial.members = 1, tuple(one.members)
            self.plans[trial.round] = plans = self.exchange.plans({}, trial)
            each.append(one)
            for work in trial.work.values() if one is not begun else ():
                replica = self.run.replicas[work.replica]
                start = trial.start_of(replica.id, work)
                for peer in replica.record.peers:
                    told = RoundAhead(run=replica.id, term=work.term, start=start, plan=plans[peer])
                    self._told.setdefault(peer, []).append(told)
        begun.ahead.extend(each[1:])

    def _trials(self, begun: RoundBegun, most: int, exchange_s: float) -> list[RoundRecord]:
        """The record as each round of the window has begun, if all goes as it is told."""
        found, everybody = list[RoundRecord](), {w.replica for w in begun.work}
        trial = copy.deepcopy(self.record)
        trial.apply(RunEvent(round_begun=begun))
        while len(found) < most and not trial.gathers and trial.work.keys() == everybody:
            found.append(trial)
            trial = copy.deepcopy(trial)
            members = [RoundMember(replica=n, group=1) for n in trial.work]
            trial.apply(RunEvent(round_done=RoundDone(round=trial.round, members=members)))
            work = local_work(self.run, sorted(everybody), exchange_s, trial)
            trial.apply(RunEvent(round_begun=RoundBegun(round=trial.round, work=work)))
        return found

    def told(self, peer: PeerId) -> list[BrokerMessage]:
        """What a peer is told of the rounds behind the one under way, while they hold."""
        if self.asked:
            return []
        told = (a for a in self._told.get(peer, ()) if a.start.round > self.record.round)
        return [BrokerMessage(round_ahead=a) for a in told]

    # ------------------------------------------------------------ going on

    @property
    def _records(self) -> list[ReplicaRecord]:
        return [r.record for r in self.run.replicas]

    def goes_on(self, equal: Collection[int]) -> RoundBegun:
        """The next round, as it was told: of those that have its version, and of those that are
        gone and whose part in it counts."""
        promised, counts = self.record.ahead[0], {*equal}
        if self.level:
            rounds = [b.members for b in self.record.ahead]
            counts |= settled(rounds, promised.round, self._stand(promised.members))
        else:
            counts |= {w.replica for w in promised.work}
        begun = RoundBegun()
        begun.CopyFrom(promised)
        del begun.work[:]
        for work in promised.work:
            if work.replica not in counts:
                continue
            mine = begun.work.add()
            mine.CopyFrom(work)
            record = self.run.replicas[work.replica].record
            begun_there = self.stands.get(work.replica, 0) >= promised.round
            if self.level and work.replica in equal and not begun_there:
                gate = self.record.gate(work.replica, record.term)
                mine.term, mine.first_step = record.term, max(record.committed, gate)
        return begun

    def _stand(
        self, members: Iterable[RoundMember], without: Collection[int] = ()
    ) -> dict[int, int]:
        """Where those stand that are there, or may come back, in the terms in which they were
        told."""
        found = {}
        for m in members:
            record = self.run.replicas[m.replica].record
            if record.running and record.term == m.term and m.replica not in without:
                found[m.replica] = self.stands.get(m.replica, 0)
        return found

    # ------------------------------------------------------------ trouble

    def answered(self, number: int, peer: PeerId, round_: int) -> None:
        """A holder says in which round it is."""
        said = self._answers.setdefault(number, {})
        said[peer] = round_
        if said.keys() >= set(self.run.replicas[number].record.peers):
            self.stands[number], self.behind[number] = max(said.values()), min(said.values())

    @property
    def lacks(self) -> list[int]:
        """Replicas that have holders who have not answered."""
        return [n for n in self._stand(self.record.members) if n not in self.stands]

    def gone(self, without: Collection[int]) -> set[int]:
        """Members of the round under way that are gone, or cannot do their part, and whose part
        counts all the same."""
        if not self.level:
            return set()
        rounds = [self.record.members, *(b.members for b in self.record.ahead)]
        stands = self._stand(self.record.members, without)
        return settled(rounds, self.record.round, stands)

    def unsettled(self, without: Collection[int]) -> set[int]:
        """Members whose groups nobody has gone past."""
        gone = self.gone(without)
        stands, members = self._stand(self.record.members, without), self.record.members
        past = {n for n, at in stands.items() if at > self.record.round}
        kept = {m.group for m in members if m.replica in gone or m.replica in past}
        return {m.replica for m in members if m.group not in kept}

    # ------------------------------------------------------------ reports that come early

    def keeps(self, number: int, member: Member, said: RoundReport) -> bool:
        """A report of a later round, or of trouble, until the record is there."""
        if self.record.told is None or said.round > self.record.round + len(self.record.ahead):
            return False
        kept = self._said.setdefault(number, [])
        if any(s == said and m.id == member.id for m, s in kept):
            return True
        most = _MOST_SAID * len(self.run.replicas[number].record.peers)
        del kept[: max(0, len(kept) - most * (1 + len(self.record.ahead)))]
        kept.append((member, said))
        return True

    def said(self) -> list[tuple[int, Member, RoundReport]]:
        """Those that are of the round under way now; older ones are forgotten."""
        found = []
        for number, kept in self._said.items():
            found += [(number, m, s) for m, s in kept if s.round == self.record.round]
            self._said[number] = [(m, s) for m, s in kept if s.round > self.record.round]
        return found


def _members(begun: RoundBegun, size: int) -> list[RoundMember]:
    """`size`: samples of a microbatch."""
    return [
        RoundMember(replica=w.replica, weight=microbatches_of(w) * size, term=w.term)
        for w in begun.work
    ]
